"""Stages of `on_gpu.py` that start whole runs: numbers compared, and what surrounds training.

Each command writes what it has found to a JSON file after every part. Runs, datasets and
checkpoints lie in a temporary directory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from safetensors.numpy import load_file, save_file

from basics.files import write_atomically
from basics.json_files import to_json
from lab.plan.memory import largest_microbatch, peak_memory
from lab.plan.setting import Setting
from reporting.metrics_file import read_metrics
from reporting.speed import usable_gib
from run_config import ModelConfig, load_run

PROJECT_DIR = Path(__file__).resolve().parents[1]
DATASET = "rising"
TINY = {"vocab_size": 257, "context_length": 16, "emb_dim": 16, "n_heads": 2, "n_layers": 2,
        "drop_rate": 0.0, "qkv_bias": False}
GPT2_SMALL = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12,
              "n_layers": 12, "drop_rate": 0.0, "qkv_bias": False}
SMALL = {"vocab_size": 50257, "context_length": 512, "emb_dim": 384, "n_heads": 6, "n_layers": 6,
         "drop_rate": 0.0, "qkv_bias": False}
VALIDATION_TOKENS = 2**19
CPU_LIMIT_GIB = 0.2


@dataclass(frozen=True)
class Work:
    """A place for runs, and what has been found so far."""

    folder: Path
    output: Path
    device: str
    is_dry: bool
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        """Write what has been found, and print it."""
        self.found.update(values)
        write_atomically(self.output, to_json(self.found, indent=1) + "\n")
        click.echo(to_json(values))

    def add_run(self, name: str, model: dict[str, Any], train: dict[str, Any]) -> None:
        """Write a run of steps that share one dataset of sequences that a model can learn."""
        run_dir = self.folder / "runs" / name
        run_dir.mkdir(parents=True)
        for file, values in (("model", model), ("train", {"dataset": DATASET} | train)):
            (run_dir / f"{file}.json").write_text(json.dumps(values))

    def add_dataset(self, num_tokens: int) -> None:
        """Write tokens that rise by 1 to 3, in a vocabulary of 257."""
        folder, generator = self.folder / "datasets" / DATASET, np.random.default_rng(0)
        folder.mkdir(parents=True)
        for split, length in (("train", num_tokens), ("validation", VALIDATION_TOKENS)):
            tokens = np.cumsum(generator.integers(1, 4, size=length + 1)) % 257
            save_file({"tokens": tokens.astype(np.uint16)}, folder / f"{split}.safetensors",
                      {"max_token_id": "256"})

    def command(self, *arguments: str, hides_gpu: bool = False) -> str:
        """Run a command of the project; return its output, which is printed too.

        Raises:
            click.ClickException: it failed.
        """
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hides_gpu else {})
        with subprocess.Popen([sys.executable, *arguments], cwd=PROJECT_DIR, env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as process:
            lines = []
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        if process.returncode:
            last = next((line for line in reversed(lines) if line.strip()), "no output").strip()
            raise click.ClickException(f"{' '.join(arguments[:3])}: status {process.returncode},"
                                       f" {last[:160]}")
        return "".join(lines)

    def places(self) -> list[str]:
        return ["--runs-dir", str(self.folder / "runs"),
                "--datasets-dir", str(self.folder / "datasets")]

    def train(self, name: str, *options: str) -> float:
        """Train a run in one process; return the seconds that the launch took."""
        started = time.monotonic()
        self.command("ddp_train.py", name, "--nproc-per-node", "1", *options, *self.places())
        return time.monotonic() - started

    def weights_path(self, name: str) -> Path:
        return self.folder / "runs" / name / "checkpoints" / "latest" / "model.safetensors"

    def losses(self, name: str) -> list[float]:
        """Return the training losses that a run has reported, each a mean of up to 10 steps."""
        records = read_metrics(self.folder / "runs" / name / "metrics.jsonl")
        return [record["train_loss"] for record in records if "train_loss" in record]


@click.group()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), required=True)
@click.option("--dry-run", "is_dry", is_flag=True, help="Tiny shapes.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.pass_context
def cli(context: click.Context, device: str, is_dry: bool, output: Path) -> None:
    """Run one of the checks of `on_gpu.py`."""
    context.obj = context.with_resource(_workplace(output, device, is_dry))


@contextmanager
def _workplace(output: Path, device: str, is_dry: bool) -> Iterator[Work]:
    with tempfile.TemporaryDirectory(prefix="on-gpu-") as folder:
        yield Work(Path(folder), output.absolute(), device, is_dry)


@cli.command()
@click.pass_obj
def search(work: Work) -> None:
    """Find the largest microbatch of GPT-2 small, timed, beside what `lab plan` expects."""
    model = TINY | {"context_length": 512} if work.is_dry else GPT2_SMALL
    work.add_run("search", model, {"microbatch_size": 1, "checkpoint_interval": 1})
    limit = ["--memory-limit-gib", str(CPU_LIMIT_GIB)] if work.device == "cpu" else []
    started = time.monotonic()
    output = work.command("ddp_train.py", "search", "--nproc-per-node", "1",
                          "--find-max-microbatch", *limit, *work.places())
    work.add(seconds=time.monotonic() - started, **read_search(output))
    work.add(**planned(work))


def read_search(output: str) -> dict[str, Any]:
    """Return the figures that a search prints; what it did not print is left out."""
    scale = {"KiB": 2**-20, "MiB": 2**-10, "GiB": 1}
    found: dict[str, Any] = {"trials": len(re.findall(r"^ *[\d,]+ +(?:[\d.,]+ +|out of)", output,
                                                      re.MULTILINE))}
    for key, pattern in {"largest": r"largest microbatch: ([\d,]+)",
                         "fastest": r"fastest microbatch: ([\d,]+)",
                         "fixed_gib": r"memory: ([\d.,-]+) (.iB) \+",
                         "gib_a_sequence": r"\+ ([\d.,]+) (.iB) a sequence"}.items():
        if match := re.search(pattern, output):
            value = match[1].replace(",", "")
            found[key] = float(value) * scale[match[2]] if "gib" in key else int(value)
    return found | {"is_compiled": "not compiled" not in output}


def planned(work: Work) -> dict[str, Any]:
    """Return what `lab plan` expects of the same run: the largest microbatch and a memory line."""
    run = load_run(work.folder / "runs", "search")
    on_gpu = work.device == "cuda"
    setting = Setting(run.model, run.train, "bf16", num_processes=1, on_gpu=on_gpu)
    if not on_gpu:
        return {"planned_largest": largest_microbatch(setting, CPU_LIMIT_GIB)}
    import torch

    card_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    peaks = [peak_memory(setting, size).total / 2**30 for size in (16, 32)]
    slope = (peaks[1] - peaks[0]) / 16
    return {"planned_largest": largest_microbatch(setting, usable_gib(card_gib)),
            "planned_fixed_gib": peaks[0] - 16 * slope, "planned_gib_a_sequence": slope}


def _small_runs(work: Work, names: dict[str, str]) -> None:
    """Write runs of 50 steps, by name, each with its precision."""
    model, size, steps = (TINY, 2, 20) if work.is_dry else (SMALL, 16, 50)
    tokens = steps * size * model["context_length"]
    work.add_dataset(tokens)
    for name, precision in names.items():
        work.add_run(name, model, {
            "microbatch_size": size, "min_train_tokens": tokens, "checkpoint_interval": steps,
            "precision": precision, "learning_rate": 1e-3})


@cli.command()
@click.pass_obj
def precision(work: Work) -> None:
    """Train the same small run in bf16 and in fp32; list their losses."""
    _small_runs(work, {"bf16": "bf16", "fp32": "fp32"})
    for name in ("bf16", "fp32"):
        seconds = work.train(name)
        work.add(**{name: work.losses(name), f"{name}_seconds": seconds})
    work.add(largest_difference=max(
        abs(a - b) for a, b in zip(work.found["bf16"], work.found["fp32"], strict=True)))


@cli.command()
@click.pass_obj
def repeat(work: Work) -> None:
    """Compare a run with the same run once more, and with one stopped and resumed."""
    _small_runs(work, {"first": "bf16", "again": "bf16", "parts": "bf16"})
    work.train("first")
    work.add(first=digest(work.weights_path("first")))
    work.train("again")
    work.add(**_compared(work, "again"))
    work.train("parts", "--max-steps", "10" if work.is_dry else "25")
    work.train("parts")
    work.add(**_compared(work, "parts"))


def _compared(work: Work, name: str) -> dict[str, Any]:
    """Compare a run's weights and last reported loss with those of the first one."""
    paths = [work.weights_path(one) for one in ("first", name)]
    first, other = map(load_file, paths)
    return {name: digest(paths[1]), f"{name}_is_equal": digest(paths[0]) == digest(paths[1]),
            f"{name}_largest_difference": max(
                float(np.abs(first[key] - other[key]).max()) for key in first),
            f"{name}_loss_difference": abs(work.losses("first")[-1] - work.losses(name)[-1])}


