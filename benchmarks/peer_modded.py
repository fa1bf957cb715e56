"""modded-nanogpt's `train_gpt_simple.py` (track 3), unchanged, as a peer of `throughput.py`.

`--peer "modded-nanogpt, its own model=benchmarks/peer_modded.py FOLDER"`, where FOLDER is a copy of
its repository; for the GPU shape only. It needs a GPU, and trains its own model: 12 layers, 768
wide, 6 heads, a vocabulary of 50,304, RMS norms, rotary positions, squared ReLU, 8 microbatches of
64 x 1,024 tokens a step, Muon. It validates once, before its first step.

The script reads llm.c's token files from `data/fineweb10B` of the current directory, so that it is
run in a temporary one, with the benchmark's kind of tokens. It prints a time after each step, by
the host's clock and without waiting for the device; over ten steps of several hundred milliseconds
that is the device's speed. After 34 steps it is ended. Read at commit 04447b45; not run here yet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from benchmarks.throughput_blocks import NUM_BLOCKS, WARM_UP_STEPS, TimedSteps
from benchmarks.throughput_launch import last_error, stop_with_descendants
from benchmarks.throughput_tokens import zipf_tokens
from preparation.import_bin import LLM_C_HEADER, LLM_C_MAGIC, LLM_C_VERSION

SCRIPT = "records/track_3_optimization/train_gpt_simple.py"
VOCABULARY = 50257
TOKENS_PER_STEP, MICROBATCH_SIZE, VALIDATION_TOKENS = 8 * 64 * 1024, 64, 20 * 524288
STEPS_PER_BLOCK = 10
NUM_STEPS = WARM_UP_STEPS + NUM_BLOCKS * STEPS_PER_BLOCK
STEP_LINE = re.compile(r"step:(\d+)/\d+ train_time:([\d.]+)s")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Run the script for 34 steps, and print its speed as JSON."""
    script = (folder / SCRIPT).resolve()
    if not script.is_file():
        raise click.UsageError(f"{script}: no such file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the script too
    with tempfile.TemporaryDirectory() as place:
        write_shards(Path(place))
        seconds = step_times(command_of(script), Path(place))
    marks = [seconds[WARM_UP_STEPS + STEPS_PER_BLOCK * block] for block in range(NUM_BLOCKS + 1)]
    timed = TimedSteps([], seconds[1], list(np.diff(marks)), STEPS_PER_BLOCK)
    click.echo(json.dumps(timed.speeds(TOKENS_PER_STEP) | {
        "precision": "bf16", "is_compiled": True, "microbatch_size": MICROBATCH_SIZE,
        "note": "another model, optimizer and batch: see peer_modded.py"}))


def command_of(script: Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1",
            str(script)]


def write_shards(place: Path) -> None:
    """Write a shard of each split, where the script looks for them; a few more tokens than used."""
    folder = place / "data" / "fineweb10B"
    folder.mkdir(parents=True)
    for split, length in (("val", VALIDATION_TOKENS), ("train", (NUM_STEPS + 4) * TOKENS_PER_STEP)):
        header = np.zeros(LLM_C_HEADER, dtype="<i4")
        tokens = zipf_tokens(length + 16, VOCABULARY)
        header[:3] = LLM_C_MAGIC, LLM_C_VERSION, len(tokens)
        with (folder / f"fineweb_{split}_000000.bin").open("wb") as file:
            file.write(header.tobytes())
            file.write(tokens.astype("<u2", copy=False).tobytes())


def step_times(command: list[str], place: Path) -> dict[int, float]:
    """Run the script until it has taken enough steps; return the time after each of them."""
    with (place / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=stderr,
                                   text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        try:
            seconds = dict(_read_steps(process))
        finally:
            stop_with_descendants(process)
    if NUM_STEPS not in seconds:
        raise click.ClickException(
            f"ended after {len(seconds)} steps: {last_error((place / 'stderr').read_text())}")
    return seconds


def _read_steps(process: subprocess.Popen) -> Iterator[tuple[int, float]]:
    for line in process.stdout:
        if (found := STEP_LINE.search(line)) and "val_loss" not in line:
            yield int(found[1]), float(found[2])
            if int(found[1]) >= NUM_STEPS:
                return


if __name__ == "__main__":
    main()
