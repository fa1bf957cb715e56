"""`lab compare`: its rows, marks and notes; CSV, JSON, Markdown, HTML and charts."""

import csv
import io
import json
import math
import re
import shutil

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.cells import cell_len

from basics.errors import UserError
from lab import columns
from lab import runs as lab_runs
from lab.columns import EVERYWHERE, FIGURES, RunFigure
from lab.compare import charts as comparison_charts
from lab.compare import rows as rows_of_compare
from lab.compare.compare import csv_of, find_results, table_of
from lab.compare.published import (
    LOSS_SETTINGS,
    MEMORY_SETTINGS,
    loss_points,
    memory_points,
    plot_fit,
    plot_line,
    plot_points,
    read_published,
)
from lab.compare.reaching import Reached, first_reaching
from lab.compare.rows import compare
from lab.run_table import table_of as list_of
from lab.runs import NUMBERS, frame, read_run
from lab.watch.answers import Watched
from reporting.metrics_file import METRICS
from run_config import TrainConfig
from tests.support.json_schemas import checked
from tests.support.lab_cli import HOSTILE as HOSTILE_TEXT
from tests.support.lab_cli import active_parts, error_line, run_lab, succeeded
from tests.support.workplace import TINY_MODEL, TINY_TRAIN

SLICE = {"dataset": "tiny", "split": "validation", "start_token": 0, "num_tokens": 400}
CHARTS = ["loss-curves.png", "loss-over-batch.png", "memory-over-microbatch.png"]
MACHINE = {"device": "AMD EPYC", "precision": "fp32", "processes": 2}

# By the number of layers; 1,536 tokens of 6 (12 L C^2 + V C) + 12 L T C.
PFLOP = {n: 1536 * (6 * (12 * n * 256 + 257 * 16) + 12 * n * 256) / 1e15 for n in (1, 2)}


class Runs:
    """Writes the files of trained runs: 12 steps of 8 sequences of 16 tokens."""

    def __init__(self, workplace):
        self.dir, self._workplace = workplace.runs_dir, workplace

    def add(self, name, *, losses=(3.2, 3.1, None), train=None, model=None, summary=None):
        """Add a finished run with training, validation and test loss (from `lab evaluate`)."""
        run_dir = self._workplace.add_run(name, train=train, model=model)
        train_loss, validation_loss, test_loss = losses
        config = {k: v for k, v in (TINY_TRAIN | (train or {})).items() if v is not None}
        world_size = 2
        batch = config["microbatch_size"] * config["gradient_accumulation_steps"] * world_size
        tokens = batch * 16 * 12
        (run_dir / "summary.json").write_text(
            json.dumps(
                {
                    "run": name,
                    "status": "finished",
                    "reason": None,
                    "global_step": 11,
                    "num_steps": 12,
                    "tokens": tokens,
                    "train_loss": train_loss,
                    "validation_loss": validation_loss,
                    "seconds": {"training": 90.0, "validation": 10.0},
                    "usd": {"training": 0.9, "validation": 0.1, "total": 1.0},
                    "tokens_per_second": 17.0,
                    "machine": MACHINE,
                    "batch": {
                        "microbatch_size": config["microbatch_size"],
                        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
                        "world_size": world_size,
                        "context_length": 16,
                        "num_steps": 12,
                    },
                    "model": TINY_MODEL | (model or {}),
                    "train": config,
                    "best": {"checkpoint": "best-iteration-9", "global_step": 9, "loss": 3.0},
                }
                | (summary or {})
            )
        )
        self.record(name, tokens=tokens, usd=1.0)
        if test_loss is not None:
            self.evaluate(name, test_loss)
        return run_dir

    def record(self, name, *, tokens=1536, usd=None):
        """Write the metrics of 12 steps, with validations after steps 6 and 12."""
        lines = []
        for step in range(12):
            record = {
                "global_step": step,
                "tokens": tokens * (step + 1) // 12,
                "seconds": 100 / 12 * (step + 1),
            }
            record |= {} if usd is None else {"usd": usd * (step + 1) / 12}
            lines.append(record | {"train_loss": 5 - step / 10, "tokens_per_second": 10 + step})
            if step % 6 == 5:
                lines.append(record | {"validation_loss": 5 - step / 10, "validation_seconds": 5.0})
        path = self.dir / name / "metrics.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def append(self, name, record):
        with (self.dir / name / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def evaluate(self, name, loss, **where):
        with (self.dir / name / "evaluations.jsonl").open("a") as file:
            file.write(
                json.dumps(
                    {
                        "target": name,
                        "checkpoint": "best-iteration-9",
                        "global_step": 9,
                        "loss": loss,
                        "perplexity": 1.0,
                    }
                    | SLICE
                    | where
                )
                + "\n"
            )

    def compare(self, *names, published=False):
        return compare(find_results(self.dir, names) + (read_published() if published else []))

    def run(self, *arguments):
        return run_lab("compare", *arguments, "--runs-dir", str(self.dir))

    def csv(self, *arguments):
        """Return the rows of CSV by run."""
        text = succeeded(self.run("--csv", *arguments)).stdout
        return {row["run"]: row for row in csv.DictReader(io.StringIO(text))}


@pytest.fixture
def runs(workplace):
    workplace.runs_dir.mkdir()
    return Runs(workplace)


def names_of(comparison):
    return [row.name for row in comparison.rows]


def differences(comparison):
    return {row.name: row.values["differs"] for row in comparison.rows}


def row_of(comparison, name):
    return next(row for row in comparison.rows if name in row.name)


def cells_of(comparison, name):
    """Return one row of the Markdown table, by column head."""
    lines = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in table_of(comparison).markdown().splitlines()
        if line.startswith("|")
    ]
    return next(dict(zip(lines[0], line, strict=True)) for line in lines if name in line[0])


