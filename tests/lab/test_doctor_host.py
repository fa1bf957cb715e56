"""What `lab doctor` finds on the machine, for the run, and on the hub."""

import json
import re
import resource
import shutil
import socket
import sysconfig
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import pytest

from basics import machine
from basics.gpu_readings import GpuReading
from lab.doctor import machine_checks, run_checks
from lab.doctor.check import OK, PROBLEM, WARNING, Subject, make_checks
from run_config import load_run
from tests.support.hub_server import (
    Fault,
    Hub,
    serving,
    tokens_hub_fixture,  # noqa: F401
    used_in_this_process,
)
from tests.support.network import refused_network
from tests.support.workplace import Workplace

GPUS = (GpuReading(name="NVIDIA A100-SXM4-40GB", memory_total_gib=40.0),) * 8
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path)


def subject(place, *, train=None, model=None, **about):
    """Return the tiny run, changed, on a CPU with 100 GiB."""
    place.add_run(train=train, model=model)
    return Subject(place.runs_dir, place.datasets_dir, "tiny",
                   run=load_run(place.runs_dir, "tiny"), **{"available_gib": 100.0} | about)


def checks(about, module=run_checks):
    return make_checks(module.CHECKS | (getattr(module, "OF_RUN", {}) if about.run else {}), about)


def test_the_disk_of_the_runs_is_measured_and_nothing_is_left(place):
    found = checks(subject(place), machine_checks)
    assert "MB/s" in found["disk of runs"].text
    assert "disk of datasets" not in found  # it is the same one
    assert not [path for path in place.root.rglob("*") if "doctor" in path.name]


@pytest.mark.parametrize(("available", "verdict"), [(100, OK), (20, WARNING), (10, PROBLEM)])
def test_ram_is_compared_with_what_processes_and_snapshot_need(place, available, verdict):
    found = run_checks.check_ram(subject(
        place, gpus=GPUS, num_processes=8, world_size=8, available_gib=available))
    assert found.verdict == verdict and "24.5" in found.text  # 8 times 3, and a block


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    unlimited = machine.available_ram_gib(), machine.num_usable_cores()
    for name, text in {"memory.max": "max", "memory.current": "5", "cpu.max": "max 100000",
                       "memory.stat": "inactive_file 1\nactive_file 2\n"}.items():
        (tmp_path / name).write_text(text)
    assert machine.available_ram_gib() == pytest.approx(unlimited[0], rel=0.2)
    assert machine.num_usable_cores() == unlimited[1]
    (tmp_path / "memory.max").write_text(str(2**20 + 2))
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert (machine.available_ram_gib(), machine.num_usable_cores()) == (2**20 / 2**30, 0.5)


def test_what_each_process_needs_is_found(place, monkeypatch):
    about = subject(place, train={"compile": False}, gpus=GPUS, num_processes=8)
    for cores, limit, free, verdict in (
            (16.0, resource.RLIM_INFINITY, 2**33, OK), (16.0, 4096, 2**30, OK),
            (8.0, 256, 2**29, WARNING), (8.0, 256, 2**26, PROBLEM)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(2**34, 0, free))
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        monkeypatch.setattr(machine_checks, "num_usable_cores", lambda cores=cores: cores)
        found = machine_checks.check_limits(about)
        assert found["shared memory"].verdict == verdict
        few = OK if verdict == OK else WARNING
        assert {found[name].verdict for name in ("CPU cores", "open files")} == {few}
    assert "shared memory" not in machine_checks.check_limits(replace(about, num_processes=1))


