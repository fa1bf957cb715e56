"""What a launch does not go on from is kept in `set-aside/`, byte for byte, also after kills."""

import json
import os
import shutil
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest

from basics.checkpoint_files import copied_links, directory_of, named_as_checkpoints, read_identity
from basics.errors import UserError
from basics.failpoints import VARIABLE
from checkpointing import find_checkpoint, list_checkpoints, open_checkpoint
from lab.runs import append_evaluation
from processes.command_line import Options
from reporting.clock import PhaseClock
from reporting.summary import FINISHED, read_summary
from reporting.tracker import TrackedRun
from run_config import load_run
from tests.support.models import damage
from tests.support.runs import add_everything, files_of, follow_links, made_once, not_kept, refused
from tests.support.stand_ins import odd_file_system
from tests.support.workplace import Workplace, read_lines, small_disk, succeeded
from trainer.resuming import ResumePoint, choose_checkpoint, copied_from
from trainer.startup import open_run_dir

PLACES = (
    "aside.copy:kill:hit=1",
    "aside.copy:kill:hit=7",
    "aside.copied:kill",
    "open.identity:kill",
    *(f"open.records:kill:hit={number}" for number in (1, 2, 3)),
    "open.reference:kill",
    "open.status:kill",
    "aside.move:kill:hit=1",
    "aside.move:kill:hit=2",
    "save.links:kill",
    "aside.end:kill",
)


