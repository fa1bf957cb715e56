"""Reference curves: a run is compared with one as it trains, warned, stopped; saving a curve."""

import json
import math
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest

from basics.errors import BEHIND_REFERENCE, UserError
from lab.sweep.definition import open_sweep
from reporting.metrics_file import read_metrics
from reporting.reference import (
    PUBLISHED_PATH,
    ReferenceComparison,
    ReferenceCurve,
    find_reference,
    mean_curve,
    read_references,
    reference_of_run,
    report_noise,
)
from reporting.setting_changes import recorded_changes
from reporting.summary import final_status
from run_config import TrainConfig, load_run
from tests.support.lab_cli import error_line, run_lab
from tests.support.runs import refused, summary_of, weights_of
from tests.support.workplace import TINY_TRAIN, Workplace, succeeded, train_tiny

CURVE = {
    "name": "other",
    "vocab_size": 257,
    "train": [[100, 6.0], [10_000, 4.0]],
    "validation": [[100, 6.2], [10_000, 4.2]],
}


LONGER = {"gradient_accumulation_steps": 1, "min_train_tokens": 1600}  # 50 steps of one process


def add_curve(workplace: Workplace, **changes: object) -> None:
    curves = {"curves": [CURVE | changes]}
    (workplace.runs_dir / "references.json").write_text(json.dumps(curves))


def config_with(**changes: object) -> TrainConfig:
    return TrainConfig.model_validate(TINY_TRAIN | changes)


def test_a_loss_is_interpolated_over_the_logarithm_of_tokens_and_back():
    curve = ReferenceCurve.model_validate(CURVE)
    assert curve.loss_at("train", 1000) == pytest.approx(5.0)
    assert curve.tokens_at("train", 5.0) == pytest.approx(1000)
    assert curve.loss_at("validation", 100) == 6.2
    assert curve.loss_at("train", 99) is None and curve.loss_at("train", 10_001) is None
    assert curve.tokens_at("train", 6.1) is None and curve.tokens_at("train", 3.9) is None
    noisy = ReferenceCurve.model_validate(
        CURVE | {"train": [[10, 6.0], [100, 4.0], [1000, 6.0], [10_000, 4.0]]}
    )
    # Between 10 and 100, and at last between 1,000 and 10,000.
    assert noisy.tokens_at("train", 5.0) == pytest.approx(10**2.5)
    tokens, losses = curve.between("train", 1000, 1e9)
    assert tokens.tolist() == [1000, 10_000] and losses == pytest.approx([5.0, 4.0])
    assert not len(curve.between("train", 1e6, 1e9)[0])


def test_other_tokenizers_are_compared_per_byte_or_refused():
    never = Mock(side_effect=AssertionError("the tokens' length takes a while to count"))
    curve = ReferenceCurve.model_validate(CURVE | {"bytes_per_token": 4.0, "train_std": 0.1})
    assert curve.in_units_of("any", 257, never) is curve  # its tokenizer is not known
    scaled = curve.in_units_of("bytes", 256, lambda: 1.0)
    # A token of the reference is four of the run, each with a quarter of the loss.
    assert scaled.train == ((400, 1.5), (40_000, 1.0)) and scaled.train_std == 0.025
    with pytest.raises(UserError, match="another tokenizer .*the run's tokens is not known"):
        curve.in_units_of("bytes", 256, lambda: None)
    with pytest.raises(UserError, match="the reference's tokens is not known"):
        ReferenceCurve.model_validate(CURVE).in_units_of("bytes", 256, never)


def test_the_mean_of_seeds_ends_at_the_last_count():
    runs = [
        [{"tokens": 100 * step, "train_loss": 5 / step + shift} for step in range(1, 9)]
        for shift in (-0.1, 0.1)
    ]
    points = mean_curve(runs, "train_loss", max_points=200)
    assert points[0] == pytest.approx((100, 5.0)) and points[-1] == pytest.approx((800, 5 / 8))
    assert mean_curve(runs, "validation_loss", max_points=200) == ()
    short = mean_curve(runs, "train_loss", max_points=3)
    assert len(short) <= 3 and short[-1] == points[-1]


