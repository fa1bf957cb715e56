"""The shape of each JSON document that a command prints with --json; nothing else is in it."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

Number, Interval = float | None, list[float] | None


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _part(name: str, **types: str) -> type[_Part]:
    """Return a part without methods: the names of its keys by what they hold."""
    kinds = {"text": str, "texts": list[str], "text_or_none": str | None, "whole": int,
             "whole_or_none": int | None, "number": float, "number_or_none": Number,
             "interval": Interval, "flag": bool}
    return create_model(name, __base__=_Part, **{
        key: (kinds[kind], ...) for kind, keys in types.items() for key in keys.split()})


Low = _part("Low", number="low expected high")


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


State = _part(
    "State", text="name status", texts="warnings", text_or_none="reason phase",
    whole_or_none="global_step num_steps",
    number_or_none="heartbeat_seconds tokens train_loss validation_loss tokens_per_second mfu"
                   " seconds usd seconds_left usd_per_hour usd_at_end memory_gib")


class List(_Part):
    schema_: Literal["list/1"]
    runs: list[State]


Compared = _part(
    "Compared", text="run status differs model ift_judge sorted_by test_slice", whole="num_seeds",
    text_or_none="machine", flag="is_within_spread",
    number_or_none="global_batch_size microbatch_size tokens steps train_loss validation_loss"
                   " test_loss validation_bits_per_byte test_bits_per_byte ift_score ift_low"
                   " ift_high seconds seconds_without_validation tokens_per_second num_gpus"
                   " usd_per_hour usd usd_without_validation usd_per_megatoken"
                   " usd_per_megatoken_without_validation test_loss_spread validation_loss_spread"
                   " train_loss_spread tokens_to_loss usd_to_loss")


class Compare(_Part):
    schema_: Literal["compare/1"]
    rows: list[Compared]
    notes: list[str]


SweptRun = _part("SweptRun", text="run state", number_or_none="loss")


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


TrialOf = _part("TrialOf", whole="microbatch_size", flag="fits", text="device",
                number_or_none="allocated_gib reserved_gib demand_gib capacity_gib"
                               " tokens_per_second")


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
    verdict: Literal["ok", "warning", "problem"]
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
    tokenizer: str | None
    text: str | None


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
