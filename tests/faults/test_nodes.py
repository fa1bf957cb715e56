"""Several nodes: two of torchrun's agents on this machine, each with a process of the run."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from basics.failpoints import MARKS, VARIABLE
from tests.support.runs import (
    SLOW_AT_THE_END,
    metrics_of,
    struck_by,
    summary_of,
    validations_of,
    wait_for,
    wait_until_gone,
    weights_of,
    with_deadlines,
)
from tests.support.workplace import (
    PROJECT_DIR,
    Workplace,
    children_of,
    ended,
    hold_port,
    start_forked,
    succeeded,
)

NODES = ("first", "second")
SLOWLY = {VARIABLE: "train:slow:seconds=0.2"}


class Cluster:
    """Two nodes that share the run directory; each has its own datasets."""

    def __init__(self, root):
        self.runs = Workplace(root)
        self.datasets_dirs = [root / name / "datasets" for name in NODES]
        self.started: list = []

    def add_dataset(self):
        for datasets_dir in self.datasets_dirs:
            node = Workplace(datasets_dir.parent)
            node.add_dataset()

    def start(self, run="tiny", *, environment=None, max_restarts=0):
        self.taken, port = hold_port()  # to the end of the agents
        self.started = []
        for name, datasets_dir in zip(NODES, self.datasets_dirs, strict=True):
            folder = self.runs.root / f"output-{name}-{time.monotonic_ns()}"
            folder.mkdir()
            self.started.append(
                start_forked(
                    "ddp_train.py",
                    [
                        run,
                        "--runs-dir",
                        str(self.runs.runs_dir),
                        "--datasets-dir",
                        str(datasets_dir),
                    ],
                    num_processes=1,
                    environment=environment,
                    folder=folder,
                    min_nodes=2,
                    max_nodes=2,
                    run_id="cluster",
                    rdzv_endpoint=f"127.0.0.1:{port}",
                    rdzv_configs={"is_host": int(name == NODES[0])},  # else whichever is faster
                    max_restarts=max_restarts,
                )
            )

    def end(self):
        results = [ended(*started) for started in self.started]
        self.taken.close()
        return results

    def train(self, run="tiny", **options):
        self.start(run, **options)
        return self.end()

    def pids(self, node):
        """Return the process ids of an agent and its worker."""
        agent = self.started[node][0].pid
        return [agent, *children_of(agent)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run directory of a run on two nodes without any fault."""
    cluster = Cluster(tmp_path_factory.mktemp("undisturbed"))
    cluster.add_dataset()
    run_dir = cluster.runs.add_run()
    for result in cluster.train():
        succeeded(result)
    return run_dir


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    cluster.add_dataset()
    cluster.runs.add_run()
    return cluster


def pytest_generate_tests(metafunc):
    """The first node holds torchrun's store, so losing it is the harder case."""
    for name in {"node", "rank"} & set(metafunc.fixturenames):
        metafunc.parametrize(name, [0, 1] if metafunc.config.getoption("--thorough") else [0])


def assert_is_complete(cluster, undisturbed):
    run_dir = cluster.runs.runs_dir / "tiny"
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)
    steps = [path.name.split("-")[-1] for path in (run_dir / "checkpoints").glob("2*")]
    assert sorted(steps, key=int) == ["4", "9", "11"]  # each is written once


def test_two_nodes_train_the_same_as_one(tmp_path, undisturbed):
    alone = Workplace(tmp_path)
    alone.add_dataset()
    one_node = alone.add_run()
    succeeded(alone.torchrun(2, "tiny"))
    for found, wanted in zip(metrics_of(undisturbed), metrics_of(one_node), strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)  # a node alone has other threads


def test_when_a_node_dies_the_other_ends_and_the_run_resumes(cluster, undisturbed, node):
    cluster.start(environment={VARIABLE: SLOW_AT_THE_END.format(0.2)})
    wait_for(cluster.runs.runs_dir / "tiny/checkpoints/latest")
    for pid in cluster.pids(node):
        os.kill(pid, signal.SIGKILL)
    results = cluster.end()
    assert all(result.returncode != 0 for result in results)
    line = next(line for line in results[1 - node].stderr.splitlines() if "Error: rank " in line)
    assert line.startswith(f"Error: rank {1 - node} lost the others in") and " at step " in line
    for result in cluster.train():
        succeeded(result)
    assert_is_complete(cluster, undisturbed)