def test_csv_and_json_rows_have_all_figures_of_a_run(runs):
    runs.add("one", losses=(3.25, 3.125, 3.0625))
    row, document = runs.csv()["one"], runs.run("--json").stdout
    known = {
        "num_seeds": 1,
        "global_batch_size": 8,
        "microbatch_size": 2,
        "tokens": 1536,
        "steps": 12,
        "training_pflop": PFLOP[2],
        "train_loss": 3.25,
        "validation_loss": 3.125,
        "test_loss": 3.0625,
        "seconds": 100,
        "seconds_without_validation": 90,
        "validation_seconds": 10,
        "tokens_per_second": 17,
        "usd_per_hour": 36,
        "usd": 1,
        "usd_without_validation": 0.9,
        "usd_per_megatoken": 1 / 0.001536,
        "usd_per_megatoken_without_validation": 0.9 / 0.001536,
    }
    assert {key: float(row[key]) for key in known} == pytest.approx(known)
    assert row["status"] == "finished" and row["ift_score"] == row["num_gpus"] == ""
    assert row["machine"] == "AMD EPYC"
    assert row["test_slice"] == "tiny/validation, 400 tokens from token 0"
    checked(document)
    (same,) = json.loads(document)["rows"]
    assert [*same] == [*row] and {key: same[key] for key in known} == pytest.approx(known)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([{"score": 1.0}, {"score": 21.5, "score_interval": [18, 25]}], "21.50 (18.00 to 25.00)"),
        ([{"score": 0, "score_interval": None}], "0.00"),
        ([], None),
        ([{"score": "x"}, {"score": 1e99}], None),
    ],
)
def test_the_score_of_a_judge_stands_beside_the_losses(runs, lines, shown):
    with (runs.add("judged") / "evaluations.jsonl").open("a") as file:
        for line in lines:
            judged = {"judge": "J", "time": "2026-11-23T10:00:00+00:00"} | line
            file.write(json.dumps(judged) + "\n")
    comparison = runs.compare(published=True)
    assert cells_of(comparison, "judged")["IFT"] == (shown or "-")
    assert cells_of(comparison, "8x A100 40 GiB*")["IFT"] == "17.09"
    assert any("judged by J on 2026-11-23" in note for note in comparison.notes) == bool(shown)
    assert runs.csv()["judged"]["ift_judge"] == ("J on 2026-11-23" if shown else "")


def test_differences_are_shown_relative_to_most_runs(runs):
    runs.add("base")
    runs.add("same")
    runs.add("wide", model={"emb_dim": 32})
    runs.add("clipped", train={"clipping_max_norm": 3.5}, summary={"code": "4d5e6f"})
    comparison = runs.compare()
    assert differences(comparison) == {
        "base": "",
        "same": "",
        "wide": "emb_dim=32",
        "clipped": "clipping_max_norm=3.5 code=4d5e6f",
    }
    assert any("another value: emb_dim=16" in note for note in comparison.notes)
    assert differences(runs.compare("base", "wide")) == {
        "base": "emb_dim=16",
        "wide": "emb_dim=32",
    }
    (runs.dir / "wide/summary.json").unlink()  # the settings are in JSON files too
    assert differences(runs.compare())["wide (no summary)"] == "emb_dim=32"