def test_a_host_name_without_an_address_is_a_problem(place, monkeypatch):
    def unknown(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    about = Subject(place.runs_dir, place.datasets_dir)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert machine_checks.check_host_name(about).verdict == OK
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = machine_checks.check_host_name(about)
    assert found.verdict == PROBLEM and found.advice == (
        'add "ADDRESS box" to /etc/hosts, with the address that others reach')
    monkeypatch.setenv("RANK", "0")
    assert machine_checks.check_host_name(about) is None


COMPILERS = {  # CC, what is installed, train.json: the verdict, and a part of the text
    "gcc": (None, ["gcc", "clang"], {}, OK, "gcc"),
    "clang alone": (None, ["clang"], {}, OK, "clang"),
    "named": ("icx", ["icx"], {}, OK, "icx"),
    "none": (None, [], {}, PROBLEM, "no gcc or clang: the"),
    "another is named": ("icx", ["gcc"], {}, PROBLEM, "CC is icx"),
    "nothing is compiled": (None, [], {"compile": False}, None, ""),
}


@pytest.mark.parametrize("case", COMPILERS)
def test_a_compiler_is_missed_where_the_step_is_compiled(place, tmp_path, monkeypatch, case):
    named, installed, train, verdict, text = COMPILERS[case]
    monkeypatch.setattr(shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    if named:
        monkeypatch.setenv("CC", named)
    about = subject(place, train={"compile": None} | train, gpus=GPUS, num_processes=8)
    found = machine_checks.check_limits(about).get("compiler")
    assert (found and found.verdict) == verdict and (not found or text in found.text)
    assert "compiler" not in machine_checks.check_limits(replace(about, gpus=()))
    if verdict == OK:
        (tmp_path / "Python.h").unlink()
        found = machine_checks.check_limits(about)["compiler"]
        assert found.text.startswith(f"no {tmp_path}/Python.h")


def test_the_speed_of_a_disk_takes_no_more_than_its_room(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(machine_checks.os, "fsync", written.append)
    monkeypatch.setattr(machine_checks, "CHUNK_BYTES", 2**10)
    assert machine_checks.write_speed(tmp_path, 2 * 2**10 - 1) is None
    assert machine_checks.write_speed(tmp_path, 6 * 2**10) > 0 and len(written) == 3
    monkeypatch.setattr(machine_checks, "TEST_SECONDS", 0.0)
    assert machine_checks.write_speed(tmp_path, 2**30) == 0 or not list(tmp_path.iterdir())


DISKS = {  # bytes a second or an error, file system, may it be written: verdict, part of the text
    "fast": (1e9, "ext4", True, OK, "writes 1,000 MB/s"),
    "slow": (5e6, "ext4", True, WARNING, "writes 5 MB/s"),
    "lost with the container": (1e9, "overlay", True, WARNING, "in the container's own layer"),
    "nearly full": (None, "ext4", True, WARNING, "too little to measure its speed"),
    "fails": (OSError(5, "Input/output error"), "ext4", True, PROBLEM, "writing fails: Input/out"),
    "read-only": (1e9, "ext4", False, PROBLEM, "cannot be written to"),
}


@pytest.mark.parametrize("case", DISKS)
def test_a_disk_gets_its_verdict(place, monkeypatch, case):
    speed, file_system, may_write, verdict, text = DISKS[case]

    def write_speed(*_):
        if isinstance(speed, Exception):
            raise speed
        return speed

    monkeypatch.setattr(machine_checks, "write_speed", write_speed)
    monkeypatch.setattr(machine_checks.os, "access", lambda *_: may_write)
    monkeypatch.setattr(machine_checks.psutil, "disk_partitions", lambda all: [
        SimpleNamespace(mountpoint="/", fstype="overlay" if file_system == "ext4" else "ext4"),
        SimpleNamespace(mountpoint=str(place.root), fstype=file_system)])
    found = machine_checks.check_runs_disk(subject(place))
    assert found.verdict == verdict and text in found.text and bool(found.advice) == (verdict != OK)


def test_the_runs_own_things(place):
    place.add_dataset()
    about = subject(place, num_processes=2, world_size=2)
    found = checks(about)
    assert {check.verdict for check in found.values()} == {OK} and "hub token" not in found
    assert found["dataset"].text.endswith("has 4,000 training tokens")
    assert found["batch"].text == "microbatch 2 x accumulation 2 x 2 processes = 8 sequences"
    assert re.match(r"microbatch 2 takes about [\d.]+ (KiB|MiB) of the 50.0 GiB of a process",
                    found["microbatch"].text)
    assert re.fullmatch(r"[\d.]+ kB each, .* free; at most 3 are kept: [\d.]+ kB",
                        found["checkpoints"].text)
    assert re.search("needs about [^0].* [MG]iB, [^0].* [KM]iB of them for",
                     found["RAM"].text)


WRONG = {
    "no dataset": ({"dataset": "other"}, "dataset", PROBLEM, "no dataset there"),
    "made here": ({"dataset": "python-stdlib"}, "dataset", OK, "is made from Python's own"),
    "too short": ({"min_train_tokens": 10**6}, "batch", PROBLEM, "wanted 1000"),
    "uneven": ({"global_batch_size": 7, "gradient_accumulation_steps": None}, "batch", PROBLEM,
               "is not divisible"),
    "old key": ({"microbatch_size": None, "minibatch_size": 2, "max_cost_usd": 5.0}, "configs",
                WARNING, "is now called"),
    "no price": ({"microbatch_size": None, "minibatch_size": 2, "max_cost_usd": 5.0}, "configs",
                 WARNING, "needs the machine's price"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_run_is_found(place, case):
    train, name, verdict, text = WRONG[case]
    place.add_dataset()
    found = checks(subject(place, train=train, world_size=2))[name]
    assert found.verdict == verdict and text in found.text, found
    assert bool(found.advice) == (verdict != OK)


@pytest.mark.parametrize(("size", "verdict"), [(16, OK), (76, WARNING), (200, PROBLEM)])
def test_a_microbatch_is_compared_with_the_memory_of_a_gpu(place, size, verdict):
    gpt2 = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12,
            "n_layers": 12, "drop_rate": 0.0}
    found = run_checks.check_microbatch(subject(
        place, model=gpt2, train={"microbatch_size": size, "precision": None}, gpus=GPUS,
        num_processes=8, world_size=8))
    assert found.verdict == verdict and "of the 38.2 GiB of a GPU" in found.text


def test_room_for_one_checkpoint_and_for_all(place, monkeypatch):
    about = subject(place)
    size = run_checks.bytes_of_checkpoint(about.run)
    for free, verdict in ((size - 1, PROBLEM), (size * 2, WARNING), (size * 100, OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free, 0, free))
        assert run_checks.check_checkpoints(about).verdict == verdict


def test_nothing_is_asked_of_the_network_unasked(place, tmp_path):
    with refused_network(tmp_path / "log"):
        place.add_dataset("someone/tokens")
        here = subject(place, train={"dataset": "someone/tokens"})  # on this machine already
        for about in (here, Subject(place.runs_dir, place.datasets_dir)):
            assert not {"hub", "hub token", "initial model"} & checks(about).keys()
    assert not (tmp_path / "log").exists()


def test_a_dataset_of_the_hub_is_looked_up(place, tmp_path, tokens_hub):
    with used_in_this_process(tokens_hub, tmp_path / "home"):
        found = checks(subject(place, train={"dataset": "someone/tokens"}))
        assert found["dataset"].verdict == OK
        assert "someone/tokens is on the hub" in found["dataset"].text
        assert found["hub token"].text.startswith("none")
        assert not tokens_hub.downloads("train.safetensors")
        shutil.rmtree(place.runs_dir)
        missing = checks(subject(place, train={"dataset": "someone/else"}))
        assert missing["dataset"].verdict == PROBLEM and missing["dataset"].advice


def test_a_model_of_the_hub_is_looked_up(place, tmp_path):
    with (serving(Hub({}, repository="someone/model", kind="models")) as hub,
          used_in_this_process(hub, tmp_path / "home")):
        about = subject(place, train={"init_from": "someone/model"})
        assert checks(about)["initial model"].verdict == OK
        (about.run.checkpoints_dir / "latest").mkdir(parents=True)  # it has begun: not needed
        assert not {"initial model", "hub token"} & checks(about).keys()


def test_a_hub_that_does_not_answer_is_no_hang(place, tmp_path):
    hub = Hub({})
    hub.endpoint = "http://127.0.0.1:9"
    with used_in_this_process(hub, tmp_path / "home"):
        found = checks(Subject(place.runs_dir, place.datasets_dir, is_online=True))
    assert found["hub"].verdict == WARNING and "does not answer" in found["hub"].text


def token(role, *permissions):
    scoped = [{"entity": {"name": "me"}, "permissions": permissions}]
    return {"name": "me", "auth": {"accessToken": {
        "role": role, "fineGrained": {"scoped": scoped}}}}


@pytest.mark.parametrize(("answer", "may_write"), [
    (token("write"), True), (token("fineGrained", "repo.write"), True), (token("read"), False),
    (token("fineGrained", "repo.content.read"), False), ({}, False)])
def test_what_a_token_may_do_is_told(place, monkeypatch, answer, may_write):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda _: answer)
    found = run_checks.check_token(Subject(place.runs_dir, place.datasets_dir, is_online=True))
    assert found.verdict == OK and ("may not write" in found.text) == (not may_write)


def test_a_token_is_never_shown(place, tmp_path, monkeypatch):
    token = "hf_marker0123456789"
    echo = {"X-Error-Message": f"Bearer {token}", "X-Request-Id": token}
    for status in (401, 400):
        hub = Hub({}, faults=[Fault("/api/whoami", times=-1, status=status, headers=echo)])
        with serving(hub), used_in_this_process(hub, tmp_path / "home"):
            monkeypatch.setenv("HF_TOKEN", token)
            found = checks(Subject(place.runs_dir, place.datasets_dir, is_online=True))
        assert found["hub token"].verdict == WARNING
        assert token not in json.dumps(found)
