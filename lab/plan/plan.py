"""`lab plan`: estimate the memory, hours and dollars of a run before it is launched."""

import math
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click

from basics.cli import ABOVE_0, RUNS_DIR, USD_PER_HOUR, print_json
from basics.errors import UserError, print_error, visible
from basics.text import counted, dollars, gb, gib
from lab.plan import estimate
from lab.plan.estimate import (
    TOKEN_BYTES,
    amount,
    bytes_of_checkpoint,
    default_precision,
    flops_per_token,
    pinned_bytes,
)
from lab.plan.memory import Memory, Setting, largest_microbatch, peak_memory, size_name
from lab.plan.speed_sources import read_measured
from lab.table import UNKNOWN, Column, Table, terminal_width, wrapped
from reporting.gpus import ABOUT_PRICES, GPUS, OTHER_PRICES, PRESET_PRICES, find_gpu
from reporting.speed import CARDS_GIB, usable_gib
from run_config import Run, TrainConfig, load_run, setting_warnings

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3, roughly
NUM_BYTES = {"fp32": 4, "bf16": 2}  # of an element
PACKAGES_BYTES = 6e9  # nearly all of it PyTorch with CUDA
PARTS = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "buckets": "DDP buckets, which hold the gradients",
    "weight_copies": "weight copies in low precision",
    "activations": "activations",
    "logits": "logits, loss and their gradients",
    "total": "total",
}
BEST = "*: the fewest US$ expected of the machines that are not spot"
TOO_SMALL_NOTE = (
    f"{estimate.TOO_SMALL}: it knows models from a tenth of GPT-2 small's FLOPs per token on; train"
    " 50 steps on such a GPU to measure the speed"
)
NO_MACHINE = "no machine in the table can train this run"
BY_GPUS = [Column("one GPU"), Column("several GPUs")]
HOURS_RANGE, USD_PRICE = "hours, fewest to most", "US$ per hour"  # hidden in a narrow terminal
VALIDATION = "validation, expected"  # too
MACHINE_COLUMNS = [
    Column("machine", "left"),
    Column("US$\nper hour", key=USD_PRICE),
    *map(
        Column,
        (
            "microbatch x\naccumulation",
            "largest\nmicrobatch",
            "global\nbatch",
            "steps",
            "checkpoints on\ndisk, at most",
            "hours,\nexpected",
        ),
    ),
    Column("hours,\nfewest to most", key=HOURS_RANGE),
    *map(Column, ("US$,\nexpected", "US$,\nfewest to most", "M tokens\nper US$", "MFU")),
    Column("validation,\nexpected", key=VALIDATION),
    Column("source", "left"),
]
HIDDEN_FIRST = (
    HOURS_RANGE,
    USD_PRICE,
    VALIDATION,
    "checkpoints on disk, at most",
    "US$, fewest to most",
    "largest microbatch",
    "global batch",
    "MFU",
)
PRICE_COLUMNS = [
    Column("machine", "left"),
    Column("US$\nper hour"),
    Column("kind", "left"),
    Column("month", "left"),
    Column("source of the price", "left"),
    *map(Column, ("hours,\nexpected", "US$,\nexpected", "tokens/s", "M tokens\nper US$")),
    Column("speed", "left"),
]


