"""Dollars, budgets and global batches, end to end."""

import json
import re
import socket

import pytest

from basics.text import dollars
from tests.support.runs import run_in_process, summary_of
from tests.support.workplace import forked, read_lines, succeeded

PRICE = 36_000  # dollars an hour: ten a second
LONG = {"min_train_tokens": 2000 * 128, "validation_interval": 50, "learning_rate": 1e-3}


def change(run_dir, **values):
    path = run_dir / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_dollars_are_shown_recorded_and_split(workplace):
    run_dir = workplace.add_run()
    workplace.add_dataset()
    output = succeeded(workplace.torchrun(2, "tiny", "--usd-per-hour", str(PRICE))).stdout
    for record in read_lines(run_dir / "metrics.jsonl"):
        assert record["usd"] == pytest.approx(record["seconds"] * 10, rel=0.02)
    summary = summary_of(run_dir)
    total = summary["usd"].pop("total")
    assert summary["usd"] == pytest.approx(
        {phase: 10 * seconds for phase, seconds in summary["seconds"].items()}, abs=0.1)
    assert sum(summary["usd"].values()) == pytest.approx(total)
    assert {phase for phase, usd in summary["usd"].items() if usd} >= {
        "training", "validation", "checkpoint", "compile", "waiting", "startup"}
    assert re.search(rf"^cost: \${dollars(total)} = \$[\d.,]+ training, ", output, re.MULTILINE)
    assert re.search(r"^machine up \d+:\d\d:\d\d, US\$[\d.,]+$", output, re.MULTILINE)
    assert re.search(r"tok/s \| .* \| \$[\d.,]+ of \$[\d.,]+ \|", output)


def test_a_resumed_run_adds_the_cost_of_each_launch_and_of_undone_steps(workplace):
    run_dir = workplace.add_run()
    workplace.add_dataset()
    totals, validated = [], {}
    for arguments, price in ((("--max-steps", "5"), PRICE), (("--max-steps", "7"), PRICE / 10),
                             ((), PRICE)):  # the last one goes on from the first one's checkpoint
        checkpoint = [path.name for path in run_dir.glob("checkpoints/*-4")] if totals[1:] else []
        succeeded(workplace.torchrun(1, "tiny", *checkpoint, *arguments, "--usd-per-hour",
                                     str(price)))
        summary = summary_of(run_dir)
        totals.append((sum(summary["seconds"].values()), summary["usd"]["total"]))
        if not validated:
            validated = read_lines(next(run_dir.glob("checkpoints/*-4/validation.json")))[0]
            assert sum(validated["usd"].values()) == pytest.approx(
                10 * sum(validated["seconds"].values()), rel=1e-2)
    (first, first_usd), (second, second_usd), (third, third_usd) = totals
    assert second_usd == pytest.approx(first_usd + second - first, rel=1e-3)
    assert third_usd == pytest.approx(second_usd + 10 * (third - second), rel=1e-3)
    lost = second - sum(validated["seconds"].values())
    assert summary["seconds"]["lost"] == pytest.approx(lost, rel=0.01) and lost > 0
    output = succeeded(workplace.torchrun(1, "tiny", "--fresh", "--max-steps", "5")).stdout
    assert summary_of(run_dir)["seconds"]["lost"] == 0 and summary_of(run_dir)["usd"] is None
    assert "$" not in output.split("sample:")[0]
    assert not any("usd" in record for record in read_lines(run_dir / "metrics.jsonl"))


def test_launches_that_were_killed_use_up_the_budget(workplace):
    run_dir = workplace.add_run(train={"max_hours": 1.0})
    workplace.add_dataset()
    (run_dir / "heartbeat.json").write_text(json.dumps(
        {"pid": 1, "host": socket.gethostname(), "time": "now", "seconds": 7200}))
    result = run_in_process(*workplace.arguments("tiny"))
    assert result.returncode == 2
    assert "max_hours is 1, and the run has taken 2" in result.stderr


def test_a_limit_stops_inside_it_with_a_checkpoint(workplace):
    run_dir = workplace.add_run(train=LONG | {"max_cost_usd": 20.0, "usd_per_hour": PRICE})
    workplace.add_dataset(num_tokens=300_000)
    output = succeeded(forked(  # with a clock that moves by a millisecond each time it is read
        "tests/support/torchrun_workers.py",
        ["train-in-fake-time", str(workplace.root), *workplace.arguments("tiny")],
        num_processes=2)).stdout
    summary = summary_of(run_dir)
    assert summary["status"] == "stopped" and summary["reason"].startswith("max_cost_usd is ")
    assert f"({summary['reason']})" in output
    assert 1.8 < sum(summary["seconds"].values()) <= 2
    stopped_at = json.loads((run_dir / "checkpoints/latest/meta.json").read_text())["global_step"]
    assert 20 < stopped_at == summary["global_step"] < 1999
    # With less than it has spent, it does not go on; with more, it does.
    change(run_dir, max_cost_usd=10)
    assert "max_cost_usd is 10, and the run has spent " in run_in_process(
        *workplace.arguments("tiny", "--nproc-per-node", "2")).stderr
    change(run_dir, max_cost_usd=20_000)
    succeeded(workplace.torchrun(2, "tiny", "--max-steps", "3"))
    assert summary_of(run_dir)["global_step"] == stopped_at + 3


def test_speed_is_judged_once_after_fifty_steps(workplace):
    workplace.add_run(train=LONG)
    workplace.add_dataset(num_tokens=300_000)
    output = succeeded(workplace.torchrun(2, "tiny", "--max-steps", "110")).stdout
    lines = re.findall(r"^speed: ([\d,]+) tokens/s, .* \(no MFU: the peak speed of ", output,
                       re.MULTILINE)
    assert len(lines) == 1 and int(lines[0].replace(",", "")) > 0
    assert re.search(r" parameters, [\d.]+ tokens per parameter; ", output)
