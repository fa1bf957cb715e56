"""`lab doctor`: the verdict on each reading, how readings are taken, the command and its report."""

import json
import os
import shutil
import sys
import threading
from collections import namedtuple
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import click
import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from basics.errors import UserError
from basics.gpu_readings import GpuReading
from lab.doctor import all_reduce, checks, doctor
from lab.doctor.checks import (
    CHECKS,
    NO_ANSWER,
    OK,
    PROBLEM,
    WARNING,
    WRONG_SUM,
    AllReduce,
    Check,
    Clock,
    Dataset,
    Disk,
    Driver,
    Finding,
    Gpus,
    HostMemory,
    Judgement,
    Network,
    RunMemory,
    Seen,
    Subject,
    TorchFacts,
    make_checks,
    read_all_reduce,
    visible_gpus,
)
from processes.distributed import Process
from run_config import load_run
from tests.support.hub_server import (
    Hub,
    serving,
    tokens_hub_fixture,  # noqa: F401
    used_in_this_process,
)
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab
from tests.support.workplace import Workplace

GPU = GpuReading(
    name="NVIDIA A100-SXM4-40GB",
    memory_used_gib=0.5,
    memory_total_gib=40.0,
    use_percent=0,
    driver_version="580.1",
)
GPUS = tuple(replace(GPU, uuid=f"GPU-{number}aaa0000") for number in range(4))
TORCH = TorchFacts("2.15.0", "13.0", 4)
BROKEN_TORCH = replace(TORCH, cause="the driver is too old", remedy="take another one")
FAILED = AllReduce(failure="rank 3: DistBackendError: NCCL error")
REDUCED = AllReduce(4, "nccl", 200e9)
PLAN = SimpleNamespace(microbatch_size=8, gradient_accumulation_steps=2, world_size=4)
READY = Dataset("someone/tokens is on the hub", 20 * 10**9, 30 * 10**9)
HERE = Dataset("datasets/tiny has 4,000 training tokens")
HUB = Network("huggingface.co", 0.2, 80e6)