@click.command(epilog=f"GPUs: {', '.join(gpu.name for gpu in GPUS)}.")
@click.argument("run")
@click.option(
    "--machine",
    "more",
    multiple=True,
    metavar="NAME=COUNTxGPU@USD",
    help="Add a machine to the table, with its price in US$ per hour, for example"
    " box=8xH100@23.92.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Show only what a US dollar buys: tokens on every card whose price is known, on demand and"
    " spot.",
)
@click.option(
    "--budget",
    type=ABOVE_0,
    metavar="USD",
    help="Show which machines can train the run within this budget, as --compare does.",
)
@click.option(
    "--save",
    is_flag=True,
    help="With --budget: write the tokens that it buys at the speed measured on this machine into"
    " train.json, as min_train_tokens.",
)
@click.option(
    "--usd-per-hour",
    type=USD_PER_HOUR,
    metavar="USD",
    help="With --save: price of the machine; overrides usd_per_hour in train.json.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Training tokens of the dataset, if min_train_tokens is -1.",
)
@RUNS_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
def command(
    run: str, more: tuple[str, ...], budget: float | None, tokens: int | None, **options: Any
) -> None:
    """Estimate the memory, hours and dollars of RUN. Needs no GPU and no dataset."""
    loaded = load_run(options["runs_dir"], run)
    for warning in setting_warnings(loaded):
        print_error(f"warning: {warning}")
    check_options(options | {"machine": more, "tokens": tokens, "budget": budget})
    if options["save"]:
        click.echo(visible(estimate.save_length(loaded.priced(options["usd_per_hour"]), budget)))
        return
    if (loaded.config.min_train_tokens == -1) != (tokens is not None):
        raise UserError(
            f"{loaded.train_path}: min_train_tokens is"
            f" {loaded.config.min_train_tokens}; --tokens goes with -1 (all tokens of"
            f" the dataset): {'add' if tokens is None else 'drop'} it"
        )
    num_tokens = tokens or loaded.config.min_train_tokens
    measured = read_measured(options["runs_dir"])
    compares = options["compare"] or budget is not None
    prices = [*PRESET_PRICES, *OTHER_PRICES] if compares else PRESET_PRICES
    machines = [estimate.Machine.priced(price) for price in prices]
    machines += [estimate.Machine.parse(text) for text in more]
    plans = [
        estimate.estimate(loaded, machine, budget, tokens=tokens, measured=measured)
        for machine in machines
    ]
    plans.sort(key=lambda plan: plan["usd"]["expected"] if "usd" in plan else math.inf)

    precision = default_precision(loaded.config)
    settings = {
        name: Setting(loaded.model, loaded.config, precision, num_gpus)
        for name, num_gpus in (("one_gpu", 1), ("several_gpus", 8))
    }
    size = loaded.config.microbatch_size
    peaks = {name: peak_memory(setting, size) for name, setting in settings.items()}
    largest = []
    for card_gib, reported_gib in CARDS_GIB.items():
        usable = usable_gib(reported_gib)
        sizes = {name: largest_microbatch(one, usable) for name, one in settings.items()}
        largest.append({"card_gib": card_gib} | sizes)

    if options["as_json"]:
        print_json(
            {
                "schema": "plan/1",
                "run": loaded.name,
                "model": size_name(loaded.model),
                "parameters": loaded.model.num_parameters,
                "tokens": num_tokens,
                "flops_per_token": flops_per_token(loaded, num_tokens),
                "checkpoint_bytes": bytes_of_checkpoint(loaded),
                "pinned_bytes": pinned_bytes(loaded),
                "memory_bytes": {
                    name: asdict(peak) | {"total": peak.total} for name, peak in peaks.items()
                },
                "largest_microbatch": largest,
                "machines": plans,
            }
        )
        return

    paragraphs = []
    with suppress(UserError):  # nothing was measured here
        speed = estimate.speed_here(loaded, tokens)
        paragraphs.append("\n".join(wrapped([speed], terminal_width())))
    if compares:
        paragraphs.append(_price_table(plans, budget).terminal())
    else:
        paragraphs.append("\n".join(wrapped(_about(loaded, num_tokens), terminal_width())))
        paragraphs.append(_memory_table(loaded.config, [*peaks.values()]).terminal())
        paragraphs.append(_microbatch_table(largest).terminal())
        paragraphs.append(_machine_table(loaded, plans).terminal())
    click.echo(visible("\n\n".join(paragraphs)))


def check_options(options: dict[str, Any]) -> None:
    """Refuse options that have no effect beside others. Raises: UserError."""
    if options["save"] and not options["budget"]:
        raise UserError("--save needs --budget")
    if options["usd_per_hour"] and not options["save"]:
        raise UserError("--usd-per-hour needs --save and --budget; else add --machine")
    of_a_plan = {
        "machine": "--machine",
        "tokens": "--tokens",
        "compare": "--compare",
        "as_json": "--json",
    }
    for name, option in of_a_plan.items():
        if options["save"] and options[name]:
            raise UserError(f"{option} does not go with --save, which shows no plan: drop one")