@pytest.mark.parametrize("num_reports", [190, 210])
def test_the_noise_of_training_has_that_of_batches_which_seeds_have_in_common(num_reports):
    generator = np.random.default_rng(0)
    batches = generator.normal(0, 0.1, num_reports)
    runs = [
        [
            {"tokens": 100 * (i + 1), "train_loss": 3 + batches[i] + generator.normal(0, 0.005)}
            for i in range(num_reports)
        ]
        for _ in range(3)
    ]
    assert report_noise(runs, "train_loss", reports=8) == pytest.approx(0.1, rel=0.25)
    assert report_noise(runs[:1], "train_loss", reports=8) == pytest.approx(0.1, rel=0.25)
    # Validation is always on the same text: only the seeds differ.
    assert report_noise(runs, "train_loss", reports=1) == pytest.approx(0.005, rel=0.25)
    assert report_noise(runs[:1], "train_loss", reports=1) is None
    assert report_noise(runs, "validation_loss", reports=1) is None


def test_published_curves_are_of_several_people_and_fall():
    curves = read_references(PUBLISHED_PATH)
    of_fineweb = [curve for curve in curves if "fineweb" in curve.name and "edu" not in curve.name]
    assert len({curve.source.split(",")[0] for curve in of_fineweb}) >= 3
    for curve in curves:
        assert "https://" in curve.source or curve.name == "demo"
        for kind in ("train", "validation"):
            losses = [loss for _, loss in curve.points(kind)]
            assert len(losses) > 3 and losses[0] < math.log(curve.vocab_size) + 0.2
            if curve.name != "demo":  # it has few sequences in a step, some harder than others
                assert all(after < before + 0.05 for before, after in pairwise(losses))
            assert losses[-1] < losses[0] / 1.3


@pytest.mark.parametrize(
    ("limit", "std", "behind", "is_behind"),
    [
        (None, None, 0.11, True),
        (None, None, 0.09, False),
        (None, 0.01, 0.06, True),  # 5 standard deviations
        (None, 0.01, 0.04, False),
        ({"std": 2}, 0.01, 0.03, True),
        ({"std": 2}, 0.01, 0.01, False),
        ({"loss": 0.5}, 0.01, 0.4, False),
        ({"loss": 0.5}, 0.01, 0.6, True),
        (None, None, math.nan, True),
    ],
)
def test_a_run_is_behind_after_so_many_reports_in_a_row(limit, std, behind, is_behind):
    settings = limit and {"stop_if_behind": limit | {"reports": 2}}
    comparison = ReferenceComparison(
        ReferenceCurve.model_validate(CURVE | {"train_std": std}), config_with(**(settings or {}))
    )
    reports = 2 if limit else 3
    for _ in range(reports - 1):
        comparison.compare("train", 1000, 5.0 + behind)
        assert not comparison.failure
    comparison.compare("train", 1000, 5.0 + behind)
    assert bool(comparison.failure) == is_behind
    assert comparison.stops == (limit is not None)
    comparison.compare("train", 10**6, 99.0)  # beyond the curve: nothing to compare with
    assert bool(comparison.failure) == is_behind
    comparison.compare("train", 1000, 5.0)
    assert not comparison.failure