def test_keys_that_change_no_loss_stand_below_the_table(runs):
    runs.add("a")
    runs.add("b", train={"head_chunks": 2, "tracker": "tensorboard", "weight_decay": 0.25})
    comparison = runs.compare()
    assert "weight_decay=0.25" in cells_of(comparison, "b").values()
    assert "settings that differ and change no loss: head_chunks, tracker" in comparison.notes
    assert not rows_of_compare.WITHOUT_EFFECT & {*LOSS_SETTINGS}
    assert {*MEMORY_SETTINGS} < {*TrainConfig.model_fields}


def test_on_a_curve_over_batch_sizes_all_settings_are_equal_but_what_is_tuned_with_the_batch():
    batch = {"global_batch_size", "microbatch_size", "gradient_accumulation_steps"}
    groups = ("matrix_", "embedding_", "head_", "vector_", "")
    tuned = {f"{group}learning_rate" for group in groups} | {"beta1", "beta2", "momentum"}
    noise = {"random_seed", "start_train_token", "precision", "use_amp", "residual_dtype"}
    others = {"epsilon", "reference", "stop_if_behind"}
    excused = batch | tuned | noise | others | rows_of_compare.WITHOUT_EFFECT
    assert {*TrainConfig.model_fields} - excused == {*LOSS_SETTINGS}


@pytest.mark.parametrize(
    ("a", "b", "order", "kind"),
    [
        ((3.0, 3.0, 3.2), (4.0, 4.0, 3.1), ["b", "a", "busy (running)"], "test"),
        ((3.0, 3.3, None), (4.0, 3.1, 3.0), ["b", "a", "busy (running)"], "validation"),
        ((3.0, 3.3, 3.0), (2.0, None, None), ["b", "a", "busy (running)"], "train"),
        ((3.0, 3.3, 3.1), (None, None, None), ["a", "busy (running)", "b"], "test"),
    ],
)
def test_rows_are_sorted_by_the_loss_that_all_finished_rows_have(runs, a, b, order, kind):
    runs.add("a", losses=a)
    runs.add("b", losses=b)
    runs.add("busy", losses=(5.0, 5.0, None), summary={"status": "running"})
    comparison = runs.compare()
    assert names_of(comparison) == order and comparison.sorted_by == f"{kind}_loss"


def test_test_losses_on_other_tokens_are_marked_and_not_sorted_by(runs):
    for name, validation, test in (("a", 3.3, 3.0), ("b", 3.2, None), ("c", 3.1, 3.2)):
        runs.add(name, losses=(3.0, validation, test))
    runs.evaluate("b", 2.0, start_token=100)
    comparison = runs.compare()
    assert names_of(comparison) == ["c", "b", "a"]  # by validation
    assert cells_of(comparison, "b")["test loss"] == "2.0000 †"
    assert cells_of(comparison, "a")["test loss"] == "3.0000"
    assert any("† not comparable: test loss on tiny" in note for note in comparison.notes)


LAST = {"checkpoint": "last-iteration-11", "global_step": 11}
EARLY = {"checkpoint": "early-iteration-4", "global_step": 4}


@pytest.mark.parametrize(
    ("summary", "measured", "loss"),
    [
        ({}, [(3.5, {}), (4.0, LAST), (5.0, EARLY)], 3.5),
        ({}, [(3.5, {}), (4.0, LAST), (3.6, {})], 3.6),
        ({}, [(3.5, {}), (2.0, {"split": "train"})], 3.5),
        ({}, [(5.0, EARLY)], None),
        ({"best": None}, [(3.5, {}), (4.0, LAST), (5.0, EARLY)], 4.0),
        ({"best": "?", "global_step": None}, [(3.5, {}), (5.0, EARLY)], 3.5),
    ],
)
def test_test_loss_is_that_of_the_best_checkpoint_else_of_the_last(runs, summary, measured, loss):
    runs.add("a", losses=(3.0, 3.0, None), summary=summary)
    for found, where in measured:
        runs.evaluate("a", found, **where)
    assert runs.compare().rows[0].values["test_loss"] == loss


