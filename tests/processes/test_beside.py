"""One process beside training: stand-ins for what goes wrong in it, and the one that draws."""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from basics.failpoints import MARKS, VARIABLE
from basics.files import lock_directory
from processes.beside import Beside, start_module
from tests.support.runs import wait_for
from tests.support.workplace import PROJECT_DIR

HANGS = "sleep 3600"


class Scripts:
    """Shell scripts that run instead of a module, one after another; the last one repeatedly."""

    def __init__(self, folder, *codes):
        self._folder, self._codes = folder, list(codes)
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self):
        assert all(process.poll() is not None for process in self.started), "two at a time"
        code = self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]
        self.started.append(subprocess.Popen(
            ["sh", "-c", code], cwd=self._folder, process_group=0, bufsize=0,
            stdin=subprocess.PIPE, stderr=subprocess.PIPE))
        return self.started[-1]


def drawing(run_dir):
    return Beside("chart", lambda: start_module("reporting.charts", run_dir))


def finish(process):
    return process.finish(lambda: math.inf)


def wait_until_gone(pid):
    until = time.monotonic() + 20
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, f"process {pid} lives on"
            time.sleep(0.02)


def test_one_process_at_a_time_and_another_one_only_if_it_was_asked_for_meanwhile(tmp_path):
    scripts = Scripts(tmp_path, "touch began; read word", "true")
    process = Beside("chart", scripts)
    process.start()
    wait_for(tmp_path / "began")
    for _ in range(3):
        process.start()
    assert process.pop_failure() == "" and len(scripts.started) == 1
    scripts.started[0].stdin.write(b"go on\n")
    assert finish(process) == "" and len(scripts.started) == 2
    assert finish(process) == "" and len(scripts.started) == 2  # nothing is due


@pytest.mark.parametrize(("code", "failure"), [
    ("echo no good >&2; exit 1", "no good; advice"),
    ("exit 3", "ended with status 3; advice"),
    ("kill -9 $$", "its process was ended by signal 9 (Killed); advice"),
    ("echo a note >&2", "a note; advice"), ("true", "")])
def test_what_it_says_and_how_it_failed_is_told_once(tmp_path, code, failure):
    process = Beside("chart", Scripts(tmp_path, code), advice="; advice")
    process.start()
    assert finish(process) == failure
    assert process.pop_failure() == finish(process) == ""
    missing = Beside("chart", lambda: subprocess.Popen([tmp_path / "missing"]))
    missing.start()
    assert finish(missing).startswith("FileNotFoundError: ")


def test_a_failure_is_told_although_the_next_one_runs_and_not_after_a_success(tmp_path):
    scripts = Scripts(tmp_path, "touch first; read word; exit 3", "touch second; read word; exit 4",
                      "exit 0")
    process = Beside("chart", scripts)
    process.start()
    wait_for(tmp_path / "first")
    process.start()
    scripts.started[0].stdin.write(b"go on\n")
    wait_for(tmp_path / "second")
    assert process.pop_failure() == "ended with status 3"
    process.start()
    scripts.started[1].stdin.write(b"go on\n")
    assert finish(process) == ""  # the last one did all that there was to do


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    beats, pid = [], tmp_path / "pid"
    process = Beside("chart", Scripts(
        tmp_path, f"trap '' TERM; {HANGS} & echo $! > pid; wait; {HANGS}"))
    process.start()
    process.start()  # the one that waits is not started any more
    failure = process.finish(lambda: 0.0 if beats and pid.exists() and pid.read_text()
                             else math.inf, heartbeat=lambda: beats.append(1))
    assert failure.startswith("it was ended after ")
    wait_until_gone(int(pid.read_text()))
    assert finish(process) == "its process was ended by signal 9 (Killed)"


@pytest.mark.parametrize(("status", "failure"), [(0, ""), (5, "ended with status 5")])
def test_after_the_last_one_has_been_told_the_end_no_other_one_is_started(tmp_path, status,
                                                                          failure):
    scripts = Scripts(tmp_path, "exit 3", "touch second; read word; test $word = end && exit "
                      f"{status}", "exit 4")
    process = Beside("tracker", scripts)
    process.start()
    assert finish(process) == "ended with status 3"
    process.start()
    wait_for(tmp_path / "second")
    process.start()
    process.tell_end()
    assert finish(process) == failure and len(scripts.started) == 2


def struck_pid(marks):
    """Wait until a drawing has come to its failpoint; return its process."""
    until = time.monotonic() + 60
    while not (marks.exists() and marks.read_text().endswith("\n")):
        assert time.monotonic() < until, "no drawing has begun"
        time.sleep(0.02)
    return int(marks.read_text().split()[3])


def test_it_is_at_the_lowest_priority_without_lock_and_torchrun(monkeypatch, tmp_path):
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "1",
                        "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0",
                        VARIABLE: "draw:hang", MARKS: str(tmp_path / "marks")}.items():
        monkeypatch.setenv(name, value)
    lock, process = lock_directory(tmp_path), drawing(tmp_path)
    process.start()
    pid = struck_pid(tmp_path / "marks")
    os.close(lock)
    os.close(lock_directory(tmp_path))  # nobody else has it
    found = psutil.Process(pid)
    assert found.nice() == 19 and found.cwd() == str(PROJECT_DIR) and not found.net_connections()
    assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)
    variables = found.environ()
    assert not [key for key in variables if key.startswith(("TORCHELASTIC", "MASTER"))
                or key.endswith(("RANK", "WORLD_SIZE"))]
    assert variables["CUDA_VISIBLE_DEVICES"] == "" and variables["OMP_NUM_THREADS"] == "1"
    os.kill(pid, signal.SIGTERM)
    assert finish(process) == "its process was ended by signal 15 (Terminated)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_it_ends_with_a_process_that_is_killed(tmp_path):
    code = ("import sys, time\nfrom pathlib import Path\n"
            "from processes.beside import Beside, start_module\n"
            "Beside('chart', lambda: start_module('reporting.charts', Path(sys.argv[1]))).start()\n"
            "time.sleep(3600)")
    marks = tmp_path / "marks"
    trainer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT_DIR,
                               env=os.environ | {VARIABLE: "draw:hang", MARKS: str(marks)})
    pid = struck_pid(marks)
    assert psutil.pid_exists(pid)
    trainer.kill()
    trainer.wait(60)
    wait_until_gone(pid)