# The second node's torchrun does not hold the store: the first one's would wait for it for long.
@pytest.mark.parametrize(("victim", "number"), [("torchrun", 1), ("process", 0)])
def test_a_signal_to_one_node_stops_both_with_a_checkpoint(cluster, undisturbed, victim, number):
    cluster.start(environment={VARIABLE: SLOW_AT_THE_END.format(0.2)})
    wait_for(cluster.runs.runs_dir / "tiny/checkpoints/latest")
    os.kill(cluster.pids(number)[victim == "process"], signal.SIGTERM)
    for result in cluster.end():  # which ends torchruns that wait, with another status
        assert result.returncode == 1 and "got signal: 15" in result.stderr, result.stderr
    assert summary_of(cluster.runs.runs_dir / "tiny")["reason"] == "SIGTERM"
    newest = (cluster.runs.runs_dir / "tiny/checkpoints/latest").readlink().name
    assert 4 <= int(newest.split("-")[-1]) < 11  # 4 if the signal came during its validation
    for result in cluster.train():
        succeeded(result)
    run_dir = cluster.runs.runs_dir / "tiny"
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert validations_of(run_dir) == validations_of(undisturbed)


# Without a watch on each other, the first node would wait for the second one for two days.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_that_ends_while_the_run_is_prepared_ends_the_other(cluster, number):
    marks = cluster.runs.root / "marks"
    cluster.start(
        environment={VARIABLE: "prepare:slow:rank=1:seconds=300", MARKS: str(marks)}
        | with_deadlines(heartbeat=1, lost=8)
    )
    slow = struck_by(marks)
    node = next(node for node in (0, 1) if slow in cluster.pids(node))
    os.kill(cluster.pids(node)[number == signal.SIGKILL], number)  # torchrun, or its process
    results = cluster.end()
    assert results[1 - node].returncode == 1, results[1 - node].stderr  # it was not killed
    if number == signal.SIGKILL:
        assert "Error: rank 1 is lost in startup" in results[1 - node].stderr
    assert not (cluster.runs.runs_dir / "tiny/checkpoints").exists()


def test_both_nodes_restart_when_a_process_of_one_was_killed(
    tmp_path, undisturbed, num_restarts, rank
):
    for number in range(num_restarts):
        cluster = Cluster(tmp_path / str(number))
        cluster.add_dataset()
        cluster.runs.add_run()
        # Each agent counts the restarts for itself: the second may see this one as its first.
        # The save after step 10 has waited until the one before is whole.
        results = cluster.train(
            max_restarts=3, environment={VARIABLE: f"train:kill:rank={rank}:hit=11:attempt=0"}
        )
        for result in results:
            succeeded(result)
        assert "resuming from " in results[0].stdout + results[1].stdout
        assert_is_complete(cluster, undisturbed)
    print(f"\n{num_restarts} of {num_restarts} restarts of two agents recovered")


@pytest.fixture
def namespaces():
    """Two connected network namespaces, 10.83.0.1 and 10.83.0.2; nothing names the interface."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    names = [f"ddp-train-{os.getpid()}-{name}" for name in NODES]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this system lets us create no network namespaces")
        ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.83.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.mark.thorough
def test_two_machines_that_lose_their_connection_end_and_resume_later(
    namespaces, tmp_path, undisturbed
):
    cluster = Cluster(tmp_path)
    cluster.add_dataset()
    settings = {"hang_timeout_seconds": 5.0, "collective_timeout_seconds": 30.0}
    cluster.runs.add_run(train=settings)
    agents = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes=2",
                "--nproc_per_node=1",
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=10.83.0.1:29400",
                "--rdzv-id=tiny",
                f"--rdzv-conf=is_host={int(number == 1)}",
                f"--log-dir={os.devnull}",
                "--local-addr",
                f"10.83.0.{number}",
                "ddp_train.py",
                "tiny",
                "--runs-dir",
                str(cluster.runs.runs_dir),
                "--datasets-dir",
                str(datasets_dir),
            ],
            env=os.environ | SLOWLY | with_deadlines(heartbeat=1, store=5),
            cwd=PROJECT_DIR,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, (name, datasets_dir) in enumerate(
            zip(namespaces, cluster.datasets_dirs, strict=True), start=1
        )
    ]
    wait_for(cluster.runs.runs_dir / "tiny/checkpoints/latest")
    workers = [pid for agent in agents for pid in children_of(agent.pid)]
    assert len(workers) == 2
    ip("-n", namespaces[0], "link", "set", "cable", "down")
    wait_until_gone(workers)  # neither waits forever
    for agent in agents:
        agent.kill()  # torchrun itself waits for minutes
    lines = [
        [line for line in agent.communicate()[1].splitlines() if line.startswith("Error: ")]
        for agent in agents
    ]
    assert [len(found) for found in lines] == [1, 1], lines
    # Whether a machine is gone or all ranks hang is not known, if both times are over at once.
    event = r"Error: rank (0|1|0 and 1) (is lost|lost the others|hung) in .* at step "
    assert all(re.match(event, line) for (line,) in lines), lines
    for result in cluster.train():
        succeeded(result)
    assert_is_complete(cluster, undisturbed)
