"""`--prefetch`: fetch and verify all that a launch of a run needs, and train nothing.

Only compiled code is written into the run directory, and it is not locked: the run may be training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from basics.checkpoint_files import BEST, named_as_checkpoints
from basics.errors import FAILED, UserError, print_line
from basics.files import check_inside
from basics.out_of_memory import is_out_of_memory
from preparation.digests import verify_digests
from preparation.ensure_dataset import is_complete, provide_dataset
from processes.command_line import Options
from processes.launch import Process, num_gpus, start_torchrun
from processes.startup_agreement import Agreement
from reporting.summary import FINISHED, has_status
from reporting.tracker import check_tracker
from run_config import Run, load_run
from tokens.batches import RunData, open_run_data
from tokens.tokenizer import TOKENIZER_FILE, load_tokenizer
from trainer.compilation import CACHE_VARIABLE, compiled_code_of_run, keep_compiled_code
from trainer.losses import Losses, build_training_state
from trainer.models import initial_model
from trainer.precision import check_attention, resolve_for_device
from trainer.startup import check_disk_space, check_run_dir

COMPILES_FOR = "DDP_TRAIN_COMPILES_FOR"  # environment variable: the number of a run's processes
BUSY_BYTES = 2 * 2**30  # of a GPU's memory, in use beside this process
TOKEN_FILES = ("train.safetensors", "validation.safetensors", TOKENIZER_FILE)


@dataclass
class Line:
    """What is printed of one thing, once it is there."""

    place: str = ""
    num_bytes: int = 0
    result: str = ""  # such as found or downloaded


def prefetch_run(script: str, options: Options, num_processes: int) -> None:
    """Fetch and verify a run's dataset, tokenizer, initial weights and compiled code.

    Raises:
        UserError: something is missing, damaged or cannot be fetched, or the run is not valid.
    """
    run = load_run(options.runs_dir, options.run)
    check_run_dir(run)
    for notice in check_tracker(run):
        print_line(f"warning: {notice}")
    dataset_dir = options.datasets_dir / run.train.dataset
    check_inside(dataset_dir, options.datasets_dir, "--datasets-dir")
    _fetch_dataset(run, dataset_dir)
    data = open_run_data(run, dataset_dir, world_size=num_processes)
    _check_tokens(data)
    _find_tokenizer(data)
    if run.train.init_from:
        _fetch_initial_weights(run, options.runs_dir, data.tokenizer_name)
    if not has_status(run, FINISHED):
        check_disk_space(run)
    lacks = "" if _compile(script, run, num_processes) else ", but for the compiled code"
    print_line(f"{run.name}: all that a launch needs is on this machine{lacks}")


@contextmanager
def _reported(what: str) -> Iterator[Line]:
    """Print one line of a thing after the block: what, where, size, how, and how long it took."""
    line, began = Line(), time.monotonic()
    yield line
    size = f", {line.num_bytes / 1e6:,.2f} MB" if line.num_bytes else ""
    place = f"{line.place}{size}: " if line.place else ""
    print_line(f"{what}: {place}{line.result}; {time.monotonic() - began:.1f} s")


def _fetch_dataset(run: Run, dataset_dir: Path) -> None:
    with _reported("dataset") as line:
        was_complete = is_complete(dataset_dir)
        provide_dataset(dataset_dir, run.train.dataset)
        files = [path for name in TOKEN_FILES if (path := dataset_dir / name).is_file()]
        line.place, line.num_bytes = str(dataset_dir), _size(files)
        how = "found" if was_complete else "downloaded" if "/" in run.train.dataset else "made"
        line.result = f"{how}, {_verified(files)}"


def _check_tokens(data: RunData) -> None:
    with _reported("token ids") as line:
        for index in range(data.plan.num_tokens // data.plan.tokens_per_microbatch):
            data.train[index]  # reading it checks its ids
        counts = f"{data.plan.num_tokens:,} for training"
        if data.validation is not None:
            for _ in data.validation:
                pass
            counts += f" and {data.validation.num_tokens:,} for validation"
        line.result = f"{counts} are in the vocabulary of {data.train.vocab_size:,}"


def _find_tokenizer(data: RunData) -> None:
    """Load the vocabulary that samples and bits per byte need, as the run will."""
    with _reported("tokenizer") as line:
        name, path = data.tokenizer_name, data.tokenizer_path
        if name is None:
            line.result = "not known, so there will be no samples"
            return
        vocabulary = load_tokenizer(name, path)
        line.place = "" if path is None else str(path)
        line.num_bytes = 0 if path is None else _size([path])
        line.result = f"{'found' if path else name}, {vocabulary.n_vocab:,} ids"


def _fetch_initial_weights(run: Run, runs_dir: Path, tokenizer_name: str | None) -> None:
    with _reported("initial weights") as line:
        if named_as_checkpoints(run.checkpoints_dir):
            line.result = "not needed, the run resumes from its checkpoints"
            return
        before = _weight_files(run.train.init_from, runs_dir)
        initial_model(run, runs_dir, tokenizer_name=tokenizer_name)
        files = _weight_files(run.train.init_from, runs_dir)
        line.place, line.num_bytes = str(files[0].parent if files else runs_dir), _size(files)
        line.result = f"{'found' if files == before else 'downloaded'}, {_verified(files)}"


def _weight_files(source: str | Any, runs_dir: Path) -> list[Path]:
    """Return the files of a model that are on this machine; none of one still to be downloaded."""
    from huggingface_hub import try_to_load_from_cache  # takes half a second

    from trainer.models import DOWNLOADED, is_run

    if is_run(source, runs_dir):
        directory = runs_dir / source / "checkpoints" / BEST
    elif Path(source).is_dir():
        directory = Path(source)
    else:
        config_path = try_to_load_from_cache(source, "config.json")
        if not isinstance(config_path, str):
            return []
        directory = Path(config_path).parent
    return sorted(path for pattern in DOWNLOADED for path in directory.glob(pattern))


def _compile(script: str, run: Run, num_processes: int) -> bool:
    """Compile the training step as a run's ranks do; return whether nothing is left to compile."""
    with _reported("compiled code") as line:
        if run.train.compile is False:
            line.result = "none, as train.json says"
            return True
        count = num_gpus()
        if not count and not run.train.compile:
            line.result = "skipped, there is no GPU here, and the run is not compiled on a CPU"
            return False
        keep_compiled_code()
        cache_dir = Path(os.environ.get(CACHE_VARIABLE, ""))
        before = set((cache_dir / "fxgraph").glob("*/*"))  # the graphs in the cache
        os.environ[COMPILES_FOR] = str(num_processes)
        try:  # one process for each GPU: PyTorch keeps code by the index of the device
            status = start_torchrun(script, sys.argv[1:],
                                    num_processes=min(num_processes, count or 1))
        finally:
            del os.environ[COMPILES_FOR]
        if status:
            sys.exit(status)  # its processes have said why
        is_new = set((cache_dir / "fxgraph").glob("*/*")) != before
        line.place = str(cache_dir)
        line.num_bytes = _size([path for path in cache_dir.rglob("*") if path.is_file()])
        line.result = ("compiled" if is_new else "found") + (
            f" for {min(num_processes, count)} GPUs" if min(num_processes, count) > 1 else "")
        return True


