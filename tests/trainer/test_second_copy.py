"""The process that keeps a second copy up to date: training goes on, and its failures are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from basics.errors import UserError
from basics.failpoints import VARIABLE
from checkpointing import list_checkpoints
from run_config import Run
from tests.support.checkpoints import save
from tests.support.second_copies import Copied
from tests.support.workplace import Workplace
from trainer import startup
from trainer.second_copy import SecondCopy, complete


@pytest.fixture
def copied(workplace: Workplace) -> Copied:
    return Copied(workplace)


def second_copy(copied: Copied, run: Run | None = None) -> SecondCopy:
    return SecondCopy(run or copied.run, copied.copy_dir, from_step=0)


def test_a_copy_is_brought_up_to_date_at_the_end(copied: Copied) -> None:
    copy = second_copy(copied)
    copy.update()
    save(copied.run.checkpoints_dir, 4, 5.0)
    assert copy.finish(lambda: 60) == ""
    assert len(list_checkpoints(copied.copy_dir / "checkpoints")) == 4


def test_a_failure_is_told_once_and_the_next_update_tries_again(copied: Copied) -> None:
    checkpoints = copied.copy_dir / "checkpoints"
    aside = checkpoints.rename(copied.workplace.root / "aside")
    checkpoints.write_text("no directory")
    copy = second_copy(copied)
    assert "File exists" in copy.finish(lambda: 60)
    assert copy.take_failure() == ""
    checkpoints.unlink()
    aside.rename(checkpoints)
    save(copied.run.checkpoints_dir, 4, 5.0)
    assert copy.finish(lambda: 60) == ""
    assert len(list_checkpoints(checkpoints)) == 4


def test_a_copy_that_hangs_is_not_waited_for(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "copy.start:hang")
    copy = second_copy(copied)
    copy.update()  # returns at once
    assert copy.take_failure() == ""
    assert copy.finish(lambda: 0.5).startswith("it was waited for 0.5 s; the next launch")


def test_training_never_looks_at_the_place(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(genuine: Callable[..., object]) -> Callable[..., object]:
        def call(path: object, *arguments: object, **options: object) -> object:
            assert str(copied.place) not in str(path), "it may hang"
            return genuine(path, *arguments, **options)
        return call

    monkeypatch.setattr("trainer.second_copy.start_module", lambda *_: None)
    for name in ("stat", "lstat", "readlink", "open", "scandir", "mkdir"):
        monkeypatch.setattr(os, name, check(getattr(os, name)))
    copy = second_copy(copied)
    copy.leave_behind()
    copy.update()
    assert copy.take_failure() == ""


def test_the_copy_of_a_finished_run_is_completed(copied: Copied) -> None:
    save(copied.run.checkpoints_dir, 4, 5.0)
    complete(copied.run, copied.copy_dir, from_step=5)
    assert len(list_checkpoints(copied.copy_dir / "checkpoints")) == 4
    complete(copied.run, None, from_step=5)


def test_the_copy_of_a_finished_run_that_fails_is_an_error(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "copy.start:raise")
    with pytest.raises(UserError, match="the second copy is not complete; run the same") as caught:
        complete(copied.run, copied.copy_dir, from_step=5)
    assert caught.value.status == 1


@pytest.mark.parametrize("is_main", [True, False])
def test_a_launch_of_a_finished_run_completes_its_copy(
    copied: Copied, is_main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple] = []
    monkeypatch.setattr(startup, "complete", lambda *place, **step: calls.append((place, step)))
    prepared = SimpleNamespace(run=copied.run, copy_dir=copied.copy_dir, first_step=5, num_steps=5,
                               plan=SimpleNamespace(tokens_per_step=1), is_finished=True)
    startup.PreparedRun.say_if_finished(prepared, SimpleNamespace(is_main=is_main))
    assert calls == [((copied.run, copied.copy_dir), {"from_step": 5})] * is_main


def test_a_run_without_a_second_copy_starts_no_process(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.second_copy.start_module", lambda *_: pytest.fail("started"))
    copy = SecondCopy(copied.run, None, from_step=0)
    copy.update()
    assert copy.finish(lambda: 60) == copy.take_failure() == ""
