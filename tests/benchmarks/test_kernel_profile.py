from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import kernel_profile
from benchmarks.kernel_profile import GROUPS, Kernel, by_group, group_of, kernels_of_trace
from tests.support.workplace import TINY_MODEL

NAMES = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT": "matmul",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>": "matmul",
    "triton_tem_fused_mm_2": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "triton_red_fused__log_softmax_nll_loss_forward_4": "cross-entropy",
    "triton_poi_fused__log_softmax__log_softmax_backward_data_nll_loss_backward_1":
        "cross-entropy",
    "void (anonymous namespace)::cunn_SoftMaxForward<..., LogSoftMaxForwardEpilogue>":
        "cross-entropy",
    "triton_per_fused_add_native_layer_norm_native_layer_norm_backward_7": "norms and elementwise",
    "triton_poi_fused_addmm_gelu_3": "norms and elementwise",
    "triton_poi_fused__to_copy_0": "copies",
    "triton_poi_fused__to_copy_add_0": "norms and elementwise",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>":
        "optimizer",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": "copies",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>":
        "norms and elementwise",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "rest",
    "aten::_fused_adamw_": "optimizer",
    "aten::_log_softmax": "cross-entropy",
    "aten::_softmax": "attention",
    "aten::mm": "matmul",
    "aten::mul": "norms and elementwise",
    "aten::empty": "rest",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_belongs_to_a_group_by_its_name(name: str) -> None:
    assert group_of(name) == NAMES[name]


def test_only_what_runs_on_the_device_is_read_from_a_trace() -> None:
    trace = {"traceEvents": [
        {"name": "nvjet_a", "cat": "kernel", "dur": 500.0},
        {"name": "nvjet_a", "cat": "kernel", "dur": 700.0},
        {"name": "Memset (Device)", "cat": "gpu_memset", "dur": 10},
        {"name": "Optimizer.step#AdamW.step", "cat": "gpu_user_annotation", "dur": 9000},
        {"name": "aten::mm", "cat": "cpu_op", "dur": 9000},
        {"name": "process_name", "ph": "M"}]}
    assert kernels_of_trace(trace) == [Kernel("nvjet_a", 1.2, 2),
                                       Kernel("Memset (Device)", 0.01, 1)]


def test_groups_are_times_of_a_step_and_shares_of_all_kernels() -> None:
    found = by_group([Kernel("nvjet_a", 6.0, 4), Kernel("nvjet_b", 3.0, 2),
                      Kernel("Memset", 1.0, 2)], 2)
    assert found["kernel_ms"] == 5.0
    groups = {one["group"]: one for one in found["groups"]}
    assert (groups["matmul"]["ms"], groups["matmul"]["share"]) == (4.5, 0.9)
    assert groups["matmul"]["launches"] == 3
    assert [one["name"] for one in found["kernels"]] == ["nvjet_a", "nvjet_b", "Memset"]


def test_a_step_on_a_cpu_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {name: TINY_MODEL[name] for name in kernel_profile.MANY_TOKENS}
    monkeypatch.setattr(kernel_profile, "MANY_TOKENS", shape)
    result = CliRunner().invoke(kernel_profile.main, [
        "--device", "cpu", "--steps", "2", "--output", str(tmp_path / "found")])
    assert result.exit_code == 0, result.output + repr(result.exception)
    found = json.loads((tmp_path / "found.json").read_text())
    milliseconds = {one["group"]: one["ms"] for one in found["groups"]}
    assert list(milliseconds) == list(GROUPS)
    assert sum(milliseconds.values()) == pytest.approx(found["kernel_ms"])
    assert min(milliseconds["matmul"], milliseconds["optimizer"]) > 0
    assert "| matmul" in (tmp_path / "found.md").read_text()