def _about(run: Run, num_tokens: int) -> list[str]:
    # How many steps there are depends on the machine; a growth is at the same share of them.
    parameters, per_token = run.model.num_parameters, flops_per_token(run, num_tokens)
    chinchilla, dtype = CHINCHILLA_TOKENS_PER_PARAMETER, run.config.all_reduce_dtype
    return [
        f"{run.name}: {size_name(run.model)}, {parameters:,} parameters; {num_tokens:,} tokens",
        f"{num_tokens / parameters:.1f} tokens per parameter (Chinchilla: {chinchilla}, or"
        f" {chinchilla * parameters:,} tokens)",
        f"{per_token / 1e6:,.1f} MFLOP per token, forward and backward;"
        f" {per_token * num_tokens:.3g} FLOP in total, without validation",
        *_about_growth(run),
        f"disk: {gb(bytes_of_checkpoint(run))} a checkpoint (how many: below),"
        f" {gb(TOKEN_BYTES * num_tokens)} or more for the tokens, {gb(PACKAGES_BYTES)} for the"
        " packages",
        f"host RAM: rank 0 pins about {gib(pinned_bytes(run))} on a GPU, for the copy from"
        " which checkpoints are written",
        f"between several GPUs: {gb(NUM_BYTES[dtype] * parameters)} of gradients a step"
        f" (all_reduce_dtype {dtype})",
    ]


def _about_growth(run: Run) -> list[str]:
    """Say what the first part of a run that grows needs, of FLOPs and of memory."""
    grow = run.config.grow
    if grow is None:
        return []
    small, flops = run.model.with_layers(grow.from_layers), run.config.flops_per_token
    setting = Setting(small, run.config, default_precision(run.config), 1)
    memory = peak_memory(setting, run.config.microbatch_size).total
    return [
        f"grows: {counted(grow.from_layers, 'layer')} for {grow.at:.0%} of the steps"
        f" ({flops(small) / 1e6:,.1f} MFLOP per token, {gib(memory)} on one GPU), then"
        f" {run.model.n_layers} ({flops(run.model) / 1e6:,.1f} MFLOP per token, memory:"
        " below)"
    ]


def _about_parts(possible: list[dict[str, Any]]) -> list[str]:
    """Say for each machine what both parts of a run that grows take."""
    lines = [
        f"  {found['name']}: "
        + ", then ".join(
            f"{counted(part['n_layers'], 'layer')} {amount(part['hours'])} h,"
            f" ${amount(part['usd'])}, {part['tokens_per_second']:,.0f} tokens/s"
            for part in found["parts"]
        )
        for found in possible
        if len(found["parts"]) > 1
    ]
    return ["both parts, expected, at the same MFU:", *lines] if lines else []


def _memory_table(config: TrainConfig, peaks: list[Memory]) -> Table:
    factor, unit = 2**20, "MiB"
    if peaks[0].total >= 2**30:
        factor, unit = 2**30, "GiB"
    precision, size = default_precision(config), config.microbatch_size
    head = f"{unit} at the peak, {precision}, microbatch {size:,}"
    rows = [
        [name, *(f"{getattr(peak, key) / factor:,.2f}" for peak in peaks)]
        for key, name in PARTS.items()
    ]
    return Table([Column(head, "left"), *BY_GPUS], rows)


def _microbatch_table(largest: list[dict[str, int]]) -> Table:
    rows = [
        [f"{found['card_gib']} GiB", f"{found['one_gpu']:,}", f"{found['several_gpus']:,}"]
        for found in largest
    ]
    return Table(
        [Column("largest microbatch, by card", "left"), *BY_GPUS],
        rows,
        [
            "computed with the activations of code that is not compiled, which needs more;",
            "ddp_train.py --find-max-microbatch measures the code that will run",
        ],
    )


def _machine_table(run: Run, machines: list[dict[str, Any]]) -> Table:
    rows = []
    for found in machines:
        batch, figures = UNKNOWN, [UNKNOWN] * 10
        if not found["reason"]:
            hours, usd, kept = found["hours"], found["usd"], found["checkpoints_kept"]
            batch = f"{found['microbatch_size']:,} x {found['gradient_accumulation_steps']:,}"
            figures = [
                f"{found['global_batch_size']:,}",
                f"{found['steps']:,}",
                f"{kept:,} ({gb(kept * bytes_of_checkpoint(run))})",
                amount(hours["expected"]),
                f"{amount(hours['low'])} to {amount(hours['high'])}",
                amount(usd["expected"]),
                f"{amount(usd['low'])} to {amount(usd['high'])}",
                _millions_per_usd(found),
                f"{found['mfu']:.0%}",
                _about_validation(found["validation"]),
            ]
        rows.append(
            [
                found["name"],
                amount(found["usd_per_hour"]),
                batch,
                f"{found['largest_microbatch']:,}",
                *figures,
                found["reason"] or found["source"],
            ]
        )
    possible = [found for found in machines if not found["reason"]]
    notes = _notes_of_reasons(machines)
    if possible:
        gpus = [find_gpu(name) for name in dict.fromkeys(found["gpu"] for found in possible)]
        known = [found["price"] for found in machines if found["price"]]
        notes += [
            "Hours and US$ count validation, and an estimate of start-up, download of its tokens"
            " and compilation; M tokens per US$: while training.",
            "validation: how many, and their share of the expected hours and US$ without start-up",
            *_about_parts(possible),
            "prices: "
            + ", ".join(dict.fromkeys(_about_price(price) for price in known))
            + ", or of --machine; other prices, on demand and spot: --compare",
            "microbatch: with a global_batch_size the largest one that fits and divides it",
            "fewest: at the best MFU of plain PyTorch: "
            + ", ".join(f"{gpu.name} {gpu.high_mfu}" for gpu in gpus),
            "most: at the MFU of the original system, with a slow disk: "
            + ", ".join(f"{gpu.name} {gpu.low_mfu}" for gpu in gpus),
            "expected: the MFU in the table, by its source:",
            *_about_speeds(possible),
        ]
    return Table(MACHINE_COLUMNS, rows, notes, HIDDEN_FIRST)


