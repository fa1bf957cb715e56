"""`lab publish` of a run that trains, saves and removes checkpoints meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from checkpointing import Snapshot, find_checkpoint, list_checkpoints, prune, save_checkpoint
from lab.publish import upload
from processes.run_lock import write_heartbeat
from run_config import load_run
from tests.support.lab_cli import error_line, run_lab, succeeded
from tests.support.tokenizers import write_tokenizer
from tests.support.workplace import Workplace
from tokens.tokenizer import choose_tokenizer
from trainer import models


def publish(workplace: Workplace, output: Path, *arguments: str):
    return run_lab("publish", "tiny", "--checkpoint", "latest", "--output", str(output),
                   "--runs-dir", str(workplace.runs_dir), *arguments)


def go_on(workplace: Workplace, num_steps: int = 1) -> str:
    """Save the next checkpoint and remove the others, as a run does; return its name."""
    checkpoints_dir = workplace.runs_dir / "tiny/checkpoints"
    newest = list_checkpoints(checkpoints_dir)[-1]
    weights = {name: weight + 0.001
               for name, weight in load_file(newest.path / "model.safetensors").items()}
    saved = save_checkpoint(checkpoints_dir, Snapshot(weights, {}), newest.meta.model_copy(
        update={"global_step": newest.meta.global_step + num_steps, "loss": None,
                "tokenizer_file": newest.meta.tokenizer_file or _tokenizer_of(newest.path)}))
    prune(checkpoints_dir, keep=1, protected=())
    return saved.name


def _tokenizer_of(checkpoint: Path) -> bytes | None:
    path = checkpoint / "tokenizer.json"
    return path.read_bytes() if path.exists() else None


@contextmanager
def training(workplace: Workplace) -> Iterator[None]:
    """Save and remove checkpoints all the time."""
    is_over, failures = threading.Event(), []

    def train() -> None:
        while not is_over.is_set():
            try:
                go_on(workplace)
            except Exception as error:
                failures.append(error)
                return
            is_over.wait(0.25)  # a run takes steps between two checkpoints

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert not failures, failures


def only_latest(workplace: Workplace) -> None:
    """Leave one checkpoint, which has no loss: none is the best one and stays."""
    checkpoints_dir = workplace.runs_dir / "tiny/checkpoints"
    go_on(workplace)
    newest = list_checkpoints(checkpoints_dir)[-1]
    for checkpoint in list_checkpoints(checkpoints_dir)[:-1]:
        shutil.rmtree(checkpoint.path)
    assert list_checkpoints(checkpoints_dir) == [newest]


def step_of_card(output: Path) -> int:
    rows = (output / "README.md").read_text().splitlines()
    row, = (row for row in rows if row.startswith("| step | "))
    return int(row.split("|")[2].split()[0].replace(",", ""))


def test_exports_while_checkpoints_are_saved_and_removed(
    trained: Workplace, tmp_path: Path
) -> None:
    only_latest(trained)
    first = load_file(list_checkpoints(trained.runs_dir / "tiny/checkpoints")[0].path
                      / "model.safetensors")["final_norm.weight"]
    began, steps = list_checkpoints(trained.runs_dir / "tiny/checkpoints")[0].meta.global_step, []
    with training(trained):
        while len(set(steps)) < 3:  # until it has gone on during the exports
            output = tmp_path / f"export-{len(steps)}"
            succeeded(publish(trained, output))
            steps.append(step_of_card(output) - 1)
            exported = load_file(output / "model.safetensors")["transformer.ln_f.weight"]
            np.testing.assert_allclose(  # the weights are those of the step on the card
                exported, first + 0.001 * (steps[-1] - began), atol=2e-4)
    assert steps == sorted(steps)


def test_a_checkpoint_removed_while_it_is_read_is_noticed(
    trained: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_latest(trained)
    load_weights, opened = models.load_weights, []

    def remove_and_load(checkpoint, model):
        opened.append(checkpoint.name)
        if len(opened) < 3:
            go_on(trained)
        load_weights(checkpoint, model)

    monkeypatch.setattr(models, "load_weights", remove_and_load)
    succeeded(publish(trained, tmp_path / "export"))
    newest = find_checkpoint(trained.runs_dir / "tiny/checkpoints", "latest")
    assert len(set(opened)) == 3 and opened[-1] == newest.name
    assert step_of_card(tmp_path / "export") == newest.meta.global_step + 1


def test_its_tokenizer_removed_after_the_weights_were_read_is_noticed(
    trained: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_latest(trained)
    checkpoints_dir = trained.runs_dir / "tiny/checkpoints"
    newest = list_checkpoints(checkpoints_dir)[-1]
    path = write_tokenizer(tmp_path, vocab_size=257)
    content = (path if path.is_file() else tmp_path / "tokenizer.json").read_bytes()
    save_checkpoint(checkpoints_dir, Snapshot(load_file(newest.path / "model.safetensors"), {}),
                    newest.meta.model_copy(update={
                        "global_step": newest.meta.global_step + 1, "tokenizer_file": content,
                        "tokenizer": choose_tokenizer(str(path)).name}))
    shutil.rmtree(newest.path)
    write_export, exported = upload.write_export, []

    def remove_and_write(target, *arguments):
        exported.append(target.checkpoint.name)
        if len(exported) == 1:
            go_on(trained)
        return write_export(target, *arguments)

    monkeypatch.setattr(upload, "write_export", remove_and_write)
    succeeded(publish(trained, tmp_path / "export"))
    assert len(set(exported)) == 2 and (tmp_path / "export/tokenizer.json").exists()


def test_a_damaged_checkpoint_is_an_error_at_once(
    trained: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_latest(trained)
    newest = list_checkpoints(trained.runs_dir / "tiny/checkpoints")[-1]
    content = bytearray((newest.path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest.path / "model.safetensors").write_bytes(content)
    find, asked = models.find_checkpoint, []
    monkeypatch.setattr(models, "find_checkpoint",
                        lambda *arguments: asked.append(arguments) or find(*arguments))
    assert "has changed since it was written" in error_line(publish(trained, tmp_path / "export"))
    assert len(asked) == 1


@pytest.mark.parametrize(("status", "has_heartbeat", "goes_on"), [
    ("running", True, True), ("running", False, False), ("finished", True, False)])
def test_the_card_says_that_training_goes_on(
    trained: Workplace, tmp_path: Path, status: str, has_heartbeat: bool, goes_on: bool
) -> None:
    run = load_run(trained.runs_dir, "tiny")
    summary = json.loads(run.summary_path.read_text()) if status == "finished" else {}
    run.summary_path.write_text(json.dumps(summary | {"status": status}))
    for path in (run.summary_path, run.metrics_path):
        os.utime(path, (0, 0))
    if has_heartbeat:
        write_heartbeat(run.heartbeat_path, phase="training", step=7)
    succeeded(publish(trained, tmp_path / "export"))
    card = " ".join((tmp_path / "export/README.md").read_text().split())
    step = step_of_card(tmp_path / "export")
    says = f"of `tiny` so far: these are the weights after step {step}, and training goes on. It is"
    assert (says in card) == goes_on and ("training goes on" in card) == goes_on
