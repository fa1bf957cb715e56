"""The runner of the measurements on a GPU, with stand-in commands."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner, Result

from basics.errors import UserError
from benchmarks import on_gpu, on_gpu_environment, on_gpu_stages
from benchmarks.on_gpu import Caller, Results
from benchmarks.on_gpu_process import installed, run_to_limit
from benchmarks.on_gpu_stages import Settings, Stage, read_tests, stages
from tests.support.workplace import PROJECT_DIR

FOREVER = float("inf")
# Stands in for throughput.py: measures one row a call, of those given after the path.
MEASURE_ONE = """
import json, pathlib, sys
path, *rows = sys.argv[1:sys.argv.index("--minutes")]
path = pathlib.Path(path)
lines = path.read_text().splitlines() if path.exists() else []
missing = [row for row in rows if row not in [json.loads(line)["row"] for line in lines]]
if missing:
    lines.append(json.dumps({"row": missing[0], "status": "ok", "tokens_per_second": 1}))
path.write_text("".join(f"{line}\\n" for line in lines))
"""


def python(name: str, code: str, *, limit: int = 100, **options: object) -> Stage:
    return Stage(name.split("-")[0], name, name.capitalize(), ("-c", code), limit, **options)


def caller(output: Path, *, ends_at: float = FOREVER) -> Caller:
    setup = {"device": "cpu", "dry_run": True, "usd_per_hour": None}
    return Caller(Results.load(output, setup), dict(os.environ), ends_at)


def call(output: Path, table: list[Stage], *, ends_at: float = FOREVER, fresh: bool = False,
         retry: bool = False) -> dict[str, str]:
    """Make one call; return the status of every stage, as the file has it."""
    one = caller(output, ends_at=ends_at)
    one.call(table, [stage for stage in table if one.is_due(stage, fresh=fresh, retry=retry)])
    found = json.loads((output / "results.json").read_text())["stages"]
    return {name: result["status"] for name, result in found.items()}


def command_line(*arguments: object) -> Result:
    return CliRunner().invoke(on_gpu.main, [str(argument) for argument in arguments])


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_command_is_killed_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"setsid sleep 300 & echo $! > {tmp_path}/pid; echo begun; sleep 300"
    status = run_to_limit(["sh", "-c", script], 2, tmp_path / "log", dict(os.environ))
    assert status is None
    assert (tmp_path / "log").read_text().startswith("begun\n")  # a shell may add "Killed"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_a_failure_is_recorded_with_its_last_lines_and_the_next_stage_runs(tmp_path: Path) -> None:
    table = [python("first", "print('why'); raise SystemExit(3)"), python("second", "pass")]
    assert call(tmp_path, table) == {"first": "failed", "second": "done"}
    result = json.loads((tmp_path / "results.json").read_text())["stages"]["first"]
    assert result["reason"] == "exit status 3: why" and result["tail"] == ["why"]
    page = (tmp_path / "on-gpu.md").read_text()
    assert "exit status 3: why" in page and "Not begun: none" in page


def test_a_stage_that_runs_out_of_time_is_recorded(tmp_path: Path) -> None:
    table = [python("slow", "import time; time.sleep(300)", limit=1)]
    assert call(tmp_path, table) == {"slow": "timed out"}


def test_what_is_done_or_failed_is_repeated_only_when_asked(tmp_path: Path) -> None:
    count = f"open(r'{tmp_path}/count', 'a').write('x')"
    table = [python("good", count), python("bad", f"{count}; raise SystemExit(1)")]

    def runs(**options: bool) -> int:
        (tmp_path / "count").write_text("")
        call(tmp_path, table, **options)
        return len((tmp_path / "count").read_text())

    assert [runs(), runs(), runs(retry=True), runs(fresh=True)] == [2, 0, 1, 2]


def test_a_stage_is_begun_only_if_its_limit_fits(tmp_path: Path) -> None:
    table = [python("long", "pass", limit=500), python("short", "pass", limit=50)]
    assert call(tmp_path, table, ends_at=time.monotonic() + 400) == {"short": "done"}
    assert call(tmp_path, table) == {"short": "done", "long": "done"}


def rows_stage(output: Path, *rows: str) -> Stage:
    command = ("-c", MEASURE_ONE, str(output / "rows.jsonl"), *rows)
    return Stage("rows", "rows", "Rows", command, 100, rows=rows, least_seconds=50)


def test_rows_are_measured_over_several_calls(tmp_path: Path) -> None:
    table = [rows_stage(tmp_path, "a", "b")]
    assert call(tmp_path, table, ends_at=time.monotonic() + 70) == {"rows": "partial"}
    assert "to be continued: rows" in (tmp_path / "on-gpu.md").read_text().replace("\n", " ")
    assert call(tmp_path, table, ends_at=time.monotonic() + 70) == {"rows": "done"}
    assert (tmp_path / "rows.jsonl").read_text().count("\n") == 2


def test_a_call_that_measures_no_row_has_failed(tmp_path: Path) -> None:
    stage = rows_stage(tmp_path, "a", "b")
    table = [Stage("rows", "rows", "Rows", stage.command[:-1], 100, rows=stage.rows)]
    call(tmp_path, table)
    assert call(tmp_path, table) == {"rows": "failed"}


def test_a_row_that_ran_out_of_time_is_tried_again_if_others_were_measured(tmp_path: Path) -> None:
    table = [rows_stage(tmp_path, "a", "b")]
    (tmp_path / "rows.jsonl").write_text(
        '{"row": "b", "status": "failed", "reason": "ran out of time after 60 s"}\n')
    assert call(tmp_path, table) == {"rows": "partial"}
    assert call(tmp_path, table) == {"rows": "failed"}  # no other row was left to be measured


def test_a_row_that_failed_is_measured_again_with_retry(tmp_path: Path) -> None:
    table = [rows_stage(tmp_path, "a")]
    (tmp_path / "rows.jsonl").write_text('{"row": "a", "status": "failed", "reason": "memory"}\n')
    assert call(tmp_path, table) == {"rows": "failed"}
    assert "failed: memory" in (tmp_path / "on-gpu.md").read_text()
    assert call(tmp_path, table, retry=True) == {"rows": "done"}


def test_a_killed_call_ends_its_stage_and_the_next_one_continues(tmp_path: Path) -> None:
    script = tmp_path / "call.py"
    wait = f"open(r'{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(300)"
    script.write_text(f"""
