"""What the nodes of one torchrun have in common, and one exchange over all their processes."""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from basics.errors import describe
from basics.machine import code_digest, within
from lab.doctor.check import OTHER_MACHINE, Checks, Finding, ok, problem, warning
from lab.doctor.load import all_reduce, first_kernel
from lab.doctor.load_tests import ADVICE, EXCHANGE, judge_exchange
from processes.launch import this_process
from processes.startup_agreement import open_store
from run_config import Run

MEET_SECONDS = 60.0  # more than the checks of a node take, without its load tests


def check_nodes(run: Run | None, is_busy: bool, time_limit: float) -> Checks:
    """Compare all nodes; add up numbers over all GPUs, unless one is in use. Every rank.

    Args:
        run, is_busy: of the first process of each node; the others know neither.
        time_limit: seconds for the exchange, as for each node's own load tests.
    """
    mine = {"node": int(os.environ["GROUP_RANK"]), "is_busy": is_busy, "versions": versions(run)}
    store = open_store("lab doctor")
    everybody = meet(mine, store, timedelta(seconds=MEET_SECONDS + time_limit))
    if isinstance(everybody, Finding):
        return {"nodes": everybody}
    checks = {"nodes": compared(everybody)}
    if not any(other["is_busy"] for other in everybody):
        checks["all-reduce of all nodes"] = _exchange(store, time_limit)
    return checks


def versions(run: Run | None) -> dict[str, str]:
    """Return what must be the same on all nodes; code and configs as a digest."""
    found = {"PyTorch": torch.__version__, "the project's code": code_digest(),
             "Python": ".".join(platform.python_version_tuple()[:2])}
    if run is not None:
        configs = f"{run.model!r} {run.train!r}".encode()
        found["the run's configs"] = hashlib.blake2b(configs, digest_size=6).hexdigest()
    return found


def meet(mine: dict[str, Any], store: dist.Store, limit: timedelta
         ) -> list[dict[str, Any]] | Finding:
    """Return what all processes tell, in the order of the ranks; or which do not come in time."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    store.set(f"process/{os.environ['RANK']}", json.dumps(mine))
    try:
        store.wait([f"process/{rank}" for rank in ranks], limit)
    except RuntimeError:
        missing = [str(rank) for rank in ranks if not store.check([f"process/{rank}"])]
        return problem(f"no answer from rank {', '.join(missing)}", OTHER_MACHINE)
    return [json.loads(store.get(f"process/{rank}")) for rank in ranks]


def compared(everybody: Sequence[dict[str, Any]]) -> Finding:
    """Compare what must be the same on all nodes."""
    nodes: dict[int, dict[str, Any]] = {}
    for each in everybody:  # the first process of each node comes first, and knows the most
        nodes.setdefault(each["node"], each)
    (first, one), *others = sorted(nodes.items())
    for node, other in others:
        for what, value in one["versions"].items():
            if value != (theirs := other["versions"].get(what)):
                return problem(
                    f"{what} differs: {value} on node {first}, {theirs} on node {node}", "bring all"
                    " nodes to the same commit and run uv sync on each; runs/ is best shared"
                    " between them")
    text = f"{', '.join(one['versions'])}: the same on all {len(nodes)}"
    busy = [str(node) for node, other in sorted(nodes.items()) if other["is_busy"]]
    return ok(text) if not busy else warning(
        f"{text}; no numbers are added up, because of node {', '.join(busy)}",
        "see that node's report")


def _exchange(store: dist.Store, time_limit: float) -> Finding:
    """Add up numbers over all processes. Every rank."""
    def work() -> dict[str, Any]:
        process = this_process()
        first_kernel(process.device)
        return all_reduce(process, store, timedelta(seconds=time_limit))

    try:
        return judge_exchange([within(time_limit, work)])
    except TimeoutError:
        return problem(f"has not ended after {time_limit:g} s", ADVICE[EXCHANGE])
    except Exception as error:  # whatever it is, the report is printed
        text = describe(error)
        return problem(text, ADVICE["gloo" if "gloo" in text else EXCHANGE])
