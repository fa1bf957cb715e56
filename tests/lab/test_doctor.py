"""`lab doctor`: the command, its report, and the isolation of its checks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from basics.errors import UserError
from basics.gpu_readings import GpuReading
from basics.machine import num_cpu_cores
from lab.doctor import examination, gpu_checks
from lab.doctor.check import (
    OK,
    PROBLEM,
    SKIPPED,
    WARNING,
    Check,
    Finding,
    Subject,
    make_checks,
    ok,
    problem,
)
from lab.doctor.load_process import Spec
from lab.doctor.load_result import Result
from lab.doctor.load_tests import load_tests
from lab.doctor.report import Report, as_document, print_report
from processes.run_lock import announce, withdraw
from tests.support.json_schemas import DoctorsCheck, checked
from tests.support.lab_cli import error_line, run_lab
from tests.support.workplace import PROJECT_DIR, Workplace, forked


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    workplace = Workplace(tmp_path)
    workplace.add_run()
    workplace.add_dataset()
    return workplace


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Start no process, and have one that could not import torch; return what was to be started.

    No disk is measured either.
    """
    started: list[Spec] = []

    class Tests:
        def __init__(self, _: Path, specs: list[Spec], *, seconds: float) -> None:
            started.extend(specs)

        def results(self) -> list[Result]:
            return [Result(0, errors={"import": "ImportError: no such library"})]

        def end(self) -> None:
            pass

    monkeypatch.setattr("lab.doctor.load_tests.LoadTests", Tests)
    monkeypatch.setattr("lab.doctor.host_checks.write_speed", lambda *_: 1e9)
    return started


def report_of(output: str) -> dict[str, DoctorsCheck]:
    """Return the checks of the only report by their names, from the JSON document."""
    report, = checked(output).reports
    return report.named()


def verdicts(output: str) -> dict[str, str]:
    return {name: check.verdict for name, check in report_of(output).items()}


def test_a_machine_without_gpus_is_fit_to_train_a_run(place: Workplace) -> None:
    """All of it is real: two processes multiply matrices and exchange data with gloo."""
    before = place.files()
    result = run_lab("doctor", *place.arguments("tiny", "--json", "--time-limit", "200"))
    assert result.exit_code == 0, result.output
    found = verdicts(result.output)
    assert found.pop("GPUs") == WARNING
    assert {found.pop(name) for name in ("PyTorch", "attention", "matrix products", "all-reduce",
                                         "configs", "dataset", "batch", "disk of runs")} == {OK}
    assert PROBLEM not in found.values() and "hub" not in found and "hub token" not in found
    texts = {name: check.text for name, check in report_of(result.output).items()}
    assert "2 processes, gloo" in texts["all-reduce"] and "GFLOP/s" in texts["matrix products"]
    assert place.files() == before