import sys
from benchmarks import on_gpu
from benchmarks.on_gpu_stages import Stage
on_gpu.stages = lambda settings: [
    Stage("a", "a", "A", ("-c", "print('one')"), 100),
    Stage("b", "b", "B", ("-c", "import os, time; {wait}"), 400)]
on_gpu.main(["--device", "cpu", "--output", r"{tmp_path}/out"])
""")
    process = subprocess.Popen([sys.executable, str(script)], cwd=PROJECT_DIR,
                               env=os.environ | {"PYTHONPATH": str(PROJECT_DIR)})
    pid_path, deadline = tmp_path / "pid", time.monotonic() + 100
    while not (pid_path.exists() and pid_path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert not is_alive(int(pid_path.read_text()))
    table = [python("a", "raise SystemExit(1)"), python("b", "pass")]
    assert list(json.loads((tmp_path / "out/results.json").read_text())["stages"]) == ["a"]
    found = Results.load(tmp_path / "out", {"device": "cpu", "dry_run": False})
    one = Caller(found, dict(os.environ), FOREVER)
    assert [stage.name for stage in table if one.is_due(stage, fresh=False, retry=False)] == ["b"]


def test_results_of_another_device_are_refused(tmp_path: Path) -> None:
    call(tmp_path, [python("a", "pass")])
    result = command_line("--output", tmp_path, "--page")
    assert result.exit_code == 2 and "name another --output" in result.output


def test_an_unknown_stage_is_refused_and_a_group_can_be_chosen(tmp_path: Path) -> None:
    assert command_line("--only", "nothing", "--output", tmp_path).exit_code == 2
    table = stages(Settings(tmp_path, "cuda"))
    names = [stage.name for stage in on_gpu.choose(table, ("numbers",), ())]
    assert names == ["environment", "numbers-precision", "numbers-repeat"]
    assert not [stage for stage in on_gpu.choose(table, (), ("ours",)) if stage.group == "ours"]
    listed = command_line("--list", "--output", tmp_path / "none").output
    assert all(stage.name in listed for stage in table) and not (tmp_path / "none").exists()


def test_every_stage_fits_into_a_call_of_ten_minutes(tmp_path: Path) -> None:
    for stage in stages(Settings(tmp_path, "cuda")):
        assert stage.seconds_to_begin() + on_gpu.RESERVE_SECONDS + 30 <= 600


def test_the_stages_name_commands_and_tests_that_exist(tmp_path: Path) -> None:
    table = stages(Settings(tmp_path, "cuda", nanogpt=tmp_path))
    modules = {stage.command[1] for stage in table}
    assert all(importlib.util.find_spec(module) for module in modules)
    (tests,) = (stage for stage in table if stage.name == "tests")
    assert "tests/test_gpu.py" in tests.command
    assert all((PROJECT_DIR / word).exists() for word in tests.command if word.endswith(".py"))
    (peers,) = (stage for stage in table if stage.name == "peers")
    assert "nanoGPT, compiled" in peers.rows and "--peer" in peers.command


def test_outcomes_are_read_from_a_session_that_was_killed(tmp_path: Path) -> None:
    text = ("collected 9 items / 5 deselected / 4 selected\n\n"
            "tests/test_gpu.py::test_a[bf16] PASSED    [ 25%]\n"
            "tests/test_gpu.py::test_b FAILED          [ 50%]\n"
            "tests/lab/test_memory.py::test_c[x y] PASSED [ 75%]\n"
            "tests/test_gpu.py::test_d ")
    found = read_tests(tmp_path, text)
    assert (found["passed"], found["failed"]) == (2, 1)
    assert found["names"] == ["tests/test_gpu.py::test_b"]


def add_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "answer = 42\n")
        wheel.writestr("carried-1.0.dist-info/METADATA",
                       "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL",
                       "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")


def has_pip() -> bool:
    """Look for pip without its import machinery, which would keep setuptools from working."""
    return any(found.name == "pip" for found in importlib.metadata.distributions())


@pytest.mark.skipif(not has_pip(), reason="this Python has no pip")
def test_wheels_are_installed_for_the_stages(tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_wheel(tmp_path)
    with installed(tmp_path) as environment:
        finished = subprocess.run([sys.executable, "-c", "import carried; print(carried.answer)"],
                                  env=environment, capture_output=True, text=True)
    assert finished.stdout == "42\n", finished.stderr


def test_what_pip_is_asked_for_and_what_it_refuses(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(command: list[str], **options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=1, stderr="ERROR: not supported on this platform\n")

    with pytest.raises(UserError, match="no \\*.whl"), installed(tmp_path):
        pass
    add_wheel(tmp_path)
    monkeypatch.setattr("benchmarks.on_gpu_process.subprocess.run", fake)
    with pytest.raises(UserError, match="not supported on this platform"), installed(tmp_path):
        pass
    assert {"--no-index", "--no-deps", "--target"} <= set(asked[0])
    assert asked[0][-1] == str(tmp_path / "carried-1.0-py3-none-any.whl")


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports when it is imported itself."""
    waiting, found = [ast.parse(path.read_text())], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)
    return found