def test_test_loss_is_on_the_slice_that_most_rows_have(runs):
    for name, longer in (("a", 100), ("b", 4000)):
        runs.add(name, losses=(3.0, 3.0, None))
        runs.evaluate(name, 3.5)
        runs.evaluate(name, 2.0, num_tokens=longer)
    for names, losses in ((["a"], ["3.5"]), (["b"], ["2"]), ([], ["3.5", "3.5"])):
        assert [row["test_loss"] for row in runs.csv(*names).values()] == losses


def test_runs_that_differ_only_in_their_seed_are_one_row(runs):
    for seed, loss in ((1, 3.0), (2, 3.1), (3, 3.2)):
        usd = {"validation": 0.0, "total": float(seed)}
        losses = (loss + 1, loss, None)
        runs.add(f"seed-{seed}", losses=losses, train={"random_seed": seed}, summary={"usd": usd})
    runs.add("wide", model={"emb_dim": 32}, losses=(9.0, 9.0, None))
    comparison = runs.compare()
    assert names_of(comparison) == ["seed-1, seed-2, seed-3", "wide"]
    assert cells_of(comparison, "seed")["val. loss"] == "3.1000 ± 0.1000 (n=3)"
    values = comparison.rows[0].values
    found = [values[key] for key in ("num_seeds", "train_loss", "validation_loss_spread", "usd")]
    assert found == pytest.approx([3, 4.1, 0.1, 2])
    assert "random_seed=1,2,3" in values["differs"]


@pytest.mark.parametrize(
    ("train", "summary"),
    [
        ({"random_seed": 1}, {}),  # an identical run is not another sample
        ({"random_seed": 2, "weight_decay": 0.5}, {}),
        ({"random_seed": 2}, {"status": "stopped"}),
        ({"random_seed": 2}, {"global_step": 5}),
        ({"random_seed": 2}, {"machine": {"device": "H100"}}),
        ({"random_seed": 2}, {"tokens": 3072}),  # a larger batch
    ],
)
def test_runs_that_differ_in_more_than_their_seed_are_separate_rows(runs, train, summary):
    runs.add("a", train={"random_seed": 1})
    runs.add("b", train=train, summary=summary)
    comparison = runs.compare()
    assert len(comparison.rows) == 2
    assert comparison.notes[0].endswith("lab sweep --seeds 3 shows")  # not known from one seed


@pytest.mark.parametrize(("loss", "is_within"), [(3.59, True), (3.60, False)])
def test_difference_within_the_seed_spread_is_marked(runs, loss, is_within):
    for seed in (1, 2, 3):
        runs.add(f"seed-{seed}", losses=(3.0, 2.9 + seed / 10, None), train={"random_seed": seed})
    runs.add("other", losses=(3.0, loss, None), train={"weight_decay": 0.5})
    comparison = runs.compare()
    # s = 0.1 of 2 degrees of freedom, t = 4.30: 4.30 * 0.1 * sqrt(1/3 + 1) = 0.4965 above 3.1
    assert row_of(comparison, "other").values["is_within_spread"] == is_within
    assert ("≈" in cells_of(comparison, "other")["val. loss"]) == is_within
    assert not comparison.rows[0].values["is_within_spread"]
    assert "≈" in comparison.notes[0] and "0.1000, 2 degrees" in comparison.notes[0]


def test_running_run_shows_its_figures_so_far(runs):
    run_dir = runs.add("busy")
    runs.record("busy", usd=2.0)
    summary = {"run": "busy", "status": "running", "seconds": {"training": 1.0}, "usd": None}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"global_step": 12, "tok')
    expected = {
        "steps": 12,
        "tokens": 1536,
        "global_batch_size": 8,
        "train_loss": 3.9,
        "validation_loss": 4.5 - 0.6,
        "seconds": 100,
        "usd": 2,
        "seconds_without_validation": 90,
        "usd_without_validation": 1.8,
        "tokens_per_second": 21,
    }
    row = row_of(runs.compare(), "busy (running)")
    assert {key: row.values[key] for key in expected} == pytest.approx(expected)


