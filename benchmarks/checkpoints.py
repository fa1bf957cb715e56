"""How long a checkpoint stops training, and how long it takes to write.

Run it with `uv run python -m benchmarks.checkpoints`. GPT-2 small with its optimizer, 2 GB a
checkpoint, is saved a few times: training waits for the snapshot, a thread writes it. The first
snapshot also allocates its buffers.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import click
import torch

from basics.cpu_settings import keep_freed_memory
from checkpointing import CheckpointMeta, TrainingState
from lab.plan.setting import GPT2_SMALL
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from trainer.background_saver import BackgroundSaver
from trainer.losses import build_training_state
from trainer.precision import resolve_for_device


@click.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path),
              help="A directory on the disk to measure.  [default: the temporary directory]")
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True)
def main(folder: Path | None, rounds: int) -> None:
    """Save GPT-2 small a few times; print how long training stopped, and the whole time."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = measure_stall(GPT2_SMALL, device, folder, rounds=rounds)
    click.echo(f"{found['gigabytes']:.2f} GB a checkpoint, from {device.type}; the first stops"
               f" training for {found['first_stall_seconds']:.2f} s, the later ones for"
               f" {found['later_stall_seconds']:.2f} s (median of {rounds - 1}); written and"
               f" verified after {found['written_seconds']:.2f} s")


def measure_stall(model: ModelConfig, device: torch.device, folder: Path | None, *,
                  rounds: int) -> dict[str, float]:
    """Save a model with its optimizer a few times; return sizes and seconds."""
    if device.type == "cpu":
        keep_freed_memory()
    state = trained_state(model, device)
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        stalled, total = [], []
        writer = BackgroundSaver(place, keep=1)
        for number in range(rounds):
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            writer.save(state, meta(number, model))
            stalled.append(time.perf_counter() - started)
            writer.wait()
            total.append(time.perf_counter() - started)
        (checkpoint,) = place.glob("*-iteration-*")
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
    finally:
        shutil.rmtree(place)
    return {"gigabytes": size / 1e9, "first_stall_seconds": stalled[0],
            "later_stall_seconds": statistics.median(stalled[1:]),
            "written_seconds": statistics.median(total[1:])}


def trained_state(model: ModelConfig, device: torch.device) -> TrainingState:
    """Build a state after one step, so that the optimizer has its moments."""
    train = resolve_for_device(
        TrainConfig(dataset="none", microbatch_size=1, checkpoint_interval=1), device)
    process = Process(rank=0, local_rank=0, world_size=1, device=device)
    state = build_training_state(model, train, process)
    for parameter in state.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return state


def meta(number: int, model: ModelConfig) -> CheckpointMeta:
    return CheckpointMeta(global_step=number, tokens=(number + 1) * 1024, loss=1.0, train_loss=1.0,
                          seconds={}, tokenizer=None, model=model, random_seed=0, data={})


if __name__ == "__main__":
    main()
