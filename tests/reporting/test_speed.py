import re
from dataclasses import replace

import pytest

from reporting.speed import (
    CARDS_GIB,
    FAR_BELOW,
    GPUS,
    Speed,
    checkpoint_bytes,
    find_gpu,
    flops_per_token,
    shared_validation,
    usable_gib,
)
from run_config import load_run
from tests.support.workplace import PROJECT_DIR
from tokens.batch_plan import BatchPlan

GOOD = Speed(
    tokens_per_second=2_800_000, num_processes=8, flops_per_token=854.44e6,
    device_name="NVIDIA H100 80GB HBM3", precision="bf16", attention_kernel="flash",
    is_compiled=True, waiting_share=0.0, microbatch_tokens=32768, throttling=None,
)
SLOW = replace(GOOD, tokens_per_second=500_000)


DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-PCIE-40GB": "A100-40",
    "A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200-NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 120GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "AMD Instinct MI300X": "MI300X",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA A10": "A10",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA GeForce RTX 5090": "RTX-5090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "GeForce RTX 3090": "RTX-3090",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100-32",
    "Tesla V100-SXM3-32GB": "V100-32",
    "Tesla V100-PCIE-16GB": "V100-PCIe",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32",
    "Tesla T4": "T4",
    "h100": "H100",  # from here on as people write them
    "H100 SXM": "H100",
    "a100": "A100-80",
    "A100 80GB": "A100-80",
    "A100-SXM-80GB": "A100-80",
    "A100 SXM4 40 GB": "A100-40",
    "H100 80GB SXM5": "H100",
    "H100 PCIe 80GB": "H100-PCIe",
    "RTX 4090": "RTX-4090",
    "4090": "RTX-4090",
}
UNKNOWN_NAMES = [
    "AMD EPYC", "NVIDIA Titan", "NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA A100X",
    "NVIDIA A100-SXM-64GB", "GRID A100D-40C", "NVIDIA A10G", "NVIDIA A10M",
    "NVIDIA A800-SXM4-80GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H100 80GB HBM2e", "NVIDIA H100 64GB HBM2",
    "NVIDIA H800", "NVIDIA H20", "NVIDIA GB200", "NVIDIA GB300", "NVIDIA L40G", "NVIDIA L20",
    "NVIDIA T400", "NVIDIA T400 4GB", "NVIDIA T4G", "Tesla V100S-PCIE-32GB",
    "AMD Instinct MI300A", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti", "Quadro RTX 6000", "NVIDIA RTX A6000",
    "NVIDIA RTX 5000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", "", "NVIDIA",
    "NVIDIA GH200 144G HBM3e",  # other memory than the plain card
    "NVIDIA V100-SXM2-64GB",
]


def test_gpus_are_found_by_their_drivers_names_and_by_one_pattern_only():
    for device, name in [*DRIVER_NAMES.items(), *((gpu.name, gpu.name) for gpu in GPUS)]:
        assert find_gpu(device).name == name
    for device in DRIVER_NAMES:
        model = re.sub("^((NVIDIA|AMD|Tesla|Instinct|GeForce) )*", "", device.replace("-", " "))
        assert sum(bool(re.fullmatch(gpu.pattern, model, re.IGNORECASE)) for gpu in GPUS) == 1


DATA_SHEETS = {  # GB, and TFLOP/s in bf16 (or fp16), tf32 and fp32, dense
    "A100-40": (40, 312, 156, 19.5), "A100-80": (80, 312, 156, 19.5),
    "GH200": (96, 989, 495, 67), "H100": (80, 989, 495, 67), "H100-NVL": (94, 835, 417, 60),
    "H100-PCIe": (80, 756, 378, 51), "H200": (141, 989, 495, 67), "H200-NVL": (141, 835, 417, 60),
    "B200": (160, 2250, 1125, 75),  # the original's; others have 180 GB
    "B300": (270, 2250, 1125, 75), "MI300X": (192, 1307, 654, 163),
    "L40S": (48, 362, 183, 91.6), "L40": (48, 181, 90.5, 90.5), "L4": (24, 121, 60, 30.3),
    "A10": (24, 125, 62.5, 31.2), "RTX-6000-Ada": (48, 364, 182, 91.1),
    "RTX-5090": (32, 209.5, 104.8, 104.8), "RTX-4090": (24, 165, 82.6, 82.6),
    "RTX-3090": (24, 71, 35.6, 35.6), "V100": (16, 125, 15.7, 15.7),
    "V100-32": (32, 125, 15.7, 15.7), "V100-PCIe": (16, 112, 14, 14),
    "V100-PCIe-32": (32, 112, 14, 14), "T4": (16, 65, 8.1, 8.1),
}


def test_an_unknown_gpu_is_not_guessed():
    for device in UNKNOWN_NAMES:
        line = replace(SLOW, device_name=device).line()
        assert line.endswith(f" (no MFU: the peak speed of {device} is not known)")