JUDGED = {  # the check, its reading: the verdict, a part of the text and one of the advice
    "driver": [
        (Driver("580.1", None, TORCH), OK, "580.1; PyTorch 2.15.0 for CUDA 13.0", ""),
        (Driver(None, "Not Found", TORCH), WARNING, "none (Not Found)", "--gpus all"),
        (Driver(None, NO_ANSWER, TORCH), PROBLEM, NO_ANSWER, "restart"),
        (Driver("9", None, BROKEN_TORCH), PROBLEM, "cannot be used: the driver is", "take another"),
        (Driver("580.1", None, replace(TORCH, cuda=None)), PROBLEM, "for CPUs", "pytorch.org"),
    ],
    "GPUs": [
        (Gpus(GPUS), OK, "4 x NVIDIA A100-SXM4-40GB (40.0 GiB)", ""),
        (Gpus((GpuReading(), GPU)), PROBLEM, "1 x a GPU that does not answer", "lost"),
        (Gpus((GPU, replace(GPU, name="NVIDIA L4"))), WARNING, "1 x NVIDIA L4", "slowest"),
        (Gpus((replace(GPU, uncorrected_ecc_errors=2),)), WARNING, "GPU 0 has 2", "such an error"),
        (Gpus((GPU, replace(GPU, use_percent=98))), WARNING, "GPU 1 (0.5 GiB, 98%)", "idle"),
        (Gpus((replace(GPU, memory_used_gib=38),)), WARNING, "GPU 0 (38.0 GiB, 0%)", "idle"),
    ],
    "PyTorch": [
        (Seen(4, 4, 4), OK, "sees 4 of 4 GPUs", ""),
        (Seen(3, 4, 4), PROBLEM, "sees 3 of 4 GPUs", "driver was renewed"),
        (Seen(2, 2, 4), WARNING, "CUDA_VISIBLE_DEVICES hides 2", "unset it"),
    ],
    "all-reduce": [
        (REDUCED, OK, "200 GB/s bus bandwidth, 4 processes, nccl", ""),
        (replace(REDUCED, bytes_per_second=1e9), WARNING, "1.00 GB/s", "NVLink"),
        (AllReduce(2, "gloo", 1e8), OK, "100 MB/s bus bandwidth, 2 processes, gloo", ""),
        (AllReduce(1, "nccl"), OK, "right sums by 1 process", ""),
        (AllReduce(left_out="in use: GPU 1"), WARNING, "left out: in use", "idle"),
        (FAILED, PROBLEM, "rank 3: DistBackendError", "NCCL_DEBUG=INFO"),
        (AllReduce(failure=f"rank 1: {WRONG_SUM}"), PROBLEM, WRONG_SUM, "defective"),
        (AllReduce(failure="no kernel image is available"), PROBLEM, "kernel", "pytorch.org"),
    ],
    "disk": [
        (Disk("runs", 9e9, 2e9), OK, "9.00 GB free in runs, writes 2.00 GB/s", ""),
        (Disk("runs", 9e9, 1e6), WARNING, "writes 1.00 MB/s", "take long"),
        (Disk("runs", 9e9, 2e9, 2e9, 8e9), OK, "checkpoints of 2.00 GB need 8.00 GB", ""),
        (Disk("runs", 9e9, 2e9, 2e9, 10e9), WARNING, "need 10.0 GB", "keep_checkpoints"),
        (Disk("runs", 1e9, 2e9, 2e9, 10e9), PROBLEM, "1.00 GB free", "keep_checkpoints"),
    ],
    "host memory": [
        (HostMemory(100, 25), OK, "100.0 GiB available; training needs about 25.0 GiB", ""),
        (HostMemory(20, 25), WARNING, "20.0 GiB", "more memory"),
        (HostMemory(10, 25), PROBLEM, "10.0 GiB", "more memory"),
    ],
    "run's memory": [
        (RunMemory(PLAN, 20.0), OK, "microbatch 8 x accumulation 2 x 4 processes", ""),
        (RunMemory(PLAN, 20.0, 38.2, 39.5), OK, "20.0 GiB each (estimate) of 38.2 GiB", ""),
        (RunMemory(PLAN, 20.0, 38.2, 10.0), PROBLEM, "only 10.0 GiB are free", "nvidia-smi"),
        (RunMemory(PLAN, 40.0, 38.2, 39.5), WARNING, "40.0 GiB", "find-max-microbatch"),
        (RunMemory(PLAN, 50.0, 38.2, 39.5), PROBLEM, "50.0 GiB", "find-max-microbatch"),
        (RunMemory(PLAN, 20.0, 38.2, None), OK, "of a GPU", ""),
    ],
    "dataset": [
        (HERE, OK, "4,000 training tokens", ""),
        (READY, OK, "on the hub: 20.0 GB are downloaded", ""),
        (replace(READY, free_bytes=10**9), PROBLEM, "1.00 GB are free", "--datasets-dir"),
    ],
    "clock": [
        (Clock(2.0), OK, "2 s ahead of the hub's", ""),
        (Clock(-7200.0), WARNING, "7,200 s behind the hub's", "HTTPS"),
    ],
    "network": [
        (HUB, OK, "huggingface.co answers in 0.2 s, sends 80.0 MB/s", ""),
        (replace(HUB, bytes_per_second=0.0), OK, "answers in 0.2 s", ""),
        (replace(HUB, bytes_per_second=2e6), WARNING, "sends 2.00 MB/s", "--prefetch"),
        (replace(HUB, failure="no route"), WARNING, "not answer: no route", "check the network"),
    ],
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_reading_alone_decides_verdict_and_advice(check):
    for reading, verdict, text, advice in JUDGED[check.name]:
        found = check.judge(reading)
        assert found.verdict == verdict and advice in found.advice, (reading, found)
        assert text in str(reading) and bool(found.advice) == (verdict != OK), str(reading)


# --- readings


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path)


@pytest.fixture
def subject(place):
    """Return a function: the tiny run, changed, on a machine; without GPUs unless it is told."""

    def subject_of(train=None, model=None, **about):
        shutil.rmtree(place.runs_dir, ignore_errors=True)
        place.add_run(train=train, model=model)
        run = load_run(place.runs_dir, "tiny")
        return Subject(place.runs_dir, place.datasets_dir, "tiny", **{"run": run} | about)

    return subject_of


def row_of(name, about):
    """Make one check; return its row."""
    (row,) = make_checks(about, [check for check in CHECKS if check.name == name])
    return row


WITH_GPUS = {"gpus": GPUS, "all_gpus": GPUS, "torch": TORCH}
Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("3, 1", [3, 1]),
        ("-1", []),
        ("GPU-2aaa0000,0", [2, 0]),
    ],
)
def test_hidden_gpus_are_those_that_cuda_hides(variable, found):
    assert visible_gpus(GPUS, variable) == [GPUS[number] for number in found]


