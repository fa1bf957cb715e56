import os
import subprocess
import threading

import pytest
import torch
import torch.distributed as dist

from basics.machine import process_namespace
from processes import peers as peers_module
from processes.peers import Peers, is_timeout


class SlowStore:
    """Answers after a while."""

    def __init__(self, seconds):
        self.seconds, self.test_ends = seconds, threading.Event()

    def check(self, keys):
        return not self.test_ends.wait(self.seconds)

    def get(self, key):
        return b"value"


@pytest.fixture
def peers():
    """Six processes that know of each other."""
    store = dist.HashStore()
    peers = [Peers(rank, 6, store, timeout_seconds=20) for rank in range(6)]
    yield peers
    for each in peers:
        each.close()


def test_the_first_value_of_a_key_wins(peers):
    assert peers[0].get("failure") == ""
    assert peers[0].set_if_missing("failure", "first") == "first"
    assert peers[1].set_if_missing("failure", "second") == peers[1].get("failure") == "first"


@pytest.mark.parametrize(("answers_after", "is_up"), [(0.2, True), (3600.0, False)])
def test_a_store_that_does_not_answer_counts_as_down(monkeypatch, answers_after, is_up):
    """Not if the answer is there, and Python had no time to read it."""
    monkeypatch.setattr(peers_module, "MOMENT_SECONDS", 20.0 if is_up else 0.05)
    store = SlowStore(answers_after)
    peers = Peers(0, 2, store, timeout_seconds=0.05)
    assert (peers.get("key") == "value") is peers.is_up is is_up
    if not is_up:
        assert not peers.is_working(1) and peers.find_dead() == []
        assert peers.set_if_missing("key", "own") == "own"
    store.test_ends.set()
    peers.close()


def test_only_processes_of_this_process_table_are_found_dead(peers):
    """Machines and containers may share a host name; they have other boots and namespaces."""
    host, *rest = process_namespace().split("/")
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = process_namespace()
    peers[1].publish(place="/".join([host, "another-boot", *rest[1:]]), pid=dead.pid)
    peers[2].publish(place="/".join([host, *rest[:1], "pid:[1]"]), pid=dead.pid)
    peers[3].publish(place=here, pid=dead.pid)
    peers[4].publish(place=here, pid=os.getpid())  # alive
    peers[5].publish(place=here, pid=dead.pid, is_done=True)
    assert peers[0].find_dead() == [3]
    assert peers[0].find_dead() == []


def test_a_rank_without_heartbeats_is_lost_once(peers):
    for each in peers:
        each.publish(at=0)
    assert peers[0].find_lost(0.0, 10.0) == []
    peers[2].publish(is_done=True)
    assert peers[0].find_lost(1.0, 10.0) == []
    for rank in (0, 3, 4, 5):
        peers[rank].publish(at=1)
    assert peers[0].find_lost(12.0, 10.0) == [1]
    for rank in (0, 3, 4, 5):
        peers[rank].publish(at=2)
    assert peers[0].find_lost(23.0, 10.0) == []


def test_the_rank_with_the_least_progress_hung(peers):
    assert peers[0].find_hung() == [0, 1, 2, 3, 4, 5]  # nothing is known
    peers[0].publish(progress=None)  # waits for others
    peers[1].publish(progress=[7, 2])
    peers[2].publish(progress=[7, 10])
    assert peers[0].find_hung() == [1]
    peers[3].publish(progress=[6, 9])
    assert peers[0].find_hung() == [3]


LAUNCH = torch.AcceleratorError("CUDA error: the launch timed out and was terminated")
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.2]:3")
# Of PyTorch's second implementation of NCCL's backend.
NCCL2_TIMEOUTS = ["Operation timed out after 720000 ms", "NCCL operation timed out",
                  "timeout - timeout watchdog detected operation timeout"]
NCCL2_ERRORS = ["error - timeout watchdog detected operation error",
                "error - nccl hit async error: remote process exited or there was a network error",
                "NCCL communicator was aborted after a previous error"]


@pytest.mark.parametrize(("error", "world_size", "is_caused"), [
    (LAUNCH, 1, False), (LAUNCH, 2, False), (CLOSED, 1, False), (CLOSED, 2, True),
    (dist.DistBackendError("NCCL error: unhandled cuda error"), 2, True),
    (RuntimeError("Timed out waiting 30000ms for recv operation to complete"), 2, True),
    *((RuntimeError(text), 2, True) for text in NCCL2_TIMEOUTS + NCCL2_ERRORS),
    (RuntimeError("NCCL error: out of memory"), 2, False), (OSError("Connection reset"), 2, False),
])
def test_what_other_processes_have_caused(error, world_size, is_caused):
    """A GPU's own error, and any error of the only process, is reported as it is."""
    peers = Peers(0, world_size, dist.HashStore(), timeout_seconds=20)
    assert peers.caused(error) is is_caused
    if str(error) in NCCL2_TIMEOUTS + NCCL2_ERRORS:
        assert is_timeout(error) is (str(error) in NCCL2_TIMEOUTS)
    peers.close()
