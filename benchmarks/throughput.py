"""Training speed of this trainer, Hugging Face's GPT-2, the original and nanoGPT.

    uv run --group test python -m benchmarks.throughput --nanogpt FOLDER

Rows take turns in fresh processes; the first one is measured again at the end. All see the same
tokens in the same global batches and, but for nanoGPT, whose head is tied, begin with the same
weights and must have the same loss curve. The rows of `LADDER`, which add one change at a time, are
a table of their own, on a GPU with smaller batches. Each measurement or failure is a line of
OUTPUT, from which the tables are made; the same command measures what is missing or has failed.
"""

import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from basics.errors import one_line
from basics.files import append_whole
from basics.machine import PROJECT_DIR, code_version
from benchmarks.systems import SystemTask
from lab.plan.memory import GPT2_SMALL, size_name
from lab.table import Column, Table
from preparation.token_stream import TokenFileWriter
from reporting.gpus import find_gpu
from reporting.metrics_file import read_metrics
from settings.data import token_file_name

ORIGINAL, HUGGING_FACE, WHOLE_RUN = "original", "Hugging Face, {}, compiled", "ours, whole run"
WHOLE_RUN_SYSTEM = "whole run"
REFERENCE = "ours, fp32"  # the row whose loss curve all others are compared with
LOSS_TOLERANCE = {"fp32": 2e-3, "tf32": 0.02, "bf16": 0.02, "fp16": 0.02}
MIN_FALL = 0.5  # nats, from the first step to the last ones: a level curve proves nothing
RUN_STEPS = 40  # of a whole run: four reports of the speed, of which the first is left out
ROW_SECONDS = 600  # that a row may take
# More rows of ours there: microbatches, and options that are no defaults.
ON_GPU: dict[str, dict[str, Any]] = {
    "ours, Muon": {"optimizer": "muon"},
    "ours, Muon, microbatch 16": {"optimizer": "muon", "microbatch_size": 16},  # gpt2-small-1gpu
    **{f"ours, microbatch {size}": {"microbatch_size": size} for size in (32, 16, 96, 48, 24, 12)},
    "ours, flash attention": {"attention": "flash"},
    "ours, cuDNN attention": {"attention": "cudnn"},
    "ours, head in 4 chunks": {"head_chunks": 4},
    "ours, activation checkpointing": {"activation_checkpointing": True},
}
# What decides first, since a rented card may have minutes only; the others come after these.
FIRST_ON_GPU = (
    "ours",
    WHOLE_RUN,
    HUGGING_FACE.format("bf16"),
    "ours, Muon, microbatch 16",
    "nanoGPT, bf16, compiled",
    ORIGINAL,
    "ours, Muon",
    "ours, microbatch 32",
    "ours, microbatch 16",
    "ours, flash attention",
    REFERENCE,
)
TUNED_KERNELS = "ours, tuned kernels"
GPU_STEPS = 16  # of which 12 are timed
# One change a row, which includes those of all rows above it; with the tokens/s of one RTX 3090
# that another author published, at batches of 10 x 1,024; GPT-2 small with tied weights.
LADDER: dict[str, tuple[dict[str, Any], int]] = {
    "fp32": ({"precision": "fp32"}, 14_100),
    "TF32": ({"precision": "tf32"}, 19_600),
    "bf16": ({"precision": "bf16"}, 27_500),
    "compiled": ({"compile": True}, 41_700),
    "flash attention": ({"attention": "flash"}, 50_000),
    "vocabulary padded": ({"pads_vocabulary": True}, 53_000),
    "fused AdamW": ({"fuses_adamw": True}, 54_000),
}
LADDER_BATCH = 48  # sequences on a GPU: with 192 the time of the optimizer would hardly be seen
FIRST_OF_LADDER = next(iter(LADDER))
Line = dict[str, Any]
Row = tuple[str, str, dict[str, Any]]  # the first three fields of a `SystemTask`


class RowFailed(Exception):
    """A row has no result; the message is the reason."""


