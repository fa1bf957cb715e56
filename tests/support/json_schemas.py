"""The shape of each JSON document that a command prints with --json; nothing else is in it."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from lab.runs import NUMBERS

TYPES = {
    "text": str,
    "texts": list[str],
    "whole": int,
    "number": float,
    "flag": bool,
    "interval": list[float],
}
OR_NONE = {f"{name}_or_none": kind | None for name, kind in TYPES.items()}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def part(
    optional: dict[str, Any] | None = None, parts: dict[str, Any] | None = None, **by_type: str
) -> type[Part]:
    """Return a part of a document: its keys by the type of their values.

    Args:
        optional: the type of each key that may be absent.
        parts: the types of the keys that are not in the table of types.
    """
    types = {
        key: TYPES.get(kind) or OR_NONE[kind]
        for kind, keys in by_type.items()
        for key in keys.split()
    }
    return create_model(
        "Part",
        __base__=Part,
        **{key: (kind, ...) for key, kind in (types | (parts or {})).items()},
        **{key: (kind | None, None) for key, kind in (optional or {}).items()},
    )


LOW_TO_HIGH = part(number="low expected high")
PRICE = part(
    text="gpu month kind source_kind provider source note",
    whole="num_gpus",
    number="usd_per_hour",
)
VALIDATION = part(whole_or_none="interval", whole="number", number="share hours usd")
MACHINE = part(
    text="name gpu",
    whole="num_gpus largest_microbatch",
    number="usd_per_hour",
    text_or_none="reason",
    parts={"price": PRICE | None},
    optional={
        "startup_hours": float,
        "hours": LOW_TO_HIGH,
        "usd": LOW_TO_HIGH,
        "validation": VALIDATION,
        "parts": list[part(whole="n_layers steps", number="hours usd tokens_per_second")],
        "tokens_per_second": float,
        "tokens_per_usd": float,
        "mfu": float,
        "source": str,
        "detail": str,
        "budget": str,
        **dict.fromkeys(
            (
                "microbatch_size",
                "gradient_accumulation_steps",
                "global_batch_size",
                "steps",
                "checkpoints",
                "checkpoints_kept",
            ),
            int,
        ),
    },
)
AGAINST_REFERENCE = part(number="loss", number_or_none="tokens")
BILL = part(
    number="machine_seconds",
    number_or_none="machine_usd",
)
RUN = part(
    text="name status notes",
    texts="warnings",
    text_or_none="reason phase tokenizer reference",
    whole_or_none="global_step num_steps",
    number_or_none="heartbeat_seconds tokens train_loss validation_loss tokens_per_second mfu"
    " seconds usd seconds_left usd_per_hour usd_at_end memory_gib bytes_per_token download_seconds"
    " validation_bits_per_byte validation_seconds peak_memory_gib",
    parts={
        "bill": BILL | None,
        "train_compared": AGAINST_REFERENCE | None,
        "validation_compared": AGAINST_REFERENCE | None,
    },
)
COMPARED = part(
    text="run status differs model ift_judge sorted_by test_slice notes",
    whole="num_seeds",
    text_or_none="machine reference",
    flag="is_within_spread is_of_other_text",
    number_or_none=" ".join(NUMBERS) + " seconds_without_validation usd_without_validation"
    " test_loss_spread validation_loss_spread"
    " train_loss_spread tokens_to_loss usd_to_loss"
    " reference_difference reference_tokens_ahead",
)
VARIANT = part(
    text="name",
    text_or_none="against_noise",
    interval_or_none="interval",
    number_or_none="loss difference tokens_to_baselines_loss seconds usd",
    parts={
        "changes": dict[str, Any],
        "runs": list[part(text="run state", number_or_none="loss seconds usd")],
    },
)
REPORT = part(text="title", parts={"checks": list[part(text="name verdict text advice")]})
LOSS = part(
    text="dataset split",
    whole="start_token num_tokens sequences blocks",
    text_or_none="tokenizer text",
    number_or_none="loss perplexity bits_per_byte",
    interval_or_none="loss_interval perplexity_interval bits_per_byte_interval",
)
SCORES = ("accuracy", "normalised_accuracy", "perplexity")
SCORE = part(
    text="benchmark questions_from",
    whole="questions cut_texts",
    text_or_none="split",
    parts={"higher_is_better": dict[str, bool]},
    optional=dict.fromkeys(SCORES, float) | {f"{name}_interval": list[float] for name in SCORES},
)
MODEL = part(
    text="name",
    text_or_none="checkpoint",
    whole_or_none="trained_tokens",
    parts={"loss": LOSS | None, "tasks": list[SCORE]},
)

DOCUMENTS = {
    "plan/1": part(
        text="run model",
        whole="parameters tokens checkpoint_bytes pinned_bytes",
        number="flops_per_token",
        parts={
            "memory_bytes": dict[str, dict[str, float]],
            "machines": list[MACHINE],
            "largest_microbatch": list[part(whole="card_gib one_gpu several_gpus")],
        },
    ),
    "list/2": part(parts={"runs": list[RUN]}),
    "compare/2": part(texts="notes", parts={"rows": list[COMPARED]}),
    "sweep/2": part(
        text="sweep base",
        text_or_none="stop_reason",
        texts="notes",
        parts={"variants": list[VARIANT], "compared_at": dict[str, float] | None},
    ),
    "evaluate/1": part(parts={"models": list[MODEL]}),
    "doctor/1": part(text_or_none="run", flag="is_fit", parts={"reports": list[REPORT]}),
}


def checked(printed: str) -> Any:
    """Return the one document in what a command printed, as an object with its keys."""
    document = json.loads(printed)
    assert next(iter(document)) == "schema"
    return DOCUMENTS[document.pop("schema")].model_validate(document)