def test_charts_need_a_directory(runs):
    runs.add("trained")
    refused = runs.run("--charts", __file__)
    assert refused.exit_code == 2 and "test_compare.py' is a file" in refused.stderr
    assert "train loss" not in refused.stdout  # before any work


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other"], "other"),
        (["trained", "fresh"], "has not been trained yet; train it with: .* fresh"),
        (["--csv", "--json"], "--csv and --json exclude each other"),
        (["--to-loss-of", "nobody"], "--to-loss-of nobody: no finished run"),
        (["--usd-per-hour", "none=1"], "--usd-per-hour .none=1.: wanted RUN=PRICE"),
        (["--charts", "/dev/null/x"], "/dev/null.*: cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_one_line(workplace, runs, arguments, message):
    assert "holds no trained run" in error_line(runs.run())
    runs.add("trained")
    workplace.add_run("fresh")
    error = runs.run(*arguments).exception
    assert isinstance(error, UserError) and re.search(message, error.line()), error


def test_published_rows_are_marked_and_have_their_figures(runs):
    runs.add("mine")
    rows = runs.csv("--published")
    published = {name: row for name, row in rows.items() if row["status"] == "published"}
    assert len(published) == len(rows) - 1 == 14
    assert "lab sweep" not in runs.run("--published").stdout  # one own run
    known = {
        "model": "GPT-2 small, untied (163M)",
        "global_batch_size": "104",
        "microbatch_size": "13",
        "tokens": "3260190720",
        "ift_score": "17.09",
        "seconds": "13904",
        "seconds_without_validation": "12404",
        "test_loss": "3.674",
        "tokens_per_second": "254000",
        "machine": "A100 40 GiB",
        "num_gpus": "8",
    }
    assert known.items() <= published["8x A100 40 GiB"].items()
    for name, usd in (("8x A100 40 GiB", 35.56), ("8x B200 160 GiB", 39.14)):  # as published
        assert float(published[name]["usd_without_validation"]) == pytest.approx(usd, abs=0.005)
    cells = cells_of(runs.compare(published=True), "8x A100 80 GiB")
    assert cells["test loss"] == "3.730" and cells["run"].endswith("GiB*")


def figure_of(points, fit):
    figure = Figure()
    plot_points({"runs": points}, fit, ("x", "y"), figure)
    return figure


def line_of(figure, label):
    return next(line for line in figure.axes[0].lines if label in line.get_label())


def test_published_losses_and_memory_are_fitted_as_published():
    rows = compare(read_published()).rows
    (losses,) = loss_points(rows, "test_loss").values()
    (memory,) = memory_points(rows).values()
    assert set(losses) == {(6, 3.944), (104, 3.674), (216, 3.725), (224, 3.730), (512, 3.771)}
    line_of(figure_of(losses, plot_fit), "minimum of the fit: 3.6922 at 97.11")
    assert set(memory) == {(6, 24), (13, 40), (27, 80), (64, 160)}
    line = line_of(figure_of(memory, plot_line), "GiB per sequence")
    assert line.get_label() == "11.48 GiB + 2.346 GiB per sequence"  # published: 11.5, 2.35


def test_runs_are_priced_afterwards(runs):
    runs.add("priced", losses=(3.0, 4.0, None), summary={"usd": None})
    runs.record("priced")
    runs.add("other", losses=(3.0, 4.1, None))
    prices = ["--usd-per-hour", "priced=72", "--usd-per-hour", "other=0.9"]
    rows = runs.csv("--to-loss-of", "other", *prices)
    known = {
        "usd_per_hour": 72,
        "usd": 2,
        "usd_without_validation": 1.8,
        "usd_to_loss": 2 * 10 / 12,
    }
    assert {key: float(rows["priced"][key]) for key in known} == pytest.approx(known)
    assert float(rows["other"]["usd"]) == pytest.approx(0.025)


@pytest.mark.parametrize("names", [(), ("new",)])
def test_charts_have_a_saved_search_before_its_run_is_launched(workplace, runs, tmp_path, names):
    runs.add("other")
    trials = [
        {"microbatch_size": 1, "fits": True, "demand_gib": 2.5},
        {"microbatch_size": 5, "fits": True, "demand_gib": 4.5},
        {"microbatch_size": 9, "fits": False, "demand_gib": None},
        {"microbatch_size": "x", "fits": True},
        7,
    ]
    path = workplace.add_run("new") / "microbatch-search.json"
    path.write_text(json.dumps({"trials": trials}))
    result = succeeded(runs.run(*names, "--charts", str(tmp_path / "charts")))
    assert "new (not launched)" in result.stdout
    assert f"written: {tmp_path / 'charts/memory-over-microbatch.png'}" in result.stderr
    shutil.copy(path, runs.dir / "other")
    (search,) = memory_points(runs.compare("other").rows).values()
    assert set(search) == {(1, 2.5), (5, 4.5)}


def test_runs_with_equal_settings_form_one_curve_and_others_none(runs):
    """Over the batch, all settings of the loss are equal; over the microbatch, those of memory."""
    for size in (1, 2, 4):
        losses = (3.0, 3 + 0.1 * np.log(size) ** 2, None)  # losses of a parabola
        machine = MACHINE | {"peak_memory_gib": 1.0 + size}  # memory of a line
        train = {"microbatch_size": size}
        runs.add(f"batch-{size}", train=train, losses=losses, summary={"machine": machine})
    runs.add("clipped", train={"clipping_max_norm": 9.0})
    runs.add("elsewhere", train={"start_val_token": 7})  # validates on other tokens
    runs.add("stopped", train={"microbatch_size": 8}, summary={"status": "stopped"})
    for name, size, gib, precision in (
        ("low-1", 1, 3.0, "bf16"),
        ("low-2", 2, 4.0, "bf16"),
        ("half", 8, 90.0, "fp16"),
    ):
        machine = {"device": "H100", "precision": precision, "peak_memory_gib": gib}
        train = {"microbatch_size": size, "weight_decay": 0.5}
        runs.add(name, train=train, summary={"machine": MACHINE | machine})
    rows = runs.compare().rows
    curve, low = loss_points(rows, "validation_loss").values()
    assert {row.name for row in curve.values()} == {"batch-1", "batch-2", "batch-4"}
    assert sorted(x for x, _ in low) == [4, 8, 32]
    line_of(figure_of(curve, plot_fit), "minimum of the fit: 3.0000 at 4")
    large, small = memory_points(rows).values()
    assert set(large) == {(1, 2.0), (2, 3.0), (4, 5.0)} and set(small) == {(1, 3.0), (2, 4.0)}


def test_texts_are_escaped_in_markdown_and_csv(runs):
    for name, dataset in (("a", "<script>"), ("b", "<script>"), ("c", HOSTILE_TEXT)):
        runs.add(name, train={"dataset": dataset})  # the most frequent value is in a note
    table = table_of(runs.compare())
    markdown = table.markdown()
    assert not active_parts(markdown) and "<script>" not in markdown
    assert "\x1b" not in markdown + table.terminal(160)
    (cells,) = csv.DictReader(io.StringIO(csv_of([{"differs": "=1+x", "train_loss": -0.5}])))
    assert (cells["differs"], cells["train_loss"]) == ("'=1+x", "-0.5")  # no formula; a number


@pytest.mark.parametrize("width", [100, 160])
def test_terminal_table_fits_and_names_its_hidden_columns(runs, width):
    for seed in (1, 2, 3):
        runs.add(f"a-rather-long-name-of-a-run-{seed}", train={"random_seed": seed})
    runs.add("other", train={"warmup_period_percent": 5, "weight_decay": 0.01})
    table, notes = table_of(runs.compare(published=True)).terminal(width).split("\n\n")
    assert max(map(cell_len, table.splitlines())) <= width
    assert "hidden columns: " in notes and "IFT" in table


def test_missing_charts_are_reported_and_old_charts_are_deleted(runs, tmp_path):
    runs.add("a", summary={"status": "stopped"})
    (runs.dir / "a/metrics.jsonl").unlink()
    for name in CHARTS:
        (tmp_path / name).write_text("old")
    found = runs.run("--csv", "--charts", str(tmp_path)).stderr.splitlines()
    assert [line.split(": ")[:2] for line in found] == [["not drawn", name] for name in CHARTS]
    assert not list(tmp_path.glob("*.png"))


def validations(*losses):
    """Return records of validations after 100, 200, ... tokens; each 100 tokens cost a dollar."""
    return [
        {"global_step": i, "tokens": 100 * (i + 1), "validation_loss": loss, "usd": i + 1.0}
        for i, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "target", "expected"),
    [
        ((5.0, 4.0, 3.0), 3.5, Reached(250, 2.5)),
        ((5.0, 4.0, 3.0), 2.9, None),
        ((5.0, 4.0, 3.0), 6.0, Reached(100, 1.0)),  # nothing is known before the first validation
        ((5.0, 3.0, 4.0, 3.0), 3.5, Reached(175, 1.75)),  # the first time counts
        ((5.0, None, 3.0), 4.0, Reached(200, 2.0)),
    ],
)
def test_tokens_to_a_loss_are_interpolated_between_validations(losses, target, expected):
    assert first_reaching(validations(*losses), target) == expected


