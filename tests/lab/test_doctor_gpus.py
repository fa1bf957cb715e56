"""What `lab doctor` makes of GPUs: readings of the driver and of PyTorch are stand-ins."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from basics.gpu_readings import GIB, GpuReading
from lab.doctor import load, machine_checks
from lab.doctor.check import OK, PROBLEM, SKIPPED, WARNING, Subject
from lab.doctor.load_tests import PARTS, Load, check_load, how_it_failed
from lab.doctor.machine_checks import check_gpus, check_readings, in_use, visible_gpus
from processes.launch import Process
from run_config import load_run
from tests.support.fake_nvml import H100, FakeNvml
from tests.support.workplace import PROJECT_DIR, Workplace

GPU = GpuReading(
    name="NVIDIA A100-SXM4-40GB", uuid="GPU-aaaa0000", memory_used_gib=0.5, memory_total_gib=40.0,
    use_percent=0, temperature_c=31, sm_clock_mhz=1410, max_sm_clock_mhz=1410,
    throttle_reasons=(), uncorrected_ecc_errors=0, driver_version="550.54.15")
GPUS = tuple(replace(GPU, uuid=f"GPU-{number}aaa0000") for number in range(4))
FACTS = {"version": "2.11.0", "cuda": "12.8", "num_gpus": 4, "problem": ["", ""],
         "without_bf16": []}
REDUCED = {"backend": "nccl", "bytes": 2**28, "seconds": 0.002, "is_right": True, "world_size": 4}
CLOCKS = {"sm_clock_mhz": 1400, "max_sm_clock_mhz": 1410, "temperature_c": 55,
          "throttle_reasons": ["sw power cap"]}
PRODUCTS = {"flops": 250e12, "dtype": "bfloat16", "name": "NVIDIA A100-SXM4-40GB", "gpu": CLOCKS}


def subject(**changes):
    return Subject(Path("runs"), Path("datasets"), **{
        "all_gpus": GPUS, "gpus": GPUS, "num_processes": 4, "world_size": 4} | changes)


@pytest.mark.parametrize(("variable", "found"), [
    (None, [0, 1, 2, 3]), ("", []), ("2", [2]), ("3, 1", [3, 1]), ("0,7,1", [0]), ("-1", []),
    ("GPU-2aaa", [2]), ("GPU-2aaa0000,0", [2, 0])])
def test_hidden_gpus_are_those_that_cuda_hides(variable, found):
    assert visible_gpus(GPUS, variable) == [GPUS[number] for number in found]


@pytest.mark.parametrize("variable", [None, "0", "GPU-whole", "MIG-second,MIG-first"])
def test_a_part_of_a_gpu_has_its_own_readings(monkeypatch, variable):
    """Others use the rest of the card, which is none of ours."""
    parts = {name: {"nvmlDeviceGetName": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                    "nvmlDeviceGetUUID": name,
                    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=GIB // 10, total=10 * GIB)}
             for name in ("MIG-first", "MIG-second")}
    nvml = FakeNvml({"GPU-whole": H100 | {"nvmlDeviceGetUUID": "GPU-whole"}} | parts)
    nvml.nvmlDeviceGetMigMode = lambda handle: (1, 1)
    nvml.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 7
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, index: (
        nvml.nvmlDeviceGetHandleByUUID([*parts, "none"][min(index, 2)]))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    whole, *_ = machine_checks.read_gpus(["GPU-whole"])
    assert in_use([whole])
    found, = visible_gpus([whole], variable)
    assert found.name.endswith("MIG 1g.10gb") and found.memory_total_gib == 10
    assert not in_use([found])
    assert found.uuid == ("MIG-second" if variable and "MIG" in variable else "MIG-first")


def test_a_gpu_that_others_use_is_found():
    assert in_use(GPUS) == ""
    assert in_use([GPU, replace(GPU, use_percent=98)]) == "in use: GPU 1 (0.5 GiB, 98%)"
    assert in_use([replace(GPU, memory_used_gib=38)]) == "in use: GPU 0 (38.0 GiB, 0%)"
    assert in_use([GpuReading()]) == ""


CASES = {
    "all is well": ("GPUs", {}, {}, OK, "4 x NVIDIA A100-SXM4-40GB"),
    "PyTorch sees fewer": ("GPUs", {}, {"num_gpus": 3}, PROBLEM, "PyTorch sees 3"),
    "PyTorch sees none": ("GPUs", {}, {"num_gpus": 0}, PROBLEM, "PyTorch sees 0"),
    "PyTorch fails": ("GPUs", {}, {"problem": ["the NVIDIA driver is too old for it", "take"]},
                      PROBLEM, "PyTorch 2.11.0 cannot use them: the NVIDIA driver is too old"),
    "hidden": ("GPUs", {"gpus": GPUS[:2], "num_processes": 2}, {"num_gpus": 2}, WARNING,
               "2 of 4 are hidden by CUDA_VISIBLE_DEVICES"),
    "one is lost": ("GPUs", {"gpus": (*GPUS[:3], GpuReading())}, {}, PROBLEM, "does not answer"),
    "two kinds": ("GPUs", {"gpus": (*GPUS[:3], replace(GPU, name="NVIDIA L4"))}, {}, WARNING,
                  "1 x NVIDIA L4"),
    "too many processes": ("GPUs", {"num_processes": 8}, {}, PROBLEM, "processes: 8"),
    "too few processes": ("GPUs", {"num_processes": 1}, {}, WARNING, "processes: 1"),
    "no GPU": ("GPUs", {"gpus": (), "all_gpus": (), "nvml_failure": "Driver Not Loaded"},
               {"num_gpus": 0}, WARNING, "none (Driver Not Loaded)"),
    "all hidden": ("GPUs", {"gpus": (), "num_processes": 1}, {"num_gpus": 0},
                   WARNING, "none; 4 of 4 are hidden"),
    "no driver library": ("GPUs", {"gpus": (), "all_gpus": (), "nvml_failure": "Not Found"}, {},
                          WARNING, "4 seen by PyTorch, but the driver cannot be read (Not Found)"),
    "dead driver": ("GPUs", {"gpus": (), "all_gpus": (), "nvml_failure": machine_checks.NO_ANSWER},
                    {"num_gpus": None}, PROBLEM, "does not answer"),
    "same driver": ("driver", {}, {}, OK, "550.54.15; PyTorch 2.11.0"),
    "PyTorch without CUDA": ("driver", {}, {"cuda": None}, PROBLEM, "with CUDA None"),
    "bf16": ("bf16", {}, {}, OK, "supported"),
    "no bf16": ("bf16", {}, {"without_bf16": [0]}, WARNING, "GPU 0 without it"),
    "cool": ("temperature", {}, {}, OK, "31 to 31"),
    "hot": ("temperature", {"gpus": (replace(GPU, temperature_c=88),)}, {}, WARNING, "GPU 0"),
    "no errors": ("ECC memory", {}, {}, OK, "no uncorrected"),
    "errors": ("ECC memory", {"gpus": (GPU, replace(GPU, uncorrected_ecc_errors=2))}, {}, WARNING,
               "GPU 1: 2 uncorrected"),
    "no ECC": ("ECC memory", {"gpus": (replace(GPU, uncorrected_ecc_errors=None),)}, {}, SKIPPED,
               "not told"),
    "in use": ("use", {"busy": "in use: GPU 0"}, {}, WARNING, "are left out"),
}


@pytest.mark.parametrize("case", CASES)
def test_readings_get_their_verdict(case):
    name, about, changes, verdict, text = CASES[case]
    about, facts = subject(**about), FACTS | changes
    found = ({"GPUs": check_gpus(about, facts)} | check_readings(about, facts))[name]
    assert found.verdict == verdict and text in found.text, found
    assert bool(found.advice) == (verdict in (WARNING, PROBLEM))


def test_a_machine_without_gpus_has_no_lines_on_them():
    facts = FACTS | {"num_gpus": 0, "cuda": None}
    assert check_readings(subject(gpus=(), all_gpus=()), facts) == {}


def test_a_run_that_sets_bf16_needs_it(tmp_path):
    place = Workplace(tmp_path)
    place.add_run(train={"precision": "bf16"})
    about = subject(run=load_run(place.runs_dir, "tiny"))
    assert check_readings(about, FACTS | {"without_bf16": [1, 3]})["bf16"] == (
        PROBLEM, "GPUs 1 and 3 without it",
        "remove precision and residual_dtype from train.json, or take a newer GPU")


def judged(name, changes=None, *, fourth=None, **end):
    """Judge four processes that have found the usual, changed; the fourth one differs by more.

    Args:
        end: of `Load`. `ended_in`, `fails_in`: the last part of the fourth process, which it began
            20 seconds before the end, and the part that fails there, with its error.
    """
    parts = {"PyTorch": FACTS, "first kernel": {"one": 1.0}, "attention": {"precision": "bf16"},
             "matrix products": PRODUCTS, "all-reduce": REDUCED}
    parts[name] = parts.get(name, {}) | (changes or {})
    ended_in, fails_in = end.pop("ended_in", None), end.pop("fails_in", {})
    load = Load(**{"seconds": 120.0} | end)
    for part, found in parts.items():
        load.begun[part] = dict.fromkeys(range(4), 100.0)
        load.found[part] = dict.fromkeys(range(3), found) | {3: found | (fourth or {})
                                                             if part == name else found}
    if ended_in:
        for part in PARTS[PARTS.index(ended_in):]:
            load.found[part].pop(3, None)
            load.begun[part] = {rank: seconds for rank, seconds in load.begun[part].items()
                                if rank < 3 or part == ended_in}
    for part, error in fails_in.items():
        load.found[part].pop(3, None)
        load.error[part][3] = error
    return check_load(load).get(name)


JUDGED = {  # the part, what differs in all, and in the fourth: the verdict, and a part of the text
    "speed": ("matrix products", {}, {}, OK, "250 TFLOP/s in bfloat16, 80% of the peak of A100-40"),
    "weak": ("matrix products", {"flops": 100e12}, {}, WARNING, "32% of the peak"),
    "one is slow": ("matrix products", {}, {"flops": 180e12}, WARNING, "GPU 3 much slower"),
    "an unknown card": ("matrix products", {"name": "Some card"}, {}, OK, "250 TFLOP/s in bf"),
    "bandwidth of nccl-tests": ("all-reduce", {}, {}, OK, "201 GB/s bus bandwidth, 4 processes"),
    "slow exchange": ("all-reduce", {"seconds": 0.5}, {}, WARNING, "0.805 GB/s"),
    "wrong sums": ("all-reduce", {}, {"is_right": False}, PROBLEM, "gives wrong sums"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_what_the_load_tests_find_gets_its_verdict(case):
    name, changes, fourth, verdict, text = JUDGED[case]
    found = judged(name, changes, fourth=fourth)
    assert found.verdict == verdict and text in found.text
    assert bool(found.advice) == (verdict != OK)


def test_only_heat_and_a_weak_supply_count_as_slowed_down():
    text = "1,400 to 1,400 of 1,410 MHz under load, at most 55 °C"
    assert judged("clocks") == (OK, text, "")
    hot = CLOCKS | {"throttle_reasons": ["sw power cap", "hw thermal slowdown"]}
    load = Load()
    for rank, gpu in enumerate((CLOCKS, hot)):
        load.begun["PyTorch"][rank] = load.begun["matrix products"][rank] = 0.0
        load.found["matrix products"][rank] = PRODUCTS | {"gpu": gpu}
    slowed = check_load(load)["clocks"]
    assert slowed.verdict == WARNING and "GPU 1 slowed down: hw thermal slowdown" in slowed.text


LATE = {"how": "no answer within 40 s", "is_late": True}
CRASH = {"how": "killed by SIGABRT", "failed_rank": 3}
FAILED = {  # the part, how the fourth ends: the verdict, parts of the text and of the advice
    "NCCL": ("all-reduce", {"fails_in": {"all-reduce": "DistBackendError: NCCL"}}, PROBLEM,
             "failed on rank 3", "NCCL_DEBUG"),
    "gloo": ("all-reduce", {"fails_in": {"all-reduce": "RuntimeError: [../gloo/tcp]"}}, PROBLEM,
             "failed on rank 3", "GLOO_SOCKET_IFNAME"),
    "it hangs": ("all-reduce", LATE | {"ended_in": "all-reduce"}, PROBLEM, "after 20 s",
                 "NCCL_DEBUG"),
    "too little time": ("all-reduce", LATE | {"ended_in": "all-reduce", "seconds": 102.0}, WARNING,
                        "within 40 s", "--time-limit"),
    "it crashes": ("all-reduce", CRASH | {"ended_in": "all-reduce"}, PROBLEM,
                   "stopped on rank 3: killed by SIGABRT", "NCCL_DEBUG"),
    "a kernel crashes it": ("first kernel", CRASH | {"ended_in": "first kernel"}, PROBLEM,
                            "stopped on rank 3: killed by SIGABRT", "take another one"),
    "it crashed before": ("all-reduce", CRASH | {"ended_in": "matrix products"}, WARNING,
                          "rank 3 stopped before it", ""),
    "never came": ("all-reduce", LATE | {"ended_in": "matrix products"}, WARNING,
                   "rank 3 stopped before it", ""),
    "no code for the GPU": ("first kernel", {"fails_in": {
        "first kernel": "AcceleratorError: CUDA error: no kernel image is available"}}, PROBLEM,
        "no kernel image", "https://pytorch.org"),
    "a kernel that the run names": ("attention", {"fails_in": {
        "attention": "attention is x; set y"}}, PROBLEM, "failed on rank 3: attention is x",
        "set y"),
    "no compiler": ("Triton", {"fails_in": {"Triton": "no gcc"}}, PROBLEM, "no gcc", "install gcc"),
}


@pytest.mark.parametrize("case", FAILED)
def test_a_part_that_fails_on_one_of_four_is_told(case):
    name, end, verdict, text, advice = FAILED[case]
    found = judged(name, **end)
    assert found.verdict == verdict and text in found.text and advice in found.advice


@pytest.mark.parametrize(("last_came", "verdict"), [(118.0, WARNING), (110.0, PROBLEM)])
def test_an_exchange_hangs_only_after_its_last_process_has_come(last_came, verdict):
    load = Load(seconds=120.0, **LATE)
    load.begun["PyTorch"], load.begun["all-reduce"] = {0: 90.0, 1: 90.0}, {0: 95.0, 1: last_came}
    assert check_load(load)["all-reduce"].verdict == verdict


def test_a_process_tells_what_it_finds_and_loads_only_what_it_should(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(load, "MATMUL_SIZE_ON_CPU", 32)
    monkeypatch.setattr(load, "MATMUL_SECONDS", 0.001)
    monkeypatch.setattr(load, "attention", lambda *_: 1 / 0)
    for number, (changes, parts) in enumerate((
            ({}, ["PyTorch", "first kernel", "matrix products"]), ({"num_gpus": 3}, ["PyTorch"]),
            ({"is_loading": False}, ["PyTorch"]))):
        output = tmp_path / str(number)
        load.main(output, SimpleNamespace(**{
            "num_gpus": 0, "is_loading": True, "seconds": 10.0, "run_name": None} | changes))
        found = Load()
        found.add(output.read_text() + '{"part": "matr')  # cut off by a kill
        assert [part for part in found.found if found.found[part]] == parts
        assert found.found["PyTorch"][0]["version"] == torch.__version__
        assert dict(found.error) == ({} if changes else {
            "attention": {0: "ZeroDivisionError: division by zero"}})


REPORT = """
Traceback (most recent call last):
ModuleNotFoundError: No module named 'x'
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 2)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_02:59:00
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 1)
"""


@pytest.mark.parametrize(("log", "found"), [
    (REPORT.format(code=-7), (3, "killed by SIGBUS")),
    (REPORT.format(code=1), (3, "ModuleNotFoundError: No module named 'x'")),
    ("ImportError: libcudart", (None, "ImportError: libcudart")), ("", (None, "exit status 9"))])
def test_how_the_processes_failed_is_read_from_torchruns_report(log, found):
    assert how_it_failed(log, 9) == found


def test_the_exchange_is_tried_over_gloo_too_and_a_wrong_sum_is_seen(monkeypatch):
    """Training with NCCL waits in a group of gloo, whose connections are others."""
    groups, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: (
        groups.append(dist.get_backend(group) if group else None), all_reduce(tensor, group=group)))
    alone = Process(0, 0, 1, torch.device("cpu"))
    found = load.all_reduce(alone, dist.HashStore(), load.timedelta(seconds=10))
    dist.destroy_process_group()
    assert found["is_right"] and groups[-1] == "gloo" and set(groups[:-1]) == {None}
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(1.001))
    found = load.all_reduce(alone, dist.HashStore(), load.timedelta(seconds=10))
    dist.destroy_process_group()
    assert not found["is_right"]


def test_pairs_that_cannot_reach_each_other(monkeypatch):
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda i, j: {i, j} != {0, 2})
    verdict, text, _ = load.unreachable_peers(3)["finding"]
    assert verdict == WARNING and text == "2 of 6 pairs of GPUs cannot, such as 0 and 2"
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda i, j: True)
    assert load.unreachable_peers(4)["finding"] == (OK, "all 12 pairs of GPUs", "")


@pytest.mark.parametrize(("kernel", "device", "verdict"), [
    ("flash", "cuda", OK), ("math", "cuda", WARNING), ("math", "cpu", OK)])
def test_slow_attention_on_a_gpu_is_a_warning(monkeypatch, kernel, device, verdict):
    for name in ("check_attention", "choose_forward_options"):
        monkeypatch.setattr(load, name, lambda *_: None)
    monkeypatch.setattr(load, "resolve_for_device", lambda train, _: train)
    monkeypatch.setattr(load, "kernel_name", lambda *_: kernel)
    found = load.attention(SimpleNamespace(run_name=None), torch.device(device))["finding"]
    assert found.verdict == verdict and found.text.startswith(f"{kernel}, in ")


def test_the_kernel_doubles_a_vector_on_tritons_interpreter():
    pytest.importorskip("triton")
    program = ("import torch; from lab.doctor.load import triton_kernel;"
               " print(triton_kernel(torch.device('cpu'))['finding'][0])")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            cwd=PROJECT_DIR, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert result.stdout == "ok\n", result.stderr
