"""What is fetched from the second copy of a run, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from basics.errors import UserError
from basics.manifest import find_damage
from basics.verified_copy import copy_whole
from checkpointing import list_checkpoints
from processes import before_torch
from processes.before_torch import fetch_configs
from run_config import load_run
from tests.support.checkpoints import damage
from tests.support.in_process import assert_refused, contents, run_in_process
from tests.support.runs import with_deadlines
from tests.support.second_copies import DATA, Copied
from tests.support.workplace import TINY_MODEL, Workplace
from trainer import fetching
from trainer.copy_process import OWN
from trainer.fetching import fetch
from trainer.second_copy import SecondCopy
from trainer.stale_copies import STALE, stale_from


@pytest.fixture
def copied(workplace: Workplace) -> Copied:
    return Copied(workplace)


def test_an_empty_run_gets_the_newest_and_the_best_checkpoint_and_the_records(
    copied: Copied, capsys: pytest.CaptureFixture
) -> None:
    copied.forget()
    fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == [2, 3]
    assert copied.run.metrics_path.read_text() == '{"global_step": 3}\n'
    newest = list_checkpoints(copied.run.checkpoints_dir)[-1].name
    assert capsys.readouterr().out == (
        f"tiny: {newest} and the records were fetched from {copied.copy_dir}\n")


def test_an_older_run_gets_the_newest_checkpoint(copied: Copied) -> None:
    copied.forget(3)
    fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == [1, 2, 3] and copied.run.metrics_path.exists()


@pytest.mark.parametrize("options", [{}, {"fresh": True}, {"began_at": 0}])
def test_a_run_that_is_as_new_or_starts_over_gets_nothing(
    copied: Copied, options: dict, capsys: pytest.CaptureFixture
) -> None:
    copied.forget(*([1] if not options else []))
    before = copied.steps()
    fetch(copied.run, copied.options(**options), DATA)
    assert copied.steps() == before and not copied.run.metrics_path.exists()
    assert capsys.readouterr().out == ""


def test_the_checkpoint_that_is_asked_for_is_fetched(copied: Copied) -> None:
    wanted = list_checkpoints(copied.run.checkpoints_dir)[0].name
    copied.forget()
    fetch(copied.run, copied.options(checkpoint=wanted), DATA)
    assert copied.steps() == [1, 2]


def test_a_damaged_copy_is_passed_over(copied: Copied, capsys: pytest.CaptureFixture) -> None:
    copied.forget()
    damage(list_checkpoints(copied.copy_dir / "checkpoints")[-1].path / "optimizer.safetensors",
           "a bit")
    fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == [2]
    assert "not fetched: reads back different" in capsys.readouterr().out


def test_a_copy_without_a_whole_checkpoint_does_not_start_the_run_over(copied: Copied) -> None:
    copied.forget()
    for found in list_checkpoints(copied.copy_dir / "checkpoints"):
        damage(found.path / "model.safetensors", "a bit")
    with pytest.raises(UserError, match="no checkpoint could be fetched: reads back different"):
        fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == [] and not copied.run.metrics_path.exists()


@pytest.mark.parametrize("how", ["cut short", "gone", "no directory"])
def test_a_copy_without_a_checkpoint_of_the_right_size_does_not_start_the_run_over(
    copied: Copied, how: str
) -> None:
    copied.forget()
    for found in list_checkpoints(copied.copy_dir / "checkpoints"):
        if how == "cut short":
            damage(found.path / "model.safetensors", how)
        else:
            shutil.rmtree(found.path)
    if how == "no directory":
        shutil.rmtree(copied.copy_dir / "checkpoints")
    with pytest.raises(UserError, match="no other checkpoint is whole") as caught:
        fetch(copied.run, copied.options(), DATA)
    assert caught.value.status == 2
    fetch(copied.run, copied.options(fresh=True), DATA)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_list_of_checkpoints_that_cannot_be_read_is_not_an_empty_one(
    copied: Copied, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    copied.forget()
    monkeypatch.setattr(fetching.os, "scandir", refuse)
    with pytest.raises(UserError, match=os.strerror(number)) as caught:
        fetch(copied.run, copied.options(), DATA)
    assert caught.value.status == (1 if number == errno.EIO else 2)


def test_checkpoints_that_were_set_aside_or_never_whole_do_not_stop_a_start(
    copied: Copied
) -> None:
    copied.forget()
    copied.update(from_step=0)
    own = json.loads((copied.copy_dir / OWN).read_text())
    own["checkpoints"].append("20260101Z000000-iteration-5")
    (copied.copy_dir / OWN).write_text(json.dumps(own))
    fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == []


def test_the_records_come_only_with_a_whole_checkpoint(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied.forget()
    seen = []
    genuine = fetching.copy_record
    monkeypatch.setattr(fetching, "copy_record", lambda *paths, **options: (
        seen.append(copied.steps()), genuine(*paths, **options)))
    fetch(copied.run, copied.options(), DATA)
    assert set(map(tuple, seen)) == {()}  # read back, but without its name: a kill loses neither
    assert copied.run.metrics_path.exists()


@pytest.mark.parametrize("how", ["a bit", "cut short"])
def test_a_damaged_checkpoint_of_the_run_is_replaced(copied: Copied, how: str) -> None:
    newest = list_checkpoints(copied.run.checkpoints_dir)[-1]
    damage(newest.path / "model.safetensors", how)
    fetch(copied.run, copied.options(), DATA)
    assert not find_damage(newest.path, thoroughly=True)
    (aside,) = copied.run.run_dir.glob("set-aside/*/checkpoints/*")
    assert aside.name == newest.name and find_damage(aside, thoroughly=True)


def test_a_damaged_checkpoint_that_is_asked_for_is_replaced(copied: Copied) -> None:
    wanted = list_checkpoints(copied.run.checkpoints_dir)[0]
    damage(wanted.path / "model.safetensors", "a bit")
    fetch(copied.run, copied.options(checkpoint=wanted.name), DATA)
    assert not find_damage(wanted.path, thoroughly=True)


def test_what_the_run_has_left_behind_is_not_fetched(
    copied: Copied, capsys: pytest.CaptureFixture
) -> None:
    SecondCopy(copied.run, copied.copy_dir, from_step=2).leave_behind()
    copied.forget()  # and is killed, before the copy has set anything aside
    fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == [1]
    SecondCopy(copied.run, copied.copy_dir, from_step=0).leave_behind()
    copied.forget()
    fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == []
    copied.update(from_step=0)
    assert stale_from(copied.run.run_dir, copied.copy_dir) is None
    assert not (copied.run.run_dir / STALE).exists()


def test_a_best_checkpoint_that_is_not_fetched_is_a_warning(
    copied: Copied, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flaky(source: Path, *arguments: object) -> None:
        if "-iteration-2" in source.name:
            raise OSError(errno.EIO, "Input/output error")
        copy_whole(source, *arguments)

    copied.forget()
    monkeypatch.setattr(fetching, "copy_whole", flaky)
    fetch(copied.run, copied.options(), DATA)
    assert copied.steps() == [3]
    assert "the best checkpoint was not fetched: Input/output error" in capsys.readouterr().out


@contextmanager
def hanging(module: ModuleType, call: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a call hang, and fail when the block has ended."""
    released = threading.Event()

    def hang(*_: object, **__: object) -> NoReturn:
        released.wait(60)
        raise RuntimeError("too late")

    monkeypatch.setattr(module, call, hang)
    yield
    released.set()


