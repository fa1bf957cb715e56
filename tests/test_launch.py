"""The processes of a launch; the files in launch/, with their tools' own parsers and stand-ins."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args

from basics.errors import BAD_INPUT, BEHIND_REFERENCE, DISK_FULL, NON_FINITE, UserError
from lab.sweep.sweep import command as sweep_command
from processes import background, distributed
from processes.background import THREADS
from processes.command_line import command_line
from processes.distributed import Process, end_torchrun, share_cpu_cores, this_process
from run_config import TrainConfig
from tests.support.runs import summary_of, wait_for
from tests.support.workplace import PROJECT_DIR, TINY_TRAIN, Workplace, hold_port

CPU = torch.device("cpu")
LAUNCH_DIR = PROJECT_DIR / "launch"
WORTH_A_RETRY = {5, 129, 138, 143}
# Stand-ins for commands. The files start those of .venv: `uv run` would install another PyTorch
# where setup_lambda.sh has installed one for an older driver.
PYTHON, TORCHRUN = (
    f'exec {sys.executable} {words}"$@"' for words in ("", "-m torch.distributed.run ")
)
SRUN = """while [ "${1#--}" != "$1" ]; do shift; done
"$@" & echo $! > srun.pid
trap 'kill -USR1 $(cat srun.pid)' USR1
while kill -0 $(cat srun.pid) 2>/dev/null; do wait $(cat srun.pid); status=$?; done
exit $status"""
SCONTROL = 'echo "$*" >> scontrol.calls; [ "$1" = show ] && echo localhost; true'
SCANCEL = "kill -USR1 $(cat srun.pid)"


@pytest.mark.parametrize(
    ("environment", "in_torchrun", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2", THREADS: "1"}, None, 4),  # torchrun has set it
        ({"LOCAL_WORLD_SIZE": "16", THREADS: "1"}, None, 1),
        ({"LOCAL_WORLD_SIZE": "2", THREADS: "1"}, "1", None),
        ({"LOCAL_WORLD_SIZE": "2", THREADS: "3"}, "3", None),
        ({"LOCAL_WORLD_SIZE": "1"}, None, 8),
        ({THREADS: "1", "TORCHELASTIC_RUN_ID": None}, None, None),  # without torchrun
    ],
)
def test_cpu_processes_share_the_cores_unless_a_person_has_set_the_threads(
    monkeypatch, environment, in_torchrun, expected
):
    for name, value in {THREADS: None, "TORCHELASTIC_RUN_ID": "x", **environment}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    parent = SimpleNamespace(environ=lambda: {THREADS: in_torchrun} if in_torchrun else {})
    monkeypatch.setattr(psutil, "Process", lambda pid: parent if pid == os.getppid() else None)
    monkeypatch.setattr("processes.distributed.num_cpu_cores", lambda: 8)
    changed: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    kept = THREADS in background.environment()
    share_cpu_cores(Process(0, 0, 2, CPU))
    assert changed == ([] if expected is None else [expected])
    assert kept == (expected is None)  # in the commands that a launch starts


def test_the_environment_that_a_process_began_with_tells_what_torchrun_has_set():
    code = (
        "import os, subprocess, sys\n"
        "os.environ.setdefault('OMP_NUM_THREADS', '1')\n"  # as torchrun does
        "os.environ['TORCHELASTIC_RUN_ID'] = 'x'\n"
        "worker = 'from processes.background import *; print(torchrun_limits_threads())'\n"
        "subprocess.run([sys.executable, '-c', worker], check=True)"
    )
    for chosen, said in (({}, "True\n"), ({THREADS: "1"}, "False\n")):
        others = {name: value for name, value in os.environ.items() if name != THREADS}
        command = [sys.executable, "-c", code]
        found = subprocess.run(
            command, env=others | chosen, cwd=PROJECT_DIR, capture_output=True, text=True
        )
        assert found.stdout == said, found.stderr


@pytest.mark.parametrize(
    ("environment", "num_gpus", "message"),
    [
        ({"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3"}, 2, "local rank 2 has no GPU"),
        ({"GLOO_SOCKET_IFNAME": "lo,nosuch0"}, 0, "no network interface nosuch0"),
    ],
)
def test_a_place_that_the_machine_lacks_is_refused(monkeypatch, environment, num_gpus, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=message):
        this_process()


@pytest.mark.parametrize(("used", "num_warnings"), [("4", 1), ("8", 0)])
def test_gpus_that_no_process_uses_are_warned_of(monkeypatch, used, num_warnings):
    monkeypatch.setattr(distributed, "num_gpus", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", used)
    warnings = distributed.unused_gpus()
    wanted = f"{used} of the 8 GPUs of this machine are used: set --nproc_per_node to 8,"
    assert [line.startswith(wanted) for line in warnings] == [True] * num_warnings


@pytest.mark.parametrize(
    ("nodes", "restarts", "local_rank", "parent_is_torchrun", "ends"),
    [
        (2, 0, 0, True, True),
        (1, 3, 0, True, True),
        (1, 0, 0, True, False),
        (2, 0, 1, True, False),
        (2, 0, 0, False, False),
    ],
)
def test_only_a_torchrun_that_would_go_on_is_ended(
    monkeypatch, nodes, restarts, local_rank, parent_is_torchrun, ends
):
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    ended: list[int] = []
    monkeypatch.setattr(distributed.os, "kill", lambda pid, number: ended.append(pid))
    parent = os.getppid()
    end_torchrun(Process(2, local_rank, 4, CPU, torchrun_pid=parent if parent_is_torchrun else 1))
    assert ended == ([parent] if ends else [])


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 60), ("cuda:0", 600 + 120)])
def test_nccl_waits_longer_than_the_watchdog(monkeypatch, device, seconds):
    """Its own timeout would end the process without a line that says which rank hung."""
    found: list[timedelta] = []
    monkeypatch.setattr(
        distributed, "join_process_group", lambda *_, timeout: found.append(timeout)
    )
    monkeypatch.setattr(distributed.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: None)
    train = TrainConfig(**TINY_TRAIN, collective_timeout_seconds=60)
    with distributed.process_group(Process(0, 0, 2, torch.device(device)), None, train):
        pass
    assert found == [timedelta(seconds=seconds)]


@pytest.mark.parametrize(
    ("towards_master", "set_by_user", "chosen"),
    [
        ("127.0.1.1", None, "eth1"),  # on the node whose name MASTER_ADDR is
        ("10.0.0.1", None, "eth1"),
        ("10.0.0.1", "ib0", "ib0"),
        ("127.0.0.1 alone", None, None),  # all nodes are on this machine
    ],
)
def test_gloo_uses_the_interface_that_leads_to_other_nodes(
    monkeypatch, towards_master, set_by_user, chosen
):
    towards_master, _, is_alone = towards_master.partition(" ")
    others = "127.0.0.1" if is_alone else "10.0.0.2"
    store = dist.HashStore()
    store.set("address/1", others)
    ways = {"head": towards_master, "10.0.0.1": "10.0.0.1", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(distributed, "_own_address", ways.__getitem__)
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            name: [SimpleNamespace(address=address)]
            for name, address in (("lo", "127.0.0.1"), ("eth0", "10.9.0.1"), ("eth1", "10.0.0.1"))
        },
    )
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    for name, value in (("GROUP_WORLD_SIZE", "2"), ("MASTER_ADDR", "head")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_by_user or "")
    if set_by_user is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    distributed.join_process_group(Process(0, 0, 2, CPU), store, timeout=timedelta(seconds=20))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


@pytest.fixture
def machine(tmp_path):
    """A copy of the project that has a tiny run, and an environment with the stand-ins."""
    workplace = Workplace(tmp_path)
    workplace.add_dataset()
    workplace.add_run(train={"min_train_tokens": 3000})
    (tmp_path / "ddp_train.py").symlink_to(PROJECT_DIR / "ddp_train.py")
    shutil.copytree(LAUNCH_DIR, tmp_path / "launch")
    taken, port = hold_port()
    for script in ("slurm.sbatch", "two-hosts.sh"):  # other tests may run on this machine
        path = tmp_path / "launch" / script
        path.write_text(path.read_text().replace("29400", str(port)))
    commands = tmp_path / "commands"
    commands.mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, body in {
        "../.venv/bin/python": PYTHON,
        "../.venv/bin/torchrun": TORCHRUN,
        "srun": SRUN,
        "scontrol": SCONTROL,
        "scancel": SCANCEL,
        "nvidia-smi": "exit 9",
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "copies").mkdir()  # where the bucket is mounted
    with taken:
        yield workplace, os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}


def test_a_launch_is_of_this_machine_and_leaves_no_directory_for_logs(monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv(THREADS, "1")  # so that it is restored
    monkeypatch.setenv("PET_NNODES", "2")  # as in a pod of Kubeflow's trainer
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "nowhere:29400")
    monkeypatch.setattr(torch.distributed.run, "run", started.append)
    monkeypatch.setattr(sys, "argv", ["ddp_train.py", "tiny"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for logs_dir in (None, tmp_path / "logs"):
        assert distributed.start_torchrun(2, logs_dir) == 0
        config, _, _ = torch.distributed.run.config_from_args(started.pop())
        assert config.logs_specs.root_log_dir == str(logs_dir or os.devnull)
        assert config.local_addr == "127.0.0.1" and config.max_nodes == 1
        assert "PET_NNODES" not in os.environ  # which its processes would see
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]  # those that were asked for


@pytest.mark.parametrize(
    ("exit_codes", "status", "line"),
    [
        (
            [-11, -11],
            139,
            "rank 0 and 1 crashed in native code: SIGSEGV; the same command continues",
        ),
        ([1, -7], 135, "rank 1 crashed in native code: SIGBUS"),
        ([-15, -6], 134, "rank 1 crashed in native code: SIGABRT"),
        ([-9, -9], 137, "rank 0 and 1: killed by SIGKILL"),
        ([1, -9], 137, ""),  # rank 0 says it
        ([2, 2], 2, ""),
    ],
)
def test_the_launcher_says_which_ranks_crashed_and_with_which_signal(
    monkeypatch, capsys, tmp_path, exit_codes, status, line
):
    """Where all ranks die at once, no other one can."""
    failures = {
        rank: ProcessFailure(rank, pid=1, exitcode=code, error_file="")
        for rank, code in enumerate(exit_codes)
    }
    first = next(found for found in failures.values() if abs(found.exitcode) == status % 128)
    first.timestamp = 0

    def fail(*_):
        raise ChildFailedError("ddp_train.py", failures)

    monkeypatch.setattr(torch.distributed.run, "run", fail)
    for logs_dir, wanted in ((None, line), (tmp_path, "")):  # a trial has a line of its own
        assert distributed.start_torchrun(2, logs_dir) == status
        said = capsys.readouterr().err
        assert said.startswith(f"Error: {wanted}") if wanted else not said


def launch_options(command):
    """Parse a command line that ends in `[torchrun ...] ddp_train.py ...`; return both parts."""
    words = command.replace("\\\n", " ").replace('"', "").split()
    script = words.index("ddp_train.py")
    torchrun = None
    if "torchrun" in words[:script]:
        values = {"nnodes": "2", "nproc_per_node": "8", "node_rank": "1", "master_port": "29400"}
        torchrun = parse_args(
            [
                re.sub(r"=\$.*", "=" + values.get(word[2:].split("=")[0], "x"), word)
                for word in words[words.index("torchrun") + 1 : script + 1]
            ]
        )
    arguments = [word for word in words[script + 1 :] if word not in ("&", "$@")]
    options = command_line.main(
        [re.sub(r"^\$.*", "tiny", word) for word in arguments], standalone_mode=False
    )
    options.check()
    return torchrun, options


@pytest.mark.parametrize("name", ["skypilot", "skypilot-sweep"])
def test_a_skypilot_job_is_recovered_for_statuses_that_are_worth_it(name):
    job = yaml.safe_load((LAUNCH_DIR / f"{name}.yaml").read_text())
    recovery = job["resources"]["job_recovery"]
    assert set(recovery["recover_on_exit_codes"]) == WORTH_A_RETRY
    assert job["resources"]["use_spot"] and recovery["max_restarts_on_errors"] == 1
    prefetch = next(line for line in job["setup"].splitlines() if "ddp_train.py" in line)
    assert launch_options(prefetch.partition(".venv/bin/python ")[2])[1].prefetch
    if name == "skypilot":
        ((place, mount),) = job["file_mounts"].items()
        assert mount["mode"] == "MOUNT_CACHED"
        command = next(line for line in job["run"].splitlines() if "ddp_train.py" in line)
        assert "--after-checkpoint" in command and f" {place}/{{run}}/ " in command
        return
    line = next(line for line in job["run"].splitlines() if " -m lab sweep " in line)
    words = line.replace("$CHANGES", job["envs"]["CHANGES"]).partition(" -m lab sweep ")[2]
    options = sweep_command.make_context("sweep", shlex.split(words)).params
    assert options["parallel"] == "auto" and options["prune"]
    for place in ("sweeps_dir", "datasets_dir"):
        assert str(options[place]).startswith(*job["volumes"])


def test_a_dstack_task_is_repeated_if_it_was_interrupted_and_keeps_its_runs():
    task = yaml.safe_load((LAUNCH_DIR / "dstack.yaml").read_text())
    assert task["retry"]["on_events"] == ["no-capacity", "interruption"] and task["max_price"]
    assert task["commands"][0] == "set -e"  # dstack goes on after some commands that fail
    _, options = launch_options(task["commands"][-1].partition(".venv/bin/python ")[2])
    for place in (options.runs_dir, options.datasets_dir):
        assert str(place).startswith(f"{task['volumes'][0]['path']}/")


def test_a_slurm_job_saves_and_is_requeued_before_its_time_limit(machine):
    workplace, environment = machine
    environment |= {
        "SLURM_SUBMIT_DIR": str(workplace.root),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_ON_NODE": "1",
        "DDP_TRAIN_FAILPOINT": "train:slow:seconds=0.2",
    }
    process = subprocess.Popen(
        ["bash", workplace.root / "launch/slurm.sbatch", "tiny"],
        env=environment,
        cwd=workplace.root,
    )
    wait_for(workplace.runs_dir / "tiny/checkpoints/latest")
    process.send_signal(signal.SIGUSR1)  # from Slurm
    assert process.wait(timeout=200) != 0
    assert summary_of(workplace.runs_dir / "tiny")["reason"] == "SIGUSR1"
    calls = (workplace.root / "scontrol.calls").read_text().splitlines()
    assert calls == ["show hostnames localhost", "requeue 7"]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("way", ["skypilot", "dstack", "two-hosts"])
def test_a_preempted_job_resumes_with_the_same_command(machine, way, number):
    workplace, environment = machine
    command = script_of(way, workplace.root)
    environment |= {"RUN": "tiny", "NUM_HOSTS": "1"}
    slowly = environment | {"DDP_TRAIN_FAILPOINT": "train:slow:seconds=0.2"}
    process = subprocess.Popen(command, env=slowly, cwd=workplace.root)
    wait_for(workplace.runs_dir / "tiny/checkpoints/latest")
    process.send_signal(number)  # the notice
    assert process.wait(timeout=200) == (1 if way == "two-hosts" else 128 + number)
    summary = summary_of(workplace.runs_dir / "tiny")
    assert (summary["status"], summary["reason"]) == ("stopped", signal.Signals(number).name)
    assert subprocess.run(command, env=environment, cwd=workplace.root).returncode == 0
    assert summary_of(workplace.runs_dir / "tiny")["status"] == "finished"


def script_of(way, root):
    """Return the command that a tool would run, without the installation."""
    if way == "two-hosts":
        return ["bash", str(root / "launch/two-hosts.sh"), "localhost", "tiny"]
    config = yaml.safe_load((LAUNCH_DIR / f"{way}.yaml").read_text())
    script = config["run"] if way == "skypilot" else config["commands"][-1]
    return [
        "bash",
        "-c",
        script.replace("/copies", str(root / "copies"))
        .replace("/data/", f"{root}/")
        .replace("$HOME/.local/bin:", ""),
    ]


def test_two_hosts_meet_at_the_first_one():
    script = (LAUNCH_DIR / "two-hosts.sh").read_text()
    torchrun, _ = launch_options(script.partition("exec .venv/bin/")[2])
    assert torchrun.nnodes == "2" and torchrun.rdzv_backend == "c10d"


def test_what_starts_a_run_again_does_not_where_a_person_has_to_act():
    """The service, and the table of the documentation."""
    text = (LAUNCH_DIR / "ddp-train@.service").read_text()
    statuses = (BAD_INPUT, NON_FINITE, DISK_FULL, BEHIND_REFERENCE)
    assert f"RestartPreventExitStatus={' '.join(map(str, statuses))}\n" in text
    assert "Restart=on-failure\n" in text
    text = (PROJECT_DIR / "docs" / "rented-machines.md").read_text()
    rows = dict(re.findall(r"^\| ([0-9, +n]+) \|.*\| (yes|no)[^|]*\|$", text, re.MULTILINE))
    worth = {"1", "5", "129", "134, 135, 139", "138", "143"}
    assert {status for status, answer in rows.items() if answer == "yes"} == worth
    assert {"0", "2", "3", "4", "6", "130", "131", "137"} <= rows.keys()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_service(tmp_path):
    text = (LAUNCH_DIR / "ddp-train@.service").read_text()
    unit = tmp_path / "ddp-train@.service"
    unit.write_text(
        text.replace("/home/ubuntu/ddp-train/.venv/bin/python", sys.executable).replace(
            "User=ubuntu", "User=root"
        )
    )
    result = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr, result.stderr
