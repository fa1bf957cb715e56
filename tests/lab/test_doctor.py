"""`lab doctor`: the command, its report, the isolation of its checks, and several nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psutil
import pytest
import torch.distributed as dist
from click.testing import CliRunner

from basics import machine
from basics.errors import UserError
from basics.gpu_readings import GpuReading
from basics.machine import num_cpu_cores
from lab.doctor import doctor, load
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
from lab.doctor.load_tests import Result, check_load, load_tests
from tests.support.json_schemas import DoctorsCheck, checked
from tests.support.lab_cli import error_line, run_lab
from tests.support.workplace import PROJECT_DIR, Workplace, forked

FACTS = {"version": "2.11.0", "cuda": "12.8", "num_gpus": 1, "problem": ["", ""],
         "without_bf16": []}
IMPORT_FAILS = Result(0, ended="ImportError: no such library")


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    workplace = Workplace(tmp_path)
    workplace.add_run()
    workplace.add_dataset()
    return workplace


class Stand:
    """A machine with these GPUs, whose load tests end with these results; no disk is measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results, self.gpus, self.pid = [IMPORT_FAILS], [], None
        self.subjects: list[tuple[Subject, int]] = []

        @contextmanager
        def tests(subject: Subject, ranks: list[Any], *, store: str) -> Iterator[Any]:
            self.subjects.append((subject, len(ranks)))
            yield lambda: self.results

        monkeypatch.setattr(doctor, "load_tests", tests)
        monkeypatch.setattr(doctor, "read_gpus", lambda: self.gpus)
        monkeypatch.setattr(doctor, "trained_by", lambda _: self.pid)
        monkeypatch.setattr("lab.doctor.machine_checks.write_speed", lambda *_: 1e9)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch)


def report_of(output: str) -> dict[str, DoctorsCheck]:
    """Return the checks by their names, from the JSON document."""
    report, = checked(output).reports
    return report.named()


def test_a_machine_without_gpus_is_fit_to_train_a_run(place: Workplace) -> None:
    """All of it is real: two processes multiply matrices and exchange data with gloo."""
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


