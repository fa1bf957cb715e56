"""The systems of the speed benchmark do equal work, and what does not is reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from basics.errors import UserError
from benchmarks.throughput_benches import Bench, benches_of
from benchmarks.throughput_blocks import time_steps
from benchmarks.throughput_child import measure, reason_of
from benchmarks.throughput_launch import Place, measure_row
from benchmarks.throughput_models import (
    NaiveGPT,
    hugging_face_model,
    initial_model,
)
from benchmarks.throughput_records import EMPTY
from benchmarks.throughput_report import (
    MIN_FALL,
    ORIGINAL,
    REFERENCE,
    curves_that_differ,
    reports_of,
    table,
)
from benchmarks.throughput_rows import Row, RowTask
from benchmarks.throughput_tokens import (
    as_in_a_plain_loop,
    as_in_a_run,
    write_token_files,
    zipf_tokens,
)
from processes.launch import Process
from run_config import ModelConfig
from tests.support.workplace import TINY_MODEL

MODEL = ModelConfig(**TINY_MODEL | {"drop_rate": 0.0})
ALONE = Process(0, 0, 1, torch.device("cpu"))
TWO = Row("two processes", "ours", {"precision": "fp32"}, num_processes=2)
ROWS = (Row("ours", "ours"), Row(REFERENCE, "ours", {"precision": "fp32"}),
        Row(ORIGINAL, "original"), Row("fused AdamW", "plain", {"fused": True}))
STEPS = 80
BENCH = Bench("tiny", MODEL, ROWS, global_batch_size=4, microbatch_size=2, num_steps=STEPS,
              rounds=1)


@pytest.fixture(scope="module")
def tokens_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_files(tmp_path_factory.mktemp("dataset") / "zipf", MODEL, BENCH.num_tokens)


@pytest.fixture(scope="module")
def rows(tokens_path: Path) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Measure the rows of one process in this process."""
    precision = torch.get_float32_matmul_precision()
    yield {row.name: [line_of(row.name, measure(task_of(row, tokens_path), ALONE))]
           for row in ROWS}
    torch.set_float32_matmul_precision(precision)


def task_of(row: Row, tokens_path: Path, **changes: Any) -> RowTask:
    return replace(RowTask(row, MODEL, 2, 4, STEPS, "cpu", tokens_path), **changes)


def line_of(name: str, result: dict[str, Any]) -> dict[str, Any]:
    return EMPTY | {"bench": "tiny", "row": name, "round": 1, "status": "ok", "seconds": 1.0,
                    "flops_per_token": 1e6, "time": "2026-01-01T00:00:00", "versions": {},
                    } | result


def place_of(tokens_path: Path, cache_dir: Path) -> Place:
    return Place("cpu", tokens_path, cache_dir, time.monotonic() + 200)


def test_all_systems_are_the_same_network() -> None:
    model = initial_model(MODEL)
    token_ids = torch.randint(MODEL.vocab_size, (2, MODEL.context_length))
    targets = token_ids.roll(-1, 1)
    expected = model(token_ids, targets)
    for logits in (NaiveGPT(model)(token_ids), hugging_face_model(model).eval()(token_ids).logits):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_ids_follow_zipfs_law_over_the_whole_vocabulary() -> None:
    tokens = zipf_tokens(200_000, 50257)
    counts = np.bincount(tokens, minlength=50257)
    assert len(counts) == 50257 and tokens.dtype == np.uint16
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert (counts[25_000:] > 0).sum() > 5_000
    assert np.array_equal(zipf_tokens(100, 50257), tokens[:100])


def test_a_run_and_a_plain_loop_see_the_same_tokens(tokens_path: Path) -> None:
    plan = task_of(ROWS[0], tokens_path, num_steps=2).plan(1)
    in_run = list(as_in_a_run(tokens_path, plan, MODEL.vocab_size, ALONE))
    plain = list(as_in_a_plain_loop(tokens_path, plan, ALONE, pins=True))
    assert len(in_run) == len(plain) == 4
    for one, other in zip(in_run, plain, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.targets, other.targets) and one.targets.dtype == torch.int64


def test_two_processes_see_the_tokens_of_one(tokens_path: Path) -> None:
    def tokens_of(rank: int, world_size: int) -> list[torch.Tensor]:
        plan = task_of(ROWS[0], tokens_path, num_steps=2).plan(world_size)
        process = Process(rank, rank, world_size, torch.device("cpu"))
        return [batch.token_ids for batch in
                as_in_a_run(tokens_path, plan, MODEL.vocab_size, process)]

    one, first, second = tokens_of(0, 1), tokens_of(0, 2), tokens_of(1, 2)
    assert torch.equal(torch.stack(one[0::2]), torch.stack(first))
    assert torch.equal(torch.stack(one[1::2]), torch.stack(second))


