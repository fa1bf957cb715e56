"""The limit on the address space, in processes of their own."""

from __future__ import annotations

import multiprocessing
import resource

import torch

from basics.memory_meters import CpuMeter, lift_limit

HARD_LIMIT = 2**45  # a user's, which only root may raise


def limit_and_lift(results) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (HARD_LIMIT, HARD_LIMIT))
    torch.set_num_threads(1)  # others do not survive a fork
    CpuMeter(torch.device("cpu"), 0.5)
    limits = [resource.getrlimit(resource.RLIMIT_AS)]
    try:
        torch.ones(2**28)
    except RuntimeError as error:
        results.put(str(error))
    lift_limit()
    limits.append(resource.getrlimit(resource.RLIMIT_AS))
    results.put(limits)


def test_a_hard_limit_stays_as_it_was() -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=limit_and_lift, args=(results,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "can't allocate memory" in results.get()
    (soft, hard), lifted = results.get()
    assert soft < hard == HARD_LIMIT and lifted == (HARD_LIMIT, HARD_LIMIT)