def tasks_of(device: str, nanogpt: Path | None = None) -> list[SystemTask]:
    """Return the rows of each shape: GPT-2 small on a GPU, on a CPU two vocabularies."""
    systems: list[Row] = [
        ("ours", "ours", {}),
        ("Hugging Face", "hugging face", {}),
        *([("nanoGPT", "nanogpt", {"folder": str(nanogpt)})] if nanogpt else []),
    ]
    rows: list[Row] = [
        ("ours", "ours", {}),
        *(
            (
                f"{name}, {precision}{', compiled' * compiles}",
                system,
                {**changes, "precision": precision, "compile": compiles},
            )
            for (name, system, changes), precision, compiles in itertools.product(
                systems, ("bf16", "fp32"), (False, True)
            )
        ),
        (WHOLE_RUN, WHOLE_RUN_SYSTEM, {}),
        (ORIGINAL, "original", {}),
    ]
    if device == "cuda":
        rows += [(name, "ours", changes) for name, changes in ON_GPU.items()]
        rows.sort(key=lambda row: (*FIRST_ON_GPU, row[0]).index(row[0]))
        small = GPT2_SMALL.model_dump()
        tasks = [
            SystemTask(*row, small, device, gpu_microbatch(*row), 192, GPU_STEPS) for row in rows
        ]
        tasks.append(replace(tasks[0], name=TUNED_KERNELS, tunes_kernels=True))
        return tasks + ladder(small, device, 8, LADDER_BATCH, GPU_STEPS)  # 8 fit an RTX 3090
    shape = {
        "context_length": 256,
        "emb_dim": 128,
        "n_heads": 4,
        "n_layers": 4,
        "drop_rate": 0.0,
        "qkv_bias": False,
    }
    return [
        SystemTask(*row, {**shape, "vocab_size": size}, device, 8, 16, num_steps)
        for size, num_steps in ((50257, 10), (257, 40))
        for row in rows
    ] + ladder(shape | {"vocab_size": 50257}, device, 8, 16, 10)


def ladder(
    shape: dict[str, Any],
    device: str,
    microbatch_size: int,
    global_batch_size: int,
    num_steps: int,
) -> list[SystemTask]:
    """Return the rows of `LADDER`, each with the changes of those above it.

    Attention before flash is PyTorch's "math", which computes in float32 under autocast too.
    """
    fields: dict[str, Any] = {"pads_vocabulary": False, "fuses_adamw": False}
    keys: dict[str, Any] = {
        "compile": False,
        "attention": "math",
        # The same in all rows, while a run's default depends on the device.
        "residual_dtype": "fp32",
        "head_chunks": 1,
    }
    tasks = []
    for name, (change, _) in LADDER.items():
        if change.keys() <= fields.keys():
            fields |= change
        else:
            keys |= change
        if device == "cpu" and name == "TF32":  # computed as fp32
            continue
        tasks.append(
            SystemTask(
                name,
                "ours",
                dict(keys),
                shape,
                device,
                microbatch_size,
                global_batch_size,
                num_steps,
                **fields,
            )
        )
    return tasks


def gpu_microbatch(name: str, system: str, changes: dict[str, Any]) -> int:
    """Return a row's microbatch, which fits 80 GiB."""
    if name == ORIGINAL:  # it keeps all attention weights
        return 16
    if changes.get("precision") == "fp32":  # 64 need 76 GiB
        return 32
    return changes.get("microbatch_size", 64)


def write_tokens(dataset_dir: Path, task: SystemTask) -> Path:
    """Write a dataset for the tasks of a shape; return the path of its training split.

    Ids follow Zipf's law over the whole vocabulary, as words do: the cost of an embedding's
    gradient depends on how often ids repeat.
    """
    size = task.model.vocab_size
    num_tokens = max(task.num_steps, RUN_STEPS) * task.plan.tokens_per_step + 1
    cumulated = np.cumsum(1 / np.arange(1, size + 1))
    draws = np.random.default_rng(0).random(num_tokens) * cumulated[-1]
    tokens = np.searchsorted(cumulated, draws).clip(max=size - 1).astype(np.uint16)
    dataset_dir.mkdir(parents=True)
    for split, length in (("train", num_tokens), ("validation", task.model.context_length + 1)):
        writer = TokenFileWriter(dataset_dir / token_file_name(split))
        writer.add(tokens[:length])
        writer.finish({"max_token_id": str(tokens[:length].max())})
    return dataset_dir / token_file_name("train")


