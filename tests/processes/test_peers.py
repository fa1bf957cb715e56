from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from basics.machine import process_namespace
from processes import peers as peers_module
from processes.peers import Peers, PeerStore, is_timeout
from tests.support.workplace import PROJECT_DIR


class StuckStore:
    """Answers nothing until the test ends, as one on a machine that is out of reach."""

    def __init__(self) -> None:
        self.test_ends = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.test_ends.wait()
        return True


@pytest.fixture
def store() -> Iterator[PeerStore]:
    store = PeerStore(dist.HashStore(), timeout_seconds=20)
    yield store
    store.close()


def test_the_first_value_of_a_key_wins(store: PeerStore) -> None:
    assert not store.has("failure")
    assert store.set_if_missing("failure", "first") == "first"
    assert store.set_if_missing("failure", "second") == "first"
    assert store.get("failure") == "first"


def test_a_store_that_does_not_answer_counts_as_down() -> None:
    stuck = StuckStore()
    store = PeerStore(stuck, timeout_seconds=0.05)
    assert store.is_up
    assert not store.has("key")
    assert not store.is_up
    assert store.set_if_missing("key", "own") == "own"
    assert store.get("key") == "" and store.add("count", 1) == 0
    stuck.test_ends.set()
    store.close()


def test_an_answer_that_python_had_no_time_to_read_is_not_lost(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    class BusyStore(StuckStore):
        def check(self, keys: list[str]) -> bool:
            return not self.test_ends.wait(0.2)

    monkeypatch.setattr(peers_module, "MOMENT_SECONDS", 20.0)
    store = PeerStore(BusyStore(), timeout_seconds=0.01)
    assert store.has("key") and store.is_up
    store.close()


def test_only_processes_of_this_process_table_are_found_dead(store: PeerStore) -> None:
    """Machines and containers may share a host name."""
    host, *rest = process_namespace().split("/")
    dead = subprocess.Popen(["true"])
    dead.wait()
    peers = Peers(0, 6, store)
    store.set("process/1", f"{'/'.join([host, 'another-boot', *rest[1:]])} {dead.pid}")
    store.set("process/2", f"{'/'.join([host, *rest[:1], 'pid:[1]'])} {dead.pid}")
    store.set("process/3", f"{process_namespace()} {dead.pid}")
    store.set("process/4", f"{process_namespace()} {os.getpid()}")  # alive
    store.set("process/5", f"{process_namespace()} {dead.pid}")
    store.set("done/5")
    assert peers.find_dead() == [3]
    assert peers.find_dead() == []


def test_a_rank_without_heartbeats_is_lost_once(store: PeerStore) -> None:
    peers, other, done = (Peers(rank, 3, store) for rank in range(3))
    for peer in (peers, other, done):
        peer.heartbeat()
    assert peers.find_lost(0.0, 10.0) == []
    done.announce_exit()
    peers.heartbeat()
    assert peers.find_lost(11.0, 10.0) == [1]
    peers.heartbeat()
    assert peers.find_lost(21.0, 10.0) == []


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
    (RuntimeError("Timed out"), 1, False),
    *((RuntimeError(text), 2, True) for text in NCCL2_TIMEOUTS + NCCL2_ERRORS),
    (RuntimeError("NCCL error: out of memory"), 2, False), (OSError("Connection reset"), 2, False),
])
def test_what_other_processes_have_caused(
    store: PeerStore, error: Exception, world_size: int, is_caused: bool
) -> None:
    """A GPU's own error, and any error of the only process, is reported as it is."""
    assert Peers(0, world_size, store).caused(error) is is_caused


def test_an_error_of_nccls_that_is_no_timeout_is_no_hang() -> None:
    assert all(is_timeout(RuntimeError(text)) for text in NCCL2_TIMEOUTS)
    assert not any(is_timeout(RuntimeError(text)) for text in NCCL2_ERRORS)


def test_the_rank_with_the_least_progress_hung(store: PeerStore) -> None:
    peers = [Peers(rank, 4, store) for rank in range(4)]
    assert peers[0].find_hung() == [0, 1, 2, 3]  # nothing is known
    peers[0].publish_progress(None)  # waits for others
    peers[1].publish_progress((7, 2))
    peers[2].publish_progress((7, 10))
    assert peers[0].find_hung() == [1]
    peers[3].publish_progress((6, 9))
    assert peers[0].find_hung() == [3]


def test_all_are_silent_only_if_each_says_so(store: PeerStore) -> None:
    first, second = Peers(0, 2, store), Peers(1, 2, store)
    assert not first.all_silent(True)
    assert second.all_silent(True)
    assert not second.all_silent(False)
    assert not first.all_silent(True)


def test_another_container_has_another_process_table() -> None:
    unshare = ["unshare", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this system has no namespaces for us")
    code = "from basics.machine import process_namespace; print(process_namespace())"
    unshared = subprocess.run([*unshare, sys.executable, "-c", code], capture_output=True,
                              text=True, cwd=PROJECT_DIR, check=True).stdout.strip()
    assert unshared != process_namespace()
    assert unshared.split("/")[0] == process_namespace().split("/")[0]
