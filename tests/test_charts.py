"""The charts of a run: what they show, also of odd records, and the process that draws them."""

import json
import logging
import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from basics.json_files import to_json
from processes import background
from processes.background import BackgroundProcess, start_module
from reporting import charts
from reporting.charts import (
    LINES,
    MAX_LAYER_POINTS,
    MAX_LINES,
    PANELS,
    draw_charts,
    plot_layers,
    plot_losses,
)
from reporting.metrics_file import INITIAL_LOSS, METRICS, NUM_LAYERS
from run_config import load_run
from tests.support.workplace import TINY_TRAIN, draw_bare

BY_LAYER = [key for key in METRICS if key.startswith("layer_")]
CHARTS = ("loss-chart.png", "grad-norm-chart.png", "learning-rate-chart.png")
SINGLE = [
    key
    for quantity in PANELS
    for prefix, suffix in LINES
    if (key := f"{prefix}{quantity}{suffix}") in METRICS and key != "grad_norm_max"
]


def records(num_steps):
    found = []
    for step in range(9, num_steps, 10):
        loss = 10 * (step + 1) ** -0.2
        found.append(
            {
                "global_step": step,
                "train_loss": loss,
                "train_loss_min": loss - 0.1,
                "train_loss_max": loss + 0.1,
                "grad_norm": 1.0,
                "grad_norm_max": 2.0,
                "learning_rate": 1e-3,
            }
        )
        if step % 100 == 99:
            found.append({"global_step": step, "validation_loss": loss + 0.05})
    return found


