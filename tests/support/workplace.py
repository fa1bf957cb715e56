"""Tiny runs and datasets for the tests, and ways to start the project's commands."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from ctypes import c_byte
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch.distributed.run
from matplotlib.figure import Figure
from safetensors.numpy import save_file

from basics import failpoints
from basics.errors import STOP_SIGNALS, drop_unwritable_output
from processes import background, run_lock, startup_agreement
from processes.signals import PARENT_DEATH_SIGNAL
from reporting import charts
from reporting.metrics_file import read_metrics
from tests.support import stand_ins

PROJECT_DIR = Path(__file__).resolve().parents[2]

TINY_MODEL = {
    "vocab_size": 257,
    "context_length": 16,
    "emb_dim": 16,
    "n_heads": 2,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": False,
}
TINY_TRAIN = {
    "dataset": "tiny",
    "microbatch_size": 2,
    "gradient_accumulation_steps": 2,
    "min_train_tokens": 12 * 128,  # 12 steps on 2 processes
    "validation_interval": 5,
    "validation_batches": 3,
    "learning_rate": 0.01,
    "clipping_max_norm": 1.0,
    "precision": "fp32",
}


def write_tokens(path: Path, tokens: np.ndarray, metadata: dict[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": tokens}, path, metadata)


@dataclass(frozen=True)
class Workplace:
    """A directory with runs and datasets of its own."""

    root: Path

    @property
    def runs_dir(self) -> Path:
        return self.root / "runs"

    @property
    def datasets_dir(self) -> Path:
        return self.root / "datasets"

    def add_run(
        self,
        name: str = "tiny",
        *,
        model: dict[str, Any] | None = None,
        train: dict[str, Any] | None = None,
    ) -> Path:
        """Write a run's two files: the tiny ones, changed; a value of None takes a key out."""
        run_dir = self.runs_dir / name
        run_dir.mkdir(parents=True)
        for file, base, changes in (("model", TINY_MODEL, model), ("train", TINY_TRAIN, train)):
            merged = {k: v for k, v in (base | (changes or {})).items() if v is not None}
            (run_dir / f"{file}.json").write_text(json.dumps(merged))
        return run_dir

    def add_dataset(
        self, name: str = "tiny", *, num_tokens: int = 4000, vocab_size: int = 257
    ) -> Path:
        """Write a dataset of tokens that can be learnt: noisy steps upwards."""
        generator = np.random.default_rng(0)
        for split, length in (("train", num_tokens), ("validation", 500)):
            steps = generator.integers(1, 4, size=length)
            tokens = (np.cumsum(steps) % vocab_size).astype(np.uint16)
            write_tokens(self.datasets_dir / name / f"{split}.safetensors", tokens)
        return self.datasets_dir / name

    def arguments(self, *arguments: str) -> list[str]:
        return [
            *arguments,
            "--runs-dir",
            str(self.runs_dir),
            "--datasets-dir",
            str(self.datasets_dir),
        ]

    def torchrun(
        self, num_processes: int, *arguments: str, **environment: str
    ) -> CompletedProcess[str]:
        """Run ddp_train.py under torchrun's agent, forked from a process that has torch loaded."""
        return forked(
            "ddp_train.py",
            self.arguments(*arguments),
            num_processes=num_processes,
            environment=environment,
        )

    def real_torchrun(self, num_processes: int, *arguments: str) -> CompletedProcess[str]:
        """Run ddp_train.py under a torchrun process: the same as `torchrun`, ten seconds slower."""
        return run_command(
            *torchrun_command(num_processes, "ddp_train.py"), *self.arguments(*arguments)
        )

    def ddp_train(self, *arguments: str, **environment: str) -> CompletedProcess[str]:
        """Run ddp_train.py without torchrun."""
        return forked("ddp_train.py", self.arguments(*arguments), environment=environment)

    def files(self) -> dict[str, int]:
        """Every file below here with its time of change, to see that nothing was written.

        That of a directory is left out: a heartbeat comes and goes.
        """
        return {
            str(path): 0 if path.is_dir() else path.lstat().st_mtime_ns
            for path in self.root.rglob("*")
        }