@pytest.mark.parametrize(
    ("work", "limit", "failure"),
    [
        (lambda *_: threading.Event().wait(30), "0.1", "has not ended within 0.1 s"),
        (lambda *_: 1 / 0, "60", "rank 0: ZeroDivisionError: division by zero"),
    ],
)
def test_an_all_reduce_that_hangs_or_fails_is_one_line(monkeypatch, capsys, work, limit, failure):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "_exit", sys.exit)
    for name in ("end_with_torchrun", "open_torchrun_store", "share_cpu_cores", "this_process"):
        monkeypatch.setattr(all_reduce, name, lambda *_: None)
    monkeypatch.setattr("sys.argv", ["all_reduce", limit])
    monkeypatch.setattr(all_reduce, "measure", work)
    with pytest.raises(SystemExit, match="1"):
        all_reduce.main()
    assert json.loads(capsys.readouterr().out) == {"failure": failure}


def test_a_torchrun_that_hangs_is_one_line_and_ends(subject, monkeypatch):
    monkeypatch.setenv("DOCTORS_TEST", str(os.getpid()))
    monkeypatch.setattr(checks, "START_SECONDS", 0.0)
    row = row_of("all-reduce", subject(time_limit=0.1))
    assert (row.verdict, row.text) == (PROBLEM, "torchrun has not ended")
    left = [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("DOCTORS_TEST") == str(os.getpid())
    ]
    assert not psutil.wait_procs(left, timeout=60)[1]


@pytest.mark.parametrize(
    "about",
    [{"trained_by": 7}, {"gpus": (replace(GPU, use_percent=98),)}],
)
def test_beside_another_use_nothing_is_loaded(subject, monkeypatch, about):
    monkeypatch.delattr(checks.subprocess, "Popen")
    assert read_all_reduce(subject(**about)).left_out


def test_a_wrong_sum_and_other_code_are_seen(monkeypatch):
    def measured():
        process = Process(0, 0, 1, torch.device("cpu"))
        try:
            all_reduce.measure(process, dist.HashStore(), timedelta(seconds=60))
        finally:
            dist.destroy_process_group()

    measured()

    def gather(versions, own, group):
        versions[:] = [own, "PyTorch 1"]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(UserError, match="another one PyTorch 1"):
        measured()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(1.001))
    with pytest.raises(UserError, match=WRONG_SUM):
        measured()


def test_the_disk_is_measured_and_nothing_is_left_on_it(place, subject, monkeypatch):
    about, before = subject(), place.files()
    size = checks.estimate.bytes_of_checkpoint(about.run)
    found = checks.read_disk(about)
    assert found.bytes_per_second > 0
    assert found.needed_bytes == 5 * size  # after steps 5, 10, 15, 20, 24
    (about.run.checkpoints_dir / "one").mkdir(parents=True)
    assert checks.read_disk(about).needed_bytes == 4 * size
    shutil.rmtree(about.run.checkpoints_dir)
    endless = checks.read_disk(subject({"min_train_tokens": -1}))  # no dataset tells the length
    assert endless.needed_bytes == size
    assert place.files().keys() == before.keys()

    def fsync(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checks.os, "fsync", fsync)
    row = row_of("disk", about)
    assert row.verdict == PROBLEM and "Input/output error" in row.text and row.advice


def test_memory_is_compared_with_what_processes_and_snapshot_need(subject):
    assert checks.read_host_memory(subject()).needed_gib < 1
    assert checks.read_host_memory(subject(**WITH_GPUS)).needed_gib == 12.5  # 4 x 3, and a block
    full = (*GPUS[:3], replace(GPU, memory_used_gib=38.0))
    about = subject(**WITH_GPUS | {"gpus": full})
    found = checks.read_run_memory(about)
    assert found.plan.world_size == 4 and found.usable_gib == pytest.approx(38.2)
    assert found.free_gib == 2.0
    assert checks.read_run_memory(replace(about, trained_by=7)).free_gib is None
    wrong = subject({"global_batch_size": 7, "gradient_accumulation_steps": None}, **WITH_GPUS)
    assert "is not divisible" in row_of("run's memory", wrong).text


@pytest.mark.parametrize(
    ("name", "verdict", "text", "asks"),
    [
        ("tiny", OK, "has 4,000 training tokens", False),
        ("python-stdlib", OK, "is made from Python's own", False),
        ("other", PROBLEM, "no dataset there", False),
        ("someone/tokens", OK, "someone/tokens is on the hub", True),
        ("someone/else", PROBLEM, "no such repository", True),
    ],
)
def test_a_dataset_is_here_or_made_or_on_the_hub(
    place, subject, tokens_hub, tmp_path, name, verdict, text, asks
):
    place.add_dataset()
    with used_in_this_process(tokens_hub, tmp_path / "home"):
        row = row_of("dataset", subject({"dataset": name}, time_limit=200.0))
    assert row.verdict == verdict and text in row.text and bool(row.advice) == (verdict != OK)
    assert bool(tokens_hub.requests) == asks and not tokens_hub.downloads("train.safetensors")