def record_losses(runs, name, *losses, **train):
    runs.add(name, losses=(3.0, losses[-1], None), train=train)
    (runs.dir / name / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in validations(*losses))
    )


def reached_of(row):
    return row.values["tokens_to_loss"], row.values["usd_to_loss"]


def test_runs_are_compared_by_the_tokens_to_the_highest_final_loss(runs):
    record_losses(runs, "slow", 6.0, 5.0, 4.0)
    record_losses(runs, "fast", 5.0, 4.0, 3.0, learning_rate=0.02)
    record_losses(runs, "other", 5.0, 3.5, start_val_token=7)  # on other tokens: not compared
    comparison = runs.compare()
    assert comparison.notes[-1].endswith("their share of its own, and what they cost")
    assert comparison.target.name == "slow" and {
        row.name: reached_of(row) for row in comparison.rows
    } == {"fast": (200, 2.0), "other": (None, None), "slow": (1536, 1.0)}  # its own: all of it
    rows = runs.csv("--to-loss-of", "fast")
    assert rows["slow"]["tokens_to_loss"] == rows["slow"]["usd_to_loss"] == ""
    assert (rows["fast"]["tokens_to_loss"], rows["fast"]["usd_to_loss"]) == ("1536", "1")
    assert runs.compare("slow").target is None