def test_two_processes_of_torchrun_print_one_report(place: Workplace) -> None:
    result = forked("lab/__main__.py", place.arguments(
        "doctor", "tiny", "--json", "--time-limit", "200"), num_processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert checked(result.stdout).is_fit
    texts = {name: check.text for name, check in report_of(result.stdout).items()}
    assert "2 processes, gloo" in texts["all-reduce"]
    assert "x 2 processes" in texts["batch"]
    assert "clocks of the nodes" not in texts


def test_a_torch_that_cannot_be_imported_is_a_problem(place: Workplace,
                                                      specs: list[Spec]) -> None:
    result = run_lab("doctor", *place.arguments())
    assert result.exit_code == 1
    line = next(line for line in result.output.splitlines() if line.startswith("problem"))
    assert "cannot be imported: ImportError: no such library" in line
    assert result.output.splitlines()[-1].startswith("not fit to train: 1 problem, ")


STOPPED = {  # in a part, how, after which time: the verdict of the line, and the exit status
    "hangs": ({"device": 1.0}, "no answer within 25 s", 20.0, "matrix products", 1),
    "hangs while it looks for GPUs": (None, "no answer within 25 s", 20.0, "PyTorch", 1),
    "crashes at once": ({"device": 1.0}, "killed by SIGSEGV", 0.0, "matrix products", 1),
    "crashes later": ({"matmul": 1.0}, "killed by SIGBUS", 0.0, "matrix products", 1),
    "crashes in attention": ({"attention": 1.0}, "killed by SIGABRT", 0.0, "attention", 1),
    "crashes between two parts": ({}, "MemoryError", 0.0, "matrix products", 1),
    "had no time left": ({"device": 1.0}, "no answer within 25 s", 2.0, "matrix products", 0),
    "is on a CPU": ({"matmul": 1.0}, "no answer within 25 s", 20.0, "matrix products", 0),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_gpu_that_hangs_or_crashes_its_process_is_not_fit(
    place: Workplace, specs: list[Spec], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    began, ended, waited, name, status = STOPPED[case]
    num_gpus = 0 if case == "is on a CPU" else 1
    facts = {"version": "2.11.0", "cuda": "12.8", "num_gpus": num_gpus, "problem": ["", ""],
             "driver_cuda": "12.8"}
    parts = {"import": {}} | ({"torch": facts} if began is not None else {})
    bad = Result(0, found=parts, began={"torch": 1.0} | (began or {}), ended=ended,
                 is_late=ended.startswith("no answer"), waited=waited)
    monkeypatch.setattr("lab.doctor.load_tests.LoadTests.results", lambda _: [bad])
    monkeypatch.setattr(examination, "read_gpus", lambda: [GpuReading(name="NVIDIA L4")] * num_gpus)
    result = run_lab("doctor", *place.arguments("--json"))
    assert result.exit_code == status, result.output
    found = report_of(result.output)[name]
    assert found.verdict == (PROBLEM if status else WARNING)
    assert ended in found.text and found.advice
    assert status == 0 or "rank 0" in found.text


def test_an_import_that_takes_long_is_no_problem(
    place: Workplace, specs: list[Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Result(0, began={"import": 1.0}, ended="no answer within 25 s", is_late=True, waited=25)
    monkeypatch.setattr("lab.doctor.load_tests.LoadTests.results", lambda _: [slow])
    result = run_lab("doctor", *place.arguments("--json"))
    assert result.exit_code == 0 and verdicts(result.output)["PyTorch"] == WARNING


def test_a_disk_that_does_not_answer_is_not_fit(
    place: Workplace, specs: list[Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.doctor.load_tests.LoadTests.results", lambda _: [
        Result(0, found={"torch": {"version": "2.11.0", "num_gpus": 0}})])
    forever = threading.Event()
    monkeypatch.setattr("lab.doctor.host_checks.write_speed", lambda *_: forever.wait())
    monkeypatch.setattr(examination, "make_checks", partial(make_checks, seconds=0.5))
    result = run_lab("doctor", *place.arguments("--json"))
    forever.set()
    assert result.exit_code == 1 and verdicts(result.output)["disk of runs"] == PROBLEM


def test_a_run_with_wrong_configs_is_not_fit(place: Workplace, specs: list[Spec]) -> None:
    (place.runs_dir / "tiny" / "train.json").write_text("{}")
    result = run_lab("doctor", *place.arguments("tiny", "--json"))
    found = verdicts(result.output)
    assert result.exit_code == 1 and found["configs"] == PROBLEM and "dataset" not in found


def test_an_unknown_run_is_one_line(place: Workplace) -> None:
    line = error_line(run_lab("doctor", *place.arguments("other")))
    assert "no such run" in line and "tiny" in line


def test_beside_a_training_nothing_is_loaded(place: Workplace, specs: list[Spec]) -> None:
    run_lab("doctor", *place.arguments("tiny"))
    assert [spec.is_loading for spec in specs] == [True, True][:num_cpu_cores()]
    specs.clear()
    announce(place.runs_dir / "tiny")
    try:
        found = verdicts(run_lab("doctor", *place.arguments("tiny", "--json")).output)
    finally:
        withdraw()
    assert [spec.is_loading for spec in specs] == [False]
    assert found["use"] == WARNING


@pytest.mark.parametrize(("used_gib", "is_trained", "status"), [
    (38.0, False, 1), (38.99, True, 0), (2.0, False, 0), (None, False, 0)])
def test_a_gpu_whose_memory_others_have_taken_is_not_fit(
    place: Workplace, specs: list[Spec], monkeypatch: pytest.MonkeyPatch,
    used_gib: float | None, is_trained: bool, status: int
) -> None:
    """A process that a killed run has left; beside a training of the run itself all is well."""
    place.add_run("large", model={"emb_dim": 768, "n_heads": 12, "n_layers": 12},
                  train={"microbatch_size": 8})
    gpu = GpuReading(name="NVIDIA A100-SXM4-40GB", memory_total_gib=40.0, memory_used_gib=used_gib)
    facts = {"version": "2.11.0", "cuda": "12.8", "num_gpus": 2, "problem": ["", ""],
             "driver_cuda": "12.8"}
    monkeypatch.setattr(examination, "read_gpus", lambda: [replace(gpu, memory_used_gib=0.5), gpu])
    monkeypatch.setattr("lab.doctor.load_tests.LoadTests.results", lambda _: [
        Result(0, found={"torch": facts}, began={"torch": 1.0})])
    monkeypatch.setattr("lab.doctor.examination.available_ram_gib", lambda: 100.0)
    if is_trained:
        announce(place.runs_dir / "large")
    try:
        result = run_lab("doctor", *place.arguments("large", "--json"))
    finally:
        withdraw()
    found = report_of(result.output)["microbatch"]
    assert result.exit_code == status, result.output
    assert found.verdict == (PROBLEM if status else OK)
    assert status == 0 or ("GPU 1 has 2.00 GiB free" in found.text and "nvidia-smi" in found.advice)


def test_processes_that_hang_or_die_are_told_and_ended(place: Workplace) -> None:
    about = Subject(place.runs_dir, place.datasets_dir)
    launch = {"world_size": 2, "name": "", "ranks": [(0, 0), (1, 1)]}
    with load_tests(about, launch, seconds=0.3) as tests:
        dead, hanging = tests._processes
        dead.kill()
        found = tests.results()
        assert hanging.poll() is None
    assert [result.ended for result in found] == ["killed by SIGKILL", "no answer within 0.3 s"]
    assert hanging.poll() is not None


def test_help_answers_without_torch() -> None:
    code = ("import sys\nfrom lab.__main__ import cli\n"
            "cli(['doctor', '--help'], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            cwd=PROJECT_DIR)
    assert result.returncode == 0, result.stderr
    assert "--online" in result.stdout


def failing(error: Exception) -> Callable[[], Finding]:
    def check() -> Finding:
        raise error

    return check


def test_a_check_that_raises_or_hangs_stops_no_other() -> None:
    forever = threading.Event()
    checks = make_checks({
        "raises": failing(ZeroDivisionError("by zero")), "refuses": failing(UserError("no; yes")),
        "hangs": lambda: forever.wait() and None, "nothing": lambda: None,
        "works": lambda: ok("well")}, seconds=0.2)
    forever.set()
    assert [(check.name, check.verdict) for check in checks] == [
        ("raises", WARNING), ("refuses", WARNING), ("hangs", WARNING), ("works", OK)]
    assert checks[0].text == "could not be checked: ZeroDivisionError: by zero"
    assert checks[2].text == "could not be checked: no answer within 0.2 s"


def test_a_driver_that_never_answers_is_no_hang(place: Workplace,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(examination, "read_gpus", lambda: forever.wait() and [])
    monkeypatch.setattr(examination, "DRIVER_SECONDS", 0.1)
    about = examination.subject_of(examination.Request(
        "tiny", place.runs_dir, place.datasets_dir, False, False, 10), {})
    forever.set()
    assert about.nvml_failure == gpu_checks.NO_ANSWER and about.num_processes == 1


def test_a_disk_of_runs_that_never_answers_is_no_hang(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, specs: list[Spec]
) -> None:
    forever = threading.Event()
    monkeypatch.setattr(examination, "load_run", lambda *_: forever.wait())
    monkeypatch.setattr(examination, "RUN_SECONDS", 0.1)
    result = run_lab("doctor", *place.arguments("tiny", "--json"))
    forever.set()
    assert result.exit_code == 1
    found = report_of(result.output)["configs"]
    assert found.verdict == PROBLEM and "no answer within 0.1 s" in found.text
    assert "--runs-dir" in found.advice


LONG = "a word " * 30
CHECKS = [Check("short", OK, "fine"), Check("a longer name", WARNING, LONG, "do " * 40),
          Check("x", PROBLEM, "bad \x1b[2J", "mend it"), Check("y", SKIPPED, "not now")]


def printed(columns: int, monkeypatch: pytest.MonkeyPatch, *, color: bool = False) -> str:
    @click.command()
    def show() -> None:
        print_report([Report("host", CHECKS)], "tiny")

    monkeypatch.setenv("COLUMNS", str(columns))
    return CliRunner().invoke(show, color=color).output


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_report_is_aligned_and_fits_the_terminal(columns: int,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(columns, monkeypatch).splitlines()
    assert max(map(len, lines)) <= columns
    starts = [line for line in lines if line.split()[0] in (OK, WARNING, PROBLEM, SKIPPED)]
    assert len(starts) == 4
    texts = [line.index(text) for line, text in zip(
        starts, ("fine", "a word", "bad", "not now"), strict=True)]
    assert len(set(texts)) == 1
    advice = next(line for line in lines if "-> mend it" in line)
    assert advice.index("->") == texts[0]
    assert lines[-1] == "not fit to train tiny: 1 problem, 1 warning"


def test_verdicts_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, colored = (printed(80, monkeypatch, color=color) for color in (False, True))
    assert "\x1b" not in plain and r"bad \x1b[2J" in plain
    assert "\x1b[31mproblem" in colored and "\x1b[33mwarning" in colored
    assert "\x1b[2J" not in colored
    assert click.unstyle(colored) == plain


def test_the_document_has_what_the_lines_have() -> None:
    document = as_document([Report("host", CHECKS)], None)
    assert next(iter(document)) == "schema" and document["schema"] == "doctor/1"
    assert document["run"] is None and not document["is_fit"]
    assert document["reports"][0]["checks"][2] == {
        "name": "x", "verdict": PROBLEM, "text": "bad \x1b[2J", "advice": "mend it"}
    assert problem("a", "b").advice == "b"