def train_tiny(root: Path, **train: Any) -> Workplace:
    """Train the tiny run for ten steps, in a workplace of its own."""
    workplace = Workplace(root)
    workplace.add_run(train={"gradient_accumulation_steps": 1, "min_train_tokens": 320} | train)
    workplace.add_dataset()
    succeeded(workplace.torchrun(1, "tiny"))
    return workplace


def torchrun_command(num_processes: int, script: str) -> list[str]:
    # A machine's own name may not resolve, and logs of processes would stay in /tmp.
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--log-dir={os.devnull}",
        f"--nproc_per_node={num_processes}",
        str(PROJECT_DIR / script),
    ]


def run_command(*command: str, timeout: float = 230, **environment: str) -> CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=PROJECT_DIR,
        env=os.environ | environment,
    )


def forked(
    script: str,
    arguments: list[str],
    *,
    num_processes: int | None = None,
    environment: dict[str, str] | None = None,
) -> CompletedProcess[str]:
    """Run a script of the project, by torchrun's agent if `num_processes` says so.

    Importing torch takes longer than a tiny run does. So a server process that has it imported,
    and has done nothing else, forks what is run; all else is as on a command line, but that its
    charts, half of the rest, are bare, and drawn in rank 0's process where no fault in the one
    that draws is asked for.
    """
    with tempfile.TemporaryDirectory() as folder:
        process, outputs = start_forked(
            script,
            arguments,
            num_processes=num_processes,
            environment=environment,
            folder=Path(folder),
        )
        return ended(process, outputs)


def ended(
    process: multiprocessing.process.BaseProcess, outputs: list[Path]
) -> CompletedProcess[str]:
    """Wait for the end of what `start_forked` has started."""
    process.join(timeout=200)
    late = "still ran after 200 s: killed" if process.is_alive() else ""
    if late:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.join()
    stdout, stderr = (path.read_text(errors="replace") for path in outputs)
    return CompletedProcess([process.name], process.exitcode, stdout, stderr + late)


def start_forked(
    script: str,
    arguments: list[str],
    *,
    num_processes: int | None = None,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
    **launch: Any,
) -> tuple[multiprocessing.process.BaseProcess, list[Path]]:
    """Start what `forked` runs; give its process, and where its stdout and stderr go.

    Args:
        launch: of torchrun's LaunchConfig, what is not as in `torchrun --standalone`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    outputs = [folder / "stdout", folder / "stderr"] if folder else [Path(os.devnull)] * 2
    process = context.Process(
        target=_run_forked,
        args=(
            script,
            arguments,
            outputs,
            environment or {},
            launch | {"nproc_per_node": num_processes} if num_processes else None,
        ),
    )
    process.start()
    return process, outputs


def children_of(pid: int) -> list[int]:
    """Give the processes that one has started, the oldest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.extend(map(int, task.read_text().split()))
    return found