@pytest.mark.parametrize(
    ("growth", "records", "summary", "pflop"),
    [
        (None, [{}], {}, PFLOP[2]),
        (0.25, [{}, {"num_layers": 2}], {}, PFLOP[1] / 4 + PFLOP[2] * 3 / 4),
        (0.75, [{}], {}, PFLOP[1]),  # it has not grown yet
        (None, [{"num_layers": 2}], {}, None),  # its layers before are not known
        (0.25, [{}], {"this_launch": {"num_layers": 2}}, PFLOP[2]),  # it got the key later
    ],
)
def test_training_flops_are_those_of_the_layers_that_a_run_had(
    runs, growth, records, summary, pflop
):
    runs.add("run", train=growth and {"grow": {"at": growth}}, summary=summary)
    for record in records:
        runs.append("run", {"global_step": 3} | record)
    assert runs.compare().rows[0].values["training_pflop"] == pytest.approx(pflop)


def test_tokens_to_a_loss_are_a_mean_over_seeds_each_with_its_own_loss(runs):
    for seed, shift in ((42, 0.0), (43, 1.0)):
        record_losses(runs, f"base-{seed}", 5.0 + shift, 3.0 + shift, random_seed=seed)
        record_losses(
            runs, f"fast-{seed}", 4.0 + shift, 2.0 + shift, random_seed=seed, learning_rate=0.02
        )
    record_losses(runs, "third", 4.0, 3.0, random_seed=44, learning_rate=0.03)
    comparison = compare(find_results(runs.dir, ()), "base-42")
    assert {row.name: reached_of(row) for row in comparison.rows} == {
        "base-42, base-43": (1536, 1.0),
        "fast-42, fast-43": (150, 1.5),
        "third": (150, 1.5),
    }  # the mean, 3.5: the target has no such seed


def test_runs_with_different_tokenizers_are_sorted_by_bits_per_byte(runs):
    for name, loss, bits in (("long", 3.0, 0.9), ("short", 1.2, 1.2 / math.log(2))):
        summary = {"validation_bits_per_byte": bits, "tokenizer": f"that of {name}"}
        runs.add(name, losses=(3.0, loss, None), train={"dataset": name}, summary=summary)
    runs.add("unknown", losses=(3.0, 1.0, None), train={"dataset": "unknown"})
    comparison = runs.compare()
    assert names_of(comparison) == ["long", "short", "unknown"]
    assert comparison.sorted_by == "validation_bits_per_byte"
    assert "sorted by bits per byte" in comparison.notes[0]
    assert "not of the same text" in comparison.notes[0]
    table = table_of(comparison).terminal(100)
    assert "val. bits" in table and "0.9000" in table and "1.7312" in table
    one = runs.compare("long", "unknown")  # of one tokenizer: only in CSV
    assert one.sorted_by == "validation_loss" and "bits" not in table_of(one).terminal(200)
    assert runs.csv()["long"]["validation_bits_per_byte"] == "0.9"


@pytest.fixture
def figures(monkeypatch):
    """The charts that are drawn, by name."""
    found = {}

    def keep(path, plot):
        found[path.name] = figure = Figure()
        plot(figure)
        return path

    monkeypatch.setattr(comparison_charts, "draw_by_hand", keep)
    return found


