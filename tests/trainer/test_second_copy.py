"""The second copy of a run: what is fetched from it, what is refused, and that training goes on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from basics.errors import UserError
from basics.failpoints import VARIABLE
from checkpointing import list_checkpoints
from processes import before_torch
from processes.before_torch import fetch_configs
from processes.command_line import Options
from run_config import Run, load_run
from tests.support.checkpoints import damage, save
from tests.support.in_process import assert_refused, contents, run_in_process
from tests.support.workplace import TINY_MODEL, Workplace
from trainer.copy_process import OWN, Copy, Job
from trainer.fetching import fetch
from trainer.second_copy import SecondCopy

DATA = {"train": "100 tokens, abc"}


class Copied:
    """A run with checkpoints at steps 1 to 3, the best at 2, and its second copy."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace, self.place = workplace, workplace.root / "copies"
        workplace.add_run()
        self.run = load_run(workplace.runs_dir, "tiny")
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            save(self.run.checkpoints_dir, step, loss)
        self.run.metrics_path.write_text('{"global_step": 3}\n')
        self.update()
        self.copy_dir = self.place / "tiny"

    def update(self) -> None:
        assert Copy(Job(str(self.run.run_dir), str(self.place / "tiny"))).update() == ""

    def forget(self, *steps: int) -> None:
        """Lose checkpoints and records of the run's own directory."""
        for found in list_checkpoints(self.run.checkpoints_dir):
            if not steps or found.meta.global_step in steps:
                shutil.rmtree(found.path)
        self.run.metrics_path.unlink()

    def options(self, **options: object) -> Options:
        return Options("tiny", runs_dir=self.workplace.runs_dir, sync_to=self.place, **options)

    def steps(self) -> list[int]:
        return [found.meta.global_step for found in list_checkpoints(self.run.checkpoints_dir)]


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
    assert copied.steps() == []


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


def test_a_place_that_cannot_be_made_is_refused(tiny: Workplace) -> None:
    (tiny.root / "file").write_text("")
    assert "cannot be written" in refused(tiny, tiny.root / "file" / "a")


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
    result = run_in_process(*tiny.arguments(), "other", "--sync-to", str(tiny.root / "copies"))
    assert result.returncode == 2 and "runs/other: no such run" in result.stderr


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


def test_a_run_without_a_second_copy_starts_no_process(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.second_copy.start_module", lambda *_: pytest.fail("started"))
    copy = SecondCopy(copied.run, None, from_step=0)
    copy.update()
    assert copy.finish(lambda: 60) == copy.take_failure() == ""


@pytest.fixture
def tiny(workplace: Workplace) -> Workplace:
    workplace.add_run()
    workplace.add_dataset()
    return workplace
