"""The settings that follow from a size: `lab new RUN --params 124M`, or `--usd 5 --machine ...`.

`apply_rules` is the table of rules; `nearest_width` and `affordable_width` find the width that it
starts from.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from basics.errors import UserError
from basics.text import dollars
from lab.plan.estimate import TOO_SMALL, Machine, amount, estimate
from lab.plan.plan import CHINCHILLA_TOKENS_PER_PARAMETER
from lab.plan.speed_sources import read_measured
from run_config import ModelConfig, Run, TrainConfig, with_defaults
from tokens.batch_plan import divided, largest_divisor

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
# 1 - `beta2` of GPT-2 small's runs, and their tokens a step. Source of the power of 0.5:
# benchmarks/recipes.md, "The rules tried on two small models".
SMALL_BETA2_REST, SMALL_STEP_TOKENS = 0.05, 2**18


def machine_of_size(params: str | None, usd: float | None, machine: str | None) -> Machine | None:
    """Return the machine on which a run of so many dollars trains; None without dollars.

    Raises: UserError: the options do not name one size, or there is no such machine.
    """
    if None not in (usd, params):
        raise UserError("--params and --usd are two sizes; drop one")
    if usd is not None and machine is None:
        raise UserError("--usd needs --machine, such as 1xRTX-4090@0.45")
    if machine is not None and usd is None:
        raise UserError("--machine needs --usd, the dollars of the run")
    return None if machine is None else Machine.parse(machine)


def shape_of(width: int, model: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return `model.json` for a width; what does not follow from that is as in `model`."""
    return model | {
        "emb_dim": width,
        "n_layers": width // 64,
        "n_heads": width // (64 if width >= 256 else 32),
        "context_length": min(256 if width <= 256 else 1024, longest),
    }


def num_parameters(model: dict[str, Any]) -> int:
    return ModelConfig.model_validate(model).num_parameters


def apply_rules(
    width: int, model: dict[str, Any], train: dict[str, Any], most_tokens: int, longest: int
) -> dict[str, str]:
    """Set in `model.json` and `train.json` what follows from a width; return the reasons by key.

    The model has the vocabulary of the dataset already, which is worth training on `most_tokens`,
    in sequences of at most `longest`.
    """
    ratio = model["emb_dim"] / width
    model |= shape_of(width, model, longest)
    count, context_length = num_parameters(model), model["context_length"]
    tokens = train["min_train_tokens"] = min(CHINCHILLA_TOKENS_PER_PARAMETER * count, most_tokens)
    sequences = SMALL_STEP_TOKENS * (tokens / 3.26e9) ** 0.75 / context_length
    batch = train["global_batch_size"] = max(8, 2 ** round(math.log2(sequences)))
    train["microbatch_size"] = largest_divisor(batch, train["microbatch_size"])
    train.pop("gradient_accumulation_steps", None)
    reasons = {
        "emb_dim": f"{count:,} parameters, {tokens / count:.3g} tokens for each"
        f" ({CHINCHILLA_TOKENS_PER_PARAMETER}, or fewer with a small dataset)",
        "n_layers": "one for each 64 of the width, as in GPT-2 small",
        "n_heads": "of 64 each, or of 32 below a width of 256",
        "context_length": "256 up to a width of 256, else 1,024; shorter with a short validation"
        " file",
        "global_batch_size": f"sequences, {batch * context_length:,} tokens a step: 262,144 x"
        " (tokens / 3.26e9)^0.75, to a power of two, at least 8 sequences",
        "microbatch_size": "sequences in one forward pass; it divides the global batch",
        "gradient_accumulation_steps": "it follows from global_batch_size",
    }
    grow = train.get("grow")
    if grow and grow.get("from_layers", 1) >= model["n_layers"]:
        del train["grow"]
        reasons["grow"] = f"from_layers is not below n_layers {model['n_layers']}"
    beta2 = 1 - SMALL_BETA2_REST * (batch * context_length / SMALL_STEP_TOKENS) ** 0.5
    configs = ModelConfig.model_validate(model), TrainConfig.model_validate(train)
    if beta2 > with_defaults(*configs)[1].beta2:
        train["beta2"] = round(beta2, 4)
        reasons["beta2"] = (
            f"1 - {SMALL_BETA2_REST} x (tokens a step / {SMALL_STEP_TOKENS:,})^0.5, or the larger"
            " one of the run that it is like"
        )
    powers = MUON_POWERS if train.get("optimizer") == "muon" else ADAMW_POWERS
    for key, power in powers.items():
        if train.get(key) is not None:
            reasons[key] = f"{train[key]} x {ratio:.3g}^{power}, by the ratio of the widths"
            train[key] = float(f"{train[key] * ratio**power:.3g}")
    return reasons