def measure_row(task: SystemTask, tokens_path: Path, folder: Path, seconds: float) -> Line:
    """Measure a row in processes of its own; `folder` has compiled code. Raises: RowFailed."""
    if task.system != WHOLE_RUN_SYSTEM:
        printed = run(
            ["-m", "benchmarks.systems", json.dumps(asdict(task)), str(tokens_path)],
            folder,
            seconds,
        )
        return json.loads(printed.splitlines()[-1])
    with tempfile.TemporaryDirectory() as runs_dir:
        run_dir = Path(runs_dir) / "whole-run"
        run_dir.mkdir()
        (run_dir / "model.json").write_text(json.dumps(task.shape))
        (run_dir / "train.json").write_text(
            json.dumps(
                task.train_values
                | {
                    "dataset": tokens_path.parent.name,
                    "checkpoint_interval": RUN_STEPS,
                    "gradient_accumulation_steps": task.plan.gradient_accumulation_steps,
                    "min_train_tokens": RUN_STEPS * task.plan.tokens_per_step,
                    "sample_prompts": [],  # a text at the end would fetch GPT-2's vocabulary
                }
            )
        )
        run(
            [
                "ddp_train.py",
                run_dir.name,
                "--runs-dir",
                runs_dir,
                "--nproc-per-node",
                "1",
                "--datasets-dir",
                str(tokens_path.parents[1]),
            ],
            folder,
            seconds,
        )
        summary = json.loads((run_dir / "summary.json").read_text())
        blocks = [
            record["tokens_per_second"]
            for record in read_metrics(run_dir / "metrics.jsonl")
            if record.get("tokens_per_second")
        ][1:]
    speed, machine = statistics.median(blocks), summary["machine"]
    return {
        "tokens_per_second": speed,
        "blocks": blocks,
        "machine": machine,
        "losses": [],
        "step_ms": task.plan.tokens_per_step / speed * 1e3,
        "microbatch_size": task.microbatch_size,
        "precision": machine["precision"],
        "peak_mib": machine["peak_memory_gib"] * 2**10,
        "seconds_by_phase": summary["seconds"],
        "compile_seconds": summary["seconds"]["compile"] if machine["compiled"] else 0.0,
    }


