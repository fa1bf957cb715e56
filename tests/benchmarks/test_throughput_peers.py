"""The peers of the speed benchmark, with stand-ins for the repositories that they run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import peer_modded
from benchmarks.throughput_benches import Bench
from benchmarks.throughput_launch import Place, measure_row
from benchmarks.throughput_rows import Row
from benchmarks.throughput_tokens import write_token_files
from preparation.import_bin import LLM_C_HEADER, LLM_C_MAGIC, LLM_C_VERSION
from run_config import ModelConfig
from tests.support.workplace import PROJECT_DIR, TINY_MODEL

NANOGPT = """
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.vocab_size == EXPECTED
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, decay, rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=rate)

    def forward(self, ids, targets):
        logits = self.embed(ids) @ self.embed.weight.T
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
# It checks its data as the real script does, prints as it does, and then hangs.
MODDED = f"""
import time
import numpy as np
from pathlib import Path
for split, least in (("val", 2000), ("train", 34 * 1000)):
    (path,) = Path.cwd().glob(f"data/fineweb10B/fineweb_{{split}}_*.bin")
    header = np.fromfile(path, dtype=np.int32, count={LLM_C_HEADER})
    tokens = np.fromfile(path, dtype=np.uint16, offset=4 * {LLM_C_HEADER})
    assert list(header[:2]) == [{LLM_C_MAGIC}, {LLM_C_VERSION}] and header[2] == len(tokens)
    assert len(tokens) > least + 2 and tokens.max() < 50257
print("step:0/3375 val_loss:10.8 train_time:0.000s step_avg:nanms")
seconds = 60.0
for step in range(1, 3375):
    seconds += 1.0 if step < 15 else 0.5 if step < 25 else 0.4
    print(f"step:{{step}}/3375 train_time:{{seconds:.3f}}s step_avg:1.00ms")
    if step == 40:
        time.sleep(600)
"""


@pytest.mark.parametrize("vocab_size, expected", [
    pytest.param(50257, 50304, marks=pytest.mark.thorough), (257, 257)])
def test_nanogpt_trains_on_the_benchmarks_tokens(
    tmp_path: Path, vocab_size: int, expected: int
) -> None:
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    (folder / "model.py").write_text(NANOGPT.replace("EXPECTED", str(expected)))
    model = ModelConfig(**TINY_MODEL | {"vocab_size": vocab_size})
    bench = Bench("tiny", model, (), global_batch_size=4, microbatch_size=2, num_steps=7, rounds=1)
    tokens_path = write_token_files(tmp_path / "zipf", model, bench.num_tokens)
    path = f"{PROJECT_DIR / 'benchmarks/peer_nanogpt.py'} {folder} --no-compile"
    result = measure_row(bench, Row("nanoGPT", "peer", {"path": path}),
                         Place("cpu", tokens_path, tmp_path, time.monotonic() + 200))
    assert len(result["blocks"]) == 3 and result["tokens_per_second"] in result["blocks"]
    assert result["microbatch_size"] == 2 and not result["is_compiled"]


def test_modded_nanogpt_is_run_on_such_tokens_and_its_times_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / peer_modded.SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text(MODDED)
    monkeypatch.setattr(peer_modded, "command_of", lambda path: [sys.executable, str(path)])
    monkeypatch.setattr(peer_modded, "TOKENS_PER_STEP", 1000)
    monkeypatch.setattr(peer_modded, "VALIDATION_TOKENS", 2000)
    result = CliRunner().invoke(peer_modded.main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["blocks"] == pytest.approx([1000, 2000, 2500])
    assert told["tokens_per_second"] == pytest.approx(2000)
    assert "another model" in told["note"]


def test_a_script_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / peer_modded.SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text("raise RuntimeError('needs a GPU')\n")
    monkeypatch.setattr(peer_modded, "command_of", lambda path: [sys.executable, str(path)])
    monkeypatch.setattr(peer_modded, "write_shards", lambda place: None)
    result = CliRunner().invoke(peer_modded.main, [str(tmp_path)])
    assert result.exit_code == 1 and "after 0 steps: RuntimeError: needs a GPU" in result.output