def digest(path: Path) -> str:
    """Return a file's sha256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cli.command()
@click.pass_obj
def run(work: Work) -> None:
    """Train GPT-2 small with a validation; evaluate its checkpoint on the GPU and on the CPU."""
    model, size, sequences = (TINY, 2, 8) if work.is_dry else (GPT2_SMALL, 64, 320)
    tokens = 20 * size * model["context_length"]
    work.add_dataset(tokens)
    work.add_run("run", model, {
        "microbatch_size": size, "min_train_tokens": tokens, "validation_interval": 10,
        "validation_sequences": sequences, "learning_rate": 1e-3})
    seconds = work.train("run")
    summary = json.loads((work.folder / "runs/run/summary.json").read_text())
    work.add(launch_seconds=seconds, validation_sequences=sequences,
             validation_seconds=[record["validation_seconds"] for record in read_metrics(
                 work.folder / "runs/run/metrics.jsonl") if "validation_seconds" in record],
             **{key: summary[key] for key in ("seconds", "checkpoints", "tokens_per_second",
                                              "train_loss", "validation_loss")})
    for device in dict.fromkeys((work.device, "cpu")):
        started = time.monotonic()
        output = work.command(
            "-m", "lab", "evaluate", "run", "--checkpoint", "latest", "--start-token", "0",
            "--tokens", str(16 * model["context_length"]), *work.places(),
            hides_gpu=device == "cpu")
        loss = re.search(r"^run .*?\)? +(\d+\.\d{6})", output, re.MULTILINE)
        work.add(**{f"evaluate_{device}_seconds": time.monotonic() - started,
                    f"evaluate_{device}_loss": float(loss[1]) if loss else None})


@cli.command()
@click.pass_obj
def checkpoint(work: Work) -> None:
    """Measure how long a checkpoint of GPT-2 small stops training."""
    from benchmarks import checkpoints

    model = ModelConfig(**(TINY if work.is_dry else GPT2_SMALL))
    with patch.object(checkpoints, "MODEL", model), redirect_stdout(io.StringIO()) as printed:
        checkpoints.main.callback(folder=work.folder, rounds=3 if work.is_dry else 5)
    line = printed.getvalue().strip()
    numbers = re.search(r"for ([\d.]+) s, the later ones for ([\d.]+) s .* after ([\d.]+) s", line)
    names = "first_stall_seconds", "later_stall_seconds", "written_seconds"
    work.add(line=line, **(dict(zip(names, map(float, numbers.groups()), strict=True))
                           if numbers else {}))


if __name__ == "__main__":
    cli()