def _about_validation(found: dict[str, Any]) -> str:
    if not found["number"]:
        return "none"
    return (
        f"{found['number']:,}: {amount(found['hours'])} h, ${amount(found['usd'])},"
        f" {found['share']:.1%}"
    )


def _price_table(machines: list[dict[str, Any]], budget: float | None) -> Table:
    rows = []
    # A spot machine loses steps when it is taken away, which the dollars do not contain.
    best = next((one for one in machines if not one["reason"] and not _is_spot(one)), None)
    for found in machines:
        price, figures = found["price"], [UNKNOWN] * 4
        about_price = [UNKNOWN, UNKNOWN, "--machine"]
        if price:
            source = f"{price['source_kind']}: {price['provider']}"
            about_price = [price["kind"], price["month"], source]
        if not found["reason"]:
            figures = [
                amount(found["hours"]["expected"]),
                amount(found["usd"]["expected"]),
                f"{found['tokens_per_second']:,.0f}",
                _millions_per_usd(found),
            ]
        rows.append(
            [
                found["name"] + (" *" if found is best else ""),
                amount(found["usd_per_hour"]),
                *about_price,
                *figures,
                found["reason"] or found["source"],
                *([] if budget is None else [found.get("budget", "")]),
            ]
        )
    remarks: dict[str, list[str]] = {}
    for price in [*PRESET_PRICES, *OTHER_PRICES]:
        if price.note:
            remarks.setdefault(price.note, []).append(f"{price.gpu} {amount(price.usd_per_hour)}")
    possible = [found for found in machines if not found["reason"]]
    notes = _notes_of_reasons(machines)
    if possible:
        notes += [
            *([BEST] if best else []),
            f"{ABOUT_PRICES} Each source: reporting/gpus.json, or --json.",
            *(f"  {', '.join(names)}: {remark}" for remark, names in remarks.items()),
            "Hours and US$ count validation, and an estimate of start-up, download of its tokens"
            " and compilation; not what a spot machine loses when it is taken away.",
            "tokens/s, M tokens per US$: while training, at the speed that is expected, by its"
            " source:",
            *_about_speeds(possible),
        ]
    columns = PRICE_COLUMNS
    if budget is not None:
        columns = [*PRICE_COLUMNS, Column(f"budget\n${dollars(budget)}", "left")]
    hidden_first = ("source of the price", "tokens/s", "month", "M tokens per US$")
    return Table(columns, rows, notes, hidden_first)


def _is_spot(found: dict[str, Any]) -> bool:
    return bool(found["price"]) and found["price"]["kind"] == "spot"


def _notes_of_reasons(machines: list[dict[str, Any]]) -> list[str]:
    """Say why the formula has no figure for a machine, or that none can train the run."""
    if any(found["reason"] == estimate.TOO_SMALL for found in machines):
        return [TOO_SMALL_NOTE]
    return [] if any(not found["reason"] for found in machines) else [NO_MACHINE]


def _millions_per_usd(found: dict[str, Any]) -> str:
    return f"{found['tokens_per_usd'] / 1e6:,.0f}"


def _about_price(price: dict[str, Any]) -> str:
    return f"{price['kind']} in {price['month']}, {price['source_kind']} ({price['provider']})"


def _about_speeds(possible: list[dict[str, Any]]) -> list[str]:
    """Say once for each GPU where its expected speed is from."""
    return [
        *dict.fromkeys(
            f"  {found['gpu']}, {found['source']}: {found['detail']}" for found in possible
        )
    ]
