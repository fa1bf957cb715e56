"""Start-up times: `uv run python benchmarks/startup.py`.

The time from launching a process to the end of its first training step on a CPU (imports, dataset,
process group and all), with one process and with two; and the time of each command's `--help`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

PROJECT_DIR = Path(__file__).parents[1]
HELPS = ("ddp_train.py", "prepare_dataset.py", "-m lab", "-m lab plan", "-m lab generate")


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(rounds: int) -> None:
    """Print the medians of a few launches, which take turns."""
    first_steps: dict[int, list[float]] = {1: [], 2: []}
    first_step_seconds(1)  # prepares the dataset, warms the page cache
    for _ in range(rounds):
        for num_processes, seconds in first_steps.items():
            seconds.append(first_step_seconds(num_processes))
    for num_processes, seconds in first_steps.items():
        click.echo(f"first step of the demo, {num_processes} process(es):"
                   f" {statistics.median(seconds):.2f} s after launch")
    for command in HELPS:
        click.echo(f"{command} --help: {help_seconds(command, rounds):.2f} s")


def first_step_seconds(num_processes: int) -> float:
    """Train one step of the demo; return the seconds of start-up and that step."""
    with tempfile.TemporaryDirectory() as folder:
        demo = Path(folder) / "demo"
        demo.mkdir()
        for name in ("model.json", "train.json"):
            shutil.copy(PROJECT_DIR / "runs/demo" / name, demo)
        torchrun = ["-m", "torch.distributed.run", "--standalone",
                    f"--nproc_per_node={num_processes}", "ddp_train.py", "demo"]
        subprocess.run([sys.executable, *torchrun, "--runs-dir", folder, "--max-steps", "1"],
                       cwd=PROJECT_DIR, check=True, capture_output=True)
        spent = json.loads((demo / "summary.json").read_text())["seconds"]
        return spent["startup"] + spent["compile"]


def help_seconds(command: str, rounds: int) -> float:
    """Return the median seconds of a command's `--help`."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run([sys.executable, *command.split(), "--help"], cwd=PROJECT_DIR, check=True,
                       capture_output=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