def test_reports_of_training_do_not_hide_that_validation_is_behind():
    curve = ReferenceCurve.model_validate(CURVE | {"train_std": 0.1, "validation_std": 0.01})
    comparison = ReferenceComparison(curve, config_with())
    for _ in range(3):
        for _ in range(10):
            comparison.compare("train", 1000, 5.3)  # 3 standard deviations
        assert not comparison.failure
        comparison.compare("validation", 1000, 5.5)  # 30
    assert comparison.failure.startswith("the validation loss has been above that of other")
    comparison = ReferenceComparison(curve, config_with())
    for _ in range(5):
        comparison.compare("validation", 1000, 9.9, counts=False)
    assert not comparison.failure


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A run whose second launch is compared with a curve that it is behind."""
    workplace = train_tiny(tmp_path_factory.mktemp("compared"))
    add_curve(workplace)
    run_dir = workplace.add_run("run", train=LONGER | {"reference": "other"})
    first = succeeded(workplace.torchrun(1, "run", "--max-steps", "10")).stdout
    add_curve(workplace, train=[[100, 2.0], [10_000, 1.0]], validation=[])
    second = succeeded(workplace.torchrun(1, "run")).stdout
    return workplace, run_dir, first, second


def test_losses_are_compared_after_as_many_tokens(compared):
    _, run_dir, first, _ = compared
    curve = ReferenceCurve.model_validate(CURVE)
    records = read_metrics(run_dir / "metrics.jsonl")
    validated = next(record for record in records if "validation_loss" in record)
    loss = validated["validation_loss"]
    expected = curve.loss_at("validation", validated["tokens"])
    assert validated["validation_reference_loss"] == pytest.approx(expected)
    assert validated["validation_reference_tokens"] == pytest.approx(
        curve.tokens_at("validation", loss)
    )
    ahead = curve.tokens_at("validation", loss) / validated["tokens"] - 1
    said = f"validation loss {loss:.4f} ({loss - expected:+.4f}, {ahead:+.0%} tokens against other)"
    assert said in first
    trained = [record for record in records if "train_loss" in record]
    assert all("train_reference_loss" in record for record in trained)


def test_a_run_that_is_behind_is_warned_once_and_a_new_curve_is_no_changed_setting(compared):
    _, run_dir, first, second = compared
    warning = "warning: the training loss has been above that of other by more than 0.1 for 3"
    assert warning not in first and second.count(warning) == 1
    assert recorded_changes(read_metrics(run_dir / "metrics.jsonl")) == []
    assert summary_of(run_dir)["status"] == "finished"
    assert reference_of_run(run_dir).train[0] == (100, 2.0)


def test_a_run_that_stays_behind_stops_with_a_checkpoint_and_can_be_continued(tmp_path):
    workplace = Workplace(tmp_path)
    workplace.add_dataset()
    workplace.runs_dir.mkdir()
    add_curve(workplace, train=[[100, 0.1], [10_000, 0.1]], validation=[])
    of_two = {"gradient_accumulation_steps": 1, "min_train_tokens": 1920}
    whole = workplace.add_run("whole", train=of_two)
    succeeded(workplace.torchrun(2, "whole"))
    limit = {"loss": 1.0, "reports": 2}
    run_dir = workplace.add_run(
        "run", train=of_two | {"reference": "other", "stop_if_behind": limit}
    )
    result = workplace.torchrun(2, "run", "--when-done", "echo over: $DDP_TRAIN_REASON")
    assert result.returncode == 0, result.stderr  # torchrun's, as after a budget
    assert final_status(load_run(workplace.runs_dir, "run"), 0) == BEHIND_REFERENCE
    summary = summary_of(run_dir)
    assert summary["status"] == "stopped" and summary["stopped_by"] == "behind"
    assert summary["reason"].startswith(
        "the training loss has been above that of other by more than 1 for"
    )
    assert f"over: {summary['reason']}" in result.stdout
    assert 0 < summary["global_step"] < 29
    assert "to continue: raise or remove stop_if_behind, then" in result.stdout
    train = json.loads((run_dir / "train.json").read_text())
    del train["stop_if_behind"]
    (run_dir / "train.json").write_text(json.dumps(train))
    succeeded(workplace.torchrun(2, "run"))
    assert weights_of(run_dir) == weights_of(whole)


def test_curves_that_cannot_be_compared_with_are_refused(tmp_path):
    workplace = Workplace(tmp_path)
    workplace.add_dataset()
    workplace.runs_dir.mkdir()
    add_curve(workplace)
    for name in ("none", "other"):
        workplace.add_run(name, train={"reference": name})
    line = refused(workplace, "none")
    assert "no reference 'none'; known are demo, " in line and ", other;" in line
    add_curve(workplace, vocab_size=50257)
    assert "has another tokenizer" in refused(workplace, "other")
    add_curve(workplace, train=[[100, 2.0], [100, 1.0]])
    assert "the tokens of train do not rise" in refused(workplace, "other")
    add_curve(workplace, train=[[10**6, 2.0]], validation=[])
    workplace.add_run("late", train={"reference": "other", "stop_if_behind": {"loss": 1.0}})
    assert "begins at 1,000,000 tokens, and the run has" in refused(workplace, "late")
    (workplace.runs_dir / "references.json").write_text('{"curves": [{"name": 3}]}')
    assert "references.json: curve 1: " in refused(workplace, "other")
    add_curve(workplace)
    workplace.add_run("stop", train={"stop_if_behind": {"loss": 1.0}})
    assert "stop_if_behind needs a curve" in refused(workplace, "stop")
    workplace.add_run("std", train={"reference": "other", "stop_if_behind": {"std": 3.0}})
    assert "the noise of reference other is not known; set loss instead" in refused(
        workplace, "std"
    )
    workplace.add_run("both", train={"stop_if_behind": {"std": 3.0, "loss": 1.0}})
    assert "either std or loss" in refused(workplace, "both")


def test_a_copied_run_and_the_runs_of_a_sweep_have_the_curve(tmp_path):
    workplace = Workplace(tmp_path)
    workplace.add_dataset()
    run_dir = workplace.add_run(train=LONGER | {"reference": "other"})
    add_curve(workplace)
    base = load_run(workplace.runs_dir, "tiny")
    sweep = open_sweep(base, tmp_path / "sweeps/tiny", [{"learning_rate": 0.02}], 1)
    assert find_reference("other", sweep.sweep_dir).train == ((100, 6.0), (10_000, 4.0))
    (run_dir / "reference.json").write_text(json.dumps(CURVE))
    (workplace.runs_dir / "references.json").unlink()
    assert find_reference("other", workplace.runs_dir, run_dir).name == "other"
    with pytest.raises(UserError, match="no reference 'other'"):
        find_reference("other", workplace.runs_dir)


def test_a_saved_curve_is_the_mean_over_seeds(tmp_path):
    workplace = Workplace(tmp_path)
    workplace.add_dataset()
    for name, changes in (
        ("first", {}),
        ("second", {"random_seed": 2}),
        ("other", {"learning_rate": 0.02}),
    ):
        workplace.add_run(name, train=LONGER | changes)
        succeeded(workplace.torchrun(1, name))
    place = ("--runs-dir", str(workplace.runs_dir))
    said = run_lab("compare", "first", "second", "--save-reference", "mine", *place)
    assert "references.json; compare with it: ddp_train.py RUN --reference mine" in said.stderr
    curve = find_reference("mine", workplace.runs_dir)
    assert curve.num_runs == 2 and curve.source == "first, second"
    runs = [
        read_metrics(workplace.runs_dir / name / "metrics.jsonl") for name in ("first", "second")
    ]
    losses = [
        next(record["validation_loss"] for record in records if "validation_loss" in record)
        for records in runs
    ]
    assert curve.validation[0][1] == pytest.approx(sum(losses) / 2)
    assert curve.train_std > 0
    table = run_lab("compare", "other", "--reference", "mine", "--json", *place)
    row = json.loads(table.stdout)["rows"][0]
    last = read_metrics(workplace.runs_dir / "other/metrics.jsonl")[-1]
    difference = last["validation_loss"] - curve.loss_at("validation", last["tokens"])
    assert row["reference_difference"] == pytest.approx(difference)
    for runs, name, problem in (
        (["first"], "mine", "there is such a curve"),
        (["first"], "../x", "a name has letters"),
        (["first", "other"], "another", "wants one run, or runs that differ only in their"),
    ):
        assert problem in error_line(run_lab("compare", *runs, "--save-reference", name, *place))
    assert [one.name for one in read_references(workplace.runs_dir / "references.json")] == ["mine"]
