from __future__ import annotations

from pathlib import Path

import pytest

from reporting.metrics_file import remove_metrics_from
from reporting.tracked_run import STATE_NAME, Feed, RecordReader, Sent, Start, TrackedRun


class Recorder:
    """A tracker that keeps the steps that it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.repeats: list[int] = []
        self.status = ""

    def repeat_from(self, step: int) -> None:
        self.repeats.append(step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def flush(self) -> None:
        pass

    def finish(self, status: str, figures: dict[str, float]) -> None:
        self.status = status


class Launches:
    """Launches of one run, with a tracker that keeps what it has over all of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.recorder, self.saved = path, Recorder(), Sent()

    def begin(self, first_step: int) -> Feed:
        self.resume(first_step)
        return self.start_again()

    def resume(self, first_step: int) -> None:
        """Begin a launch, whose tracker does not come as far as to its first record."""
        remove_metrics_from(self.path, first_step)
        start = Start(self.path.stat().st_size if self.path.exists() else 0, first_step)
        self.saved = TrackedRun(id="a", trackers={"t": self.saved}).at_launch(
            "t", start).sent_to("t")

    def start_again(self) -> Feed:
        """Start the tracker, as after a failure of its process."""
        feed = Feed(self.path, self.recorder, self.saved, save=self._save)
        feed.begin()
        return feed

    def _save(self, sent: Sent) -> None:
        self.saved = sent

    def add(self, *steps: int) -> None:
        with self.path.open("a") as file:
            for step in steps:
                file.write(f'{{"global_step": {step}, "train_loss": 1.0}}\n')


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(tmp_path / "metrics.jsonl")


def test_each_record_is_passed_on_once_as_it_comes(launches: Launches) -> None:
    feed = launches.begin(0)
    feed.send_new()
    launches.add(0, 1)
    feed.send_new()
    with launches.path.open("a") as file:
        file.write('{"global_step": 2, ')
        file.flush()
        feed.send_new()
        assert launches.recorder.steps == [1, 2]
        file.write('"train_loss": 1.0}\n')
    feed.finish("finished", {})
    assert launches.recorder.steps == [1, 2, 3] and launches.recorder.status == "finished"
    assert launches.saved == Sent(num_logged=3, num_sent=3) and feed.num_new == 3


def test_a_resumed_run_goes_on_where_the_tracker_was(launches: Launches) -> None:
    feed = launches.begin(0)
    launches.add(0, 1)
    feed.finish("stopped", {})
    launches.add(2, 3)  # while the tracker was gone
    feed = launches.begin(4)
    assert launches.recorder.steps == [1, 2, 3, 4] and not launches.recorder.repeats
    launches.add(4)
    feed.finish("finished", {})
    assert launches.recorder.steps == [1, 2, 3, 4, 5]


def test_steps_that_a_kill_has_undone_are_told_and_passed_on_again(launches: Launches) -> None:
    feed = launches.begin(0)
    launches.add(0, 1, 2, 3)
    feed.finish("", {})
    feed = launches.begin(2)  # the checkpoint holds the state after step 1
    assert launches.recorder.repeats == [3]
    assert launches.saved == Sent(num_logged=2, num_sent=2)
    launches.add(2, 3, 4)
    feed.finish("finished", {})
    assert launches.recorder.steps == [1, 2, 3, 4, 3, 4, 5]
    assert launches.saved == Sent(num_logged=5, num_sent=5)


def test_a_kill_of_the_tracker_repeats_its_last_records_and_loses_nothing(
    launches: Launches
) -> None:
    feed = launches.begin(0)
    launches.add(0)
    feed.send_new()
    launches.add(1)
    feed.send_new()
    assert launches.saved == Sent(num_logged=1, num_sent=2)  # has the second one arrived?
    launches.begin(2)
    assert launches.recorder.steps == [1, 2, 2] and not launches.recorder.repeats


def test_steps_that_were_sent_just_before_a_kill_are_told_too(launches: Launches) -> None:
    feed = launches.begin(0)
    launches.add(*range(10))
    feed.send_new()
    launches.add(*range(10, 20))
    feed.send_new()  # a kill: of the last ten it is not known whether they have arrived
    launches.begin(12)
    assert launches.recorder.repeats == [13] and launches.recorder.steps[20:] == [11, 12]


