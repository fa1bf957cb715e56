"""The Triton kernels, on Triton's interpreter and, where there is one, on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from ops.functional_cross_entropy import functional_cross_entropy
from ops.fused_cross_entropy import fused_losses_
from tests.support.cross_entropy import (
    DTYPES,
    FUSED,
    LOGITS,
    VOCABULARIES,
    compare_head,
    compare_rows,
    compiled_buffers,
    head_inputs,
)
from tests.support.workplace import PROJECT_DIR


@pytest.fixture(scope="module")
def interpreted() -> dict[tuple, dict]:
    """All cases, in a process of their own: Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(PROJECT_DIR)}
    result = subprocess.run([sys.executable, "tests/support/cross_entropy.py"], cwd=PROJECT_DIR,
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {tuple(line.pop("case")): line for line in lines}


def assert_rows_agree(found: dict, dtype: str) -> None:
    assert found["loss"] < 1e-6
    assert found["gradient"] < (1e-6 if dtype == "float32" else 2**-8)  # half a bf16 step at 1
    assert found["padding"] == 0
    assert found["same without gradients"] and not found["written without gradients"]


def assert_head_agrees(found: dict) -> None:
    assert found["loss"] < 1e-3 and max(found["input"], found["weight"]) < 0.015


def assert_one_buffer(buffers: list[str], num_rows: int) -> None:
    """Gradients replace the logits, and nothing else has their size."""
    sizes = [name for name in buffers if name.startswith(f"({num_rows}, 10")]
    assert sizes == [f"({num_rows}, 1024) bfloat16"]


@pytest.mark.timeout(600)  # the first one waits for all
@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LOGITS)
def test_rows_have_pytorchs_losses_and_gradients(
    interpreted: dict, vocabulary: tuple[int, int], dtype: str, kind: str
) -> None:
    assert_rows_agree(interpreted[(*vocabulary, dtype, kind)], dtype)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("compiles", [False, True])
def test_the_head_has_the_gradients_of_float32(interpreted: dict, name: str,
                                               compiles: bool) -> None:
    assert_head_agrees(interpreted[name, compiles])


@pytest.mark.parametrize(("name", "num_rows"), zip(FUSED, (2048, 512), strict=True))
def test_compiled_code_writes_gradients_over_the_logits(interpreted: dict, name: str,
                                                        num_rows: int) -> None:
    assert_one_buffer(interpreted[name, "buffers"]["buffers"], num_rows)


def test_without_triton_the_other_forms_still_work() -> None:
    """What the trainer imports does not import triton."""
    code = ("import sys; sys.modules['triton'] = None; import torch, gpt; from tests.support"
            ".workplace import TINY_MODEL; from run_config import ModelConfig;"
            " ids = torch.zeros(1, 8, dtype=torch.int64);"
            " gpt.GPTModel(ModelConfig(**TINY_MODEL))(ids, ids).backward()")
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT_DIR, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LOGITS)
def test_rows_on_a_gpu(vocabulary: tuple[int, int], dtype: str, kind: str) -> None:
    assert_rows_agree(compare_rows("cuda", vocabulary, dtype, kind), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("compiles", [False, True])
def test_the_head_on_a_gpu(name: str, compiles: bool) -> None:
    assert_head_agrees(compare_head("cuda", FUSED[name], compiles))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "chunk_tokens"), zip(FUSED, (None, 512), strict=True))
def test_compiled_code_on_a_gpu_writes_gradients_over_the_logits(
    name: str, chunk_tokens: int | None
) -> None:
    options = replace(FUSED[name], chunk_tokens=chunk_tokens)
    buffers = compiled_buffers(functional_cross_entropy, options, device="cuda")
    assert_one_buffer(buffers, chunk_tokens or 2048)


@pytest.mark.gpu
def test_more_than_2_31_logits_on_a_gpu() -> None:
    """A row's offset must not overflow 32 bits."""
    num_rows, num_columns = 2**31 // 50304 + 64, 50304
    if torch.cuda.mem_get_info()[0] < 3 * num_rows * num_columns:
        pytest.skip("needs 7 GB of free GPU memory")
    logits = torch.zeros(num_rows, num_columns, dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 20
    targets = torch.full((num_rows,), 5, device="cuda")
    losses = fused_losses_(logits, targets, 50257, with_gradients=True)
    assert losses[-1] < 1e-3 < losses[-2]
    assert logits[-1, 5] > -1e-3 and logits[-2, 5] < -0.99


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_tokens", [None, 512])
def test_the_fused_form_holds_the_logits_once_on_a_gpu(chunk_tokens: int | None) -> None:
    x, weight, targets = head_inputs("cuda", num_tokens=8192, vocab_size=50257)
    options = replace(FUSED["fused"], chunk_tokens=chunk_tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        functional_cross_entropy(x, weight, targets, options).backward()
    logits = 2 * (chunk_tokens or 8192) * 50304
    assert torch.cuda.max_memory_allocated() - before < 1.1 * logits + 2**25
