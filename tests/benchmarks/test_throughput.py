"""The speed benchmark compares equal work, and reports when it does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2LMHeadModel

from benchmarks import throughput
from benchmarks.throughput import run_peer, run_rounds, run_row
from benchmarks.throughput_child import measure
from benchmarks.throughput_report import (
    MIN_FALL,
    ORIGINAL,
    REFERENCE,
    Bench,
    Measured,
    curves_that_differ,
    draw,
    report_of,
    table,
)
from benchmarks.throughput_rows import (
    NaiveGPT,
    Row,
    RowTask,
    hugging_face_config,
    hugging_face_weights,
    initial_model,
    microbatches,
)
from processes.launch import Process
from run_config import ModelConfig
from tests.support.workplace import TINY_MODEL

MODEL = ModelConfig(**TINY_MODEL | {"drop_rate": 0.0})
ALONE = Process(0, 0, 1, torch.device("cpu"))
ROWS = (Row("ours", "ours"), Row(REFERENCE, "ours", {"precision": "fp32"}),
        Row(ORIGINAL, "original"), Row("fused AdamW", "plain", {"fused": True}),
        Row("two processes", "ours", {"precision": "fp32"}, num_processes=2))
STEPS = 120
BENCH = Bench("tiny", MODEL, ROWS, global_batch_size=4, microbatch_size=2, num_steps=STEPS,
              rounds=1)
CEILING = {"fp32": 1e9}


def test_all_systems_are_the_same_network() -> None:
    model = initial_model(MODEL)
    hugging_face = GPT2LMHeadModel(hugging_face_config(MODEL))
    hugging_face.load_state_dict(hugging_face_weights(model))
    token_ids = torch.randint(MODEL.vocab_size, (2, MODEL.context_length))
    targets = token_ids.roll(-1, 1)
    expected = model(token_ids, targets)
    for logits in (NaiveGPT(model)(token_ids), hugging_face.eval()(token_ids).logits):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_two_processes_see_the_tokens_of_one() -> None:
    def tokens_of(rank: int, world_size: int) -> list[torch.Tensor]:
        task = RowTask(ROWS[0], MODEL, 2, 4, num_steps=2, device_type="cpu")
        process = Process(rank, rank, world_size, torch.device("cpu"))
        return [batch.token_ids for batch in microbatches(task, process)]

    one, first, second = tokens_of(0, 1), tokens_of(0, 2), tokens_of(1, 2)
    assert torch.equal(torch.stack(one[0::2]), torch.stack(first))
    assert torch.equal(torch.stack(one[1::2]), torch.stack(second))


@pytest.fixture(scope="module")
def measured() -> Iterator[list[Measured]]:
    """Measure the rows of one process in this process."""
    precision = torch.get_float32_matmul_precision()
    yield [Measured(row, [measure(RowTask(row, MODEL, 2, 4, STEPS, "cpu"), ALONE)])
           for row in ROWS[:-1]]
    torch.set_float32_matmul_precision(precision)


def test_every_row_is_measured_in_turn_and_the_first_again(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def fake(bench: Bench, row: Row, *_: object) -> dict:
        order.append(row.name)
        return {"tokens_per_second": float(len(order))}

    monkeypatch.setattr(throughput, "run_row", fake)
    monkeypatch.setattr(throughput, "run_peer", fake)
    bench = replace(BENCH, rows=ROWS[:2], rounds=2)
    measured = run_rounds(bench, "cpu", peers={"a peer": "peer.py"})
    assert order == ["ours", REFERENCE, "a peer"] * 2 + ["ours"]
    assert [len(one.results) for one in measured] == [3, 2, 2]


def test_two_processes_have_the_curve_of_one(measured: list[Measured], tmp_path: Path) -> None:
    result = run_row(replace(BENCH, num_steps=6), ROWS[-1], "cpu", tmp_path)
    assert result["tokens_per_second"] > 0
    expected = measured[1].results[0]["losses"][:6]
    assert result["losses"] == pytest.approx(expected, abs=2e-3)


def test_all_systems_have_the_same_curve(measured: list[Measured]) -> None:
    assert curves_that_differ(measured) == []
    losses = measured[1].results[0]["losses"]
    assert losses[0] - losses[-1] >= MIN_FALL


def test_a_level_curve_is_reported(measured: list[Measured]) -> None:
    result = dict(measured[1].results[0]) | {"losses": [3.0] * STEPS}
    (line,) = curves_that_differ([Measured(measured[1].row, [result])])
    assert "too level" in line


def test_a_curve_that_differs_is_reported(measured: list[Measured]) -> None:
    result = dict(measured[2].results[0])
    result["losses"] = [*result["losses"][:-1], result["losses"][-1] + 0.01]
    other = Measured(replace(measured[2].row, name="slow learner"), [result])
    (line,) = curves_that_differ([*measured, other])
    assert line.startswith("slow learner: ")


def test_a_curve_of_nan_is_reported(measured: list[Measured]) -> None:
    result = dict(measured[2].results[0]) | {"losses": [float("nan")] * STEPS}
    assert curves_that_differ([measured[1], Measured(measured[2].row, [result])])


def test_the_table_has_ratios(measured: list[Measured], tmp_path: Path) -> None:
    measured = [*measured, Measured(Row("a peer", "peer"), [
        {"tokens_per_second": 2 * measured[2].median("tokens_per_second"), "step_ms": 1.0}])]
    report = report_of(BENCH, measured, CEILING)
    lines = table(json.loads(json.dumps(report)))
    (peer,) = [line.split() for line in lines if line.startswith("| a peer ")]
    assert peer[-4:] == ["-", "|", "2.00", "|"]
    draw([report], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 5000


def test_a_peers_last_speed_is_read(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("import json, os\nshape = json.loads(os.environ['THROUGHPUT_SHAPE'])\n"
                      "print('warming up: 3 tok/s')\n"
                      "print(f\"{shape['batch_size'] * 1000 + shape['emb_dim']:,} tokens/s\")\n")
    row = Row("x", "peer", {"path": f"{script} --any-option"})
    assert run_peer(BENCH, row, tmp_path)["tokens_per_second"] == 4016