def train(root):
    workplace = Workplace(root)
    run_dir = add_everything(workplace, min_train_tokens=12 * 64)
    succeeded(workplace.torchrun(1, "tiny", "--after-checkpoint", "echo copied"))
    append_evaluation(run_dir / "evaluations.jsonl", {"global_step": 11})
    TrackedRun.load(run_dir).save(run_dir)  # of a tracker, whose files are in a directory
    assert files_of(run_dir).keys() > {
        "evaluations.jsonl",
        "samples.jsonl",
        "reference.json",
        "layers-chart.png",
        "after-checkpoint.log",
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run that has every kind of file, and its dataset."""
    return Workplace(made_once(tmp_path_factory, "everything", train))


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained.root, tmp_path / "copied", symlinks=True)
    return Workplace(tmp_path / "copied")


def at_step(run_dir, step):
    (name,) = [path.name for path in run_dir.glob(f"checkpoints/*-iteration-{step}")]
    return name


def open_as(workplace, *, num_steps=12, **options):
    """Choose a checkpoint and open the run directory, as a launch does; None if all is done."""
    run = load_run(workplace.runs_dir, "tiny")
    options = Options("tiny", **options)
    name, warnings = choose_checkpoint(run, options)
    resume = ResumePoint(open_checkpoint(run.checkpoints_dir / name) if name else None)
    if read_summary(run).get("status") == FINISHED and resume.first_step >= num_steps:
        return None
    data = SimpleNamespace(
        plan=SimpleNamespace(num_steps=num_steps),
        tokenizer_name=None,
        training=SimpleNamespace(token_file=SimpleNamespace(bytes_per_token=None)),
    )
    opened = open_run_dir(run, data, resume, None, options, PhaseClock())
    return opened, warnings


def longer(run_dir):
    return {"num_steps": 24}


def without_checkpoints(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    return {}


def without_the_last_checkpoint(run_dir):
    shutil.rmtree(run_dir / "checkpoints" / at_step(run_dir, 11))
    return {}


def with_a_damaged_last_checkpoint(run_dir):
    damage(run_dir / "checkpoints" / at_step(run_dir, 11) / "model.safetensors", "cut short")
    return {}


def with_links_that_were_followed(run_dir):
    follow_links(run_dir)
    return {"num_steps": 24}


WAYS = {
    "fresh": lambda run_dir: {"fresh": True},
    "fresh, without checkpoints": lambda run_dir: without_checkpoints(run_dir) | {"fresh": True},
    "an earlier checkpoint": lambda run_dir: {"checkpoint": at_step(run_dir, 4)},
    **{
        way.__name__: way
        for way in (
            longer,
            without_checkpoints,
            without_the_last_checkpoint,
            with_a_damaged_last_checkpoint,
            with_links_that_were_followed,
        )
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_all_files_are_copied_before_the_first_one_changes(copied, way):
    run_dir = copied.runs_dir / "tiny"
    before_name = at_step(run_dir, 11)
    options = WAYS[way](run_dir)
    before = files_of(run_dir)
    opened, _ = open_as(copied, **options)
    (aside_dir,) = (run_dir / "set-aside").iterdir()
    assert opened.aside_dir == aside_dir and read_summary(load_run(copied.runs_dir, "tiny"))
    aside, now = files_of(aside_dir), files_of(run_dir)
    kept = {name for name in before if name.startswith("checkpoints/") and name not in aside}
    assert {name: aside[name] for name in before if name not in kept} == {
        name: content for name, content in before.items() if name not in kept
    }
    assert {name: now.get(name) for name in kept} == {name: before[name] for name in kept}
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "running"
    first_step = {"fresh": 0, "checkpoint": 5}.get(next(iter(options), ""), None)
    if first_step is not None:
        assert all(r["global_step"] < first_step for r in read_lines(run_dir / "metrics.jsonl"))
        assert {step for step in steps_of(run_dir)} == ({4} if first_step else set())
    assert not copied_links(run_dir / "checkpoints")
    if way == "fresh":  # what is set aside is a run directory
        aside_dir.rename(copied.runs_dir / "earlier")
        earlier = load_run(copied.runs_dir, "earlier")
        assert choose_checkpoint(earlier, Options("earlier")) == (before_name, [])
        assert copied_from(earlier) is None


def steps_of(run_dir):
    return {found.meta.global_step for found in list_checkpoints(run_dir / "checkpoints")}


@pytest.mark.parametrize("then", ["the same command", "a plain command"])
@pytest.mark.parametrize("way", WAYS)
def test_a_kill_loses_nothing_and_the_next_launch_completes_it(
    trained, tmp_path, monkeypatch, way, then
):
    num_killed = 0
    for number, place in enumerate(PLACES):
        workplace = Workplace(tmp_path / str(number))
        shutil.copytree(trained.root, workplace.root, symlinks=True)
        run_dir = workplace.runs_dir / "tiny"
        options = WAYS[way](run_dir)
        before, identity = files_of(run_dir), read_identity(run_dir)
        monkeypatch.setenv(VARIABLE, place)
        is_killed = killed(lambda: open_as(workplace, **options))  # noqa: B023
        monkeypatch.delenv(VARIABLE)
        if not is_killed:  # this way moves fewer directories
            continue
        num_killed += 1
        assert not_kept(before, run_dir) == [], place
        if then == "a plain command":
            options = {key: options[key] for key in options.keys() & {"num_steps"}}
        is_completed = open_as(workplace, **options) is not None
        assert not_kept(before, run_dir) == [], place
        asides = list((run_dir / "set-aside").glob("*"))
        if not is_completed:  # the kill came before any change: the run is still the finished one
            assert read_identity(run_dir) == identity
            assert files_of(run_dir) == before
            continue
        assert not list(run_dir.glob("set-aside/*/.*")), place
        assert len(asides) == 1, place
        # A directory that can be put into `runs/` and be gone on with.
        assert read_identity(asides[0]) == identity
    assert num_killed >= 9


def killed(launch):
    """Do this in a process that a failpoint may kill; return whether it did."""
    child = os.fork()
    if not child:
        try:
            launch()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_launch_after_a_kill_sets_nothing_aside(copied):
    """It takes the steps again that it cuts, as they were."""
    run_dir = copied.runs_dir / "tiny"
    (run_dir / "summary.json").write_text('{"status": "running"}')
    shutil.rmtree(run_dir / "checkpoints" / at_step(run_dir, 11))
    opened, _ = open_as(copied)
    assert opened.aside_dir is None and not (run_dir / "set-aside").exists()
    assert opened.identity == read_identity(run_dir) and steps_of(run_dir) == {4, 5, 9}


def test_a_run_that_was_never_launched_sets_nothing_aside(workplace):
    run_dir = workplace.add_run()
    assert open_as(workplace, fresh=True)[0].aside_dir is None
    assert not (run_dir / "set-aside").exists()


@pytest.mark.parametrize("place", ["aside.copied", "open.identity"])
def test_evaluations_after_a_copy_that_was_not_needed_are_in_the_next_one(
    copied, monkeypatch, place
):
    run_dir = copied.runs_dir / "tiny"
    monkeypatch.setenv(VARIABLE, f"{place}:kill")
    assert killed(lambda: open_as(copied, fresh=True))
    monkeypatch.delenv(VARIABLE)
    append_evaluation(run_dir / "evaluations.jsonl", {"global_step": 11})
    before = files_of(run_dir)
    open_as(copied, fresh=True)
    assert not_kept(before, run_dir) == []
    assert len(list((run_dir / "set-aside").iterdir())) == 1


def test_files_that_do_not_fit_on_the_disk_are_a_line_and_nothing_is_changed(trained, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    with small_disk(place, "8m"):
        workplace = Workplace(place)
        shutil.copytree(trained.runs_dir, workplace.runs_dir, symlinks=True)
        run_dir = workplace.runs_dir / "tiny"
        with (place / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(4096))
        before = files_of(run_dir)
        with pytest.raises(UserError, match="No space left on device"):
            open_as(workplace, fresh=True)
        assert files_of(run_dir) == before and not list(run_dir.glob("set-aside/*"))


def test_what_cannot_be_renamed_is_copied_and_a_part_of_it_replaces_nothing(copied, monkeypatch):
    for patch in odd_file_system(copied.root):
        monkeypatch.setattr(*patch)
    run_dir = copied.runs_dir / "tiny"
    before = files_of(run_dir)
    monkeypatch.setenv(VARIABLE, "aside.move:kill:hit=2")
    assert killed(lambda: open_as(copied, fresh=True))
    monkeypatch.delenv(VARIABLE)
    (aside_dir,) = (run_dir / "set-aside").iterdir()
    partial = aside_dir / "checkpoints" / at_step(run_dir, 9)
    partial.mkdir()
    (partial / "meta.json").write_text("{")
    open_as(copied)
    assert not_kept(before, run_dir) == []


# Links that a copy has followed


def test_links_that_a_copy_has_followed_are_said_and_set_aside(copied):
    run_dir = copied.runs_dir / "tiny"
    follow_links(run_dir)
    assert find_checkpoint(run_dir / "checkpoints", "latest").meta.global_step == 11
    latest = open_checkpoint(directory_of(run_dir / "checkpoints/latest"))
    assert latest.meta.global_step == 11  # what the lab reads
    opened, warnings = open_as(copied, num_steps=24)
    assert [line.split(": ")[1] for line in warnings] == [
        "is a directory, since a copy has followed the link; it is set aside"
    ] * 2
    for name in ("latest", "best"):
        assert (run_dir / "checkpoints" / name).is_symlink()
        assert open_checkpoint(opened.aside_dir / "checkpoints" / name)
    assert named_as_checkpoints(opened.aside_dir / "checkpoints") == []


@pytest.mark.parametrize("remains", ["nothing", "an earlier one", "a damaged one"])
def test_a_followed_link_with_the_only_copy_of_the_newest_checkpoint_is_refused(copied, remains):
    run_dir = copied.runs_dir / "tiny"
    follow_links(run_dir)
    newest = run_dir / "checkpoints" / at_step(run_dir, 11)
    if remains == "nothing":
        for path in named_as_checkpoints(run_dir / "checkpoints"):
            shutil.rmtree(path)
    elif remains == "an earlier one":
        shutil.rmtree(newest)
    else:
        damage(newest / "model.safetensors", "cut short")
    line = refused(copied, "tiny")
    assert "latest: is a directory, since a copy has followed the link" in line
    name = line.split("rename it to ")[1].split(",")[0]
    shutil.rmtree(newest, ignore_errors=True)
    (run_dir / "checkpoints/latest").rename(run_dir / "checkpoints" / name)
    opened, _ = open_as(copied, num_steps=24)
    assert steps_of(run_dir) >= {11} and opened.identity == read_identity(run_dir)