def packages_of(*modules: str) -> set[str]:
    """Return the packages that modules of the project import, and those that they import."""
    waiting, seen, packages = list(modules), set(), set()
    while waiting:
        module = waiting.pop()
        path = PROJECT_DIR / f"{module.replace('.', '/')}.py"
        if path.exists() and module not in seen:
            seen.add(module)
            waiting += imports_of(path)
        elif not (PROJECT_DIR / module.split(".")[0]).is_dir() and module not in seen:
            packages.add(module.split(".")[0])
    return packages - sys.stdlib_module_names - {path.stem for path in PROJECT_DIR.glob("*.py")}


def test_all_packages_that_the_stages_import_are_needed_and_no_others(tmp_path: Path) -> None:
    commands = {stage.command[1] for stage in stages(Settings(tmp_path, "cuda"))} - {"pytest"}
    found = packages_of("ddp_train", "lab.__main__", "lab.evaluate.evaluate",
                        "lab.evaluate.measure", "benchmarks.checkpoints", "benchmarks.on_gpu_page",
                        *commands)
    found -= {"tiktoken_ext"}  # a part of tiktoken
    assert found | {"transformers", "pytest"} == set(on_gpu_environment.NEEDED)
    tests = packages_of("tests.conftest", *(
        path.removesuffix(".py").replace("/", ".")
        for path in stages(Settings(tmp_path, "cuda"))[1].command if path.endswith(".py")))
    assert tests - {"tiktoken_ext"} <= {*on_gpu_environment.NEEDED, *on_gpu_environment.FOR_TESTS}


@pytest.mark.parametrize("missing", [[], ["no_such_package"]])
def test_the_environment_says_what_is_missing(tmp_path: Path, missing: list[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu_environment, "NEEDED", ("torch", *missing))
    monkeypatch.setattr(on_gpu_environment, "FOR_OTHER_COMMANDS", ())
    monkeypatch.setattr(sys, "argv", ["environment", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        on_gpu_environment.main()
    assert ended.value.code == (1 if missing else 0)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["missing"] == missing and found["packages"]["torch"]


def test_a_dry_run_measures_on_a_cpu(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.on_gpu", "--device", "cpu", "--dry-run", "--only",
         "around-checkpoint", "--skip", "environment", "--output", str(tmp_path), "--usd-per-hour",
         "2"], cwd=PROJECT_DIR, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["stages"]["around-checkpoint"]["status"] == "done", results
    assert results["stages"]["around-checkpoint"]["values"]["later_stall_seconds"] >= 0
    page = (tmp_path / "on-gpu.md").read_text()
    assert "a dry run" in page and "later stall seconds" in page and "ours-kernels" in page
    assert on_gpu_stages.read_rows(tmp_path / "missing.jsonl") == []
