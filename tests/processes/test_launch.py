import os
import re
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from basics.errors import UserError
from processes import launch
from processes.launch import Process, end_torchrun, share_cpu_cores, this_process
from run_config import TrainConfig
from tests.support.workplace import TINY_TRAIN

CPU = torch.device("cpu")


@pytest.mark.parametrize(("num_local_processes", "omp_num_threads", "expected"), [
    (2, "1", [4]), (16, "1", [1]), (2, "3", [])])
def test_cpu_processes_share_the_cores(monkeypatch, num_local_processes, omp_num_threads, expected):
    monkeypatch.setattr("processes.launch.num_cpu_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_local_processes))
    monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    changed: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    share_cpu_cores(Process(0, 0, num_local_processes, CPU))
    assert changed == expected


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for key, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="local rank 2 has no GPU of its own; this machine has 2"):
        this_process()


@pytest.mark.parametrize(("used", "num_warnings"), [("4", 1), ("8", 0)])
def test_gpus_that_no_process_uses_are_warned_of(monkeypatch, used, num_warnings):
    monkeypatch.setattr(launch, "num_gpus", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", used)
    warnings = launch.unused_gpus()
    wanted = f"{used} of the 8 GPUs of this machine are used: set --nproc_per_node to 8,"
    assert [line.startswith(wanted) for line in warnings] == [True] * num_warnings


@pytest.mark.parametrize(("nodes", "local_rank", "parent_is_torchrun", "ends"), [
    (2, 0, True, True), (1, 0, True, False), (2, 1, True, False), (2, 0, False, False)])
def test_only_a_torchrun_that_is_one_of_several_is_ended(monkeypatch, nodes, local_rank,
                                                         parent_is_torchrun, ends):
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setattr(psutil.Process, "exe", lambda self: "/usr/bin/python3.12")
    ended: list[int] = []
    monkeypatch.setattr(psutil.Process, "terminate", lambda self: ended.append(self.pid))
    parent = os.getppid()
    end_torchrun(Process(2, local_rank, 4, CPU, torchrun_pid=parent if parent_is_torchrun else 1))
    assert ended == ([parent] if ends else [])


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 60), ("cuda:0", 600 + 120)])
def test_nccl_waits_longer_than_the_watchdog_and_is_named(monkeypatch, capsys, device, seconds):
    """Its own timeout would end the process without a line that says which rank hung."""
    world = SimpleNamespace(_get_backend=lambda _: type("ProcessGroupNCCL2", (), {})())
    monkeypatch.setattr(launch.dist, "group", SimpleNamespace(WORLD=world))
    found: list[timedelta] = []
    monkeypatch.setattr(launch, "join_process_group",
                        lambda *_, timeout: found.append(timeout))
    monkeypatch.setattr(launch.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: None)
    train = TrainConfig(**TINY_TRAIN, collective_timeout_seconds=60)
    with launch.process_group(Process(0, 0, 2, torch.device(device)), None, train):
        pass
    said = r"NCCL \d+\.\d+\.\d+, PyTorch's ProcessGroupNCCL2\n" if device == "cuda:0" else ""
    assert re.fullmatch(said, capsys.readouterr().out)
    assert found == [timedelta(seconds=seconds)]


@pytest.mark.parametrize(("towards_master", "set_by_user", "chosen"), [
    ("127.0.1.1", None, "eth1"),  # on the node whose name MASTER_ADDR is
    ("10.0.0.1", None, "eth1"), ("10.0.0.1", "ib0", "ib0"),
    ("127.0.0.1 alone", None, None),  # all nodes are on this machine
])
def test_gloo_uses_the_interface_that_leads_to_other_nodes(monkeypatch, towards_master, set_by_user,
                                                           chosen):
    towards_master, _, is_alone = towards_master.partition(" ")
    others = "127.0.0.1" if is_alone else "10.0.0.2"
    store = dist.HashStore()
    store.set("address/1", others)
    ways = {"head": towards_master, "10.0.0.1": "10.0.0.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(launch, "_own_address", ways.__getitem__)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {
        name: [SimpleNamespace(address=address)]
        for name, address in (("lo", "127.0.0.1"), ("eth0", "10.9.0.1"), ("eth1", "10.0.0.1"))})
    monkeypatch.setattr(launch.dist, "init_process_group", lambda *_, **__: None)
    for name, value in (("GROUP_WORLD_SIZE", "2"), ("MASTER_ADDR", "head")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    launch.join_process_group(Process(0, 0, 2, CPU), store, timeout=timedelta(seconds=20))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