def test_two_processes_of_torchrun_print_one_report(place: Workplace) -> None:
    result = forked("lab/__main__.py", place.arguments(
        "doctor", "tiny", "--json", "--time-limit", "200"), num_processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    found = report_of(result.stdout)
    assert checked(result.stdout).is_fit and "2 processes, gloo" in found["all-reduce"].text
    assert "x 2 processes" in found["batch"].text and "nodes" not in found


def test_a_torch_that_cannot_be_imported_is_a_problem(place: Workplace, stand: Stand) -> None:
    result = run_lab("doctor", *place.arguments())
    assert result.exit_code == 1
    line = next(line for line in result.output.splitlines() if line.startswith("problem"))
    assert "cannot be imported: ImportError: no such library" in line
    assert result.output.splitlines()[-1].startswith("not fit to train: 1 problem, ")


LATE = {"ended": "no answer within 25 s", "is_late": True}
STOPPED = {  # the last part that was begun, how it ended: the verdict, and a part of the text
    "hangs": ("first kernel", LATE | {"waited": 20.0}, PROBLEM, "on rank 0 after 20 s"),
    "hangs while it looks for GPUs": ("PyTorch", LATE | {"waited": 20.0}, PROBLEM, "after 20 s"),
    "crashes": ("matrix products", {"ended": "killed by SIGBUS"}, PROBLEM,
                "stopped on rank 0: killed by SIGBUS"),
    "crashes between two parts": ("attention", {"ended": "MemoryError"}, PROBLEM, "MemoryError"),
    "had no time left": ("first kernel", LATE | {"waited": 2.0}, WARNING, "within 25 s"),
    "is on a CPU": ("matrix products", LATE | {"waited": 20.0}, WARNING, "within 25 s"),
    "imports slowly": ("", LATE | {"waited": 20.0}, WARNING, "within 25 s"),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_gpu_that_hangs_or_crashes_its_process_is_not_fit(
    place: Workplace, stand: Stand, case: str
) -> None:
    part, end, verdict, text = STOPPED[case]
    number = 0 if case == "is on a CPU" else 1
    found = {} if part in ("", "PyTorch") else {"PyTorch": FACTS | {"num_gpus": number}}
    stand.results = [Result(0, found, part=part, **end)]
    stand.gpus = [GpuReading(name="NVIDIA L4")] * number
    result = run_lab("doctor", *place.arguments("--json"))
    assert result.exit_code == (verdict == PROBLEM), result.output
    line = report_of(result.output)[part or "PyTorch"]
    assert line.verdict == verdict and text in line.text and line.advice


def test_a_run_with_wrong_configs_is_not_fit(place: Workplace, stand: Stand) -> None:
    (place.runs_dir / "tiny" / "train.json").write_text("{}")
    result = run_lab("doctor", *place.arguments("tiny", "--json"))
    found = report_of(result.output)
    assert result.exit_code == 1 and found["configs"].verdict == PROBLEM and "dataset" not in found


def test_an_unknown_run_is_one_line(place: Workplace) -> None:
    line = error_line(run_lab("doctor", *place.arguments("other")))
    assert "no such run" in line and "tiny" in line


def test_beside_a_training_nothing_is_loaded(place: Workplace, stand: Stand) -> None:
    run_lab("doctor", *place.arguments("tiny"))
    stand.pid = 7
    found = report_of(run_lab("doctor", *place.arguments("tiny", "--json")).output)
    assert [(bool(about.busy), number) for about, number in stand.subjects] == [
        (False, min(2, num_cpu_cores())), (True, 1)]
    assert found["use"].text.startswith("tiny is being trained by process 7: the tests")


@pytest.mark.parametrize(("used_gib", "is_trained", "status"), [
    (38.0, False, 1), (38.99, True, 0), (2.0, False, 0), (None, False, 0)])
def test_a_gpu_whose_memory_others_have_taken_is_not_fit(
    place: Workplace, stand: Stand, monkeypatch: pytest.MonkeyPatch,
    used_gib: float | None, is_trained: bool, status: int
) -> None:
    """A process that a killed run has left; beside a training of the run itself all is well."""
    place.add_run("large", model={"emb_dim": 768, "n_heads": 12, "n_layers": 12},
                  train={"microbatch_size": 8, "compile": False})
    gpu = GpuReading(name="NVIDIA A100-SXM4-40GB", memory_total_gib=40.0, memory_used_gib=used_gib)
    stand.gpus = [replace(gpu, memory_used_gib=0.5), gpu]
    stand.results = [Result(0, {"PyTorch": FACTS | {"num_gpus": 2}}, part="PyTorch")]
    stand.pid = 7 if is_trained else None
    monkeypatch.setattr(doctor, "available_ram_gib", lambda: 100.0)
    result = run_lab("doctor", *place.arguments("large", "--json"))
    found = report_of(result.output)["microbatch"]
    assert result.exit_code == status, result.output
    assert found.verdict == (PROBLEM if status else OK)
    assert status == 0 or ("GPU 1 has 2.00 GiB free" in found.text and "nvidia-smi" in found.advice)


def test_processes_that_hang_or_die_are_told_and_ended(place: Workplace) -> None:
    about = Subject(place.runs_dir, place.datasets_dir, time_limit=0.8)  # torch needs longer
    ranks = [{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"} for rank in range(2)]
    with load_tests(about, [ranks[0] | {"PYTHONHOME": "/nowhere"}, ranks[1]]) as results:
        dead, hanging = results()
    assert dead.ended and not dead.is_late  # the last line that it printed
    assert hanging.ended == "no answer within 0.8 s" and hanging.is_late
    left = [child for child in psutil.Process().children() if "lab.doctor.load" in child.cmdline()]
    assert left == []


def test_help_answers_without_torch() -> None:
    code = ("import sys\nfrom lab.__main__ import cli\n"
            "cli(['doctor', '--help'], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            cwd=PROJECT_DIR)
    assert result.returncode == 0, result.stderr
    assert "--online" in result.stdout


def test_a_check_that_raises_or_hangs_stops_no_other() -> None:
    forever = threading.Event()

    def failing(error: Exception) -> Finding:
        raise error

    checks = make_checks({
        "raises": partial(failing, ZeroDivisionError("by zero")),
        "refuses": partial(failing, UserError("no; yes")),
        "hangs": lambda: forever.wait() and None, "disk": lambda: forever.wait() and None,
        "nothing": lambda: None, "works": lambda: ok("well")}, seconds=0.2, late={"disk": "other"})
    forever.set()
    assert {name: (found.verdict, found.text) for name, found in checks.items()} == {
        "raises": (WARNING, "could not be checked: ZeroDivisionError: by zero"),
        "refuses": (WARNING, "could not be checked: no; yes"),
        "hangs": (WARNING, "could not be checked: no answer within 0.2 s"),
        "disk": (PROBLEM, "no answer within 0.2 s"), "works": (OK, "well")}


@pytest.mark.parametrize(("function", "name", "text"), [
    ("read_gpus", "GPUs", "the driver does not answer"),
    ("load_run", "configs", "no answer within 0.1 s"),
    ("write_speed", "disk of runs", "no answer within 0.5 s")])
def test_a_driver_or_a_disk_that_never_answers_is_no_hang(
    place: Workplace, stand: Stand, monkeypatch: pytest.MonkeyPatch, function: str, name: str,
    text: str
) -> None:
    forever = threading.Event()
    module = "machine_checks" if function == "write_speed" else "doctor"
    monkeypatch.setattr(f"lab.doctor.{module}.{function}", lambda *_: forever.wait())
    monkeypatch.setattr(doctor, "DRIVER_SECONDS", 0.1)
    monkeypatch.setattr(doctor, "RUN_SECONDS", 0.1)
    monkeypatch.setattr(doctor, "make_checks", partial(make_checks, seconds=0.5))
    stand.results = [Result(0, {"PyTorch": FACTS | {"num_gpus": 0}}, part="PyTorch")]
    result = run_lab("doctor", *place.arguments("tiny", "--json"))
    forever.set()
    found = report_of(result.output)[name]
    assert result.exit_code == 1 and found.verdict == PROBLEM and text in found.text


CHECKS = {"short": ok("fine"), "a longer name": Finding(WARNING, "a word " * 30, "do " * 40),
          "x": Finding(PROBLEM, "bad \x1b[2J", "mend it"), "y": Finding(SKIPPED, "not now")}


@pytest.mark.parametrize("columns", [60, 120])
def test_a_report_is_aligned_fits_the_terminal_and_obeys_no_text(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    "nothing differs": ({"clock": 100.25}, OK, "of node 1 is 0.25 s ahead of that of node 0"),
    "clock": ({"clock": 10.0}, WARNING, "90.00 s behind"),
    "code": ({"versions": VERSIONS | {"the project's code": "def"}}, PROBLEM,
             "the project's code differs: abc on node 0, def on node 1"),
    "in use": ({"is_loading": False}, WARNING, "because of node 1"),
}


@pytest.mark.parametrize("case", NODES)
def test_nodes_are_compared(case: str) -> None:
    changes, verdict, text = NODES[case]
    one = {"node": 0, "versions": VERSIONS, "clock": 100.0, "is_loading": True}
    met = {"everybody": [one, one, one | {"node": 1} | changes]}
    found = check_load([Result(0, {"nodes": met}, part="nodes")])["nodes"]
    assert found.verdict == verdict and text in found.text


def test_processes_of_nodes_meet_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    for rank in ("0", "2"):
        store.set(f"process/{rank}", json.dumps({"node": int(rank)}))
        store.set(f"clock/{rank}", "5.0")
    for name, value in ("RANK", 1), ("LOCAL_RANK", 0), ("WORLD_SIZE", 3), ("GROUP_RANK", 1):
        monkeypatch.setenv(name, str(value))
    everybody = load.meet({"node": 1}, store, timedelta(seconds=20))["everybody"]
    assert [other["node"] for other in everybody] == [0, 1, 2]
    assert [other["clock"] for other in everybody][::2] == [5.0, 5.0]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(load, "open_store", lambda _: store)
    spec = SimpleNamespace(num_gpus=0, is_loading=True, store="name", file="", seconds=0.2,
                           versions={}, runs_dir="", run_name=None)
    load.main(tmp_path / "0", spec)  # does not go on alone
    last = json.loads((tmp_path / "0").read_text().splitlines()[-1])
    found = check_load([Result(1, errors={last["part"]: last["error"]}, part=last["part"])])
    assert found["nodes"].verdict == PROBLEM
    assert found["nodes"].text == "failed on rank 1: no answer from rank 3"


def test_a_wheels_code_is_that_of_a_checkout(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
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
