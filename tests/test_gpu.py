"""What only a GPU can show. Skipped, with the reason, where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import Workplace, read_lines, succeeded, write_tokens

from batch_plan import BatchPlan
from token_dataset import Microbatches, TokenFile, prefetch

pytestmark = pytest.mark.gpu


def test_microbatches_arrive_whole_on_the_device(tmp_path) -> None:
    tokens = np.arange(60_001, dtype=np.uint16)
    write_tokens(tmp_path / "t.safetensors", tokens)
    plan = BatchPlan(microbatch_size=10, gradient_accumulation_steps=1, world_size=1,
                     context_length=100, num_steps=60)
    data = Microbatches(TokenFile(tmp_path / "t.safetensors"), plan, start_token=0,
                        vocab_size=65536)
    device = torch.device("cuda", 0)
    for index, token_ids, targets in prefetch(data, range(60), device=device):
        first = index * 1000
        assert token_ids.device == device and token_ids.dtype == torch.int64
        assert token_ids.flatten().tolist() == list(range(first, first + 1000))
        assert targets.flatten().tolist() == list(range(first + 1, first + 1001))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_run_trains_stops_and_resumes(workplace: Workplace, precision: str) -> None:
    workplace.add_dataset()
    changes = {"precision": precision, "gradient_accumulation_steps": 1, "min_train_tokens": 640}
    for name in ("whole", "parts"):
        workplace.add_run(name, train=changes)
    succeeded(workplace.typed_torchrun(1, "whole"))
    succeeded(workplace.typed_torchrun(1, "parts", "--max-steps", "7"))
    succeeded(workplace.typed_torchrun(1, "parts"))
    losses = [[r["validation_loss"] for r in read_lines(workplace.runs_dir / n / "metrics.jsonl")
               if "validation_loss" in r] for n in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]
