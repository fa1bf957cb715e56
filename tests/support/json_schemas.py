"""The shape of each JSON document that a command prints with --json; nothing else is in it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Low(_Part):
    low: float
    expected: float
    high: float


class Machine(_Part):
    name: str
    gpu: str
    num_gpus: int
    usd_per_hour: float
    largest_microbatch: int
    reason: str | None
    microbatch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    steps: int | None = None
    checkpoints: int | None = None
    hours: Low | None = None
    usd: Low | None = None
    mfu: float | None = None
    source: str | None = None
    validations: int | None = None
    validation_share: dict[Literal["rank0", "all"], float] | None = None
    budget: str | None = None


class Plan(_Part):
    schema_: Literal["plan/1"]
    run: str
    model: str
    parameters: int
    tokens: int
    flops_per_token: float
    checkpoint_bytes: int
    pinned_bytes: int
    memory_bytes: dict[Literal["one_gpu", "several_gpus"], dict[str, float]]
    largest_microbatch: list[dict[Literal["card_gib", "one_gpu", "several_gpus"], int]]
    machines: list[Machine]


class State(_Part):
    name: str
    status: str
    reason: str | None
    phase: str | None
    heartbeat_seconds: float | None
    global_step: int | None
    num_steps: int | None
    tokens: float | None
    train_loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    seconds: float | None
    usd: float | None
    seconds_left: float | None
    usd_per_hour: float | None
    usd_at_end: float | None
    memory_gib: float | None
    warnings: list[str]


class List(_Part):
    schema_: Literal["list/1"]
    runs: list[State]


class Compared(_Part):
    run: str
    status: str
    differs: str
    model: str
    num_seeds: int
    global_batch_size: float | None
    microbatch_size: float | None
    tokens: float | None
    steps: float | None
    train_loss: float | None
    validation_loss: float | None
    test_loss: float | None
    validation_bits_per_byte: float | None
    test_bits_per_byte: float | None
    ift_score: float | None
    seconds: float | None
    seconds_without_validation: float | None
    tokens_per_second: float | None
    num_gpus: float | None
    usd_per_hour: float | None
    usd: float | None
    usd_without_validation: float | None
    usd_per_megatoken: float | None
    usd_per_megatoken_without_validation: float | None
    ift_low: float | None
    ift_high: float | None
    ift_judge: str
    machine: str | None
    test_loss_spread: float | None
    validation_loss_spread: float | None
    train_loss_spread: float | None
    sorted_by: str
    is_within_spread: bool
    test_slice: str
    tokens_to_loss: float | None
    usd_to_loss: float | None


class Compare(_Part):
    schema_: Literal["compare/1"]
    rows: list[Compared]
    notes: list[str]


class SweptRun(_Part):
    run: str
    state: str
    loss: float | None


class Variant(_Part):
    name: str
    changes: dict[str, Any]
    runs: list[SweptRun]
    loss: float | None
    difference: float | None
    interval: list[float] | None
    against_noise: str | None
    tokens_to_baselines_loss: float | None
    seconds: float | None
    usd: float | None


class Sweep(_Part):
    schema_: Literal["sweep/1"]
    sweep: str
    base: str
    stop_reason: str | None
    variants: list[Variant]
    notes: list[str]


class TrialOf(_Part):
    microbatch_size: int
    fits: bool
    allocated_gib: float | None
    reserved_gib: float | None
    demand_gib: float | None
    capacity_gib: float | None
    tokens_per_second: float | None
    device: str


class Search(_Part):
    schema_: Literal["find-max-microbatch/1"]
    run: str
    world_size: int
    largest: int
    fastest: int
    smallest_that_did_not_fit: int | None
    memory_gib: dict[Literal["fixed", "a_sequence"], float] | None
    trials: list[TrialOf]


class DoctorsCheck(_Part):
    name: str
    verdict: Literal["ok", "warning", "problem", "skipped"]
    text: str
    advice: str


class Report(_Part):
    title: str
    checks: list[DoctorsCheck]

    def named(self) -> dict[str, DoctorsCheck]:
        """Return the checks by their names, each of which is in a report only once."""
        assert len({check.name for check in self.checks}) == len(self.checks)
        return {check.name: check for check in self.checks}


class Doctor(_Part):
    schema_: Literal["doctor/1"]
    run: str | None
    is_fit: bool
    reports: list[Report]


class Loss(_Part):
    dataset: str
    split: str
    start_token: int
    num_tokens: int
    loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    sequences: int
    loss_interval: list[float] | None
    perplexity_interval: list[float] | None
    bits_per_byte_interval: list[float] | None


class TaskScore(_Part):
    benchmark: str
    questions: int
    questions_from: str
    split: str | None
    cut_texts: int
    accuracy: float | None = None
    accuracy_interval: list[float] | None = None
    normalised_accuracy: float | None = None
    normalised_accuracy_interval: list[float] | None = None
    perplexity: float | None = None
    perplexity_interval: list[float] | None = None


class Model(_Part):
    name: str
    checkpoint: str | None
    trained_tokens: int | None
    loss: Loss | None
    tasks: list[TaskScore]


class Evaluate(_Part):
    schema_: Literal["evaluate/1"]
    models: list[Model]


DOCUMENTS = {kind.model_fields["schema_"].annotation.__args__[0]: kind
             for kind in (Plan, List, Compare, Sweep, Search, Evaluate, Doctor)}


def checked(printed: str) -> Any:
    """Return the one document in what a command printed, as its model."""
    document = json.loads(printed)
    assert next(iter(document)) == "schema"
    kind = DOCUMENTS[document["schema"]]
    return kind.model_validate({"schema_": document.pop("schema")} | document)