def test_memory_and_peaks_are_those_of_the_data_sheets():
    assert set(DATA_SHEETS) == {gpu.name for gpu in GPUS}
    for name, (memory, *wanted) in DATA_SHEETS.items():
        gpu = find_gpu(name)
        assert 0.9 * memory < gpu.memory_gib <= memory
        peaks = [gpu.peak(precision) for precision in ("bf16", "tf32", "fp32")]
        assert peaks == pytest.approx([peak * 1e12 for peak in wanted])
        assert gpu.peak("fp16") == gpu.peak("bf16")
    assert {gpu.name for gpu in GPUS if not gpu.has_bf16} == {
        "V100", "V100-32", "V100-PCIe", "V100-PCIe-32", "T4"}
    assert all(0.85 * card < usable_gib(card) < card - 1 for card in CARDS_GIB)


def test_the_expected_mfu_is_that_of_public_figures():
    public = {"H100": 448e3, "H200": 455e3, "H100-NVL": 340e3, "GH200": 410e3, "A100-80": 187e3,
              "L40S": 76e3, "B200": 621e3, "RTX-3090": 105e3 / 2}  # tokens/s, of one of several
    for name, speed in public.items():
        gpu = find_gpu(name)
        assert gpu.expected_mfu == pytest.approx(speed * 854.44e6 / gpu.peak_flops, abs=0.006)


def test_every_mfu_is_plausible_and_its_origin_a_gpu_of_the_table_or_an_assumption():
    by_name = {gpu.name: gpu for gpu in GPUS}
    for gpu in GPUS:
        assert 0 < gpu.low_mfu.share < gpu.expected_mfu < gpu.high_mfu.share < 1
        assert gpu.public_mfu or gpu.expected_mfu == 0.8 * gpu.high_mfu.share
        for kind in ("low_mfu", "high_mfu", "public_mfu"):
            found = getattr(gpu, kind)
            if found and found.origin.startswith("from "):
                assert found.share == getattr(by_name[found.origin[5:]], kind).share


def test_a_shared_validation_is_dealt_out_in_whole_microbatches():
    for num_sequences, world_size, share in ((80, 8, 2 / 10), (8, 8, 1), (9, 8, 1 / 2),
                                             (64, 8, 1 / 8), (0, 8, 0), (80, 1, 1)):
        plan = BatchPlan(8, 1, world_size, 16, 100)
        assert shared_validation(num_sequences, plan) == pytest.approx(share)


def test_flops_and_checkpoints_of_gpt2_small_are_the_published_ones():
    run = load_run(PROJECT_DIR / "runs", "original")
    assert flops_per_token(run.model) == pytest.approx(854.44e6, rel=1e-5)
    assert "493,000 tokens/s" in (line := replace(SLOW, tokens_per_second=493_000).line())
    assert "5.3% MFU" in line
    for optimizer, num_floats in (("adamw", 3 * 163_009_536),
                                  ("muon", 3 * 163_009_536 - 12 * 12 * 768**2)):  # one moment each
        train = run.train.model_copy(update={"optimizer": optimizer})
        assert checkpoint_bytes(run.model, train, 163_009_536) == 4 * num_floats


def test_a_speed_is_shown_beside_the_best_of_its_gpu():
    assert "30.2% MFU; H100 should reach up to 41%" in GOOD.line()
    line = replace(GOOD, device_name="NVIDIA B200").line()
    assert "up to 40% with such a model (assumed)" in line
    assert "model (from A100-80)" in replace(GOOD, device_name="A100-SXM4-40GB").line()
    assert "at dropout 0.1, whose masks" in replace(GOOD, drop_rate=0.1).line()
    assert "dropout" not in GOOD.line()
    assert "dropout" not in replace(GOOD, drop_rate=0.1, is_compiled=False).line()


@pytest.mark.parametrize(("changes", "reason"), [
    ({"waiting_share": 0.3}, "waiting for data 30% of the time"),
    ({"is_compiled": False}, "the model is not compiled"),
    ({"attention_kernel": "math"}, "PyTorch's math attention kernel"),
    ({"precision": "fp32"}, "precision fp32"),
    ({"throttling": "sw thermal slowdown"}, "the GPU is throttled (sw thermal slowdown)"),
    ({"microbatch_tokens": 1024}, "a small microbatch of 1,024 tokens"),
    ({"is_compiled": False, "waiting_share": 0.5},
     "waiting for data 50% of the time, the model is not compiled"),  # the strongest first
])
def test_a_low_speed_has_its_reason_and_no_other(changes, reason):
    assert replace(SLOW, **changes).line().endswith(f"likely reason: {reason}")
    assert reason not in replace(GOOD, **changes).line()


def test_reasons_are_listed_below_half_of_the_expected_mfu():
    assert "likely reason: none found" in SLOW.line()
    limit = 8 * 989e12 * 0.41 * FAR_BELOW / 854.44e6
    assert "reason" not in replace(GOOD, tokens_per_second=limit * 1.01).line()
    assert "reason" in replace(GOOD, tokens_per_second=limit * 0.99).line()
