from __future__ import annotations

import signal

import pytest

from processes.stop_signals import StopSignals, stop_signals, torchrun_signals


@pytest.mark.parametrize("under_nohup", [True, False])
def test_sighup_stops_a_run_but_stays_ignored_under_nohup(under_nohup: bool) -> None:
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
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
