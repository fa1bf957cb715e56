"""Training speed beside other busy processes: `uv run python -m benchmarks.busy_machine`.

Each way to start the demo trains some steps while N other processes compute in endless loops, each
in a session of its own, as if other people had started them. Linux divides the time between
sessions (`sched_autogroup_enabled`), and torchrun gives each of its processes one: P processes
should have P / (P + N) of the machine, and that share of their speed without others. Medians of
all rounds; loads take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from basics.machine import num_cpu_cores
from reporting.metrics_file import read_metrics

PROJECT_DIR = Path(__file__).parent.parent
DEMO = PROJECT_DIR / "runs" / "demo"


@dataclass(frozen=True)
class Way:
    """A way to start a run: processes of torchrun, and environment variables."""

    name: str
    num_processes: int
    environment: dict[str, str] = field(default_factory=dict)

    def share(self, num_others: int) -> float:
        """Return the share of its speed that is left beside so many others."""
        return self.num_processes / (self.num_processes + num_others)


def ways() -> list[Way]:
    """Return what is compared; unset variables leave the decision to the trainer."""
    cores = num_cpu_cores()
    return [
        Way(f"{cores} processes", cores),
        Way("1 process", 1),
        Way("1 process, OpenMP's own limit", 1, {"OMP_WAIT_POLICY": ""}),
        Way("1 process, spin 10,000 times", 1, {"GOMP_SPINCOUNT": "10000"}),
        Way("1 process, spin 1,000 times", 1, {"GOMP_SPINCOUNT": "1000"}),
        Way("1 process, sleep at once", 1, {"OMP_WAIT_POLICY": "passive"}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 2, 6])
    parser.add_argument("--ways", type=int, nargs="*", default=None)
    options = parser.parse_args()
    chosen = ways() if options.ways is None else [ways()[i] for i in options.ways]
    speeds: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for way in chosen:
                for load in options.loads:
                    with busy_processes(load):
                        speed = measure(way, Path(folder), num_steps=options.steps)
                    speeds.setdefault((way.name, load), []).append(speed)
                    print(f"{way.name}, {load} others: {speed:,.0f} tokens/s", file=sys.stderr)
    for way in chosen:
        medians = [statistics.median(speeds[way.name, load]) for load in options.loads]
        cells = [f"{median:,.0f} ({median / medians[0]:.2f} of {way.share(load):.2f})"
                 for median, load in zip(medians, options.loads, strict=True)]
        print(f"| {way.name} | {' | '.join(cells)} |")


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let other processes compute in endless loops meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
              for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(way: Way, folder: Path, *, num_steps: int) -> float:
    """Train the demo's first steps; return its tokens a second after the first report."""
    run_dir = folder / "demo"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    for name in ("model.json", "train.json"):
        shutil.copy(DEMO / name, run_dir)
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc_per_node={way.num_processes}", "ddp_train.py", "demo",
         "--runs-dir", folder, "--datasets-dir", folder / "datasets",
         "--max-steps", str(num_steps)],
        cwd=PROJECT_DIR, env=os.environ | way.environment, check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    reports = [record for record in read_metrics(run_dir / "metrics.jsonl")
               if "train_loss" in record]
    first, last = reports[0], reports[-1]
    return (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])


if __name__ == "__main__":
    main()
