import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from basics.errors import UserError
from processes import startup_agreement
from processes.startup_agreement import AgreedError, Agreement


def on_each_rank(work, num_ranks=3):
    """Call a function on every rank, each in a thread; return the results or the errors."""
    def call(rank):
        try:
            return work(Agreement(rank, num_ranks), rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(call, range(num_ranks)))


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """One store for all ranks, as torchrun has it."""
    store = dist.HashStore()
    monkeypatch.setattr(startup_agreement, "_open_torchrun_store", lambda: store)
    return store


def fail_with(error):
    raise error


@pytest.mark.parametrize(("text", "wanted"), [
    ("The server socket has failed to listen. port: 29577, code: -98, name: EADDRINUSE",
     "MASTER_PORT 29577: another program uses this port; set another one"),
    ("client socket has timed out", "rank 0 lost the others before it began: DistNetworkError"),
])
def test_without_torchruns_store_a_process_says_why(monkeypatch, text, wanted):
    monkeypatch.setenv("MASTER_PORT", "29577")
    with pytest.raises(UserError, match=f"^{wanted}"):
        Agreement(0, 1, lambda: fail_with(dist.DistNetworkError(text)))


def test_every_rank_has_its_own_result_and_all_have_rank_0s():
    def work(agreement, rank):
        return (agreement.run("own", lambda: rank),
                agreement.from_rank_0("of rank 0", lambda: f"{rank}"),
                agreement.gather("all", f"rank {rank}"))

    everything = ["rank 0", "rank 1", "rank 2"]
    assert on_each_rank(work) == [(rank, "0", everything) for rank in range(3)]


@pytest.mark.parametrize(("error", "kinds", "told", "status"), [
    (lambda rank: UserError(f"rank {rank}", 4), [AgreedError] * 3, "rank 1", 4),
    (lambda rank: MemoryError("out"), [AgreedError, MemoryError, MemoryError],
     "rank 1 failed: MemoryError: out", 1)])
def test_the_error_of_the_lowest_rank_is_raised_on_all(error, kinds, told, status):
    """Where a rank crashes, the others end too."""
    found = on_each_rank(lambda agreement, rank: agreement.run(
        "step", lambda: fail_with(error(rank)) if rank else None))
    assert [type(each) for each in found] == kinds
    assert (str(found[0]), found[0].status) == (told, status)


def test_a_value_that_differs_is_an_error_on_all_ranks():
    def work(agreement, rank):
        agreement.require_same("equal", "a")
        agreement.require_same("unequal", rank == 2)

    assert all("rank 2 reads another run than rank 0" in str(error) for error in on_each_rank(work))


def test_a_later_launch_finds_no_keys_of_an_earlier_one():
    def work(agreement, rank):
        began_at = agreement.step_before_restart()
        agreement.gather("all have looked", "")
        if rank == 0:
            agreement.record_training_began(20 if began_at is None else 30)
        return agreement.name, began_at

    first, second = on_each_rank(work), on_each_rank(work)
    assert len(set(first)) == len(set(second)) == 1 and first[0][0] != second[0][0]
    assert first[0][1] is None and second[0][1] == 20
    assert on_each_rank(work)[0][1] == 20  # of the launch, not of its first restart


@pytest.mark.parametrize(("rank", "key", "value"), [
    (0, "", ""),  # rank 1 never begins
    (0, "nonce/1", "known"),  # it ended before all had begun
    (1, "", ""), (1, "echo", "name of-another-launch")])
def test_a_process_does_not_wait_for_long_for_one_that_never_begins(store, monkeypatch, rank, key,
                                                                    value):
    assert startup_agreement.BEGIN_SECONDS == 1800  # the half hour of RELIABILITY.md
    monkeypatch.setattr(startup_agreement, "BEGIN_SECONDS", 0.3)
    if key:
        store.set(key, value)
    with pytest.raises(UserError, match=f"rank {rank} lost the others before it began: ") as caught:
        Agreement(rank, 2)
    assert caught.value.status == 1


def test_one_process_agrees_with_itself_without_torchrun(capsys, monkeypatch):
    agreement = Agreement.in_one_process()
    assert agreement.run("step", lambda: 7) == 7
    assert agreement.from_rank_0("text", lambda: "a") == "a"
    agreement.require_same("value", 1.5)
    assert agreement.step_before_restart() is None
    with pytest.raises(AgreedError, match=r"runs/\\udcff: not UTF-8"):
        agreement.run("path", lambda: fail_with(UserError("runs/\udcff: not UTF-8")))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="2"):
        agreement.exit(UserError("once"))
    assert capsys.readouterr().err == "Error: once\n"
