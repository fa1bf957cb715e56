"""What `lab doctor` makes of GPUs: readings of the driver and of PyTorch are stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from basics.gpu_readings import GpuReading
from lab.doctor import gpu_checks, load_process, load_tests
from lab.doctor.check import OK, PROBLEM, SKIPPED, WARNING, Finding, Subject
from lab.doctor.gpu_checks import in_use, numbers, runs_on, visible_gpus
from lab.doctor.load_process import Spec
from lab.doctor.load_result import Result
from processes.launch import Process
from run_config import load_run
from tests.support.workplace import PROJECT_DIR, Workplace

GPU = GpuReading(
    name="NVIDIA A100-SXM4-40GB", uuid="GPU-aaaa0000", memory_used_gib=0.5, memory_total_gib=40.0,
    use_percent=0, temperature_c=31, sm_clock_mhz=1410, max_sm_clock_mhz=1410,
    throttle_reasons=(), uncorrected_ecc_errors=0, driver_version="550.54.15")
GPUS = tuple(replace(GPU, uuid=f"GPU-{number}aaa0000") for number in range(4))
FACTS = {"version": "2.11.0", "cuda": "12.8", "num_gpus": 4, "problem": ["", ""],
         "driver_cuda": "12.8", "architectures": ["sm_80", "sm_90", "compute_90"],
         "cards": [{"name": "A100", "capability": [8, 0], "memory_gib": 39.4,
                    "has_bf16": True}] * 4}
REDUCED = {"backend": "nccl", "bytes": 2**28, "seconds": 0.002, "is_right": True}
MATMUL = {"flops": 250e12, "dtype": "bfloat16", "name": "NVIDIA A100-SXM4-40GB",
          "gpu": {"sm_clock_mhz": 1400, "max_sm_clock_mhz": 1410, "temperature_c": 55,
                  "throttle_reasons": ["sw power cap"]}}


def subject(**changes: Any) -> Subject:
    return Subject(Path("runs"), Path("datasets"), **{
        "all_gpus": GPUS, "gpus": GPUS, "num_processes": 4, "world_size": 4} | changes)


def result(rank: int, **parts: dict[str, Any]) -> Result:
    return Result(rank, found=parts, began=dict.fromkeys(parts, time.time()))


def results(**changes: Any) -> list[Result]:
    parts = {"torch": FACTS, "matmul": MATMUL, "all_reduce": REDUCED,
             "attention": {"kernel": "flash", "precision": "bf16", "of": ""}} | changes
    return [result(rank, **parts) for rank in range(4)]


@pytest.mark.parametrize(("parts", "began", "level", "text"), [
    ({"triton": {"version": "3.9", "is_right": True}}, True, OK, "Triton 3.9 compiles and runs"),
    ({"triton": {"version": "3.9", "is_right": False}}, True, PROBLEM, "wrong results"),
    ({}, True, PROBLEM, "no gcc"), ({}, False, None, ""),
])
def test_a_kernel_is_compiled_and_run(
    parts: dict, began: bool, level: str | None, text: str
) -> None:
    first = Result(0, found=parts, began={"triton": time.time()} if began else {},
                   errors={"triton": "no gcc"} if not parts and began else {})
    finding = load_tests.check_triton([first])
    assert (finding and finding.verdict) == level and text in (finding.text if finding else "")


def test_the_kernel_doubles_a_vector_on_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    program = ("import torch; from lab.doctor.triton_kernel import run_kernel;"
               " print(run_kernel(torch.device('cpu'))['is_right'])")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            cwd=PROJECT_DIR, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert result.stdout == "True\n", result.stderr


@pytest.mark.parametrize(("variable", "found"), [
    (None, [0, 1, 2, 3]), ("", []), ("2", [2]), ("3, 1", [3, 1]), ("0,7,1", [0]), ("-1", []),
    ("GPU-2aaa", [2]), ("GPU-2aaa0000,0", [2, 0])])
def test_hidden_gpus_are_those_that_cuda_hides(variable: str | None, found: list[int]) -> None:
    assert visible_gpus(GPUS, variable) == [GPUS[number] for number in found]


def test_a_gpu_that_others_use_is_found() -> None:
    assert in_use(GPUS) == ""
    assert in_use([GPU, replace(GPU, use_percent=98)]) == "GPU 1 (0.5 GiB, 98%)"
    assert in_use([replace(GPU, memory_used_gib=38)]) == "GPU 0 (38.0 GiB, 0%)"
    assert in_use([GpuReading()]) == ""
    assert [numbers([3]), numbers([0, 2]), numbers([0, 1, 5])] == [
        "GPU 3", "GPUs 0 and 2", "GPUs 0, 1 and 5"]


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
    "dead driver": ("GPUs", {"gpus": (), "all_gpus": (), "nvml_failure": gpu_checks.NO_ANSWER},
                    {"num_gpus": None}, PROBLEM, "does not answer"),
    "same driver": ("driver", {}, {}, OK, "550.54.15 for CUDA 12.8"),
    "newer driver": ("driver", {}, {"driver_cuda": "13.0"}, OK, "built with 12.8"),
    "older minor version": ("driver", {}, {"driver_cuda": "12.2"}, OK, ""),
    "newer CUDA by its compatibility package": ("driver", {}, {"cuda": "13.0"}, OK, "13.0"),
    "PyTorch without CUDA": ("driver", {}, {"cuda": None}, PROBLEM, "without CUDA"),
    "known architecture": ("architecture", {}, {}, OK, "sm_80"),
    "unknown architecture": ("architecture", {}, {"architectures": ["sm_90"]}, PROBLEM,
                             "GPUs 0, 1, 2 and 3: sm_80"),
    "bf16": ("bf16", {}, {}, OK, "supported"),
    "no bf16": ("bf16", {}, {"cards": [{"has_bf16": False}]}, WARNING, "GPU 0 without it"),
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
def test_readings_get_their_verdict(case: str) -> None:
    name, about, facts, verdict, text = CASES[case]
    found = gpu_checks.CHECKS[name](subject(**about), FACTS | facts)
    assert found.verdict == verdict and text in found.text, found
    assert bool(found.advice) == (verdict in (WARNING, PROBLEM))


def test_a_machine_without_gpus_has_no_lines_on_them() -> None:
    facts = FACTS | {"num_gpus": 0, "cuda": None, "cards": [], "architectures": []}
    empty = subject(gpus=(), all_gpus=())
    found = {name: check(empty, facts) for name, check in gpu_checks.CHECKS.items()}
    assert [name for name, finding in found.items() if finding] == ["GPUs"]


def test_a_run_that_sets_bf16_needs_it(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    place.add_run(train={"precision": "bf16"})
    run = load_run(place.runs_dir, "tiny")
    facts = FACTS | {"cards": [{"has_bf16": False}]}
    assert gpu_checks.check_bf16(subject(run=run), facts).verdict == PROBLEM


@pytest.mark.parametrize(("capability", "architectures", "runs"), [
    ((8, 0), ["sm_80"], True), ((8, 6), ["sm_80"], True), ((8, 0), ["sm_86"], False),
    ((9, 0), ["sm_80"], False), ((9, 0), ["compute_80"], True), ((12, 0), ["sm_120"], True),
    ((10, 0), ["sm_90a"], False), ((9, 0), ["sm_90a"], True), ((7, 0), ["compute_80"], False),
    ((10, 3), ["sm_100"], True), ((8, 0), ["gfx942"], False)])
def test_code_runs_on_the_gpus_it_was_built_for(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert runs_on(capability, architectures) is runs


def judged(name: str, found: list[Result]) -> Finding | None:
    return (load_tests.CHECKS | load_tests.SHARED_CHECKS)[name](found)


def test_the_speed_is_compared_with_the_peak_and_between_gpus() -> None:
    fast = judged("matrix products", results())
    assert fast.verdict == OK and fast.text == (
        "250 TFLOP/s in bfloat16, 80% of the peak of A100-40")
    weak = judged("matrix products", results(matmul=MATMUL | {"flops": 100e12}))
    assert weak.verdict == WARNING and "32% of the peak" in weak.text
    mixed = [*results()[:3], result(3, matmul=MATMUL | {"flops": 180e12})]
    slow = judged("matrix products", mixed)
    assert slow.verdict == WARNING and "GPU 3 much slower" in slow.text
    unknown_card = judged("matrix products", results(matmul=MATMUL | {"name": "Some card"}))
    assert unknown_card.verdict == OK and "peak" not in unknown_card.text
    for part in ("device", "matmul"):
        broken = [replace(each, errors={part: "RuntimeError: illegal"}) for each in results()]
        assert judged("matrix products", broken).verdict == PROBLEM


def test_only_heat_and_a_weak_supply_count_as_slowed_down() -> None:
    normal = judged("clocks", results())
    assert normal.verdict == OK and normal.text == "1,400 to 1,400 of 1,410 MHz under load, at" \
        " most 55 °C"
    hot = MATMUL["gpu"] | {"throttle_reasons": ["sw power cap", "hw thermal slowdown"]}
    slowed = judged("clocks", [*results()[:3], result(3, matmul=MATMUL | {"gpu": hot})])
    assert slowed.verdict == WARNING and "GPU 3 slowed down: hw thermal slowdown" in slowed.text


def test_the_bandwidth_is_that_of_nccl_tests() -> None:
    good = judged("all-reduce", results())
    assert good.verdict == OK and good.text.startswith("201 GB/s bus bandwidth, 4 processes")
    slow = judged("all-reduce", results(all_reduce=REDUCED | {"seconds": 0.5}))
    assert slow.verdict == WARNING
    wrong = judged("all-reduce", results(all_reduce=REDUCED | {"is_right": False}))
    assert wrong.verdict == PROBLEM and "wrong sums" in wrong.text
    assert judged("all-reduce", results()[:1]) is None


def without_exchange(began: float, **about: Any) -> list[Result]:
    return [*results()[:3], Result(3, found={"torch": FACTS}, began={"all_reduce": began}, **about)]


def test_an_exchange_that_fails_or_hangs_is_a_problem() -> None:
    failed = without_exchange(time.time(), errors={"all_reduce": "DistBackendError: NCCL"})
    assert judged("all-reduce", failed).verdict == PROBLEM
    assert "NCCL_DEBUG" in judged("all-reduce", failed).advice
    failed = without_exchange(time.time(), errors={"all_reduce": "RuntimeError: [../gloo/tcp]"})
    assert "GLOO_SOCKET_IFNAME" in judged("all-reduce", failed).advice
    late = without_exchange(0.0, ended="no answer within 25 s", is_late=True)
    hangs = judged("all-reduce", [replace(each, waited=20) for each in late])
    assert hangs.verdict == PROBLEM and "has not ended after 20 s" in hangs.text
    short = judged("all-reduce", [replace(each, waited=2) for each in late])
    assert short.verdict == WARNING and "could not be checked: no answer within 25 s" == short.text
    crashed = judged("all-reduce", [replace(late[3], rank=0, waited=20), *late[1:3], replace(
        late[3], ended="killed by SIGABRT", is_late=False, waited=20)])
    assert crashed.verdict == PROBLEM
    assert crashed.text == "all_reduce on rank 3: killed by SIGABRT"


def test_an_exchange_is_timed_by_the_clock_of_each_node() -> None:
    """The other node's clock is 100 s behind: by rank 0's, its process waits for 102 s."""
    now = time.time()
    late = [Result(rank, found={"torch": FACTS}, began={"all_reduce": now - rank * 100},
                   ended="no answer within 25 s", is_late=True, waited=2) for rank in range(2)]
    assert judged("all-reduce", late).verdict == WARNING


def test_the_time_that_a_process_waits_is_taken_when_it_is_read(tmp_path: Path) -> None:
    lines = [{"part": "torch", "began": time.time() - 90}, {"part": "torch", "found": FACTS},
             {"part": "device", "began": time.time() - 60}]
    (tmp_path / "out").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = load_tests.read_result(spec(tmp_path), "no answer", is_late=True)
    assert found.waited == pytest.approx(60, abs=30)
    assert found.stopped_in == "device" and found.hangs


def test_attention_and_peers() -> None:
    assert judged("attention", results()).text == "flash, in bf16"
    math = {"kernel": "math", "precision": "bf16", "of": "GPT-2 small"}
    assert judged("attention", results(attention=math)).verdict == WARNING
    refused = [Result(0, found={"torch": FACTS}, errors={"attention": "attention is x; set it"})]
    assert judged("attention", refused).verdict == PROBLEM
    assert judged("attention", refused).advice == "set it"
    assert judged("peer-to-peer", results()) is None
    assert judged("peer-to-peer", results(peers={"num_pairs": 12, "without": []})).verdict == OK
    apart = judged("peer-to-peer", results(peers={"num_pairs": 12, "without": [[0, 3], [3, 0]]}))
    assert apart.verdict == WARNING and "2 of 12 pairs" in apart.text and "0 and 3" in apart.text


def test_a_process_that_only_reports_has_no_results_of_load() -> None:
    facts_only = [Result(0, found={"torch": FACTS}, began={"torch": 1.0})]
    found = {name: judged(name, facts_only) for name in
             (load_tests.CHECKS | load_tests.SHARED_CHECKS)}
    assert [name for name, finding in found.items() if finding] == ["PyTorch"]


def spec(tmp_path: Path, **changes: Any) -> Spec:
    return Spec(**{
        "output": str(tmp_path / "out"), "rank": 0, "world_size": 1, "local_rank": 0,
        "num_gpus": 0, "store": "", "name": "", "is_loading": True, "runs_dir": str(tmp_path),
        "run_name": None, "seconds": 10.0} | changes)


def test_a_process_tells_what_it_finds_part_by_part(tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_process, "MATMUL_SIZE_ON_CPU", 32)
    monkeypatch.setattr(load_process, "MATMUL_SECONDS", 0.001)
    monkeypatch.setattr(load_process, "attention", lambda *_: 1 / 0)
    load_process.main(spec(tmp_path))
    found = load_tests.read_result(spec(tmp_path), "")
    assert list(found.found) == ["import", "torch", "device", "matmul"]
    assert found.errors == {"attention": "ZeroDivisionError: division by zero"}
    assert set(found.began) == {"import", "torch", "device", "attention", "matmul"}
    assert found.found["matmul"]["flops"] > 0 and found.found["torch"]["version"]


def test_the_exchange_is_tried_over_gloo_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training with NCCL waits in a group of gloo, whose connections are others."""
    groups, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: (
        groups.append(dist.get_backend(group) if group else None), all_reduce(tensor, group=group)))
    alone = Process(0, 0, 1, torch.device("cpu"))
    found = load_process.all_reduce(spec(tmp_path, store=str(tmp_path / "store")), alone)
    dist.destroy_process_group()
    assert found["is_right"] and groups[-1] == "gloo" and set(groups[:-1]) == {None}


@pytest.mark.parametrize("changes", [{"num_gpus": 3}, {"is_loading": False}])
def test_gpus_in_use_and_others_than_the_drivers_are_not_loaded(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    load_process.main(spec(tmp_path, **changes))
    assert set(load_tests.read_result(spec(tmp_path), "").began) == {"import", "torch"}


def test_pairs_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda i, j: {i, j} != {0, 2})
    assert load_process.unreachable_peers(3) == {"num_pairs": 6, "without": [(0, 2), (2, 0)]}


def test_cuda_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlSystemGetCudaDriverVersion_v2", lambda: 12080)
    assert load_process._driver_cuda() == "12.8"
