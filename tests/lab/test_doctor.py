"""`lab doctor`: the command, its report, the isolation of its checks, and several nodes."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import click
import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from basics import machine
from basics.errors import UserError
from basics.gpu_readings import GpuReading
from lab.doctor import doctor, nodes
from lab.doctor.check import (
    OK,
    PROBLEM,
    SKIPPED,
    WARNING,
    Finding,
    Subject,
    make_checks,
    ok,
    print_checks,
)
from lab.doctor.load_tests import Load, load_tests
from tests.support.json_schemas import checked
from tests.support.lab_cli import error_line, run_lab
from tests.support.workplace import PROJECT_DIR, Workplace

FACTS = {"version": "2.11.0", "cuda": "12.8", "num_gpus": 1, "problem": ["", ""],
         "without_bf16": []}


@pytest.fixture
def place(tmp_path):
    workplace = Workplace(tmp_path)
    workplace.add_run()
    workplace.add_dataset()
    return workplace


def load_of(num_gpus, part="", **ended):
    """Return what one process has found that has begun a part 20 seconds before its end."""
    load = Load(seconds=120.0, **ended)
    if part:
        load.begun["PyTorch"][0] = load.begun[part][0] = 100.0
    if part and part != "PyTorch":
        load.found["PyTorch"][0] = FACTS | {"num_gpus": num_gpus}
    return load


class Stand:
    """A machine with these GPUs, whose load tests end with this; no disk is measured."""

    def __init__(self, monkeypatch):
        self.load, self.gpus, self.pid = load_of(0, how="ImportError: no such library"), [], None
        self.busy: list[str] = []

        @contextmanager
        def tests(subject):
            self.busy.append(subject.busy)
            yield lambda: self.load

        monkeypatch.setattr(doctor, "load_tests", tests)
        monkeypatch.setattr(doctor, "read_gpus", lambda: self.gpus)
        monkeypatch.setattr(doctor, "trained_by", lambda _: self.pid)
        monkeypatch.setattr("lab.doctor.machine_checks.write_speed", lambda *_: 1e9)


@pytest.fixture
def stand(monkeypatch):
    return Stand(monkeypatch)


def report_of(output):
    """Return the checks by their names, from the JSON document."""
    report, = checked(output).reports
    return report.named()


def test_a_machine_without_gpus_is_fit_to_train_a_run(place):
    """All of it is real: under torchrun two processes multiply matrices and exchange data."""
    before = place.files()
    result = run_lab("doctor", *place.arguments("tiny", "--json", "--time-limit", "200"))
    assert result.exit_code == 0, result.output
    found = report_of(result.output)
    assert found["GPUs"].verdict == WARNING
    assert {found[name].verdict for name in (
        "PyTorch", "attention", "matrix products", "all-reduce", "configs", "dataset", "batch",
        "disk of runs")} == {OK}
    assert not {"hub", "hub token", "nodes", "Triton"} & found.keys()
    assert "2 processes, gloo" in found["all-reduce"].text
    assert "GFLOP/s" in found["matrix products"].text
    assert place.files() == before


@pytest.mark.thorough
def test_two_nodes_print_a_report_each_and_add_up_numbers_together(place):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launches = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
         "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
         "-m", "lab", *place.arguments("doctor", "tiny", "--json", "--time-limit", "200")],
        cwd=PROJECT_DIR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)]
    for launch in launches:
        output, errors = launch.communicate(timeout=400)
        assert launch.returncode == 0, errors
        found = report_of(output)
        assert {found[name].verdict for name in ("nodes", "all-reduce of all nodes")} == {OK}
        assert "4 processes, gloo" in found["all-reduce of all nodes"].text
        assert "x 4 processes" in found["batch"].text
        assert "the run's configs" in found["nodes"].text


def test_only_the_first_process_of_a_node_reports(place, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2",
                        "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = run_lab("doctor", *place.arguments("tiny"))
    assert (result.exit_code, result.output) == (0, "")


LATE = {"how": "no answer within 40 s", "is_late": True}
STOPPED = {  # the last part that was begun, GPUs, the end: the verdict, and parts of the text
    "cannot be imported": ("", 1, {"how": "ImportError: no such library"}, PROBLEM,
                           "cannot be imported: ImportError: no such library"),
    "hangs": ("first kernel", 1, LATE, PROBLEM, "on rank 0 after 20 s"),
    "hangs while it looks for GPUs": ("PyTorch", 1, LATE, PROBLEM, "after 20 s"),
    "crashes": ("matrix products", 1, {"how": "killed by SIGBUS", "failed_rank": 0}, PROBLEM,
                "stopped on rank 0: killed by SIGBUS"),
    "crashes before it reports": ("PyTorch", 1, {"how": "killed by SIGKILL", "failed_rank": 1},
                                  PROBLEM, "stopped on rank 1: killed by SIGKILL"),
    "is on a CPU": ("matrix products", 0, LATE, WARNING, "within 40 s"),
    "imports slowly": ("", 1, LATE, WARNING, "within 40 s"),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_gpu_that_hangs_or_crashes_its_process_is_not_fit(place, stand, case):
    part, num_gpus, end, verdict, text = STOPPED[case]
    stand.load = load_of(num_gpus, part, **end)
    stand.gpus = [GpuReading(name="NVIDIA L4")] * num_gpus
    result = run_lab("doctor", *place.arguments("--json"))
    assert result.exit_code == (verdict == PROBLEM), result.output
    line = report_of(result.output)[part or "PyTorch"]
    assert line.verdict == verdict and text in line.text and line.advice


def test_a_run_with_wrong_configs_is_not_fit(place, stand):
    (place.runs_dir / "tiny" / "train.json").write_text("{}")
    result = run_lab("doctor", *place.arguments("tiny", "--json"))
    found = report_of(result.output)
    assert result.exit_code == 1 and found["configs"].verdict == PROBLEM and "dataset" not in found


def test_an_unknown_run_is_one_line(place):
    line = error_line(run_lab("doctor", *place.arguments("other")))
    assert "no such run" in line and "tiny" in line


def test_beside_a_training_nothing_is_loaded(place, stand):
    run_lab("doctor", *place.arguments("tiny"))
    stand.pid = 7
    found = report_of(run_lab("doctor", *place.arguments("tiny", "--json")).output)
    assert list(map(bool, stand.busy)) == [False, True]
    assert found["use"].text.startswith("tiny is being trained by process 7: the tests")


@pytest.mark.parametrize(("used_gib", "is_trained", "status"), [
    (38.0, False, 1), (38.99, True, 0), (2.0, False, 0), (None, False, 0)])
def test_a_gpu_whose_memory_others_have_taken_is_not_fit(place, stand, monkeypatch, used_gib,
                                                         is_trained, status):
    """A process that a killed run has left; beside a training of the run itself all is well."""
    place.add_run("large", model={"emb_dim": 768, "n_heads": 12, "n_layers": 12},
                  train={"microbatch_size": 8, "compile": False})
    gpu = GpuReading(name="NVIDIA A100-SXM4-40GB", memory_total_gib=40.0, memory_used_gib=used_gib)
    stand.gpus = [replace(gpu, memory_used_gib=0.5), gpu]
    stand.load = load_of(2, "first kernel")
    stand.pid = 7 if is_trained else None
    monkeypatch.setattr(doctor, "available_ram_gib", lambda: 100.0)
    result = run_lab("doctor", *place.arguments("large", "--json"))
    found = report_of(result.output)["microbatch"]
    assert result.exit_code == status, result.output
    assert found.verdict == (PROBLEM if status else OK)
    assert status == 0 or ("GPU 1 has 2.00 GiB free" in found.text and "nvidia-smi" in found.advice)


def of_this_test():
    return [process for process in psutil.process_iter(["cmdline", "environ"])
            if "lab.doctor.load" in (process.info["cmdline"] or ())
            and (process.info["environ"] or {}).get("DOCTORS_TEST") == str(os.getpid())]


@pytest.mark.parametrize("is_dead", [True, False])
def test_processes_that_hang_or_die_are_told_and_ended(place, monkeypatch, is_dead):
    monkeypatch.setenv("DOCTORS_TEST", str(os.getpid()))
    if is_dead:
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
    about = Subject(place.runs_dir, place.datasets_dir, time_limit=60.0 if is_dead else 0.5)
    with load_tests(about) as results:
        load = results()  # torch needs longer than half a second
        assert load.is_late == (not is_dead) and load.how
        while load.is_late and len(of_this_test()) < 2:
            time.sleep(0.05)  # until torchrun has started a process, which imports torch
    assert of_this_test() == []


def test_a_check_that_raises_or_hangs_stops_no_other(place):
    forever = threading.Event()

    def failing(error, _):
        raise error

    checks = make_checks({
        "raises": partial(failing, ZeroDivisionError("by zero")),
        "refuses": partial(failing, UserError("no; yes")),
        "hangs": lambda _: forever.wait() and None,
        "disk of runs": lambda _: forever.wait() and None,
        "nothing": lambda _: None, "works": lambda _: ok("well")},
        Subject(place.runs_dir, place.datasets_dir), seconds=0.2)
    forever.set()
    assert {name: (found.verdict, found.text) for name, found in checks.items()} == {
        "raises": (WARNING, "could not be checked: ZeroDivisionError: by zero"),
        "refuses": (WARNING, "could not be checked: no; yes"),
        "hangs": (WARNING, "could not be checked: no answer within 0.2 s"),
        "disk of runs": (PROBLEM, "no answer within 0.2 s"), "works": (OK, "well")}


@pytest.mark.parametrize(("function", "name", "text"), [
    ("read_gpus", "GPUs", "the driver does not answer"),
    ("load_run", "configs", "no answer within 0.1 s")])
def test_a_driver_or_a_disk_that_never_answers_is_no_hang(place, stand, monkeypatch, function, name,
                                                          text):
    forever = threading.Event()
    monkeypatch.setattr(doctor, function, lambda *_: forever.wait())
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", 0.1)
    monkeypatch.setattr(doctor, "RUN_SECONDS", 0.1)
    stand.load = load_of(0, "first kernel")
    result = run_lab("doctor", *place.arguments("tiny", "--json"))
    forever.set()
    found = report_of(result.output)[name]
    assert result.exit_code == 1 and found.verdict == PROBLEM and text in found.text


CHECKS = {"short": ok("fine"), "a longer name": Finding(WARNING, "a word " * 30, "do " * 40),
          "x": Finding(PROBLEM, "bad \x1b[2J", "mend it"), "y": Finding(SKIPPED, "not now")}


@pytest.mark.parametrize("columns", [60, 120])
def test_a_report_is_aligned_fits_the_terminal_and_obeys_no_text(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    show = click.Command("show", callback=lambda: print_checks(CHECKS, "tiny"))
    plain, colored = (CliRunner().invoke(show, color=color).output for color in (False, True))
    lines = plain.splitlines()
    assert max(map(len, lines)) <= columns
    starts = [line for line in lines if line.split()[0] in (OK, WARNING, PROBLEM, SKIPPED)]
    place, *others = (line.index(text) for line, text in zip(
        starts, ("fine", "a word", "bad", "not now"), strict=True))
    assert set(others) == {place}
    assert next(line for line in lines if "-> mend it" in line).index("->") == place
    assert lines[-1] == "not fit to train tiny: 1 problem, 1 warning"
    assert "\x1b" not in plain and r"bad \x1b[2J" in plain and "\x1b[2J" not in colored
    assert "\x1b[31mproblem" in colored and click.unstyle(colored) == plain


VERSIONS = {"PyTorch": "2.11.0", "the project's code": "abc"}
NODES = {  # how node 1 differs: the verdict, and a part of the text
    "nothing differs": ({}, OK, "PyTorch, the project's code: the same on all 2"),
    "code": ({"versions": VERSIONS | {"the project's code": "def"}}, PROBLEM,
             "the project's code differs: abc on node 0, def on node 1"),
    "in use": ({"is_busy": True}, WARNING, "because of node 1"),
}


@pytest.mark.parametrize("case", NODES)
def test_nodes_are_compared(case):
    changes, verdict, text = NODES[case]
    one = {"node": 0, "versions": VERSIONS, "is_busy": False}
    other = one | {"node": 1} | changes
    found = nodes.compared([one, one | {"versions": {}}, other, other | {"versions": {}}])
    assert found.verdict == verdict and text in found.text


def test_a_process_that_does_not_come_is_named_and_nothing_is_added_up(monkeypatch):
    store = dist.HashStore()
    for rank in ("0", "2"):
        store.set(f"process/{rank}", json.dumps({"node": int(rank), "is_busy": False}))
    for name, value in ("RANK", 1), ("LOCAL_RANK", 0), ("WORLD_SIZE", 3), ("GROUP_RANK", 1):
        monkeypatch.setenv(name, str(value))
    everybody = nodes.meet({"node": 1}, store, timedelta(seconds=20))
    assert [other["node"] for other in everybody] == [0, 1, 2]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(nodes, "open_store", lambda _: store)
    monkeypatch.setattr(nodes, "MEET_SECONDS", 0.1)
    checks = nodes.check_nodes(None, is_busy=False, time_limit=0.1)
    assert list(checks) == ["nodes"] and checks["nodes"].verdict == PROBLEM
    assert checks["nodes"].text == "no answer from rank 3"


EXCHANGES = {  # what it does: parts of the text and of the advice
    "wrong sums": (lambda: {"is_right": False}, "wrong sums", "another one"),
    "fails": (lambda: 1 / 0, "ZeroDivisionError", "NCCL_DEBUG"),
    "hangs": (lambda: threading.Event().wait(30), "has not ended after 0.2 s", "NCCL_DEBUG"),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_an_exchange_of_all_nodes_that_fails_is_a_problem(monkeypatch, case):
    work, text, advice = EXCHANGES[case]
    everybody = [{"node": node, "versions": {}, "is_busy": False} for node in (0, 1)]
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setattr(nodes, "open_store", lambda _: None)
    monkeypatch.setattr(nodes, "meet", lambda *_: everybody)
    monkeypatch.setattr(nodes, "this_process", lambda: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(nodes, "all_reduce", lambda *_: work())
    found = nodes.check_nodes(None, is_busy=False, time_limit=0.2)["all-reduce of all nodes"]
    assert found.verdict == PROBLEM and text in found.text and advice in found.advice
    everybody[1]["is_busy"] = True
    assert list(nodes.check_nodes(None, is_busy=False, time_limit=0.2)) == ["nodes"]


def test_a_wheels_code_is_that_of_a_checkout(tmp_path, monkeypatch):
    """It is installed among the modules of other packages."""
    for name in ("gpt.py", "lab/generate.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(machine, "PROJECT_DIR", tmp_path)
    before = machine.code_digest()
    (tmp_path / "six.py").write_text("")
    assert machine.code_digest() == before
    (tmp_path / "gpt.py").write_text("1")
    assert machine.code_digest() != before
    assert {path.name for path in PROJECT_DIR.glob("*.py")} <= set(machine.SOURCES)