def test_a_hub_is_measured_and_one_that_does_not_answer_is_no_hang(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "DOWNLOADED_BYTES", 2**16)
    content = {"model.safetensors": bytes(2**17)}
    with serving(Hub(content, "openai-community/gpt2", kind="models")) as hub:
        with used_in_this_process(hub, tmp_path / "home"):
            assert abs(checks.read_clock(subject()).seconds_ahead) < 60
            found = checks.read_network(subject())
        assert found.host == "127.0.0.1" and found.bytes_per_second and hub.num_bytes == 2**16
    with used_in_this_process(Hub({}, endpoint="http://127.0.0.1:9"), tmp_path / "home"):
        rows = make_checks(subject({"dataset": "someone/tokens"}), CHECKS[-3:])
    assert [(row.name, row.verdict) for row in rows] == [("dataset", PROBLEM), ("network", WARNING)]
    assert all("check the network" in row.advice for row in rows)


# --- the command


@pytest.fixture
def doctor_of(place, tokens_hub, tmp_path):
    """Return a function that runs the command for a run: its status and its rows by name."""
    place.add_dataset()

    def run(name="tiny", *options):
        with used_in_this_process(tokens_hub, tmp_path / "home"):
            result = run_lab("doctor", *place.arguments(name, "--json", *options))
        (report,) = checked(result.stdout).reports
        return result.exit_code, {check.name: check for check in report.checks}

    return run


@pytest.fixture
def without_torchrun(monkeypatch):
    """Leave the all-reduce out; return what the checks were made of."""
    subjects = []
    others = [check for check in CHECKS if check.name != "all-reduce"]
    monkeypatch.setattr(
        doctor, "make_checks", lambda about: subjects.append(about) or make_checks(about, others)
    )
    return subjects


def test_a_problem_is_status_1_and_a_wrong_name_2(place, doctor_of, without_torchrun, monkeypatch):
    run_dir = place.add_run()
    monkeypatch.setattr(doctor, "trained_by", lambda _: 7)
    status, found = doctor_of()
    assert status == 0 and found["dataset"].verdict == OK
    assert without_torchrun[0].trained_by == 7
    (run_dir / "train.json").write_text("{}")
    status, found = doctor_of()
    assert status == 1 and "train.json" in found["run's memory"].text and "dataset" not in found
    line = error_line(run_lab("doctor", *place.arguments("other")))
    assert "no such run" in line and "tiny" in line
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    line = error_line(run_lab("doctor", *place.arguments("tiny")))
    assert "starts torchrun itself" in line and "-m lab.doctor.all_reduce" in line


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        ("read_gpus", "driver", NO_ANSWER),
        ("read_torch", "driver", NO_ANSWER),
        ("load_run", "run's memory", "no answer within 1 s"),
    ],
)
def test_a_driver_or_a_disk_that_never_answers_is_no_hang(
    place, doctor_of, without_torchrun, monkeypatch, function, name, text
):
    place.add_run()
    forever = threading.Event()
    monkeypatch.setattr(doctor, function, lambda *_: forever.wait())
    status, found = doctor_of("tiny", "--time-limit", "1")
    forever.set()
    assert status == 1 and found[name].verdict == PROBLEM and text in found[name].text


@pytest.mark.parametrize(
    ("error", "verdict", "text", "advice"),
    [
        (ZeroDivisionError("by zero"), WARNING, "could not be checked: ZeroDivisionError", ""),
        (UserError("no; yes"), PROBLEM, "no", "yes"),
        (None, PROBLEM, "no answer within 0.2 s", ""),
    ],
)
def test_a_check_that_raises_or_hangs_stops_no_other(subject, error, verdict, text, advice):
    forever = threading.Event()

    def read(_):
        if error is not None:
            raise error
        forever.wait()

    works = Check("works", lambda _: "well", lambda _: Judgement(OK))
    about = subject(time_limit=0.2)
    row, other = make_checks(about, [Check("odd", read, str), works])
    forever.set()
    assert row.verdict == verdict and row.text.startswith(text) and advice in row.advice
    assert other[:3] == ("works", OK, "well")


@pytest.mark.parametrize("width", [60, 160])
def test_a_report_fits_the_terminal_and_obeys_no_text(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [
        Finding("run's memory", WARNING, "a word " * 30, "do " * 40),
        Finding("disk", PROBLEM, "bad \x1b[2J", "mend it"),
    ]
    show = click.Command("show", callback=lambda: doctor.print_rows(rows, "tiny"))
    plain, colored = (CliRunner().invoke(show, color=color).output for color in (False, True))
    assert max(map(len, plain.splitlines())) <= min(width, 100)
    assert r"bad \x1b[2J" in plain and "\x1b[2J" not in colored