def compile_step(options: Options, process: Process, agreement: Agreement) -> None:
    """Compile what a rank of the run does; PyTorch's cache on disk has the code then. Every rank.

    Raises:
        AgreedError: on every rank, if it cannot be compiled or does not fit, or a GPU is in use.
    """
    run = agreement.run("configs", lambda: load_run(options.runs_dir, options.run))
    process = replace(process, world_size=int(os.environ[COMPILES_FOR]))
    os.environ["LOCAL_WORLD_SIZE"] = os.environ[COMPILES_FOR]  # code for a CPU has its threads
    agreement.run("compile", lambda: _compile_here(run, process))


def _compile_here(run: Run, process: Process) -> None:
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
        free, total = torch.cuda.mem_get_info()
        if total - free > BUSY_BYTES:  # something else computes, and must not run out of memory
            raise UserError(f"GPU {process.device.index} is in use, {free / 2**30:.1f} of"
                            f" {total / 2**30:.1f} GiB are free: the code was not compiled, all"
                            " else is here", FAILED)
    train = resolve_for_device(run.train, process.device)
    try:
        check_attention(run.model, train, process.device)
        with compiled_code_of_run(run.run_dir, train, process):
            Losses(build_training_state(run.model, train, process).model, train, process)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{run.train_path}: microbatch_size {train.microbatch_size} does not fit"
                        f" into the memory of {process.device}; make it smaller, or set"
                        " head_chunks 8 (--find-max-microbatch measures what fits)") from None


def _verified(files: list[Path]) -> str:
    num_known = verify_digests(files)
    return f"{num_known} of {len(files)} files compared with the hub's digests"


def _size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)
