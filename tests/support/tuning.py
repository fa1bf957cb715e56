"""A run that `lab tune` can tune in a second, and its data."""

import json
from pathlib import Path

import torch
from click.testing import Result

from checkpointing import CheckpointMeta, Snapshot, save_checkpoint
from gpt import GPTModel
from run_config import ModelConfig
from tests.support.lab_cli import run_lab
from tests.support.workplace import TINY_MODEL, Workplace

MODEL = ModelConfig(**TINY_MODEL | {"context_length": 192})
FAST = ("--learning-rate", "0.01", "--max-new-tokens", "20")


def add_tunable_run(workplace: Workplace) -> Workplace:
    """Add a run with a checkpoint, and instructions that all have the same output."""
    run_dir = workplace.add_run(model={"context_length": 192, "drop_rate": 0.0})
    torch.manual_seed(0)
    meta = CheckpointMeta(global_step=1, tokens=0, loss=1.0, train_loss=1.0, seconds={},
                          tokenizer="bytes", model=MODEL, random_seed=42, data={})
    save_checkpoint(run_dir / "checkpoints", Snapshot(GPTModel(MODEL).state_dict(), {}), meta)
    write_entries(workplace.root / "data.json", 40, output=" Yes.")
    return workplace


def write_entries(path: Path, count: int, *, output: str) -> Path:
    path.write_text(json.dumps([
        {"instruction": f"Ask {i}", "input": "é" if i == 36 else "", "output": output}
        for i in range(count)]))
    return path


def entries_of(path: Path) -> list[dict[str, str]]:
    return json.loads(path.read_text())


def tune(workplace: Workplace, *arguments: str, data: Path | None = None) -> Result:
    return run_lab("tune", *workplace.arguments("tiny"), "--data",
                   str(data or workplace.root / "data.json"), *FAST, *arguments)


def answers_in(workplace: Workplace) -> dict:
    return json.loads((workplace.runs_dir / "tiny/instruction-answers.json").read_text())
