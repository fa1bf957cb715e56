"""The limit on the address space, in processes of their own."""

from __future__ import annotations

import multiprocessing
import resource

import pytest
import torch

from basics.memory_meters import CpuMeter, GpuMeter, lift_limit
from basics.out_of_memory import is_out_of_memory, says_out_of_memory

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


@pytest.mark.gpu
def test_the_limit_of_a_gpu_holds_and_its_error_is_recognised() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    limit_gib = torch.cuda.memory_reserved(device) / 2**30 + 0.5
    meter = GpuMeter(device, limit_gib)
    try:
        kept = torch.empty(2**28, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2**30, dtype=torch.uint8, device=device)
        peak = meter.peak()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert says_out_of_memory(str(caught.value)) and is_out_of_memory(caught.value)
    assert len(kept) == 2**28 and 0.25 <= peak.allocated_gib <= peak.reserved_gib
    assert peak.demand_gib == peak.allocated_gib and peak.capacity_gib <= limit_gib
    torch.empty(2**30, dtype=torch.uint8, device=device)  # the error was the limit's


@pytest.mark.gpu
def test_the_drivers_text_is_recognised() -> None:
    torch.cuda.init()
    with pytest.raises(RuntimeError) as of_code:
        torch.cuda.check_error(2)  # cudaErrorMemoryAllocation
    with pytest.raises(torch.AcceleratorError) as of_call:
        torch.empty(2**50, dtype=torch.uint8, pin_memory=True)  # a petabyte
    for caught in (of_code, of_call):
        assert says_out_of_memory(str(caught.value)) and is_out_of_memory(caught.value), caught
    assert torch.ones(2, device="cuda").sum().item() == 2  # the context still works
