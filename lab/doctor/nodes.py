"""The examination of several processes that torchrun has started, on one node or more. Uses torch.

They exchange text through torchrun's store: no collective is needed, and one that does not answer
is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from basics.machine import code_digest
from lab.doctor import load_tests
from lab.doctor.check import (
    PROBLEM,
    Check,
    Finding,
    Subject,
    make_checks,
    ok,
    problem,
    unknown,
    warning,
)
from lab.doctor.examination import Request, checks_of_gpus, other_checks, subject_of
from lab.doctor.load_result import Result
from lab.doctor.report import Report
from lab.doctor.run_checks import num_processes
from processes.startup_agreement import Agreement

SLACK_SECONDS = 30.0  # for the checks that load nothing
NUM_ASKED = 4  # times that a node asks for rank 0's clock; the quickest answer counts
MUCH_SKEW = 1.0  # seconds


class Exchange:
    """Text from rank to rank, with a time limit."""

    def __init__(self, rank: int, world_size: int, store: dist.Store, *, seconds: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._seconds = store, seconds

    def tell(self, key: str, text: str) -> None:
        self._store.set(key, text.encode("utf-8", "backslashreplace"))

    def ask(self, key: str, seconds: float | None = None) -> str | None:
        """Wait for a text; None if nobody tells it in time."""
        with suppress(RuntimeError):  # the error of a time-out, and of a store that is gone
            self._store.wait([key], timedelta(seconds=max(0.1, seconds or self._seconds)))
            return self._store.get(key).decode()
        return None

    def gather(self, step: str, text: str) -> list[str | None]:
        """Return every rank's text, None for those that do not answer in time. Every rank."""
        self.tell(f"{step}/{self.rank}", text)
        until = time.monotonic() + self._seconds
        return [self.ask(f"{step}/{rank}", until - time.monotonic())
                for rank in range(self.world_size)]


def examine_nodes(request: Request, show: Callable[[list[Report]], int]) -> int:
    """Make all checks on all nodes; return the exit status that `show` decides. Every rank.

    Args:
        show: prints the reports, on rank 0.

    Raises:
        UserError: on every rank, there is no such run.
    """
    environment = os.environ
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    agreement = Agreement(rank, world_size)
    subject = agreement.run("run", lambda: subject_of(request, environment))
    exchange = Exchange(rank, world_size, agreement.connect("doctor"),
                        seconds=request.time_limit + SLACK_SECONDS)
    hello = {"node": int(environment.get("GROUP_RANK", "0")), "busy": subject.busy,
             "is_training": subject.is_training, "local_rank": int(environment["LOCAL_RANK"])}
    everybody = by_rank(exchange.gather("hello", json.dumps(hello)))
    subject = with_others(subject, everybody.values())
    skew = measure_skew(exchange, leaders_of(everybody))
    found = hello | _examine_node(request, subject, hello["local_rank"], f"{agreement.name}/load")
    texts = exchange.gather("found", json.dumps(found | {"skew": skew}))
    if rank == 0:
        status = show(reports_of([text and json.loads(text) for text in texts]))
        exchange.tell("status", str(status))
        return status
    return int(exchange.ask("status") or 1)


def with_others(subject: Subject, everybody: Collection[Mapping[str, Any]]) -> Subject:
    """Return the subject with what is known of all nodes: one that is busy stops all tests."""
    busy = next((f"on another node, {other['busy']}" for other in everybody if other["busy"]), "")
    return replace(subject, busy=subject.busy or busy,
                   is_training=any(other["is_training"] for other in everybody))


def by_rank(texts: Sequence[str | None]) -> dict[int, dict[str, Any]]:
    """Read what was gathered; ranks without an answer are left out."""
    return {rank: json.loads(text) for rank, text in enumerate(texts) if text}


