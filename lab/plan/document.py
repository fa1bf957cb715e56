"""The estimates of `lab plan` as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lab.plan.estimate import (
    Estimate,
    bytes_of_checkpoint,
    num_checkpoints,
    num_validations,
    pinned_bytes,
)
from lab.plan.memory import largest_microbatch, peak_memory
from lab.plan.setting import num_parameters, size_name
from lab.plan.tables import settings_of, verdict
from reporting.speed import CARDS_GIB, flops_per_token, usable_gib
from run_config import Run

COLUMNS = ("one_gpu", "several_gpus")  # as in the tables


def plan_document(run: Run, estimates: list[Estimate], *, num_tokens: int,
                  budget: float | None) -> dict[str, Any]:
    """Return what the tables show, with all digits: bytes, hours and US dollars."""
    settings = dict(zip(COLUMNS, settings_of(run), strict=True))
    peaks = {name: peak_memory(setting, run.train.microbatch_size)
             for name, setting in settings.items()}
    return {
        "schema": "plan/1",
        "run": run.name,
        "model": size_name(run.model), "parameters": num_parameters(run.model),
        "tokens": num_tokens,
        "flops_per_token": flops_per_token(run.model),
        "checkpoint_bytes": bytes_of_checkpoint(run), "pinned_bytes": pinned_bytes(run),
        "memory_bytes": {name: asdict(peak) | {"total": peak.total}
                         for name, peak in peaks.items()},
        "largest_microbatch": [
            {"card_gib": card} | {name: largest_microbatch(setting, usable_gib(card))
                                  for name, setting in settings.items()} for card in CARDS_GIB],
        "machines": [_machine(run, found, budget) for found in estimates],
    }


def _machine(run: Run, found: Estimate, budget: float | None) -> dict[str, Any]:
    machine, plan = found.machine, found.plan
    values: dict[str, Any] = {
        "name": machine.name, "gpu": machine.gpu.name, "num_gpus": machine.num_gpus,
        "usd_per_hour": machine.usd_per_hour, "largest_microbatch": found.largest,
        "reason": found.reason or None,  # why it cannot train the run
    }
    if plan is None:
        return values
    on_rank_0, on_all = found.validation
    return values | {
        "microbatch_size": plan.microbatch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "global_batch_size": plan.global_batch_size, "steps": plan.num_steps,
        "checkpoints": num_checkpoints(run, plan),
        "hours": asdict(found.hours), "usd": asdict(found.usd),
        "mfu": found.speed.mfu, "source": found.speed.source,
        "validations": num_validations(run, plan),
        "validation_share": {"rank0": on_rank_0, "all": on_all},
        "budget": None if budget is None else verdict(found.usd, budget),
    }


