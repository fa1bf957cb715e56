"""`--prefetch`: fetch and verify all that a launch of a run needs, and train nothing.

Nothing is written into the run directory, and it is not locked: the run may be training.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from basics.errors import FAILED, UserError, print_line
from basics.out_of_memory import is_out_of_memory
from preparation.digests import verify_digests
from preparation.ensure_dataset import is_complete
from processes.command_line import Options
from processes.launch import Process, num_gpus, start_torchrun
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from run_config import Run, load_run
from tokens.batches import RunData
from tokens.tokenizer import TOKENIZER_FILE, load_tokenizer
from trainer.compilation import CACHE_VARIABLE, keep_compiled_code
from trainer.losses import Losses, build_training_state
from trainer.models import DOWNLOADED, model_directory
from trainer.precision import check_attention, resolve_for_device
from trainer.startup import prepare_run

COMPILES = "DDP_TRAIN_COMPILES"  # environment variable of the processes that compile
BUSY_BYTES = 2 * 2**30  # of a GPU's memory, in use beside this process
TOKEN_FILES = ("train.safetensors", "validation.safetensors", TOKENIZER_FILE)


def prefetch_run(script: str, options: Options, process: Process) -> None:
    """Fetch and verify a run's dataset, tokenizer, initial weights and compiled code.

    Args:
        process: stands for all processes of the run.

    Raises:
        UserError: something is missing, damaged or cannot be fetched, or the run is not valid.
    """
    dataset_dir = options.datasets_dir / load_run(options.runs_dir, options.run).train.dataset
    was_complete = is_complete(dataset_dir)
    prepared = prepare_run(options, process, PhaseClock(), Agreement.in_one_process())
    run, data = prepared.run, prepared.data
    for warning in prepared.warnings:
        print_line(f"warning: {warning}")
    files = [path for name in TOKEN_FILES if (path := dataset_dir / name).is_file()]
    how = "found" if was_complete else "downloaded" if "/" in run.train.dataset else "made"
    print_line(f"dataset: {dataset_dir}: {how}, {_verified(files)}")
    _check_tokens(data)
    if data.tokenizer_name is None:
        print_line("tokenizer: not known, so there will be no samples")
    else:
        vocabulary = load_tokenizer(data.tokenizer_name, data.tokenizer_path)
        print_line(f"tokenizer: {data.tokenizer_path or data.tokenizer_name},"
                   f" {vocabulary.n_vocab:,} ids")
    if run.train.init_from and prepared.resume_from is None:
        directory = model_directory(run.train.init_from, options.runs_dir)
        files = sorted(path for pattern in DOWNLOADED for path in directory.glob(pattern))
        print_line(f"initial weights: {directory}: {_verified(files)}")
    lacks = ""
    if run.train.compile is False:
        print_line("compiled code: none, as train.json says")
    elif num_gpus() == 0 and run.train.compile is None:
        lacks = ", but for the compiled code"
        print_line("compiled code: skipped, there is no GPU here, and the run is not compiled on a"
                   " CPU")
    else:
        _compile(script, process.world_size)
    print_line(f"{run.name}: all that a launch needs is on this machine{lacks}")


def _check_tokens(data: RunData) -> None:
    """Read all tokens of the run, which checks their ids."""
    for index in range(data.plan.num_tokens // data.plan.tokens_per_microbatch):
        data.train[index]
    counts = f"{data.plan.num_tokens:,} for training"
    if data.validation is not None:
        for _ in data.validation:
            pass
        counts += f" and {data.validation.num_tokens:,} for validation"
    print_line(f"token ids: {counts} are in the vocabulary of {data.train.vocab_size:,}")


def _verified(files: list[Path]) -> str:
    size = sum(path.stat().st_size for path in files) / 1e6
    return (f"{size:,.2f} MB, {verify_digests(files)} of {len(files)} files compared with the hub's"
            " digests")


def _compile(script: str, num_processes: int) -> None:
    """Compile the training step as a run's ranks do, under torchrun.

    One process for each GPU: PyTorch keeps code by the index of the device.
    """
    keep_compiled_code()
    os.environ[COMPILES] = "1"
    try:
        status = start_torchrun(script, sys.argv[1:], num_processes=num_processes)
    finally:
        del os.environ[COMPILES]
    if status:
        sys.exit(status)  # its processes have said why
    print_line(f"compiled code: {os.environ.get(CACHE_VARIABLE, 'in a temporary directory')},"
               f" of {num_processes} process{'es' if num_processes > 1 else ''}")


def compile_step(options: Options, process: Process, agreement: Agreement) -> None:
    """Compile what a rank of the run does; PyTorch's cache on disk has the code then. Every rank.

    Raises:
        AgreedError: on every rank, if it cannot be compiled or does not fit, or a GPU is in use.
    """
    run = agreement.run("configs", lambda: load_run(options.runs_dir, options.run))
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
        Losses(build_training_state(run.model, train, process).model, train, process)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{run.train_path}: microbatch_size {train.microbatch_size} does not fit"
                        f" into the memory of {process.device}; make it smaller, or set"
                        " head_chunks 8 (--find-max-microbatch measures what fits)") from None