def _run_forked(
    script: str,
    arguments: list[str],
    outputs: list[Path],
    environment: dict[str, str],
    launch: dict[str, Any] | None,
) -> None:
    os.setsid()
    os.environ |= environment
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)  # a terminal is then its own
    os.chdir(PROJECT_DIR)
    if launch is None:
        _run_script(script, arguments)
        return
    try:
        _run_agent(script, arguments, **launch)
    except BaseException:  # torchrun would not wait for its workers any more, as this would
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _run_agent(script: str, arguments: list[str], **launch: Any) -> None:
    """Be torchrun's agent; its workers are forked instead of started anew."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, MultiprocessContext
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Names in records that nobody reads: looking through the stack is a fifth of a launch's time.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    # Shared memory instead of events: `set` waits for ever for a waiting process that was killed.
    is_closing, all_forked = RawValue("b", False), RawValue("b", False)
    start, close = MultiprocessContext._start, MultiprocessContext._close

    def start_all(*which: Any) -> None:  # called again for a restart
        is_closing.value = all_forked.value = False
        start(*which)
        all_forked.value = True

    def close_all(*which: Any, **how: Any) -> None:
        is_closing.value = True
        close(*which, **how)

    MultiprocessContext._start, MultiprocessContext._close = start_all, close_all
    config = LaunchConfig(
        **{
            "min_nodes": 1,
            "max_nodes": 1,
            "run_id": uuid.uuid4().hex,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "localhost:0",
            "start_method": "fork",
            "max_restarts": 0,
            "logs_specs": DefaultLogsSpecs(os.devnull),
        }
        | launch
    )
    elastic_launch(config, _run_worker)(script, arguments, is_closing, all_forked)


def _run_worker(script: str, arguments: list[str], is_closing: c_byte, all_forked: c_byte) -> None:
    # The agent's store looks up the names of those that connect to it, in a thread with a lock of
    # the C library: a worker that is forked meanwhile would wait for that lock for ever.
    agent = os.getppid()
    while not all_forked.value:
        if os.getppid() != agent:  # it was killed
            os._exit(1)
        time.sleep(0.001)
    for descriptor in os.listdir("/proc/self/fd"):  # torchrun's store is not this process's
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                os.close(int(descriptor))
    run_lock.release_run()  # nor is its lock
    for number in STOP_SIGNALS:  # nor are its handlers
        signal.signal(number, signal.SIG_DFL)
    for module in (startup_agreement, sys.modules.get("ddp_train")):
        if module is not None:
            module.leave = _leave
    _run_script(script, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    threading.Thread(target=_end_with_siblings, args=(is_closing,), daemon=True).start()


def _leave(status: int) -> None:
    """End this process as `leave` does, unless all went well: its agent waits for its return."""
    drop_unwritable_output()
    if status:
        os._exit(status)


def _end_with_siblings(is_closing: c_byte) -> None:
    """Where another has failed, or a signal came, be gone as what torchrun has not forked would be.

    A forked one waits for the agent, which waits half a minute for it.
    """
    while not is_closing.value and (
        len(children_of(os.getppid())) >= int(os.environ["LOCAL_WORLD_SIZE"])
    ):
        time.sleep(0.1)
    os._exit(0)


def _run_script(script: str, arguments: list[str]) -> None:
    sys.argv, parent = [script, *arguments], os.getppid()
    stand_ins.use_odd_files()
    charts.draw_by_hand = draw_bare
    if "draw:" not in os.environ.get(failpoints.VARIABLE, ""):
        start_module = background.start_module
        background.start_module = lambda module, run_dir: (
            DrawnHere(run_dir) if module == "reporting.charts" else start_module(module, run_dir)
        )
    torch.distributed.run.run = lambda options: _run_agent(
        options.training_script,
        options.training_script_args,
        nproc_per_node=int(options.nproc_per_node),
    )
    runpy.run_path(str(PROJECT_DIR / script), run_name="__main__")
    # What started it waits from here on for the agent, also for one that is dead.
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def draw_bare(path: Path, plot: Callable[[Figure], object]) -> Path:
    """Draw the curves of a figure, small and without any text, in an eighth of the time."""
    figure = Figure(figsize=(5, 3))
    plot(figure)
    for axes in figure.axes:
        axes.set_axis_off()
        axes.set_title("")
        if legend := axes.get_legend():
            legend.remove()
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png", dpi=30)
    return partial.replace(path)


class DrawnHere(contextlib.nullcontext):
    """A process that draws, and has ended: what it does is done in this one."""

    stderr, returncode = None, 0

    def __init__(self, run_dir: Path) -> None:
        super().__init__(self)
        charts.draw_charts(run_dir, read_metrics(run_dir / "metrics.jsonl"))


def hold_port() -> tuple[socket.socket, int]:
    """Return a socket and its port, on which a server can listen that asks for this port.

    Until the socket is closed, the system gives the port to no process that asks for any.
    """
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", 0))
    return taken, taken.getsockname()[1]


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """Have a disk of a size in the middle of a test; what is not allowed to mount one skips it."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()[:80]}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def succeeded(result: CompletedProcess[str]) -> CompletedProcess[str]:
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