def measured(task: SystemTask, tokens_path: Path, folder: Path, seconds: float) -> Line:
    """Measure a row; return its figures or the reason why it has none, with versions and time.

    Rows of one system share a cache of compiled code below `folder`: only with the first one are
    the seconds of compiling those of an empty cache.
    """
    place = folder / re.sub(r"\W+", "-", "ours" if task.system == WHOLE_RUN_SYSTEM else task.system)
    line: Line = {"status": "ok", "has_cache": place.exists()}
    try:
        line |= measure_row(task, tokens_path, place, seconds)
    except RowFailed as error:
        line |= {"status": "failed", "reason": str(error)}
    return line | {
        "torch": torch.__version__,
        "code": code_version(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def run(arguments: list[str], folder: Path, seconds: float) -> str:
    """Run Python in the project's directory; return its standard output. Raises: RowFailed."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=PROJECT_DIR,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, seconds),
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")},
        )
    except subprocess.TimeoutExpired:  # ours end with the process that started them
        raise RowFailed(f"ran out of time after {seconds:,.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        errors = [line for line in said if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
        raise RowFailed(one_line((errors or said)[-1]))
    return done.stdout


def losses_off(line: Line, reference: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(line["losses"], reference, strict=False))


def differences(lines: list[Line]) -> list[str]:
    curves = [line for line in lines if line.get("losses")]
    if not curves:
        return []
    reference = next((one for one in curves if one["row"] == REFERENCE), curves[0])["losses"]
    found = [
        f"{line['row']}: its losses differ by {losses_off(line, reference):.4f}"
        for line in curves  # true for NaN too
        if not losses_off(line, reference) <= LOSS_TOLERANCE[line["precision"]]
    ]
    end = statistics.mean(reference[-max(1, len(reference) // 8) :])
    if not reference[0] - end >= MIN_FALL:
        found.append(f"the loss went from {reference[0]:.3f} to {end:.3f}: too level to compare")
    return found


def speed_table(lines: list[Line], flops: float) -> list[str]:
    """Format measurements of one shape, `flops` a token, as Markdown: medians, or why not.

    Rows of `LADDER` are compared with its first one, and have the notes' figures beside them.
    """
    rows: dict[str, list[Line]] = {}
    for line in lines:
        rows.setdefault(line["row"], []).append(line)
    is_ladder = any(name in LADDER for name in rows)
    against = (FIRST_OF_LADDER,) if is_ladder else (ORIGINAL, HUGGING_FACE.format("fp32"))
    speeds = {}
    for name, measured in rows.items():
        known = [line["tokens_per_second"] for line in measured if line["status"] == "ok"]
        if known:
            speeds[name] = statistics.median(known)
    reference: list[float] = next((line["losses"] for line in lines if line.get("losses")), [])
    columns = [
        Column("", "left"),
        *map(
            Column,
            (
                "precision",
                "microbatch",
                "peak MiB",
                "tokens/s",
                "MFU",
                "compiling, s",
                "losses off",
                *(f"/ {name}" for name in against),
                *(("RTX 3090, notes", f"/ {FIRST_OF_LADDER}, notes") if is_ladder else ()),
            ),
        ),
    ]
    cells = []
    for name, measured in rows.items():
        if name not in speeds:
            cells.append([name, f"failed: {measured[-1]['reason']}", *[""] * (len(columns) - 2)])
            continue
        one = next(line for line in measured if line["status"] == "ok")
        gpu = find_gpu(one["machine"]["device"]) if "machine" in one else None  # older lines: none
        off = one.get("losses") or None
        notes = []
        if is_ladder:
            tokens = LADDER[name][1]
            notes = [(tokens, ",.0f"), (tokens / LADDER[FIRST_OF_LADDER][1], ".2f")]
        compiling = f"{one['compile_seconds']:.0f}"
        if one["compile_seconds"] and one.get("has_cache"):
            compiling += " (cached)"
        cells.append(
            [
                name,
                one["precision"],
                *(
                    "-" if value is None else format(value, form)
                    for value, form in (
                        (one["microbatch_size"], ""),
                        (one["peak_mib"], ",.0f"),
                        (speeds[name], ",.0f"),
                        (gpu and speeds[name] * flops / gpu.peak(one["precision"]), ".3f"),
                        (compiling, ""),
                        (off and losses_off(one, reference), ".4f"),
                        *(
                            (speeds[name] / speeds[other] if other in speeds else None, ".2f")
                            for other in against
                        ),
                        *notes,
                    )
                ),
            ]
        )
    return Table(columns, cells).markdown().splitlines()


@click.command()
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda" if torch.cuda.is_available() else "cpu",
    show_default=True,
)
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--only", multiple=True, metavar="ROW", help="Measure only this row; repeatable.")
@click.option("--minutes", type=float, default=math.inf, help="End then; it goes on later.")
@click.option(
    "--nanogpt",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="A copy of its repository.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("throughput.jsonl"),
    show_default=True,
    help="One file for each machine.",
)
def main(device: str, rounds: int, only: tuple[str, ...], minutes: float, **options: Any) -> None:
    """Measure training speed, and print a table for each shape."""
    ends_at, output = time.monotonic() + 60 * minutes, options["output"]
    known = list(map(json.loads, output.open())) if output.exists() else []
    tasks, is_good = tasks_of(device, options["nanogpt"]), True
    names = {task.name for task in tasks}
    if unknown := set(only) - names:
        raise click.UsageError(f"--only {min(unknown)}: wanted one of: {'; '.join(sorted(names))}")
    for (shape, is_ladder), group in itertools.groupby(
        tasks, lambda task: (task.model, task.name in LADDER)
    ):
        title = f"{size_name(shape)}, {device}{', one change at a time' * is_ladder}"
        chosen = [task for task in group if task.name in (only or names)]
        if not chosen:
            continue
        latest = {(line["row"], line["round"]): line for line in known if line["bench"] == title}
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            tokens_path = write_tokens(Path(folder) / "zipf", chosen[0])
            turns = list(itertools.product(range(rounds), chosen))
            if not only:  # how much the machine's speed has changed meanwhile
                turns.append((rounds, chosen[0]))
            for number, task in turns:
                seconds = min(ROW_SECONDS, ends_at - time.monotonic())
                if seconds < 0 or latest.get((task.name, number), {}).get("status") == "ok":
                    continue
                line = {"bench": title, "row": task.name, "round": number} | measured(
                    task, tokens_path, Path(folder), seconds
                )
                latest[task.name, number] = line
                append_whole(output, json.dumps(line) + "\n")
                click.echo(
                    f"{task.name}: {line.get('reason') or line['tokens_per_second']}", err=True
                )
        lines = list(latest.values())
        wrong = differences(lines)
        is_good &= not wrong and all(line["status"] == "ok" for line in lines)
        click.echo("\n".join(["", title, *speed_table(lines, shape.flops_per_token), *wrong]))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
