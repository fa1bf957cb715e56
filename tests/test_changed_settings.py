"""Settings that change between two launches, and run directories that are copied."""

import json
import shutil

import pytest
from matplotlib.figure import Figure

from lab.compare.rows import compare
from lab.publish.model_card import PublishRequest, model_card
from lab.runs import read_run
from reporting import charts
from reporting.metrics_file import read_metrics
from reporting.setting_changes import histories, recorded_changes
from tests.support.runs import refused, run_in_process
from tests.support.workplace import succeeded, train_tiny
from trainer.models import load_model


def change(run_dir, **settings):
    path = run_dir / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    workplace = train_tiny(tmp_path_factory.mktemp("launches"))
    run_dir = workplace.add_run(
        "steps",
        train={"gradient_accumulation_steps": 1, "min_train_tokens": 320, "learning_rate": 0.01},
    )
    said = [succeeded(workplace.torchrun(1, "steps", "--max-steps", "4")).stdout]
    change(run_dir, learning_rate=0.02)
    said += [succeeded(workplace.torchrun(1, "steps", "--max-steps", "4")).stdout]
    change(run_dir, learning_rate=0.03, weight_decay=0.2, usd_per_hour=2.0)
    said += [succeeded(workplace.torchrun(1, "steps")).stdout]
    return workplace, run_dir, said


def test_a_changed_setting_is_a_line_at_the_resume_and_a_record(launches):
    _, run_dir, (first, second, third) = launches
    assert " was " not in first
    assert "learning_rate was 0.01 until step 4 and is 0.02 from here on\n" in second
    assert "because learning_rate changed" in second
    assert "learning_rate was 0.02 until step 8 and is 0.03 from here on\n" in third
    assert "weight_decay was 0.1 until step 8 and is 0.2 from here on\n" in third
    assert third.count(" from here on\n") == 2  # a price is not a setting of the training
    records = read_metrics(run_dir / "metrics.jsonl")
    assert recorded_changes(records) == [
        (4, {"learning_rate": [0.01, 0.02]}),
        (8, {"learning_rate": [0.02, 0.03], "weight_decay": [0.1, 0.2]}),
    ]


def test_a_comparison_and_a_card_tell_until_when_a_setting_was_another(launches):
    workplace, run_dir, _ = launches
    both = compare([read_run(run_dir), read_run(workplace.runs_dir / "tiny")]).rows
    differs = {row.name: row.values["differs"] for row in both}
    assert "learning_rate=0.01 until step 4, 0.02 until step 8, then 0.03" in differs["steps"]
    assert "weight_decay=0.1 until step 8, then 0.2" in differs["steps"]
    target = load_model("steps", runs_dir=workplace.runs_dir, checkpoint_name="latest")
    card = model_card(
        target,
        PublishRequest("steps", runs_dir=workplace.runs_dir, datasets_dir=workplace.datasets_dir),
    )
    assert "| 0.01 until step 4, 0.02 until step 8, then 0.03 |" in card
    assert '"weight_decay": 0.2' in card


def test_charts_have_a_line_where_a_setting_changed(launches, monkeypatch):
    _, run_dir, _ = launches
    labels = {}

    def draw(path, plot):
        figure = Figure()
        plot(figure)
        labels[path.name] = [
            text for axes in figure.axes for text in axes.get_legend_handles_labels()[1]
        ]

    monkeypatch.setattr(charts, "draw_by_hand", draw)
    charts.draw_charts(run_dir, read_metrics(run_dir / "metrics.jsonl"))
    for name in ("loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png"):
        assert "step 4: learning_rate changed" in labels[name]
        assert "step 8: learning_rate, weight_decay changed" in labels[name]


def test_a_change_that_is_taken_back_before_a_checkpoint_leaves_no_record(tmp_path):
    workplace = train_tiny(tmp_path, min_train_tokens=640, checkpoint_interval=10)
    run_dir = workplace.runs_dir / "tiny"
    change(run_dir, min_train_tokens=960, learning_rate=0.02)
    killed = workplace.torchrun(1, "tiny", DDP_TRAIN_FAILPOINT="train:kill:hit=2")
    assert killed.returncode
    change(run_dir, learning_rate=0.01)
    succeeded(workplace.torchrun(1, "tiny"))
    assert histories(read_metrics(run_dir / "metrics.jsonl")) == {
        "min_train_tokens": "640 until step 20, then 960"
    }


@pytest.mark.parametrize(
    "value",
    [
        1,
        None,
        [],
        {"learning_rate": 3},
        {"learning_rate": [1]},
        {"a b": [1, 2]},
        {"learning_rate": [1, 2, 3]},
    ],
)
def test_a_damaged_change_is_left_out(value):
    assert histories([{"global_step": 3, "changed": value}]) == {}


def test_values_are_text_of_limited_length_on_one_line():
    found = histories([{"global_step": 3, "changed": {"tracker": ["a\nb" * 100, None]}}])
    assert found["tracker"].isprintable() and len(found["tracker"]) < 120


def test_a_copied_run_directory_says_whose_copy_it_is(tmp_path):
    workplace = train_tiny(tmp_path)
    original, copy = workplace.runs_dir / "tiny", workplace.runs_dir / "mine"
    shutil.copytree(original, copy, symlinks=True)
    result = run_in_process(*workplace.arguments("mine"), under_torchrun=True)
    assert f"tokens in {original}, of which this is a copy; --fresh starts it over" in result.stdout
    change(copy, random_seed=3)
    line = refused(workplace, "mine", under_torchrun=True)
    assert "; the checkpoint was copied from " in line
    assert line.endswith("/runs/tiny; set it back, or start over with --fresh\n")
    change(copy, random_seed=42, min_train_tokens=480)
    said = succeeded(workplace.torchrun(1, "mine")).stdout
    assert f"warning: {copy} is a copy of {original} with its checkpoints, and goes on" in said
    change(copy, min_train_tokens=640)
    assert "copy" not in succeeded(workplace.torchrun(1, "mine")).stdout  # it has its own now
    change(original, min_train_tokens=480)
    assert "copy" not in succeeded(workplace.torchrun(1, "tiny")).stdout


def test_a_renamed_run_directory_is_no_copy(tmp_path):
    workplace = train_tiny(tmp_path)
    (workplace.runs_dir / "tiny").rename(workplace.runs_dir / "mine")
    assert "copy" not in run_in_process(*workplace.arguments("mine"), under_torchrun=True).stdout