def test_what_is_sent_is_known_before(launches: Launches) -> None:
    feed = launches.begin(0)
    launches.recorder.log = lambda *_: 1 / 0
    launches.add(0, 1)
    with pytest.raises(ZeroDivisionError):
        feed.send_new()
    assert launches.saved == Sent(num_logged=0, num_sent=2)


def test_a_tracker_that_is_started_again_gets_what_is_missing(launches: Launches) -> None:
    feed = launches.begin(0)
    for step in range(3):
        launches.add(step)
        feed.send_new()
    launches.add(3, 4)
    launches.start_again().finish("", {})
    assert launches.recorder.steps == [1, 2, 3, 3, 4, 5] and not launches.recorder.repeats


def test_undone_steps_are_told_also_where_the_tracker_begins_late(launches: Launches) -> None:
    feed = launches.begin(0)
    launches.add(0, 1, 2, 3)
    feed.finish("", {})
    launches.resume(2)  # its tracker fails at once, as that of the next launch
    launches.add(2, 3, 4)
    launches.resume(4)
    launches.add(4, 5)
    launches.start_again().finish("", {})
    assert launches.recorder.repeats == [3]
    assert launches.recorder.steps == [1, 2, 3, 4, 3, 4, 5, 6]


def test_lines_that_are_no_records_count_for_nothing(launches: Launches) -> None:
    launches.path.write_text('nonsense\n{"global_step": -1}\n[]\n{"global_step": 0, "usd": 1}\ncut')
    launches.begin(1).finish("", {})  # which rewrites the file
    launches.path.write_text('nonsense\n' + launches.path.read_text())
    launches.add(1)
    launches.start_again().finish("", {})
    assert launches.recorder.steps == [1, 2]


@pytest.mark.parametrize("size", [1, 30, 64, 100])
def test_a_long_file_is_read_in_pieces(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    launches.add(*range(50))
    expected = list(range(1, 51)) if size >= 64 else []  # a longer line is no record
    monkeypatch.setattr("reporting.tracked_run.PIECE_BYTES", size)
    launches.begin(50)
    assert launches.recorder.steps == expected


def test_a_file_that_another_launch_has_replaced_is_not_read_on(launches: Launches) -> None:
    launches.add(0, 1)
    feed = launches.begin(2)
    remove_metrics_from(launches.path, 1)
    with pytest.raises(OSError, match="metrics.jsonl was replaced by another launch"):
        feed.send_new()


def test_only_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to("/dev/zero")
    with pytest.raises(OSError):
        RecordReader(tmp_path / "linked").read()
    with pytest.raises(OSError, match="not a plain file"):
        RecordReader(Path("/dev/zero")).read()


def test_the_id_stays_until_a_run_starts_over(tmp_path: Path) -> None:
    first = TrackedRun.load(tmp_path)
    assert not list(tmp_path.iterdir())
    three = Sent(num_logged=3, num_sent=4, start=Start(100, 1))
    first.save(tmp_path, "wandb", three)
    again = TrackedRun.load(tmp_path)
    assert (again.id, again.trackers) == (first.id, {"wandb": three})
    again.save(tmp_path, "trackio", Sent())
    assert TrackedRun.load(tmp_path).trackers == {"wandb": three, "trackio": Sent()}
    fresh = TrackedRun.load(tmp_path, starts_over=True)
    assert fresh.id != first.id and not fresh.trackers
    assert fresh.name_of("r" * 128) == "r" * 80 + f"-{fresh.id}"


@pytest.mark.parametrize("content", [
    "", "{", "[]", '{"id": 1}', '{"id": "../../x"}', '{"id": "a", "trackers": {"wandb": 1}}',
    '{"id": "a", "other": 1}'])
def test_a_damaged_state_starts_a_new_tracked_run(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE_NAME).write_text(content)
    found = TrackedRun.load(tmp_path)
    assert len(found.id) > 10 and not found.trackers
