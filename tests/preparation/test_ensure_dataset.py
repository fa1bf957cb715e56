from __future__ import annotations

import os
import socket
import subprocess

import pytest

from basics.errors import UserError
from preparation.ensure_dataset import provide_dataset
from tests.support.preparation import (
    decoded,
    texts_source,
)
from tests.support.workplace import Workplace


def test_a_missing_dataset_is_an_error(workplace: Workplace) -> None:
    with pytest.raises(UserError, match="no dataset there; make it with prepare_dataset.py"):
        provide_dataset(workplace.datasets_dir / "mine", "mine")
    workplace.add_dataset("mine")
    provide_dataset(workplace.datasets_dir / "mine", "mine")


def test_the_standard_library_is_prepared_when_it_is_named(
    workplace: Workplace, monkeypatch
) -> None:
    out = workplace.datasets_dir / "python-stdlib"
    monkeypatch.setattr("preparation.standard_library.python_stdlib",
                        lambda: texts_source(["a", "b"]))
    provide_dataset(out, "python-stdlib")
    assert decoded(out / "train.safetensors") == ["a"]
    assert [path.name for path in out.parent.iterdir()] == ["python-stdlib"]


def test_unfinished_directories_of_dead_processes_are_removed(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preparation.standard_library.python_stdlib",
                        lambda: texts_source(["a", "b"]))
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f".python-stdlib.{socket.gethostname()}-{pid}" for pid in (os.getppid(), ended.pid)]
    for name in names:
        (workplace.datasets_dir / name).mkdir(parents=True)
    provide_dataset(workplace.datasets_dir / "python-stdlib", "python-stdlib")
    left = {path.name for path in workplace.datasets_dir.iterdir()}
    assert left == {"python-stdlib", names[0]}  # the first process may still be preparing
