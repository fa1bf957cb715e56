"""A stand-in for ddp_train.py that writes what a run would, in a moment, without torch.

Its loss follows from the settings: lowest at a learning rate of 0.01 and without dropout, higher
with a clipping_max_norm of 0.5, plus a noise of the seed.
Some settings make it fail: weight_decay 9 diverges, 8 is refused, 7 crashes; 6 waits for a signal
after half of the run. With `compile` false its steps take longer. Pruning is the trainer's own.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

STEPS, TOKENS = 4, 1000
KEPT = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DDP_TRAIN_SHARES")  # of the environment
SECONDS, SLOW = 100.0, 1.2  # of a run, at least as it says; times as long without `compile`


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def loss_of(model: dict[str, Any], train: dict[str, Any], share: float = 1.0) -> float:
    """Return the validation loss after a share of the run."""
    noise = 0.01 * math.sin(train["random_seed"] * 7 + 100 * model["drop_rate"])
    return (
        5
        - share
        + 0.1 * math.log2(train.get("learning_rate", 0.02) / 0.01) ** 2
        + model["drop_rate"]
        + (0.2 if train.get("clipping_max_norm") == 0.5 else 0)
        + noise
    )


def comparison_of(run_dir: Path, train: dict[str, Any]) -> Any:
    """Return the trainer's own comparison with the run's reference; None without one."""
    if train.get("reference") is None:
        return None
    from reporting.reference import ReferenceComparison, find_reference
    from run_config import TrainConfig

    curve = find_reference(train["reference"], run_dir.parent)
    return ReferenceComparison(curve, TrainConfig.model_validate(train))


def main() -> int:
    name, options = sys.argv[1], dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    run_dir = Path(options["--runs-dir"]) / name
    model, train = (
        json.loads((run_dir / f"{file}.json").read_text()) for file in ("model", "train")
    )
    with (run_dir.parent / "launches").open("a") as file:
        file.write(f"{name}\n")
    given = {key: os.environ.get(key) for key in KEPT}
    given |= {"cores": sorted(os.sched_getaffinity(0)), "options": options}
    (run_dir / "given.json").write_text(json.dumps(given))
    comparison = comparison_of(run_dir, train)
    price = float(options.get("--usd-per-hour") or train.get("usd_per_hour") or 0)
    metrics = run_dir / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    run_seconds = SECONDS * (SLOW if train.get("compile") is False else 1)
    limits = [3600 * train.get("max_hours", math.inf)]
    if price:
        limits.append(3600 * train.get("max_cost_usd", math.inf) / price)
    fault = {9: 3, 8: 2, 7: 1}.get(train.get("weight_decay"), 0)
    if fault == 2:
        print("Error: it is refused", file=sys.stderr)
        return fault
    for step in range(done, STEPS):
        share = (step + 1) / STEPS
        record = {
            "global_step": step,
            "tokens": TOKENS * share,
            "seconds": run_seconds * share,
            "validation_loss": loss_of(model, train, share),
        }
        record |= {"usd": price * run_seconds / 3600 * share} if price else {}
        with metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
        is_behind = False
        if comparison is not None:
            comparison.compare("validation", int(record["tokens"]), record["validation_loss"])
            is_behind = bool(comparison.failure)
        is_spent = step + 1 < STEPS and run_seconds * (step + 2) / STEPS > min(limits)
        if is_behind or is_spent:
            summary = {
                "status": "stopped",
                "stopped_by": "behind" if is_behind else "budget",
                "reason": comparison.failure if is_behind else "the limit is near",
                "global_step": step,
                "num_steps": STEPS,
                "seconds": {"training": SECONDS * share},
                "usd": {"total": price * SECONDS / 3600 * share} if price else None,
            }
            write_atomically(run_dir / "summary.json", json.dumps(summary))
            return 6 if is_behind else 0
        if fault or (train.get("weight_decay") == 6 and step == 1 and not done):
            if not fault:
                (run_dir / "waits").touch()
                number = signal.sigtimedwait(
                    [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], 60
                ).si_signo
                fault = 128 + number
            reason = {1: "crash", 3: f"{run_dir}: the gradients of 20 steps were not finite"}
            summary = {
                "status": "stopped" if fault > 128 else "failed",
                "reason": reason.get(fault, "signal"),
                "seconds": {"training": SECONDS * share},
                "usd": None,
            }
            write_atomically(run_dir / "summary.json", json.dumps(summary))
            return fault
    seconds = {"training": run_seconds - 1, "validation": 1.0}
    usd = {phase: price / 3600 * value for phase, value in seconds.items()}
    write_atomically(
        run_dir / "summary.json",
        json.dumps(
            {
                "run": name,
                "status": "finished",
                "reason": None,
                "global_step": STEPS - 1,
                "num_steps": STEPS,
                "tokens": TOKENS,
                "validation_loss": loss_of(model, train),
                "seconds": seconds,
                "usd": usd | {"total": sum(usd.values())} if price else None,
            }
        ),
    )
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    sys.exit(main())