@pytest.mark.parametrize("call", ["list_checkpoints", "copy_whole"])
def test_a_place_that_does_not_answer_is_an_error(
    copied: Copied, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_deadlines(fetch=0.2, fetch_stall=0.2).items():
        monkeypatch.setenv(name, value)
    copied.forget()
    with hanging(fetching, call, monkeypatch), pytest.raises(
            UserError, match=r"copies: no answer within 0.2 s") as caught:
        fetch(copied.run, copied.options(), DATA)
    assert caught.value.status == 1


def test_configs_that_cannot_be_fetched_in_time_are_an_error(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_deadlines(fetch=0.2).items():
        monkeypatch.setenv(name, value)
    shutil.rmtree(copied.run.run_dir)
    with hanging(before_torch, "copy_record", monkeypatch), pytest.raises(
            UserError, match=r"no answer within 0.2 s") as caught:
        fetch_configs(copied.options())
    assert caught.value.status == 1


def test_a_single_kept_checkpoint_is_warned_of(copied: Copied) -> None:
    assert fetch(copied.run, copied.options(), DATA) == []
    train = copied.run.train.model_copy(update={"keep_checkpoints": 1})
    (warning,) = fetch(replace(copied.run, train=train), copied.options(), DATA)
    assert warning.startswith("keep_checkpoints is 1: of the second copy, too,")


@pytest.mark.parametrize(("change", "words"), [
    ({"emb_dim": 32}, "emb_dim is 32"), ({"random_seed": 7}, "random_seed is 7"),
    ({}, "tokens of")])
def test_the_copy_of_another_run_is_refused(
    copied: Copied, change: dict[str, int], words: str
) -> None:
    model = copied.run.model.model_copy(update={k: v for k, v in change.items() if k in TINY_MODEL})
    train = copied.run.train.model_copy(
        update={k: v for k, v in change.items() if k not in TINY_MODEL})
    data = DATA if change else {"train": "other tokens"}
    with pytest.raises(UserError, match=f"tiny: is the copy of another run: .*{words}") as caught:
        fetch(replace(copied.run, model=model, train=train), copied.options(), data)
    assert caught.value.status == 2


def test_a_directory_that_is_no_second_copy_is_refused(copied: Copied) -> None:
    (copied.copy_dir / OWN).unlink()
    with pytest.raises(UserError, match="is no second copy that --sync-to has made"):
        fetch(copied.run, copied.options(), DATA)


def test_a_second_copy_that_leads_elsewhere_is_refused(copied: Copied) -> None:
    elsewhere = copied.copy_dir.rename(copied.workplace.root / "elsewhere")
    copied.copy_dir.symlink_to(elsewhere)
    with pytest.raises(UserError, match="leads out of"):
        fetch(copied.run, copied.options(), DATA)


def refused(workplace: Workplace, place: Path, *arguments: str) -> str:
    """Check that a place is refused and no file is changed; return the error line."""
    before = contents(workplace.root)
    result = run_in_process(*workplace.arguments("tiny", *arguments, "--sync-to", str(place)))
    assert_refused(result)
    assert contents(workplace.root) == before
    return result.stderr


def test_the_runs_directory_is_no_place_for_a_second_copy(tiny: Workplace) -> None:
    assert "is no second copy" in refused(tiny, tiny.runs_dir)


@pytest.mark.parametrize("run", ["tiny", "other"])  # one that is here, and one to be fetched
def test_a_place_that_is_not_mounted_is_not_made(tiny: Workplace, run: str) -> None:
    before, place = contents(tiny.root), tiny.root / "not-mounted"
    result = run_in_process(*tiny.arguments(), run, "--sync-to", str(place))
    assert (result.returncode, contents(tiny.root)) == (1, before)
    assert result.stderr == (f"Error: {place}: --sync-to names no directory that exists; mount it,"
                             " or create it first\n")


@pytest.mark.parametrize("search", ["--find-max-microbatch", "--find-learning-rate"])
def test_a_search_copies_nothing(tiny: Workplace, search: str) -> None:
    line = refused(tiny, tiny.root / "copies", search)
    assert f"--sync-to cannot be used with {search}" in line


def test_the_configs_are_fetched_where_the_run_is_not_there(
    copied: Copied, capsys: pytest.CaptureFixture
) -> None:
    shutil.rmtree(copied.run.run_dir)
    fetch_configs(copied.options())
    assert load_run(copied.workplace.runs_dir, "tiny").model == copied.run.model
    assert "were fetched from" in capsys.readouterr().out
    copied.run.train_path.write_text("{}")
    fetch_configs(copied.options())  # those of the run directory count
    assert copied.run.train_path.read_text() == "{}"
    assert before_torch.fetch_configs is fetch_configs


def test_a_run_that_is_nowhere_is_an_error(tiny: Workplace) -> None:
    (tiny.root / "copies").mkdir()
    result = run_in_process(*tiny.arguments(), "other", "--sync-to", str(tiny.root / "copies"))
    assert result.returncode == 2 and "runs/other: no such run" in result.stderr


@pytest.fixture
def tiny(workplace: Workplace) -> Workplace:
    workplace.add_run()
    workplace.add_dataset()
    return workplace
