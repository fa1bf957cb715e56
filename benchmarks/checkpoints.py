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

from basics.memory_meters import keep_freed_memory
from benchmarks.memory_model import GPT2_SMALL
from checkpointing import CheckpointMeta, TrainingState
from processes.launch import Process
from run_config import ModelConfig, TrainConfig
from trainer.background_saver import BackgroundSaver
from trainer.precision import resolve_for_device
from trainer.step import build_training_state

MODEL = ModelConfig(**GPT2_SMALL, drop_rate=0.0, qkv_bias=False)


@click.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path),
              help="A directory on the disk to measure.  [default: the temporary directory]")
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True)
def main(folder: Path | None, rounds: int) -> None:
    """Save GPT-2 small a few times; print how long training stopped, and the whole time."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()
    state = trained_state(device)
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        stalled, total = [], []
        writer = BackgroundSaver(place, keep=1)
        for number in range(rounds):
            started = time.perf_counter()
            writer.save(state, meta(number))
            stalled.append(time.perf_counter() - started)
            writer.wait()
            total.append(time.perf_counter() - started)
        (checkpoint,) = place.glob("*-iteration-*")
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
    finally:
        shutil.rmtree(place)
    click.echo(f"{size / 1e9:.2f} GB a checkpoint, from {device.type}; the first stops training for"
               f" {stalled[0]:.2f} s, the later ones for {statistics.median(stalled[1:]):.2f} s"
               f" (median of {rounds - 1}); written and verified after"
               f" {statistics.median(total[1:]):.2f} s")


def trained_state(device: torch.device) -> TrainingState:
    """Build a state after one step, so that the optimizer has its moments."""
    train = resolve_for_device(
        TrainConfig(dataset="none", microbatch_size=1, checkpoint_interval=1), device)
    process = Process(rank=0, local_rank=0, world_size=1, device=device)
    state = build_training_state(MODEL, train, process)
    for parameter in state.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad()
    return state


def meta(number: int) -> CheckpointMeta:
    return CheckpointMeta(global_step=number, tokens=(number + 1) * 1024, loss=1.0, train_loss=1.0,
                          seconds={}, tokenizer=None, model=MODEL, random_seed=0, data={})


if __name__ == "__main__":
    main()
