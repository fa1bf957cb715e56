from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from tests.support.checkpoints import ONE_PROCESS
from tests.support.workplace import write_tokens
from tokens.batch_plan import BatchPlan
from tokens.batches import Microbatches
from tokens.token_file import TokenFile
from trainer.losses import validate


@pytest.mark.parametrize("microbatch_size", [1, 2, 5])
def test_the_loss_does_not_depend_on_the_microbatch_size(
    tmp_path: Path, microbatch_size: int
) -> None:
    write_tokens(tmp_path / "t.safetensors", np.arange(41, dtype=np.uint16))
    plan = BatchPlan(microbatch_size, 1, 1, context_length=4, num_steps=1)
    data = Microbatches(TokenFile(tmp_path / "t.safetensors"), plan, start_token=0, vocab_size=100,
                        num_sequences=5)
    losses = SimpleNamespace(process=ONE_PROCESS, model=nn.Identity(),
                             validation=lambda token_ids, _: token_ids.float().mean())
    watchdog = SimpleNamespace(heartbeat=lambda: None, stop_signal=0)
    loss = validate(losses, data, watchdog, shares=False)
    assert loss == np.arange(20).mean()