def leaders_of(everybody: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the first rank of each node but rank 0's, of those that have answered."""
    return [rank for rank, other in everybody.items() if rank and other["local_rank"] == 0]


def _examine_node(request: Request, subject: Subject, local_rank: int,
                  name: str) -> dict[str, Any]:
    """Make this process's load test, and on the first of each node its other checks."""
    launch = {"world_size": subject.world_size, "name": name,
              "ranks": [(local_rank, int(os.environ["RANK"]))]}
    with load_tests.load_tests(subject, launch, seconds=request.time_limit) as tests:
        others = other_checks(subject) if local_rank == 0 else []
        results = tests.results()
    gpus = checks_of_gpus(subject, results) if local_rank == 0 else []
    return {"host": socket.gethostname(), "result": asdict(results[0]),
            "gpus": [asdict(check) for check in gpus],
            "others": [asdict(check) for check in others],
            "versions": versions(subject) if local_rank == 0 else {}}


def versions(subject: Subject) -> dict[str, str]:
    """Return what must be the same on all nodes; code and configs as a digest."""
    found = {"PyTorch": version("torch"), "Python": ".".join(platform.python_version_tuple()[:2]),
             "the project's code": code_digest()}
    if subject.run is not None:
        configs = f"{subject.run.model!r} {subject.run.train!r}"
        found["the run's configs"] = hashlib.blake2b(
            configs.encode(), digest_size=6).hexdigest()
    return found


def measure_skew(exchange: Exchange, leaders: Sequence[int]) -> list[float] | None:
    """Compare the clock of each node's first process with rank 0's. Every rank.

    Returns:
        On a leader, the seconds that its clock is ahead, and how far that may be wrong.
    """
    if exchange.rank == 0:
        for leader in leaders:
            for number in range(NUM_ASKED):
                if exchange.ask(f"time?/{leader}/{number}") is None:
                    break
                exchange.tell(f"time/{leader}/{number}", repr(time.time()))
    if exchange.rank not in leaders:
        return None
    answers = [_ask_time(exchange, number) for number in range(NUM_ASKED)]
    known = [answer for answer in answers if answer is not None]
    return min(known, key=lambda answer: answer[1]) if known else None


def _ask_time(exchange: Exchange, number: int) -> list[float] | None:
    asked = time.time()
    exchange.tell(f"time?/{exchange.rank}/{number}", "")
    theirs, answered = exchange.ask(f"time/{exchange.rank}/{number}"), time.time()
    if theirs is None:
        return None
    return [(asked + answered) / 2 - float(theirs), (answered - asked) / 2]


def reports_of(everybody: Sequence[Mapping[str, Any] | None]) -> list[Report]:
    """Return one report for each node, and one of what they have together.

    Args:
        everybody: by rank, what `_examine_node` returned, None without an answer.
    """
    answers = [found for found in everybody if found is not None]
    nodes = sorted({found["node"] for found in answers})
    reports = [_report_of_node([found for found in answers if found["node"] == node])
               for node in nodes]
    shared = [Check(f"rank {rank}", PROBLEM, "no answer", "restart its machine, or take another"
                    " one") for rank, found in enumerate(everybody) if found is None]
    if len(answers) == len(everybody):
        shared += make_checks(load_tests.SHARED_CHECKS, _results(answers))
    leaders = [found for found in answers if found["local_rank"] == 0]
    if len(nodes) > 1:
        shared += make_checks(NODE_CHECKS, leaders)
        return [*reports, Report("all nodes", shared)]
    reports[0].checks.extend(shared)
    return reports


def _report_of_node(answers: Sequence[Mapping[str, Any]]) -> Report:
    answers = sorted(answers, key=lambda found: found["local_rank"])
    leader = answers[0]
    title = f"node {leader['node']}: {leader['host']}, {num_processes(len(answers))}"
    return Report(title, [*(Check(**check) for check in leader["gpus"]),
                          *make_checks(load_tests.CHECKS, _results(answers)),
                          *(Check(**check) for check in leader["others"])])


def _results(answers: Sequence[Mapping[str, Any]]) -> list[Result]:
    return [Result(**found["result"]) for found in answers]


def check_skew(leaders: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare the clocks of the nodes with that of rank 0's."""
    skews = {found["node"]: found["skew"] for found in leaders if found["node"] != 0}
    if None in skews.values():
        return unknown("a node did not get the time of rank 0")
    worst, (ahead, error) = max(skews.items(), key=lambda item: abs(item[1][0]))
    text = f"node {worst} is {abs(ahead):,.3f} s {'ahead of' if ahead > 0 else 'behind'} node 0"
    return ok(text) if abs(ahead) - error < MUCH_SKEW else warning(
        text, "set the clocks (timedatectl set-ntp true): logs and the hub need the time")


def check_versions(leaders: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that all nodes would train the same run with the same code."""
    first = leaders[0]["versions"]
    for found in leaders[1:]:
        for what, value in found["versions"].items():
            if value != first.get(what):
                return problem(
                    f"{what} differs: {first.get(what)} on node {leaders[0]['node']}, {value} on"
                    f" node {found['node']}", "bring all nodes to the same commit and run uv sync"
                    " on each; runs/ is best shared between them")
    return ok(f"{', '.join(first)}: the same on all nodes")


NODE_CHECKS = {"clocks of the nodes": check_skew, "versions": check_versions}
