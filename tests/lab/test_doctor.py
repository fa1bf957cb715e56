"""`lab doctor`: the command and its report, GPUs, load tests, host, run, several nodes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections import namedtuple
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from basics import machine
from basics.errors import UserError
from basics.gpu_readings import GIB, GpuReading, read_gpus
from lab.doctor import doctor, load_process, machine_checks, run_checks
from lab.doctor.doctor import print_checks
from lab.doctor.load_tests import PARTS, Outcome, check_load, load_tests
from lab.doctor.machine_checks import (
    NO_ANSWER,
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Subject,
    compare_gpus,
    in_use,
    make_checks,
    ok,
    visible_gpus,
)
from processes.distributed import Process
from run_config import load_run
from tests.support.hub_server import (
    Fault,
    Hub,
    serving,
    tokens_hub_fixture,  # noqa: F401
    used_in_this_process,
)
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab
from tests.support.stand_ins import H100, FakeNvml, refused_network
from tests.support.workplace import PROJECT_DIR, Workplace

A100 = "NVIDIA A100-SXM4-40GB"
GPU = GpuReading(
    name=A100,
    memory_used_gib=0.5,
    memory_total_gib=40.0,
    use_percent=0,
    temperature_c=31,
    uncorrected_ecc_errors=0,
    driver_version="550.54.15",
)
GPUS = tuple(replace(GPU, uuid=f"GPU-{number}aaa0000") for number in range(4))
FACTS = {"version": "2.11.0", "num_gpus": 4, "problem": ["", ""]}
PRODUCTS = {"flops": 250e12, "dtype": "bfloat16", "gpu": A100}
REDUCED = {"backend": "nccl", "bytes": 2**28, "seconds": 0.002, "is_right": True, "world_size": 4}
FOUND = dict(zip(PARTS, (FACTS, PRODUCTS, REDUCED), strict=True))
NOW = 1000.0
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path)


@pytest.fixture
def ready(place):
    """A workplace with a run and its dataset."""
    place.add_run()
    place.add_dataset()
    return place


def subject(place, *, train=None, model=None, **about):
    """Return the tiny run, changed, on a CPU with 100 GiB."""
    place.add_run(train=train, model=model)
    return Subject(
        place.runs_dir,
        place.datasets_dir,
        "tiny",
        run=load_run(place.runs_dir, "tiny"),
        **{"available_gib": 100.0} | about,
    )


def checks_of(about):
    return make_checks(run_checks.RUN_CHECKS, about)


def outcome(last=PARTS[-1], began=20.0, **changes):
    """Return what a process found that did not end the last part, begun this many seconds ago."""
    parts = {
        part: {"begun": NOW - began, "found": FOUND[part] | changes}
        for part in PARTS[: PARTS.index(last) + 1]
    }
    parts[last].pop("found")
    return Outcome(parts)


class Stand:
    """A machine with these GPUs, whose load tests end with this; no disk is measured."""

    def __init__(self, monkeypatch):
        self.outcomes, self.gpus = [Outcome(end="ImportError: x")], []
        self.pid, self.busy = None, []

        def tests(subject):
            self.busy.append(subject.busy)
            return self.outcomes

        monkeypatch.setattr(doctor, "load_tests", tests)
        monkeypatch.setattr(doctor, "read_gpus", lambda: self.gpus)
        monkeypatch.setattr(doctor, "trained_by", lambda _: self.pid)
        monkeypatch.setattr(machine_checks, "TEST_BYTES", 2**10)
        monkeypatch.setattr("lab.doctor.load_tests.time", SimpleNamespace(time=lambda: NOW))


@pytest.fixture
def stand(monkeypatch):
    return Stand(monkeypatch)


def report_of(output):
    """Return the checks by their names, from the JSON document."""
    (report,) = checked(output).reports
    return {check.name: check for check in report.checks}


# --- the command


def test_a_machine_without_gpus_is_fit_to_train_a_run(ready, monkeypatch):
    """All of it is real: two processes multiply matrices and exchange data."""
    monkeypatch.setattr(
        machine_checks, "CHECK_SECONDS", 200.0
    )  # others may keep disk and cores busy
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 200.0)
    before = ready.files()
    result = run_lab("doctor", *ready.arguments("tiny", "--json", "--time-limit", "200"))
    assert result.exit_code == 0, result.output
    found = report_of(result.stdout)
    assert found["GPUs"].verdict == WARNING
    assert {
        found[name].verdict
        for name in (  # the disk may be slow
            "PyTorch",
            "matrix products",
            "all-reduce",
            "configs",
            "dataset",
            "batch",
        )
    } == {OK}, found
    assert not {"nodes", "disk of datasets"} & found.keys()
    assert "2 processes, gloo" in found["all-reduce"].text
    assert "GFLOP/s" in found["matrix products"].text and "MB/s" in found["disk of runs"].text
    assert ready.files() == before


def test_wrong_configs_and_a_failed_import_are_not_fit(ready, stand):
    (ready.runs_dir / "tiny" / "train.json").write_text("{}")
    result = run_lab("doctor", *ready.arguments("tiny", "--json"))
    found = report_of(result.stdout)
    assert result.exit_code == 1 and found["configs"].verdict == PROBLEM and "dataset" not in found
    assert found["PyTorch"].verdict == PROBLEM and "ImportError" in found["PyTorch"].text
    line = error_line(run_lab("doctor", *ready.arguments("other")))
    assert "no such run" in line and "tiny" in line


def test_beside_a_training_nothing_is_loaded(ready, stand):
    run_lab("doctor", *ready.arguments("tiny"))
    stand.pid = 7
    found = report_of(run_lab("doctor", *ready.arguments("tiny", "--json")).output)
    assert list(map(bool, stand.busy)) == [False, True]
    assert found["use"].text.startswith("tiny is being trained by process 7: the tests")


@pytest.mark.parametrize(
    ("used_gib", "is_trained", "status"),
    [(38.0, False, 1), (38.99, True, 0), (2.0, False, 0), (None, False, 0)],
)
def test_a_gpu_whose_memory_others_have_taken_is_not_fit(
    place, stand, monkeypatch, used_gib, is_trained, status
):
    """A process that a killed run has left; beside a training of the run itself all is well."""
    place.add_dataset()
    place.add_run(
        "large",
        model={"emb_dim": 768, "n_heads": 12, "n_layers": 12},
        train={"microbatch_size": 8, "compile": False},
    )
    stand.gpus = [GPU, replace(GPU, memory_used_gib=used_gib)]
    stand.outcomes = [outcome(num_gpus=2, began=1.0)]
    stand.pid = 7 if is_trained else None
    monkeypatch.setattr(doctor, "available_ram_gib", lambda: 100.0)
    result = run_lab("doctor", *place.arguments("large", "--json"))
    found = report_of(result.stdout)["microbatch"]
    assert result.exit_code == status, result.output
    assert found.verdict == (PROBLEM if status else OK)
    assert status == 0 or ("GPU 1 has 2.00 GiB free" in found.text and "nvidia-smi" in found.advice)


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        ("read_gpus", "GPUs", "the driver does not answer"),
        ("load_run", "configs", "no answer within 0.1 s"),
    ],
)
def test_a_driver_or_a_disk_that_never_answers_is_no_hang(
    ready, stand, monkeypatch, function, name, text
):
    forever = threading.Event()
    monkeypatch.setattr(doctor, function, lambda *_: forever.wait())
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 0.1)
    result = run_lab("doctor", *ready.arguments("tiny", "--json"))
    forever.set()
    found = report_of(result.stdout)[name]
    assert result.exit_code == 1 and found.verdict == PROBLEM and text in found.text


def test_a_check_that_raises_or_hangs_stops_no_other(place, monkeypatch):
    forever = threading.Event()
    monkeypatch.setattr(machine_checks, "CHECK_SECONDS", 1.0)

    def failing(error, _):
        raise error

    found = make_checks(
        {
            "raises": partial(failing, ZeroDivisionError("by zero")),
            "refuses": partial(failing, UserError("no; yes")),
            "hangs": lambda _: forever.wait() and None,
            "nothing": lambda _: None,
            "works": lambda _: ok("well"),
        },
        Subject(place.runs_dir, place.datasets_dir),
    )
    forever.set()
    assert {name: (one.verdict, one.text) for name, one in found.items()} == {
        "raises": (WARNING, "could not be checked: ZeroDivisionError: by zero"),
        "refuses": (PROBLEM, "no"),
        "hangs": (PROBLEM, "no answer within 1 s"),
        "works": (OK, "well"),
    }
    assert found["refuses"].advice == "yes"


def test_a_report_fits_the_terminal_and_obeys_no_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    show = click.Command(
        "show",
        callback=lambda: print_checks(
            {
                "a name": Finding(WARNING, "a word " * 30, "do " * 40),
                "x": Finding(PROBLEM, "bad \x1b[2J", "mend it"),
            },
            "tiny",
        ),
    )
    plain, colored = (CliRunner().invoke(show, color=color).output for color in (False, True))
    assert max(map(len, plain.splitlines())) <= 60 and "-> mend it" in plain
    assert plain.endswith("not fit to train tiny: 1 problem, 1 warning\n")
    assert r"bad \x1b[2J" in plain and "\x1b[2J" not in colored
    assert "\x1b[31m" in colored and click.unstyle(colored) == plain


# --- GPUs


@pytest.fixture
def install(monkeypatch):
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("-1", []),
        ("GPU-2aaa", [2]),
        ("GPU-2aaa0000,0", [2, 0]),
    ],
)
def test_hidden_gpus_are_those_that_cuda_hides(variable, found):
    assert visible_gpus(GPUS, variable) == [GPUS[number] for number in found]


@pytest.mark.parametrize("variable", [None, "0", "GPU-whole", "MIG-second,MIG-first"])
def test_a_part_of_a_gpu_has_its_own_readings(install, variable):
    """Others use the rest of the card, which is none of ours."""
    parts = {
        name: {
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "nvmlDeviceGetUUID": name,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=GIB // 10, total=10 * GIB),
        }
        for name in ("MIG-first", "MIG-second")
    }
    nvml = FakeNvml({"GPU-whole": H100 | {"nvmlDeviceGetUUID": "GPU-whole"}} | parts)
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda handle, index: nvml.nvmlDeviceGetHandleByUUID(
        ["none", *parts, "none"][min(index, 3)]
    )
    install(nvml)
    whole, *_ = read_gpus(["GPU-whole"])
    assert in_use([whole])
    (found,) = visible_gpus([whole], variable)
    assert found.name.endswith("MIG 1g.10gb") and found.memory_total_gib == 10
    assert not in_use([found])
    assert found.uuid == ("MIG-second" if variable and "MIG" in variable else "MIG-first")


def test_a_gpu_that_others_use_is_found():
    assert in_use(GPUS) == "" and in_use([GpuReading()]) == ""
    assert in_use([GPU, replace(GPU, use_percent=98)]) == "in use: GPU 1 (0.5 GiB, 98%)"
    assert in_use([replace(GPU, memory_used_gib=38)]) == "in use: GPU 0 (38.0 GiB, 0%)"


NO_GPUS = {"gpus": (), "all_gpus": ()}
READINGS = {  # what the driver sees, what PyTorch says: the verdict, and a part of the text
    "all is well": ({}, {}, OK, f"4 x {A100}; driver 550.54.15"),
    "PyTorch sees fewer": ({}, {"num_gpus": 3}, PROBLEM, "PyTorch 2.11.0 sees 3"),
    "PyTorch fails": (
        {},
        {"problem": ["the NVIDIA driver is too old for it", "take"]},
        PROBLEM,
        "PyTorch 2.11.0 cannot use them: the NVIDIA driver is too old",
    ),
    "PyTorch without CUDA": (
        {},
        {"version": "2.11.0+cpu", "num_gpus": 0},
        PROBLEM,
        "PyTorch 2.11.0+cpu sees 0",
    ),
    "hidden": (
        {"gpus": GPUS[:2], "num_processes": 2},
        {"num_gpus": 2},
        WARNING,
        "2 of 4 are hidden by CUDA_VISIBLE_DEVICES",
    ),
    "one is lost": ({"gpus": (*GPUS[:3], GpuReading())}, {}, PROBLEM, "does not answer"),
    "two kinds": (
        {"gpus": (*GPUS[:3], replace(GPU, name="NVIDIA L4"))},
        {},
        WARNING,
        "1 x NVIDIA L4",
    ),
    "no GPU": (
        NO_GPUS | {"nvml_failure": "Driver Not Loaded"},
        {"num_gpus": 0},
        WARNING,
        "none (Driver Not Loaded)",
    ),
    "all hidden": ({"gpus": (), "num_processes": 1}, {"num_gpus": 0}, WARNING, "4 of 4 are hidden"),
    "no driver library": (
        NO_GPUS | {"nvml_failure": "Not Found"},
        {},
        WARNING,
        "none (Not Found): PyTorch sees 4, which are not tested",
    ),
    "dead driver": (NO_GPUS | {"nvml_failure": NO_ANSWER}, None, PROBLEM, "does not answer"),
}


@pytest.mark.parametrize("case", READINGS)
def test_what_the_driver_and_pytorch_see_is_compared(case):
    about, changes, verdict, text = READINGS[case]
    found = compare_gpus(
        Subject(
            Path("runs"),
            Path("datasets"),
            **{"all_gpus": GPUS, "gpus": GPUS, "num_processes": 4} | about,
        ),
        {} if changes is None else FACTS | changes,
    )
    assert found.verdict == verdict and text in found.text, found
    assert bool(found.advice) == (verdict != OK)


def test_lost_data_of_a_gpus_memory_is_told(place):
    about = Subject(place.runs_dir, place.datasets_dir, gpus=GPUS)
    assert machine_checks.check_ecc(about) is None
    found = machine_checks.check_ecc(
        replace(about, gpus=(GPU, replace(GPU, uncorrected_ecc_errors=2)))
    )
    assert found.verdict == WARNING and found.text == "GPU 1: 2 uncorrected errors"


# --- the tests that load them

ALL_FOUND = Outcome({part: {"begun": 0.0, "found": found} for part, found in FOUND.items()})


def changed(part, **changes):
    return Outcome(ALL_FOUND.parts | {part: {"begun": 0.0, "found": FOUND[part] | changes}})


def failed(part, error):
    return Outcome(ALL_FOUND.parts | {part: {"begun": 0.0, "error": error}})


def crashed(part, end="killed by SIGABRT"):
    return Outcome(outcome(part).parts, end)


ON_CPU = Outcome(
    {"PyTorch": {"begun": 0.0, "found": FACTS | {"num_gpus": 0}}, "matrix products": {"begun": 0.0}}
)
JUDGED = {  # the part, the others and the last process: the verdict, parts of text and advice
    "speed": (
        "matrix products",
        ALL_FOUND,
        ALL_FOUND,
        OK,
        "250 TFLOP/s in bfloat16, 80% of the peak of A100-40",
        "",
    ),
    "weak": (
        "matrix products",
        *[changed("matrix products", flops=100e12)] * 2,
        WARNING,
        "32% of the peak",
        "nvidia-smi",
    ),
    "one is slow": (
        "matrix products",
        ALL_FOUND,
        changed("matrix products", flops=180e12),
        WARNING,
        "GPU 3 much slower",
        "nvidia-smi",
    ),
    "bandwidth of nccl-tests": (
        "all-reduce",
        ALL_FOUND,
        ALL_FOUND,
        OK,
        "201 GB/s bus bandwidth, 4 processes",
        "",
    ),
    "slow exchange": (
        "all-reduce",
        ALL_FOUND,
        changed("all-reduce", seconds=0.5),
        WARNING,
        "0.805 GB/s",
        "NVLink",
    ),
    "wrong sums": (
        "all-reduce",
        ALL_FOUND,
        changed("all-reduce", is_right=False),
        PROBLEM,
        "gives wrong sums",
        "another one",
    ),
    "NCCL": (
        "all-reduce",
        ALL_FOUND,
        failed("all-reduce", "DistBackendError: NCCL"),
        PROBLEM,
        "failed on rank 3",
        "NCCL_DEBUG",
    ),
    "no code for the GPU": (
        "matrix products",
        ALL_FOUND,
        failed("matrix products", "AcceleratorError: CUDA error: no kernel image is available"),
        PROBLEM,
        "no kernel image",
        "https://pytorch.org",
    ),
    "the exchange hangs": (
        "all-reduce",
        ALL_FOUND,
        outcome(),
        PROBLEM,
        "on rank 3 after 20 s",
        "NCCL_DEBUG",
    ),
    "its last process has just come": (
        "all-reduce",
        outcome(),
        outcome(began=2.0),
        WARNING,
        "not ended in time",
        "--time-limit",
    ),
    "a GPU hangs": (
        "matrix products",
        ALL_FOUND,
        outcome("matrix products"),
        PROBLEM,
        "on rank 3 after 20 s",
        "take another one",
    ),
    "a CPU is slow": (
        "matrix products",
        ON_CPU,
        ON_CPU,
        WARNING,
        "not ended in time",
        "--time-limit",
    ),
    "the exchange crashes": (
        "all-reduce",
        outcome(),
        crashed("all-reduce"),
        PROBLEM,
        "failed on rank 3: killed by SIGABRT",
        "NCCL_DEBUG",
    ),
    "it crashed before": (
        "all-reduce",
        outcome(),
        crashed("matrix products"),
        WARNING,
        "rank 3 has not come to it",
        "--time-limit",
    ),
    "cannot be imported": (
        "PyTorch",
        Outcome(),
        Outcome(end="ImportError: no libcudart"),
        PROBLEM,
        "rank 3: ImportError: no libcudart",
        "reinstall-package torch",
    ),
}


@pytest.mark.parametrize("case", JUDGED)
def test_what_four_processes_find_and_how_they_end_gets_its_verdict(stand, case):
    name, others, last, verdict, text, advice = JUDGED[case]
    found = check_load([others] * 3 + [last])[name]
    assert found.verdict == verdict and text in found.text and advice in found.advice, found


def test_a_process_tells_what_it_finds_and_loads_only_what_it_should(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(load_process, "MATMUL_SIZE_ON_CPU", 32)
    monkeypatch.setattr(load_process, "MATMUL_SECONDS", 0.001)

    def parts_of(**changes):
        load_process.main(
            tmp_path,
            SimpleNamespace(**{"num_gpus": 0, "is_loading": True, "seconds": 10.0} | changes),
        )
        with (tmp_path / "0").open("a") as file:
            file.write('{"part": "matr')  # cut off by a kill
        found = Outcome.read(tmp_path / "0", SimpleNamespace(poll=lambda: 0)).parts
        (tmp_path / "0").unlink()
        return found

    assert list(parts_of()) == list(PARTS[:2])
    assert list(parts_of(num_gpus=3)) == list(parts_of(is_loading=False)) == ["PyTorch"]
    monkeypatch.setattr(load_process, "matrix_products", lambda _: 1 / 0)
    found = parts_of()
    assert list(found) == list(PARTS[:2])
    assert found["matrix products"]["error"] == "ZeroDivisionError: division by zero"


def of_this_test():
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "lab.doctor.load_process" in (process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("DOCTORS_TEST") == str(os.getpid())
    ]


@pytest.mark.parametrize("is_dead", [True, False])
def test_processes_that_hang_or_die_are_told_and_ended(place, monkeypatch, is_dead):
    monkeypatch.setenv("DOCTORS_TEST", str(os.getpid()))
    if is_dead:
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
    about = Subject(place.runs_dir, place.datasets_dir, time_limit=60.0 if is_dead else 0.1)
    processes = load_tests(about)  # torch needs longer than a tenth of a second
    assert any(process.end for process in processes) == is_dead
    assert check_load(processes)["PyTorch"].verdict == (PROBLEM if is_dead else WARNING)
    assert of_this_test() == []


def test_a_wrong_sum_is_seen(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(1.001))
    found = load_process.all_reduce(
        Process(0, 0, 1, torch.device("cpu")), dist.HashStore(), timedelta(seconds=10)
    )
    dist.destroy_process_group()
    assert not found["is_right"]


# --- the machine


@pytest.mark.parametrize(("available", "verdict"), [(100, OK), (20, WARNING), (10, PROBLEM)])
def test_ram_is_compared_with_what_processes_and_snapshot_need(place, available, verdict):
    found = run_checks.check_ram(
        subject(place, gpus=GPUS * 2, num_processes=8, world_size=8, available_gib=available)
    )
    assert found.verdict == verdict and "24.5" in found.text  # 8 times 3, and a block


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    unlimited = machine.available_ram_gib()
    for name, text in {
        "memory.max": "max",
        "memory.current": "5",
        "memory.stat": "inactive_file 1\nactive_file 2\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert machine.available_ram_gib() == pytest.approx(unlimited, rel=0.2)
    (tmp_path / "memory.max").write_text(str(2**20 + 2))
    assert machine.available_ram_gib() == 2**20 / 2**30


@pytest.mark.parametrize(("free", "verdict"), [(2**30, OK), (2**29, WARNING), (2**26, PROBLEM)])
def test_shared_memory_must_suffice_for_all_processes(place, monkeypatch, free, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**34, 0, free))
    about = Subject(place.runs_dir, place.datasets_dir, num_processes=8)
    assert machine_checks.check_shared_memory(about).verdict == verdict
    assert machine_checks.check_shared_memory(replace(about, num_processes=1)) is None


def test_a_host_name_without_an_address_is_a_problem(place, monkeypatch):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    about = Subject(place.runs_dir, place.datasets_dir)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert machine_checks.check_host_name(about).verdict == OK
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = machine_checks.check_host_name(about)
    assert found.verdict == PROBLEM and found.advice == (
        'add "ADDRESS box" to /etc/hosts, with the address that others reach'
    )
    monkeypatch.setenv("RANK", "0")
    assert machine_checks.check_host_name(about) is None


COMPILERS = {  # CC, what is installed, train.json: the verdict, and a part of the text
    "gcc": (None, ["gcc", "clang"], {}, OK, "gcc"),
    "named": ("icx", ["icx"], {}, OK, "icx"),
    "none": (None, [], {}, PROBLEM, "no gcc or clang: the"),
    "another is named": ("icx", ["gcc"], {}, PROBLEM, "no icx: the"),
    "nothing is compiled": (None, [], {"compile": False}, None, ""),
}


@pytest.mark.parametrize("case", COMPILERS)
def test_a_compiler_is_missed_where_the_step_is_compiled(place, tmp_path, monkeypatch, case):
    named, installed, train, verdict, text = COMPILERS[case]
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    if named:
        monkeypatch.setenv("CC", named)
    about = subject(place, train={"compile": None} | train, gpus=GPUS)
    found = machine_checks.check_compiler(about)
    assert (found and found.verdict) == verdict and (not found or text in found.text)
    assert machine_checks.check_compiler(replace(about, gpus=())) is None
    if verdict == OK:
        (tmp_path / "Python.h").unlink()
        assert machine_checks.check_compiler(about).text.startswith(f"no {tmp_path}/Python.h")


def test_a_place_for_compiled_code_is_needed_from_which_it_can_run(place, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    about = subject(place)
    assert machine_checks.check_caches(about) == ok(str(tmp_path / ".cache/ddp-train/inductor"))
    flags = SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    found = machine_checks.check_caches(about)
    assert found.verdict == WARNING and "set TORCHINDUCTOR_CACHE_DIR" in found.advice
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    found = machine_checks.check_caches(about)
    assert found.verdict == PROBLEM and "neither the home directory" in found.text


DISKS = {  # seconds to write, an error, file system, bytes free: verdict, part of the text
    "fast": (0.01, None, "ext4", 1e9, OK, "writes 3,355 MB/s"),
    "slow": (5.0, None, "ext4", 1e9, WARNING, "writes 7 MB/s"),
    "lost with the container": (0.01, None, "overlay", 1e9, WARNING, "the container's own layer"),
    "fails": (
        0.01,
        OSError(5, "Input/output error"),
        "ext4",
        1e9,
        PROBLEM,
        "writing fails: Input/out",
    ),
}


@pytest.mark.parametrize("case", DISKS)
def test_a_disk_gets_its_verdict_and_nothing_is_left_on_it(place, monkeypatch, case):
    seconds, error, file_system, free, verdict, text = DISKS[case]
    clock, written = [0.0], []

    def fsync(descriptor):
        written.append(os.fstat(descriptor).st_size)
        clock[0] += seconds
        if error:
            raise error

    about = subject(place)
    monkeypatch.setattr(machine_checks.os, "fsync", fsync)
    monkeypatch.setattr(machine_checks.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
    monkeypatch.setattr(
        machine_checks.psutil,
        "disk_partitions",
        lambda all: [
            SimpleNamespace(mountpoint="/", fstype="overlay" if file_system == "ext4" else "ext4"),
            SimpleNamespace(mountpoint=str(place.root), fstype=file_system),
        ],
    )
    before = place.files()
    found = machine_checks.check_runs_disk(about)
    assert found.verdict == verdict and text in found.text and bool(found.advice) == (verdict != OK)
    assert written in ([], [machine_checks.TEST_BYTES]) and place.files() == before


# --- the run


def test_the_runs_own_things(place):
    place.add_dataset()
    found = checks_of(subject(place, num_processes=2, world_size=2))
    assert {check.verdict for check in found.values()} == {OK}
    assert found["dataset"].text.endswith("has 4,000 training tokens")
    assert found["batch"].text == "microbatch 2 x accumulation 2 x 2 processes = 8 sequences"
    assert "at most 3 are kept" in found["checkpoints"].text and "needs about" in found["RAM"].text


WRONG = {  # train.json: the check, its verdict, and a part of the text
    "no dataset": ({"dataset": "other"}, "dataset", PROBLEM, "no dataset there"),
    "no set": (
        {"validation": {"own": "tiny", "far": "far"}},
        "dataset",
        PROBLEM,
        "validation set far: .*far/validation.safetensors is not there",
    ),
    "made here": ({"dataset": "python-stdlib"}, "dataset", OK, "is made from Python's own"),
    "too short": ({"min_train_tokens": 10**6}, "batch", PROBLEM, "wanted 1,000,065"),
    "uneven": (
        {"global_batch_size": 7, "gradient_accumulation_steps": None},
        "batch",
        PROBLEM,
        "is not divisible",
    ),
    "no price": ({"max_cost_usd": 5.0}, "configs", WARNING, "needs the machine's price"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_run_is_found(place, case):
    train, name, verdict, text = WRONG[case]
    place.add_dataset()
    found = checks_of(subject(place, train=train, world_size=2))[name]
    assert found.verdict == verdict and re.search(text, found.text), found
    assert bool(found.advice) == (verdict != OK)


@pytest.mark.parametrize(("size", "verdict"), [(16, OK), (76, WARNING), (200, PROBLEM)])
def test_a_microbatch_is_compared_with_the_memory_of_a_gpu(place, size, verdict):
    gpt2 = {
        "vocab_size": 50257,
        "context_length": 1024,
        "emb_dim": 768,
        "n_heads": 12,
        "n_layers": 12,
        "drop_rate": 0.0,
    }
    found = run_checks.check_microbatch(
        subject(
            place,
            model=gpt2,
            train={"microbatch_size": size, "precision": None},
            gpus=GPUS * 2,
            num_processes=8,
            world_size=8,
            is_training=True,
        )
    )
    assert found.verdict == verdict and "of the 38.2 GiB of a GPU" in found.text


def test_room_for_one_checkpoint_and_for_all(place, monkeypatch):
    about = subject(place)
    size = run_checks.estimate.bytes_of_checkpoint(about.run)
    for free, verdict in ((size - 1, PROBLEM), (size * 2, WARNING), (size * 100, OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free, 0, free))
        assert run_checks.check_checkpoints(about).verdict == verdict


# --- the network


def test_nothing_is_asked_of_the_network_unasked(place, tmp_path):
    with refused_network(tmp_path / "log"):
        place.add_dataset("someone/tokens")
        here = subject(place, train={"dataset": "someone/tokens"})  # on this machine already
        assert checks_of(here)["dataset"].verdict == OK
    assert not (tmp_path / "log").exists()


def test_a_dataset_of_the_hub_is_looked_up(place, tmp_path, tokens_hub, monkeypatch):
    monkeypatch.setattr(run_checks, "ASK_SECONDS", 60.0)  # a loaded machine may need seconds
    with used_in_this_process(tokens_hub, tmp_path / "home"):
        found = checks_of(subject(place, train={"dataset": "someone/tokens"}))
        assert found["dataset"].verdict == OK, found["dataset"]
        assert "someone/tokens is on the hub" in found["dataset"].text
        assert not tokens_hub.downloads("train.safetensors")
        shutil.rmtree(place.runs_dir)
        missing = checks_of(subject(place, train={"dataset": "someone/else"}))
        assert missing["dataset"].verdict == PROBLEM and missing["dataset"].advice


def test_a_hub_that_does_not_answer_is_no_hang(place, tmp_path):
    hub = Hub({})
    hub.endpoint = "http://127.0.0.1:9"
    with used_in_this_process(hub, tmp_path / "home"):
        found = checks_of(subject(place, train={"dataset": "someone/tokens"}))["dataset"]
    assert found.verdict == PROBLEM and "check the network" in found.advice


def test_a_token_is_never_shown(place, tmp_path, monkeypatch):
    token = "hf_marker0123456789"
    hub = Hub(
        {},
        faults=[
            Fault(
                "/api/datasets",
                times=-1,
                status=400,
                headers={"X-Error-Message": f"Bearer {token}", "X-Request-Id": token},
            )
        ],
    )
    with serving(hub), used_in_this_process(hub, tmp_path / "home"):
        monkeypatch.setenv("HF_TOKEN", token)
        found = checks_of(subject(place, train={"dataset": "someone/tokens"}))["dataset"]
    assert found.verdict == PROBLEM and token not in json.dumps(found)


# --- several nodes


@pytest.mark.thorough
def test_two_nodes_print_a_report_each_and_add_up_numbers_together(ready):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launches = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                "--nproc-per-node=2",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{port}",
                "--local-addr=127.0.0.1",
                f"--log-dir={os.devnull}",
                "-m",
                "lab",
                *ready.arguments("doctor", "tiny", "--json", "--time-limit", "200"),
            ],
            cwd=PROJECT_DIR,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for launch in launches:
        output, errors = launch.communicate(timeout=400)
        assert launch.returncode == 0, errors
        found = report_of(output)
        assert {
            found[name].verdict for name in ("nodes", "all-reduce", "all-reduce of all nodes")
        } == {OK}
        assert "4 processes, gloo" in found["all-reduce of all nodes"].text
        assert "x 4 processes" in found["batch"].text


def test_only_the_first_process_of_a_node_reports(ready, monkeypatch):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    result = run_lab("doctor", *ready.arguments("tiny"))
    assert (result.exit_code, result.output) == (0, "")


@pytest.fixture
def nodes(monkeypatch):
    """Set this process among others, which tell these things; return its checks."""

    def check(*others, world_size, work=lambda: REDUCED, time_limit=30.0):
        store = dist.HashStore()
        for rank, other in enumerate(others, start=1):
            store.set(
                f"process/{rank}",
                json.dumps(
                    {"node": 1, "is_busy": False}
                    | other
                    | {"versions": versions | other.get("versions", {})}
                ),
            )
        for name, value in ("RANK", 0), ("WORLD_SIZE", world_size), ("GROUP_RANK", 0):
            monkeypatch.setenv(name, str(value))
        for name, value in {
            "open_torchrun_store": lambda: store,
            "all_reduce": lambda *_: work(),
            "MEET_SECONDS": 0.1,
            "code_digest": lambda: "abc",
            "this_process": lambda: SimpleNamespace(device=torch.device("cpu")),
        }.items():
            monkeypatch.setattr(load_process, name, value)
        return load_process.check_nodes(is_busy=False, time_limit=time_limit)

    versions = {
        "PyTorch": torch.__version__,
        "the project's code": "abc",
        "Python": ".".join(map(str, sys.version_info[:2])),
    }
    return check


def test_nodes_are_compared_and_one_that_does_not_come_is_named(nodes):
    found = nodes({}, {}, world_size=3)
    assert found["nodes"].text == "PyTorch, the project's code, Python: the same on all"
    assert found["all-reduce of all nodes"].verdict == OK
    found = nodes({"versions": {"the project's code": "def"}}, world_size=2)["nodes"]
    assert found.verdict == PROBLEM and "differs" in found.text and "on node 1" in found.text
    found = nodes({"is_busy": True}, world_size=2)
    assert "because of node 1" in found["all-reduce of all nodes"].text
    found = nodes({}, world_size=3, time_limit=0.2)
    assert list(found) == ["nodes"] and found["nodes"].verdict == PROBLEM
    assert found["nodes"].text == "no answer from rank 2"
    for work, limit, text in (
        (lambda: 1 / 0, 30.0, "ZeroDivisionError"),
        (lambda: threading.Event().wait(30), 0.2, "has not ended after 0.2 s"),
    ):
        found = nodes({}, world_size=2, work=work, time_limit=limit)["all-reduce of all nodes"]
        assert found.verdict == PROBLEM and text in found.text and "NCCL_DEBUG" in found.advice


def test_a_wheels_code_is_that_of_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "gpt.py").write_text("")
    monkeypatch.setattr(machine, "PROJECT_DIR", tmp_path)
    before = machine.code_digest()
    (tmp_path / "six.py").write_text("")  # installed among the modules of other packages
    assert machine.code_digest() == before
    assert {path.name for path in PROJECT_DIR.glob("*.py")} <= set(machine.SOURCES)