def plotted_losses(found):
    """Lay out the loss chart."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    plot_losses(
        figure.subplots(),
        [r for r in found if "train_loss" in r],
        [r for r in found if "validation_loss" in r],
    )
    return figure


@pytest.mark.parametrize("num_steps", [10, 20_000])
def test_three_charts_are_drawn_for_any_length(tmp_path, num_steps):
    draw_charts(tmp_path, records(num_steps))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(CHARTS)
    for name in CHARTS:
        pixels = imread(tmp_path / name)
        assert pixels.shape[:2] == (672, 1200) and (pixels[..., :3].min(axis=-1) < 0.9).any()


@pytest.mark.processes
def test_a_process_draws_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "LOWEST", [])  # beside tests that use all cores it takes long
    drawn, directly = tmp_path / "drawn" / "tiny", tmp_path / "directly" / "tiny"
    for place in (drawn, directly):
        place.mkdir(parents=True)  # the title is the run's name
    (drawn / "metrics.jsonl").write_text("".join(to_json(r) + "\n" for r in records(300)))
    process = BackgroundProcess("chart", lambda: start_module("reporting.charts", drawn))
    process.start()
    assert process.finish(lambda: math.inf) == ""
    draw_charts(directly, records(300))
    for name in CHARTS:
        assert (drawn / name).read_bytes() == (directly / name).read_bytes()


def test_the_loss_chart_shows_training_validation_the_best_one_and_the_one_before_training(
    tmp_path, monkeypatch
):
    (tmp_path / "train.json").write_text("rubbish")  # it has what the records tell
    found = [{"global_step": 0, INITIAL_LOSS: 5.5}, *records(2000)]
    lines = lines_of(drawn(tmp_path, found, monkeypatch)["loss-chart.png"])
    points = {label: line.get_xydata().tolist() for label, line in lines.items()}
    training = points["training, mean between two points"]
    assert training[0] == [10, pytest.approx(10 * 10**-0.2)] and len(points["validation"]) == 20
    assert points["best: 2.2367 at step 2,000"] == [points["validation"][-1]]
    assert points["validation before training: 5.5000"] == [[0, 5.5]]


def test_the_loss_chart_has_the_range_of_all_but_the_first_steps_and_a_legend_below():
    found = records(2000)
    for record in found:  # a second set is above the first
        if "validation_loss" in record:
            record["validation_loss/code"] = 1.5 * record["validation_loss"]
    figure = plotted_losses(found)
    top = figure.axes[0].get_ylim()[1]
    highest = max(
        r["validation_loss/code"]
        for r in found
        if "validation_loss" in r and r["global_step"] > 100
    )
    assert (
        highest
        <= top
        < max(record["train_loss_max"] for record in found if "train_loss_max" in record)
    )
    few = plotted_losses(records(100))
    assert few.axes[0].get_ylim()[1] > records(100)[0]["train_loss"]
    nothing = plotted_losses([record | {"train_loss_max": None} for record in found])
    assert math.isfinite(nothing.axes[0].get_ylim()[1])


def test_the_legend_is_inside_of_the_chart(tmp_path, monkeypatch):
    settings = json.dumps({"train": {}})
    (tmp_path / "summary.json").write_text(settings)
    long = [
        record
        | (
            {
                "validation_loss/a-set-with-a-long-name": 2.0,
                "validation_perplexity/a-set-with-a-long-name": 7.0,
                "validation_bits_per_byte/a-set-with-a-long-name": 1.0,
            }
            if "validation_loss" in record
            else {}
        )
        for record in records(2000)
    ]
    figure = drawn(tmp_path, long, monkeypatch)["loss-chart.png"]
    figure.set_size_inches(10, 5.6)
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_spikes_are_marked_while_the_loss_falls_fast_and_early_in_a_run():
    noise = np.random.default_rng(1).normal(scale=0.03, size=100)
    losses = 3 + 8 * np.exp(-np.arange(100) / 15) + noise
    found = [
        {"global_step": step, "train_loss": loss, "train_loss_min": loss, "train_loss_max": loss}
        for step, loss in enumerate(losses)
    ]
    assert charts.find_spikes(found) == []
    peaks = {14: 1.5, 25: 1.2, 80: 0.6}
    for step, height in peaks.items():
        found[step]["train_loss"] += height
    assert [record["global_step"] for record in charts.find_spikes(found)] == list(peaks)
    (axes,) = plotted_losses(found).axes
    assert "spikes (mean far above those before): 3" in axes.get_legend_handles_labels()[1]


def is_spike(losses, place):
    """Return the same of one report, whose place is not one of the first ten."""
    before = losses[max(0, place - 20) : place]
    changes = np.diff(before)
    deviation = 1.4826 * np.median(np.abs(changes - np.median(changes))) / np.sqrt(2)
    height = losses[place] - min(np.median(before), np.median(before[-5:]))
    return height > max(0.1, 7 * deviation)


@pytest.mark.parametrize("num_reports", [0, 1, 9, 10, 11, 12, 19, 20, 21, 22, 300])
@pytest.mark.parametrize("scale", [0.0, 0.003, 0.3])
def test_spikes_are_those_that_each_report_has_by_itself(num_reports, scale):
    random = np.random.default_rng(num_reports)
    losses = 3 + 8 * np.exp(-np.arange(num_reports) / 15)
    losses += random.normal(scale=scale, size=num_reports)
    losses += random.uniform(0, 2, num_reports) * (random.random(num_reports) < 0.1)
    steps = [{"global_step": step, "train_loss": loss} for step, loss in enumerate(losses)]
    expected = [step for step in steps[10:] if is_spike(losses, step["global_step"])]
    assert charts.find_spikes(steps) == expected and (expected or num_reports < 300)


@pytest.mark.parametrize(("first", "each"), [(0, 1e-5), (0.05, 1e-4)])
def test_an_axis_in_dollars_has_labels_that_differ_and_do_not_overlap(first, each):
    for usd in ([1, 1, 1], [1, 1, 2], [0, 0, 0], [3, 1, 2]):  # damaged, or without a price
        priced = zip(records(30), usd, strict=True)
        assert plotted_losses([record | {"usd": spent} for record, spent in priced]).axes
    found = [record for record in records(120) if "train_loss" in record]
    for number, record in enumerate(found, start=1):
        record["usd"] = first + each * number
    figure = plotted_losses(found)
    FigureCanvasAgg(figure).draw()
    below, above = figure.axes
    assert above.get_xlabel() == "US$" and above.get_xlim() == below.get_xlim()
    labels = above.get_xticklabels()
    assert len(labels) == 5 and len({label.get_text() for label in labels}) == 5
    for label, step in zip(labels, above.get_xticks(), strict=True):
        wanted = first + each * step / 10
        assert float(label.get_text().replace(",", "")) == pytest.approx(wanted, rel=0.2)
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 + 5 < right.x0 for left, right in pairwise(boxes))


def test_missing_numbers_records_and_fonts_do_not_stop_a_chart_and_cause_no_warning(
    tmp_path, monkeypatch, caplog, recwarn
):
    monkeypatch.setattr(font_manager, "get_font_names", list)
    draw_charts(tmp_path, [])
    assert not list(tmp_path.iterdir())
    found = records(300)
    found[3]["train_loss"] = found[4]["grad_norm"] = found[5]["grad_norm_max"] = None
    found[6]["skipped_steps"] = None
    with caplog.at_level(logging.WARNING):
        draw_charts(tmp_path, found)
    assert set(CHARTS) == {path.name for path in tmp_path.iterdir()}
    assert not caplog.records and not recwarn.list


def diagnosed(num_steps, *, depth=12):
    return [
        {"global_step": 100 * i + 99}
        | {key: [1.0 + layer for layer in range(depth)] for key in BY_LAYER}
        | dict.fromkeys(SINGLE, 0.5)
        for i in range(num_steps)
    ]


def plotted(found):
    """The lines of each panel, as (points, 2)."""
    figure = Figure()
    plot_layers(figure, found, "run")
    return {
        quantity: [line.get_xydata() for line in axes.lines]
        for quantity, axes in zip(PANELS, figure.axes, strict=False)
    }


def test_every_quantity_of_the_diagnostics_is_plotted():
    lines = plotted(diagnosed(5))
    assert set(BY_LAYER) == {f"layer_{quantity}" for quantity in list(PANELS)[:5]}
    assert [len(lines[quantity]) for quantity in PANELS] == [14, 14, 13, 12, 12, 4, 4]
    assert lines["grad_norm"][3].tolist() == [[100 * i + 100, 4.0] for i in range(5)]
    lines = plotted(diagnosed(1000, depth=200))["attention_entropy"]
    assert len(lines) == MAX_LINES and all(len(line) == MAX_LAYER_POINTS for line in lines)
    assert lines[0][0, 1] == 1.0 and lines[-1][0, 1] == 200.0  # the first and the last layer


def test_diagnostics_that_cannot_be_drawn_do_not_stop_their_chart(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "draw_by_hand", draw_bare)
    warnings.simplefilter("error", RuntimeWarning)  # a mean of nothing
    for values in ([None] * 12, [0.0] * 12, [-1.0] * 12, [1e100] * 12):
        found = [record | dict.fromkeys(BY_LAYER, values) for record in diagnosed(3)]
        found[2] |= dict.fromkeys(SINGLE)
        draw_charts(tmp_path, found)
        assert [path.name for path in tmp_path.iterdir()] == ["layers-chart.png"]
        (tmp_path / "layers-chart.png").unlink()


def test_a_growth_is_marked_and_its_layers_begin_there(tmp_path, monkeypatch):
    found = [*records(300), {"global_step": 150, NUM_LAYERS: 12}]
    found += [*diagnosed(2, depth=1), *({**r, "global_step": 999} for r in diagnosed(3))]
    figures = drawn(tmp_path, found, monkeypatch)
    for name in CHARTS:
        marked = lines_of(figures[name])["12 layers from step 151 on"]
        assert list(marked.get_xdata()) == [150, 150]
    entropy = figures["layers-chart.png"].axes[list(PANELS).index("attention_entropy")]
    first, last = (line.get_ydata() for line in (entropy.lines[0], entropy.lines[11]))
    assert np.isfinite(first).all() and np.isfinite(last).tolist() == [False] * 2 + [True] * 3


def drawn(run_dir, found, monkeypatch):
    """Return the figures of a run's charts by name."""
    figures = {}

    def keep(path, plot):
        figures[path.name] = figure = Figure()
        plot(figure)

    monkeypatch.setattr(charts, "draw_by_hand", keep)
    draw_charts(run_dir, found)
    return figures