def nearest_width(params: str, model: dict[str, Any], longest: int) -> int:
    """Return the width whose model is nearest to so many parameters. Raises: UserError."""
    wanted = math.nan
    with suppress(ValueError):
        wanted = float(params.replace("k", "e3").replace("M", "e6").replace("B", "e9"))
    sizes = {width: num_parameters(shape_of(width, model, longest)) for width in WIDTHS}
    smallest, *_, largest = sizes.values()
    if not smallest <= wanted <= largest:
        raise UserError(
            f"--params {params[:60]!r}: wanted a number from {smallest:,} to {largest:,}, such as"
            " 124M"
        )
    return min(WIDTHS, key=lambda width: abs(sizes[width] - wanted))


def affordable_width(
    usd: float, machine: Machine, run_of: Callable[[int], Run], most_tokens: int
) -> tuple[int, int, str]:
    """Return the largest width that so many dollars and the dataset allow.

    Also return its microbatch, and a line with its cost and the limit of the width.

    Args:
        run_of: returns the run of a width, with as many tokens as the dataset allows.

    Raises: UserError: there is none, or no cost is known.
    """
    runs = {width: run_of(width) for width in WIDTHS}
    measured = read_measured(runs[WIDTHS[0]].run_dir.parent)
    plans = {
        width: estimate(run, machine, tokens=None, measured=measured) for width, run in runs.items()
    }
    costs = {width: plan["usd"]["expected"] for width, plan in plans.items() if not plan["reason"]}
    if not costs:
        raise UserError(
            f"--machine {machine.name}: lab plan can estimate no size there"
            f" ({plans[WIDTHS[-1]]['reason']}); use --params"
        )
    cheapest = min(costs, key=costs.__getitem__)
    if costs[cheapest] > usd:
        raise UserError(
            f"--usd {usd:g}: the cheapest size that lab plan can estimate has"
            f" {runs[cheapest].model.num_parameters:,} parameters and costs"
            f" US${dollars(costs[cheapest])} on this machine; allow more, or use --params"
        )
    affordable = max(width for width in costs if costs[width] <= usd)
    possible = [
        width
        for width, plan in plans.items()
        if width <= affordable
        and CHINCHILLA_TOKENS_PER_PARAMETER * runs[width].model.num_parameters <= most_tokens
        and plan["reason"] in (None, TOO_SMALL)
    ]
    if not possible:
        raise UserError(
            f"--usd {usd:g}: {runs[affordable].config.dataset} has too little text for the smallest"
            f" size, {CHINCHILLA_TOKENS_PER_PARAMETER} tokens for each parameter; prepare more, or"
            " use --params"
        )
    width = possible[-1]
    following = width + WIDTHS.step
    limit = "the largest width"
    if width < affordable:
        limit = f"the dataset, which is worth training on {most_tokens:,} tokens"
    elif following in costs:
        limit = f"the money; the next size costs US${dollars(costs[following])}"
    elif following in plans:
        limit = f"the machine; the next size: {plans[following]['reason']}"
    # A size too small for the formula costs less than the next size whose cost is known.
    bound = min(known for known in costs if known >= width)
    less_than = "less than " * (bound > width)
    line = (
        f"expected on {machine.name}: {less_than}{amount(plans[bound]['hours']['expected'])} hours,"
        f" US${dollars(costs[bound])}; limit of the size: {limit}"
    )
    most = plans[width]["largest_microbatch"]
    sized = divided(runs[width], world_size=machine.num_gpus, most=most)
    return width, sized.config.microbatch_size, line