def test_curves_of_different_tokenizers_are_in_bits_per_byte(runs, figures, tmp_path):
    lengths = {"long": 4.0, "short": 1.0, "unknown": None}  # bytes per token
    for name, length in lengths.items():
        runs.add(name, train={"dataset": name}, summary={"tokenizer": f"that of {name}"})
        if length is not None:
            bits = 2.0 / math.log(2) / length
            last = {"global_step": 11, "tokens": 1536, "seconds": 100.0, "usd": 1.0}
            runs.append(name, last | {"validation_loss": 2.0, "validation_bits_per_byte": bits})
    _, missing = comparison_charts.draw_comparison(runs.compare().rows, tmp_path)
    assert any(line.startswith("not drawn in loss-curves.png: unknown: ") for line in missing)
    axes = figures["loss-curves.png"].axes[0]
    assert axes.get_ylabel() == "loss (bits per byte)"
    ends = {round(line.get_ydata()[-1], 6) for line in axes.lines if len(line.get_ydata()) > 2}
    last = 5 - 11 / 10  # the training loss of both, in nats per token
    assert ends >= {round(last / math.log(2) / length, 6) for length in (4.0, 1.0)}
    comparison_charts.draw_comparison(runs.compare("long").rows, tmp_path)
    assert figures["loss-curves.png"].axes[0].get_ylabel() == "loss (nats per token)"


@pytest.mark.parametrize(("usd", "labels"), [(2.0, ["minutes", "US$"]), (None, ["minutes"])])
def test_curves_have_a_panel_for_each_recorded_axis(runs, figures, tmp_path, usd, labels):
    runs.add("a")
    runs.record("a", usd=usd)
    comparison_charts.draw_comparison(runs.compare().rows, tmp_path)
    axes = figures["loss-curves.png"].axes
    assert [each.get_xlabel() for each in axes] == ["global step", "tokens", *labels]
    assert max(axes[2].lines[0].get_xdata()) == pytest.approx(100 / 60)


def test_a_metric_that_is_recorded_and_declared_is_in_every_display(runs, monkeypatch):
    """One entry where it is measured, and one in the table of figures."""
    new = RunFigure("wheel_turns", "turns", "count", EVERYWHERE, importance=10)
    for module in (columns, lab_runs):
        monkeypatch.setattr(module, "FIGURES", [*FIGURES, new])
    monkeypatch.setattr(lab_runs, "NUMBERS", (*NUMBERS, new.key))
    monkeypatch.setattr(rows_of_compare, "NUMBERS", (*NUMBERS, new.key))
    monkeypatch.setitem(METRICS, new.key, "machine/wheel_turns")
    runs.add("one")
    runs.append("one", {"global_step": 11, new.key: 1234.0})
    assert cells_of(runs.compare(), "one")["turns"] == "1,234"
    assert runs.csv()["one"][new.key] == "1234"
    assert runs.compare().rows[0].values[new.key] == 1234
    result = read_run(runs.dir / "one", whole=False)
    assert "1,234" in list_of([result]).terminal(160)
    assert result.state()[new.key] == 1234
    page = Watched(runs.dir).runs()
    assert {"key": new.key, "heading": "turns", "unit": "count"} in page["columns"]
    assert page["runs"][0][new.key] == 1234
    assert frame(runs.dir)[new.key].tolist() == [1234]


def test_runs_are_a_data_frame_for_notebooks(runs):
    """As docs/evaluation.md shows it."""
    for seed, loss in enumerate((3.0, 3.2, 3.4)):
        runs.add(f"seed-{seed}", train={"random_seed": seed}, losses=(3.2, loss, loss))
    runs.add("wide", model={"emb_dim": 32}, losses=(3.0, 2.5, None))
    table = frame(runs.dir).set_index("run")
    assert table.loc["wide", ["validation_loss", "emb_dim", "usd"]].tolist() == [2.5, 32, 1.0]
    by_width = table.groupby("emb_dim")["validation_loss"].agg(["mean", "std", "count"])
    assert by_width.loc[16].tolist() == pytest.approx([3.2, 0.2, 3])
    records = frame(runs.dir, records=True)
    last = records.dropna(subset="validation_loss").groupby("run")["global_step"].max()
    assert last.to_dict() == dict.fromkeys(table.index, 11)