def lines_of(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_reports_without_a_loss_are_in_the_charts_of_norms_and_rates(workplace, monkeypatch):
    found = records(100)
    reports = [record for record in found if "train_loss" in record]
    reports[3]["skipped_steps"] = 4
    for key in ("train_loss", "train_loss_min", "train_loss_max"):
        reports[3].pop(key)
    figures = drawn(workplace.add_run(), found, monkeypatch)
    norms = lines_of(figures["grad-norm-chart.png"])
    assert "skipped steps (gradient not finite): 4" in norms
    lines = (
        norms["mean between two points"],
        lines_of(figures["learning-rate-chart.png"])["so far"],
    )
    assert {len(line.get_xdata()) for line in lines} == {len(reports)}


def test_each_validation_set_has_a_line_with_its_last_figures(workplace, monkeypatch):
    run_dir = workplace.add_run(train={"validation": {"own": "tiny", "other": "tiny2"}})
    settings = json.loads((run_dir / "train.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({"num_steps": 200, "train": settings}))
    found = records(200)
    for record in found:
        if "validation_loss" in record:
            record |= {"validation_perplexity": 5.4321, "validation_loss/other": 3.5}
    lines = lines_of(drawn(run_dir, found, monkeypatch)["loss-chart.png"])
    assert "validation on own: at last perplexity 5.432" in lines and "validation" not in lines
    assert [*lines["validation on other"].get_ydata()] == [3.5, 3.5]


def test_the_planned_schedule_and_the_clipping_limit_are_drawn(workplace, monkeypatch):
    trained = {"schedule": "linear", "warmup_period_percent": 10, "clipping_max_norm": 1.5}
    run_dir = workplace.add_run(train={"clipping_max_norm": 7.0})  # edited since the launch
    (run_dir / "summary.json").write_text(
        json.dumps({"num_steps": 2000, "train": TINY_TRAIN | trained})
    )
    figures = drawn(run_dir, records(100), monkeypatch)
    planned = lines_of(figures["learning-rate-chart.png"])["planned"]
    x, y = planned.get_data()
    assert (x[0], x[-1], y[-1]) == (1, 2000, 0.0) and max(y) == pytest.approx(0.01, rel=0.01)
    assert len(x) <= charts.MAX_POINTS
    limit = lines_of(figures["grad-norm-chart.png"])["clipped to 1.5"]
    assert [*limit.get_ydata()] == [1.5, 1.5]
    resumed = [
        *records(50),
        {"global_step": 49, "changed": {"learning_rate": [0.02, 0.01]}},
        *records(100)[50:],
    ]
    planned = lines_of(drawn(run_dir, resumed, monkeypatch)["learning-rate-chart.png"])["planned"]
    assert planned.get_xdata()[0] == 51  # before that the schedule was another one


def test_the_planned_schedule_of_a_run_with_a_global_batch_is_drawn(workplace, monkeypatch):
    changes = {"global_batch_size": 8, "gradient_accumulation_steps": None}
    run_dir = workplace.add_run(train=changes)
    run = load_run(workplace.runs_dir, run_dir.name)
    summary = {"num_steps": 200, "train": run.train_settings()}  # all keys, as a run writes them
    (run_dir / "summary.json").write_text(json.dumps(summary))
    figures = drawn(run_dir, records(100), monkeypatch)
    assert "planned" in lines_of(figures["learning-rate-chart.png"])
