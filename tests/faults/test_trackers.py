"""Runs with a tracker: it gets all records, and holds nothing up."""

import re

import pytest

from basics.failpoints import VARIABLE
from reporting.metrics_file import METRICS
from reporting.tracker import TrackedRun
from tests.support.runs import (
    metrics_of,
    train_undisturbed,
    weights_of,
    with_deadlines,
)
from tests.support.trackers import in_tensorboard
from tests.support.workplace import read_lines, succeeded

SETTINGS = {"diagnostics_interval": 4}
STEPS = "global_step"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run directory of a run without a tracker."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), SETTINGS)


def add(workplace, tracker):
    workplace.add_dataset()
    return workplace.add_run(train=SETTINGS | {"tracker": tracker})


def test_a_tracker_that_hangs_changes_nothing(workplace, undisturbed):
    run_dir = add(workplace, "trackio")
    package = workplace.root / "stand-in" / "trackio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import time; time.sleep(3600)")
    result = succeeded(workplace.torchrun(2, "tiny", PYTHONPATH=str(package.parent),
                                          **with_deadlines(tracker=1)))
    (said,) = re.findall("warning: tracker trackio: (.*)", result.stdout)
    assert said.startswith("it was ended after 1 s; `lab export-metrics tiny --to trackio`")
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert metrics_of(run_dir) == metrics_of(undisturbed)
    assert not TrackedRun.load(run_dir).sent.get("trackio")


def test_a_run_that_is_killed_goes_on_in_the_same_tracked_run(workplace, undisturbed):
    run_dir = add(workplace, "tensorboard")
    assert workplace.torchrun(2, "tiny", **{VARIABLE: "validate:kill:rank=0:hit=2"}).returncode
    tracked = TrackedRun.load(run_dir)
    result = succeeded(workplace.torchrun(2, "tiny"))
    assert "warning: tracker" not in result.stdout
    assert weights_of(run_dir) == weights_of(undisturbed)
    records = read_lines(run_dir / "metrics.jsonl")
    assert TrackedRun.load(run_dir) == tracked.model_copy(
        update={"sent": {"tensorboard": len(records)}})
    values = in_tensorboard(run_dir / "tensorboard" / tracked.id)
    for key in ("train_loss", "validation_loss", "head_grad_norm", "tokens_per_second"):
        assert [step for step, _ in values[METRICS[key].name]] == [
            record[STEPS] + 1 for record in records if record.get(key) is not None], key
    assert values["final/steps"][-1] == (12, 12.0)
    keys = {key for record in records for key in record} - {STEPS}
    assert keys <= METRICS.keys()  # all that a run records is shown
