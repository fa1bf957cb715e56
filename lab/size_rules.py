"""The settings that follow from a size: `lab new RUN --params 124M`, or `--usd 5 --machine ...`.

`apply_rules` is the table of rules; the two other functions find the width that it starts from.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from basics.errors import UserError
from lab.plan.estimate import Machine, estimate
from lab.plan.plan import CHINCHILLA_TOKENS_PER_PARAMETER
from lab.plan.speed_sources import read_measured
from run_config import ModelConfig, Run

BASE = "gpt2-small-1gpu"  # whose settings are taken, without --like
WIDTHS = range(64, 2048 + 1, 64)
# By which power of the ratio of two widths a rate changes. Source: benchmarks/recipes.md, "A
# prediction from one model for the next". With AdamW `learning_rate` is of the matrices.
MUON_POWERS = {
    "learning_rate": 0.5,
    "matrix_learning_rate": 0,
    "embedding_learning_rate": 0.5,
    "head_learning_rate": 0.5,
    "vector_learning_rate": 0.5,
}
ADAMW_POWERS = MUON_POWERS | {"learning_rate": 1, "matrix_learning_rate": 1}


def shape_of(width: int, model: dict[str, Any]) -> dict[str, Any]:
    """Return `model.json` for a width; what does not follow from that is as in `model`."""
    return model | {
        "emb_dim": width,
        "n_layers": width // 64,
        "n_heads": width // (64 if width >= 256 else 32),
        "context_length": 256 if width <= 256 else 1024,
    }


def num_parameters(model: dict[str, Any]) -> int:
    return ModelConfig.model_validate(model).num_parameters


def apply_rules(
    width: int, model: dict[str, Any], train: dict[str, Any], most_tokens: int
) -> dict[str, str]:
    """Set in `model.json` and `train.json` what follows from a width; return a line by key.

    The model has the vocabulary of the dataset already, which is worth training on `most_tokens`.
    """
    ratio = model["emb_dim"] / width
    model |= shape_of(width, model)
    count, context_length = num_parameters(model), model["context_length"]
    tokens = train["min_train_tokens"] = min(CHINCHILLA_TOKENS_PER_PARAMETER * count, most_tokens)
    sequences = 2**18 * (tokens / 3.26e9) ** 0.75 / context_length
    batch = train["global_batch_size"] = max(8, 2 ** round(math.log2(sequences)))
    train["microbatch_size"] = min(train["microbatch_size"], batch)
    train.pop("gradient_accumulation_steps", None)  # it follows from the global batch
    reasons = {
        "emb_dim": f"{count:,} parameters, {tokens / count:.3g} tokens for each"
        f" ({CHINCHILLA_TOKENS_PER_PARAMETER}, or as many as the dataset allows)",
        "n_layers": "one for each 64 of the width, as in GPT-2 small",
        "n_heads": "of 64 each, or of 32 below a width of 256",
        "context_length": "256 up to a width of 256, else 1,024",
        "global_batch_size": "262,144 tokens x (tokens / 3.26e9)^0.75, to a power of two",
        "microbatch_size": "in one forward pass; it changes the speed, not the result",
    }
    powers = MUON_POWERS if train.get("optimizer") == "muon" else ADAMW_POWERS
    for key, power in powers.items():
        if train.get(key) is not None:
            reasons[key] = f"{train[key]} x {ratio:.3g}^{power}, by the ratio of the widths"
            train[key] = float(f"{train[key] * ratio**power:.3g}")
    settings = model | train
    return {key: f"  {key} {settings[key]:,}: {reason}" for key, reason in reasons.items()}


def nearest_width(params: str, model: dict[str, Any]) -> int:
    """Return the width whose model is nearest to so many parameters. Raises: UserError."""
    wanted = 0.0
    with suppress(ValueError):
        wanted = float(params.replace("k", "e3").replace("M", "e6").replace("B", "e9"))
    if not 0 < wanted < math.inf:
        raise UserError(f"--params {params[:60]!r}: wanted a number such as 124M or 1.5B")
    return min(WIDTHS, key=lambda width: abs(num_parameters(shape_of(width, model)) - wanted))


def affordable_width(usd: float, machine: Machine, run_of: Callable[[int], Run]) -> tuple[int, int]:
    """Return the largest width whose run costs at most so much, and its microbatch there.

    Args:
        run_of: returns the run of a width.

    Raises: UserError: there is none whose cost is known.
    """
    measured = read_measured(run_of(WIDTHS[0]).run_dir.parent)
    for width in reversed(WIDTHS):
        plan = estimate(run_of(width), machine, tokens=None, measured=measured)
        if not plan["reason"] and plan["usd"]["expected"] <= usd:
            return width, plan["microbatch_size"]
    raise UserError(
        f"--usd {usd:g}: no size that lab plan can estimate costs so little on this machine"
        f" ({plan['reason'] or 'all cost more'}); allow more, or use --params"
    )
