"""The Triton kernels, on Triton's interpreter and, where there is one, on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ops.functional_cross_entropy import functional_cross_entropy
from ops.fused_cross_entropy import fused_losses_
from tests.support.cross_entropy import (
    DTYPES,
    FUSED,
    HEADS,
    LOGITS,
    RAGGED,
    ROWS,
    VOCABULARIES,
    N,
    compare_head,
    compare_rows,
    head_inputs,
)
from tests.support.workplace import PROJECT_DIR

HALF_STEP = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}  # at 1; rounded up in float32


def assert_rows_agree(found: dict, dtype: str) -> None:
    assert found["loss"] < 1e-6
    assert found["gradient"] < HALF_STEP[dtype]
    assert found["padding"] == 0
    assert found["same without gradients"] and not found["written without gradients"]


def assert_head_agrees(found: dict, name: str, dtype: str, *, compiles: bool) -> None:
    assert found["loss"] < 1e-3 and max(found["input"], found["weight"]) < 0.015
    if compiles:  # gradients replace the logits, and nothing else has their size
        wanted = {"fused": [N], "fused in chunks": [RAGGED, N % RAGGED]}[name]
        assert [size for size in found["buffers"] if "(1024, " not in size and ", 10" in size] == [
            f"({num_rows}, 1024) {dtype}" for num_rows in wanted]


@pytest.mark.timeout(600)  # compiles
def test_rows_and_heads_on_tritons_interpreter() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(PROJECT_DIR)}
    result = subprocess.run([sys.executable, "tests/support/cross_entropy.py"], cwd=PROJECT_DIR,
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = {tuple(line.pop("case")): line
             for line in map(json.loads, result.stdout.splitlines())}
    for vocabulary, dtype, kind in ROWS:
        assert_rows_agree(found.pop((*vocabulary, dtype, kind)), dtype)
    for name, dtype, compiles in HEADS:
        assert_head_agrees(found.pop((name, dtype, compiles)), name, dtype, compiles=compiles)
    assert not found


def test_a_machine_without_triton_can_train() -> None:
    code = """import sys; sys.modules["triton"] = None
import torch; from gpt import GPTModel; from run_config import ModelConfig
ids = torch.zeros(1, 4, dtype=torch.int64)
GPTModel(ModelConfig(vocab_size=9, context_length=4, emb_dim=4, n_heads=1, n_layers=1,
                     drop_rate=0, qkv_bias=False))(ids, ids).backward()"""
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT_DIR, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LOGITS)
def test_rows_on_a_gpu(vocabulary: tuple[int, int], dtype: str, kind: str) -> None:
    assert_rows_agree(compare_rows("cuda", vocabulary, dtype, kind), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("compiles", [False, True])
def test_the_head_on_a_gpu(name: str, dtype: str, compiles: bool) -> None:
    found = compare_head("cuda", FUSED[name], dtype, compiles=compiles)
    assert_head_agrees(found, name, dtype, compiles=compiles)


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
    for _ in range(2):  # in the first run, cuBLAS allocates what it keeps
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            functional_cross_entropy(x, weight, targets, options).backward()
    logits = 2 * (chunk_tokens or 8192) * 50304
    assert torch.cuda.max_memory_allocated() - before < 1.1 * logits + 2**25


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernels_compile_for_a_gpu_with_wide_loads(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler needs no GPU: this is the code for an H100."""
    pytest.importorskip("triton")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ops import cross_entropy_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32",
                 "vocab_size": "constexpr", "num_columns": "constexpr"}
    source = ASTSource(
        kernels.write_losses_and_gradients, signature,
        constexprs={"vocab_size": 50257, "num_columns": 50304},
        attrs={(number,): [["tt.divisibility", 16]] for number in range(3)})
    found = compile(source, target=GPUTarget("cuda", 90, 32),
                    options={"num_warps": kernels.NUM_WARPS})
    assert found.asm["cubin"]
    code = found.asm["ptx"]
    assert "ld.global.v4" in code and "st.global.v4" in code  # 16 bytes at a time
