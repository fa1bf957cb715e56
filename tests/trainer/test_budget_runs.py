"""Dollars, budgets and global batches, end to end."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.support.in_process import run_in_process
from tests.support.workplace import Workplace, forked, read_lines, succeeded

PRICE = 36_000  # dollars an hour: ten a second
LONG = {"min_train_tokens": 2000 * 128, "validation_interval": 50, "learning_rate": 1e-3}


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def change(run_dir: Path, **values: object) -> None:
    path = run_dir / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def in_fake_time(workplace: Workplace, *arguments: str):
    """Train with a clock that moves by a millisecond each time it is read."""
    return forked("tests/support/torchrun_workers.py",
                  ["train-in-fake-time", str(workplace.root), *workplace.arguments(*arguments)],
                  num_processes=2)


def test_dollars_are_shown_recorded_and_split(workplace: Workplace) -> None:
    run_dir = workplace.add_run()
    workplace.add_dataset()
    output = succeeded(workplace.torchrun(2, "tiny", "--usd-per-hour", str(PRICE))).stdout
    records = read_lines(run_dir / "metrics.jsonl")
    for record in records:
        assert record["usd"] == pytest.approx(record["seconds"] * 10, rel=0.02)
    summary = summary_of(run_dir)
    phases = {k: v for k, v in summary["usd"].items() if k != "total"}
    assert set(phases) == set(summary["seconds"]) == {
        "training", "diagnostics", "validation", "checkpoint", "chart", "compile", "download",
        "waiting", "startup", "lost"}
    assert sum(phases.values()) == pytest.approx(summary["usd"]["total"])
    for phase, usd in phases.items():
        assert usd == pytest.approx(summary["seconds"][phase] * 10, abs=0.1)
    assert all(summary["usd"][phase] > 0 for phase in ("training", "validation", "checkpoint",
                                                       "compile", "waiting", "startup"))
    total = f"{summary['usd']['total']:,.2f}"
    assert re.search(rf"^cost: \${total} = \$[\d.,]+ training, ", output, re.MULTILINE)
    assert re.search(r"^machine up \d+:\d\d:\d\d, US\$[\d.,]+$", output, re.MULTILINE)
    assert re.search(r"tok/s \| .* \| \$[\d.,]+ of \$[\d.,]+ \|", output)


def test_without_a_price_there_are_no_dollars(workplace: Workplace) -> None:
    run_dir = workplace.add_run()
    workplace.add_dataset()
    assert "$" not in succeeded(workplace.torchrun(1, "tiny")).stdout.split("sample:")[0]
    assert summary_of(run_dir)["usd"] is None
    assert not any("usd" in record for record in read_lines(run_dir / "metrics.jsonl"))


def test_a_resumed_run_adds_the_cost_of_each_launch(workplace: Workplace) -> None:
    run_dir = workplace.add_run()
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "5", "--usd-per-hour", str(PRICE)))
    meta = json.loads((run_dir / "checkpoints/latest/meta.json").read_text())
    assert sum(meta["usd"].values()) == pytest.approx(10 * sum(meta["seconds"].values()), rel=1e-2)
    first = summary_of(run_dir)
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "2", "--usd-per-hour",
                                 str(PRICE / 10)))
    both = summary_of(run_dir)
    later = sum(both["seconds"].values()) - sum(first["seconds"].values())
    validated = json.loads(next(run_dir.glob("checkpoints/*-4/validation.json")).read_text())
    spent = sum(validated["seconds"].values())
    assert sum(meta["seconds"].values()) < spent <= sum(first["seconds"].values())
    assert both["seconds"]["lost"] == pytest.approx(sum(first["seconds"].values()) - spent)
    assert both["usd"]["total"] == pytest.approx(first["usd"]["total"] + later, rel=1e-3)


def test_undone_steps_are_counted_as_lost(workplace: Workplace) -> None:
    run_dir = workplace.add_run(train={"usd_per_hour": float(PRICE)})
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "10"))
    before = summary_of(run_dir)
    earlier = next(p.name for p in run_dir.glob("checkpoints/*-iteration-4"))
    succeeded(workplace.torchrun(1, "tiny", earlier))
    after = summary_of(run_dir)
    assert after["usd"]["lost"] > 0 and after["seconds"]["lost"] > 0
    kept = json.loads(next(run_dir.glob("checkpoints/*-iteration-4/validation.json")).read_text())
    lost = sum(before["seconds"].values()) - sum(kept["seconds"].values())
    assert after["seconds"]["lost"] == pytest.approx(lost, rel=0.01)
    assert after["usd"]["total"] > before["usd"]["total"]


def test_launches_that_were_killed_while_they_started_use_up_the_budget(
    workplace: Workplace
) -> None:
    run_dir = workplace.add_run(train={"max_hours": 1.0})
    workplace.add_dataset()
    (run_dir / "heartbeat.json").write_text(json.dumps(
        {"pid": 1, "host": socket.gethostname(), "time": "now", "seconds": 7200}))
    result = run_in_process(*workplace.arguments("tiny"))
    assert result.returncode == 2
    assert "max_hours is 1, and the run has taken 2" in result.stderr


def test_fresh_resets_the_cost(workplace: Workplace) -> None:
    run_dir = workplace.add_run()
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny", "--max-steps", "5"))
    succeeded(workplace.torchrun(1, "tiny", "--fresh", "--max-steps", "5"))
    assert summary_of(run_dir)["seconds"]["lost"] == 0


@pytest.mark.parametrize("limit", [  # two seconds
    {"max_cost_usd": 20.0, "usd_per_hour": PRICE},
    pytest.param({"max_hours": 2 / 3600}, marks=pytest.mark.thorough),
])
def test_a_limit_stops_inside_it_with_a_checkpoint(workplace: Workplace, limit: dict) -> None:
    run_dir = workplace.add_run(train=LONG | limit)
    workplace.add_dataset(num_tokens=300_000)
    output = succeeded(in_fake_time(workplace, "tiny")).stdout
    summary = summary_of(run_dir)
    key = next(iter(limit))
    assert summary["status"] == "stopped" and summary["reason"].startswith(f"{key} is ")
    assert f"({summary['reason']})" in output
    spent = sum(summary["seconds"].values())
    assert 1.8 < spent <= 2
    meta = json.loads((run_dir / "checkpoints/latest/meta.json").read_text())
    assert 20 < meta["global_step"] == summary["global_step"] < 1999
    steps = [r["global_step"] for r in read_lines(run_dir / "metrics.jsonl") if "train_loss" in r]
    assert steps[-1] == meta["global_step"]
    # With less than it has spent, it does not go on; with more, it does.
    change(run_dir, **{key: limit[key] / 2})
    before = workplace.files()
    refused = workplace.torchrun(2, "tiny")
    assert re.search(rf"train.json: {key} is [\d.e-]+, and the run has .*; raise it to go on",
                     refused.stderr)
    assert workplace.files() == before
    change(run_dir, **{key: limit[key] * 1000})
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "3"))
    assert summary_of(run_dir)["global_step"] == meta["global_step"] + 3


def test_speed_is_judged_once_after_fifty_steps(workplace: Workplace) -> None:
    workplace.add_run(train=LONG)
    workplace.add_dataset(num_tokens=300_000)
    assert "speed: " not in succeeded(workplace.torchrun(2, "tiny", "--max-steps", "40")).stdout
    output = succeeded(workplace.torchrun(2, "tiny", "--max-steps", "110")).stdout
    lines = re.findall(r"^speed: ([\d,]+) tokens/s, .* \(no MFU: the peak speed of ", output,
                       re.MULTILINE)
    assert len(lines) == 1 and int(lines[0].replace(",", "")) > 0
    assert re.search(r" parameters, [\d.]+ tokens per parameter; ", output)
