"""`lab plan`: estimate the memory, hours and dollars of a run before it is launched."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from basics.cli import ABOVE_0, USD_PER_HOUR, print_json
from basics.errors import UserError, visible
from basics.text import gb, gib
from lab.plan.estimate import (
    KNOWN_MACHINES,
    Estimate,
    Machine,
    bytes_of_checkpoint,
    estimate,
    num_checkpoints,
    num_validations,
    pinned_bytes,
)
from lab.plan.length import save_length
from lab.plan.memory import largest_microbatch, peak_memory
from lab.plan.setting import num_parameters, parameters_by_group, size_name
from lab.plan.speed_sources import read_measured
from lab.plan.tables import (
    batch_table,
    card_table,
    cost_table,
    memory_table,
    settings_of,
    verdict,
)
from reporting.speed import CARDS_GIB, GPUS, flops_per_token, usable_gib
from run_config import Run, load_run

CHINCHILLA_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, table 3, roughly
NUM_BYTES = {"fp32": 4, "bf16": 2}  # of an element
PACKAGES_BYTES = 6e9  # nearly all of it PyTorch with CUDA


@click.command(epilog=f"GPUs: {', '.join(gpu.name for gpu in GPUS)}.")
@click.argument("run")
@click.option("--machine", "machines", multiple=True, metavar="NAME=COUNTxGPU@USD",
              help="Add a machine to the table, with its price in US$ per hour, for example"
                   " box=8xH100@23.92.")
@click.option("--budget", type=ABOVE_0, metavar="USD",
              help="Show which machines can train the run within this budget.")
@click.option("--save", is_flag=True,
              help="With --budget: write the tokens that it buys on this machine, at the speed"
                   " measured there, as min_train_tokens into train.json.")
@click.option("--usd-per-hour", type=USD_PER_HOUR, metavar="USD",
              help="With --save: price of the machine; overrides usd_per_hour in train.json.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N",
              help="Training tokens of the dataset; needed if min_train_tokens is -1, and for"
                   " repeat_data to say how often they are read.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"),
              show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, for scripts.")
def command(run: str, machines: tuple[str, ...], budget: float | None, tokens: int | None,
            **options: Any) -> None:
    """Estimate the memory, hours and dollars of RUN. Needs no GPU and no dataset."""
    loaded = load_run(options["runs_dir"], run)
    if options["save"] or options["usd_per_hour"]:
        if not (options["save"] and budget) or machines or tokens or options["as_json"]:
            raise UserError("--save needs --budget, --usd-per-hour needs --save; neither goes with"
                            " --machine, --tokens or --json")
        click.echo(visible(save_length(loaded.priced(options["usd_per_hour"]), budget)))
        return
    uses_all_tokens = loaded.train.min_train_tokens == -1
    if uses_all_tokens and tokens is None:
        raise UserError(f"{loaded.train_path}: min_train_tokens is -1 (all tokens of the dataset);"
                        " set their number with --tokens")
    if tokens is not None and not (uses_all_tokens or loaded.train.repeat_data):
        raise UserError(f"{loaded.train_path}: min_train_tokens is not -1, so --tokens has no"
                        " effect; drop --tokens")
    measured = read_measured(options["runs_dir"])
    estimates = sorted((estimate(loaded, Machine.parse(text), tokens=tokens, measured=measured)
                        for text in (*KNOWN_MACHINES, *machines)),
                       key=lambda found: found.usd.expected)
    if options["as_json"]:
        print_json(_document(loaded, estimates, num_tokens=_num_tokens(loaded, tokens),
                             budget=budget))
        return
    possible = [found for found in estimates if found.plan is not None]
    tables = [memory_table(loaded), card_table(loaded), batch_table(loaded, estimates),
              *([cost_table(loaded, possible, budget)] if possible else [])]
    click.echo(visible("\n\n".join([
        "\n".join(_run_lines(loaded, tokens)),
        *(table.terminal() for table in tables),
        *([] if possible else ["no machine in the table can train this run"])])))


def _num_tokens(run: Run, tokens: int | None) -> int:
    return tokens if run.train.min_train_tokens == -1 else run.train.min_train_tokens


def _run_lines(run: Run, tokens: int | None) -> list[str]:
    parameters, per_token = num_parameters(run.model), flops_per_token(run.model)
    num_tokens = _num_tokens(run, tokens)
    chinchilla = CHINCHILLA_TOKENS_PER_PARAMETER
    times = "--tokens says how often" if tokens is None else f"{num_tokens / tokens:.3g} times"
    return [
        f"{run.name}: {size_name(run.model)}, {parameters:,} parameters; {num_tokens:,} tokens",
        f"{num_tokens / parameters:.1f} tokens per parameter (Chinchilla: {chinchilla}, or"
        f" {chinchilla * parameters:,} tokens)",
        f"{per_token / 1e6:,.1f} MFLOP per token, forward and backward;"
        f" {per_token * num_tokens:.3g} FLOP in total, without validation",
        *([f"repeat_data: the dataset is read again where it ends ({times})"]
          if run.train.repeat_data else []),
        f"disk: {gb(bytes_of_checkpoint(run))} a checkpoint (how many: below), {gb(2 * num_tokens)}"
        f" or more for the tokens, {gb(PACKAGES_BYTES)} for the packages",
        f"host RAM: rank 0 pins about {gib(pinned_bytes(run))} on a GPU, for the copy from which"
        " checkpoints are written",
        f"between several GPUs: {gb(NUM_BYTES[run.train.all_reduce_dtype] * parameters)} of"
        f" gradients a step (all_reduce_dtype {run.train.all_reduce_dtype})"
        + (f", {gb(NUM_BYTES['bf16'] * parameters_by_group(run.model)['matrix'])} of Muon's updates"
           " in bf16" if run.train.optimizer == "muon" else ""),
    ]


def _document(run: Run, estimates: list[Estimate], *, num_tokens: int,
                  budget: float | None) -> dict[str, Any]:
    """Return what the tables show, with all digits: bytes, hours and US dollars."""
    settings = settings_of(run)
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
