"""What `lab doctor` makes of several nodes; tests/lab/test_doctor.py starts torchrun."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lab.doctor import nodes
from lab.doctor.check import OK, PROBLEM, WARNING, Check, Subject
from lab.doctor.load_result import Result
from lab.doctor.nodes import Exchange, measure_skew, reports_of

VERSIONS = {"PyTorch": "2.11.0", "Python": "3.12.3", "the project's code": "abc"}
REDUCED = {"backend": "nccl", "bytes": 2**28, "seconds": 0.002, "is_right": True}


def answer(rank: int, **changes: Any) -> dict[str, Any]:
    """Return what one of four processes on two nodes finds."""
    node, local_rank = divmod(rank, 2)
    line = [asdict(Check("RAM", OK, "enough"))] if local_rank == 0 else []
    return {"node": node, "local_rank": local_rank, "busy": "", "host": f"host{node}", "gpus": [],
            "others": line, "skew": [0.25, 0.001] if (node, local_rank) == (1, 0) else None,
            "versions": VERSIONS if local_rank == 0 else {},
            "result": asdict(Result(rank, found={
                "torch": {"version": "2.11.0"}, "all_reduce": REDUCED})),
            } | changes


def shared(everybody: list[dict[str, Any] | None]) -> dict[str, Check]:
    return {check.name: check for check in reports_of(everybody)[-1].checks}


def test_each_node_has_a_report_and_all_have_one() -> None:
    reports = reports_of([answer(rank) for rank in range(4)])
    assert [report.title for report in reports] == [
        "node 0: host0, 2 processes", "node 1: host1, 2 processes", "all nodes"]
    assert [check.name for check in reports[1].checks] == ["PyTorch", "RAM"]
    found = shared([answer(rank) for rank in range(4)])
    assert {check.verdict for check in found.values()} == {OK}
    assert found["clocks of the nodes"].text == "node 1 is 0.250 s ahead of node 0"
    assert "4 processes, nccl" in found["all-reduce"].text


@pytest.mark.parametrize(("skew", "verdict"), [
    ([-90.0, 0.01], WARNING), ([0.9, 0.0], OK), ([3.0, 5.0], OK), (None, WARNING)])
def test_clocks_that_differ_are_found(skew: list[float] | None, verdict: str) -> None:
    found = shared([answer(0), answer(1), answer(2, skew=skew), answer(3)])
    assert found["clocks of the nodes"].verdict == verdict


def test_other_code_on_a_node_is_a_problem() -> None:
    other = VERSIONS | {"the project's code": "def"}
    found = shared([answer(0), answer(1), answer(2, versions=other), answer(3)])["versions"]
    assert found.verdict == PROBLEM
    assert found.text == "the project's code differs: abc on node 0, def on node 1"


def test_a_process_without_an_answer_is_named() -> None:
    found = shared([answer(0), answer(1), answer(2), None])
    assert (found["rank 3"].verdict, found["rank 3"].text) == (PROBLEM, "no answer")
    assert "all-reduce" not in found and found["versions"].verdict == OK


def test_a_training_on_one_node_is_known_to_all() -> None:
    here = Subject(Path("runs"), Path("datasets"))
    idle, training = answer(0) | {"is_training": False}, answer(2) | {
        "is_training": True, "busy": "tiny is being trained by process 7"}
    found = nodes.with_others(here, [idle, training])
    assert found.is_training and found.busy == (
        "on another node, tiny is being trained by process 7")
    assert nodes.with_others(here, [idle, idle]) == here


def test_the_first_ranks_of_nodes_are_right_beside_one_that_is_missing() -> None:
    texts = [None if rank == 1 else json.dumps(answer(rank)) for rank in range(6)]
    assert nodes.leaders_of(nodes.by_rank(texts)) == [2, 4]


def test_one_node_has_no_clocks_to_compare() -> None:
    reports = reports_of([answer(0), answer(1)])
    assert len(reports) == 1 and [check.name for check in reports[0].checks] == [
        "PyTorch", "RAM", "all-reduce"]


def test_a_clock_that_is_ahead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = dist.HashStore(), time.time

    def ahead() -> float:
        return real() + (100 if threading.current_thread().name == "leader" else 0)

    monkeypatch.setattr(nodes.time, "time", ahead)
    found = []
    leader = threading.Thread(name="leader", target=lambda: found.append(
        measure_skew(Exchange(2, 4, store, seconds=20), [2])))
    leader.start()
    assert measure_skew(Exchange(0, 4, store, seconds=20), [2]) is None
    leader.join()
    (skew, error), = found
    assert abs(skew - 100) <= error + 0.01 and error < 10


def test_a_missing_answer_is_not_waited_for_without_end() -> None:
    store = dist.HashStore()
    exchange = Exchange(0, 2, store, seconds=0.2)
    assert exchange.gather("step", "mine") == ["mine", None]


def test_versions_name_the_code_and_the_run() -> None:
    about = Subject(Path("runs"), Path("datasets"))
    assert set(nodes.versions(about)) == {"PyTorch", "Python", "the project's code"}