def test_steps_are_timed_in_three_blocks_after_a_warm_up() -> None:
    waits: list[int] = []
    steps = iter(range(100))
    taken: list[int] = []
    timed = time_steps(lambda: taken.append(next(steps)), 34, lambda: waits.append(len(taken)))
    assert waits == [1, 4, 14, 24, 34]
    assert len(timed.block_seconds) == 3 and timed.steps_per_block == 10
    timed = replace(timed, block_seconds=[1.0, 5.0, 2.0])
    assert timed.speeds(100) == {"tokens_per_second": 500, "step_ms": 200,
                                 "blocks": [1000, 200, 500]}


@pytest.mark.thorough  # tests/trainer compares two processes with one
def test_two_processes_have_the_curve_of_one(
    rows: dict[str, list[dict[str, Any]]], tokens_path: Path, tmp_path: Path
) -> None:
    result = measure_row(replace(BENCH, num_steps=6), TWO, place_of(tokens_path, tmp_path))
    assert result["tokens_per_second"] > 0
    assert result["losses"] == pytest.approx(rows[REFERENCE][0]["losses"][:6], abs=2e-3)


def test_a_row_that_did_not_compile_has_failed(
    tokens_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("compiling failed: no C++ compiler")

    monkeypatch.setattr("trainer.losses.compile_now", fail)
    row = Row("compiled", "ours", {"precision": "fp32", "compile": True})
    with pytest.raises(UserError) as failed:
        measure(task_of(row, tokens_path, num_steps=4), ALONE)
    assert reason_of(failed.value)["reason"] == "compiling failed: no C++ compiler"


def test_all_systems_have_the_same_curve(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert curves_that_differ(rows) == []
    losses = rows[REFERENCE][0]["losses"]
    assert losses[0] - np.mean(losses[-10:]) >= MIN_FALL


@pytest.mark.parametrize("defect", ["sees the future", "no attention", "another GELU"])
def test_a_model_with_an_error_is_reported(
    defect: str, rows: dict[str, list[dict[str, Any]]], tokens_path: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = F.scaled_dot_product_attention
    wrong = {"sees the future": lambda q, k, v, **_: attention(q, k, v),
             "no attention": lambda q, k, v, **_: v * 0,
             "another GELU": lambda x, **_: F.relu(x)}[defect]
    name = "gelu" if defect == "another GELU" else "scaled_dot_product_attention"
    monkeypatch.setattr(F, name, wrong)
    row = Row(defect, "ours", {"precision": "fp32"})
    line = line_of(defect, measure(task_of(row, tokens_path), ALONE))
    (difference,) = curves_that_differ(rows | {defect: [line]})
    assert difference.startswith(f"{defect}: its losses differ")


@pytest.mark.parametrize("losses, expected", [
    ([3.0] * STEPS, "too level"), ([float("nan")] * STEPS, "too level"), ([3.0, 2.0], "steps")])
def test_wrong_curves_are_reported(
    rows: dict[str, list[dict[str, Any]]], losses: list[float], expected: str
) -> None:
    line = rows[REFERENCE][0] | {"losses": losses}
    shown = {"another": [line]} if expected == "too level" else rows | {"another": [line]}
    assert expected in curves_that_differ(shown)[-1]


def test_the_table_has_ratios_and_reasons(rows: dict[str, list[dict[str, Any]]]) -> None:
    original = rows[ORIGINAL][0]
    lines = [line for measured in rows.values() for line in measured]
    lines += [line_of("a peer", {"tokens_per_second": 2 * original["tokens_per_second"],
                                 "step_ms": 1.0, "machine": original["machine"],
                                 "note": "another model"}),
              line_of("broken", {"status": "failed", "reason": "ran out of time",
                                 "machine": original["machine"]})]
    (report,) = json.loads(json.dumps(reports_of(lines)))
    shown = table(report)
    (peer,) = [line.split() for line in shown if line.startswith("| a peer ")]
    assert peer[-4:] == ["-", "|", "2.00", "|"]
    assert "a peer: another model" in shown
    assert any(line.startswith("| broken ") and "| failed: ran out of time " in line
               for line in shown)


@pytest.mark.parametrize("ladder", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_row_divides_the_global_batch_and_has_a_name_of_its_own(
    device: str, ladder: bool
) -> None:
    for bench in benches_of(device, rounds=1, ladder=ladder):
        assert len({row.name for row in bench.rows}) == len(bench.rows)
        for row in bench.rows:
            size = row.microbatch_size or bench.microbatch_size
            assert bench.global_batch_size % size == 0
