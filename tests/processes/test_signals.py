import os
import signal
import socket
import subprocess
import sys

import pytest

from processes.signals import StopSignals, stop_signals, torchrun_signals
from tests.support.workplace import PROJECT_DIR


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", f"from processes.signals import *; {code}"],
                          cwd=PROJECT_DIR, timeout=60, capture_output=True, text=True,
                          env=os.environ | environment)


@pytest.mark.parametrize("under_nohup", [True, False])
def test_sighup_stops_a_run_but_stays_ignored_under_nohup(under_nohup):
    before = {number: signal.getsignal(number) for number in (*stop_signals(), signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        signals = StopSignals()
        signal.raise_signal(signal.SIGHUP)
        assert signals.wait(0) == ([] if under_nohup else [signal.SIGHUP])
        assert ("SIGHUP" in torchrun_signals()) is not under_nohup
        signals.release()
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert is_ignored is under_nohup
        assert signal.set_wakeup_fd(-1) == -1  # nothing writes to a socket that is closed later
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("is_up", "status"), [(True, 0), (False, 128 + signal.SIGTERM)])
def test_a_worker_that_starts_after_its_torchrun_died_ends(is_up, status):
    with socket.create_server(("127.0.0.1", 0)) as store:  # torchrun's
        port = store.getsockname()[1]
        if not is_up:
            store.close()
        result = run("end_with_torchrun()", TORCHELASTIC_USE_AGENT_STORE="True",
                     MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert (result.returncode, result.stdout, result.stderr) == (status, "", "")


def test_a_process_that_asks_after_its_parents_death_ends():
    for parent, status in ((2**22, -signal.SIGTERM), (os.getpid(), 0)):
        assert run(f"end_with_parent({parent})").returncode == status
