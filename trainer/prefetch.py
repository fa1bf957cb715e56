"""`--prefetch`: fetch and verify all that a launch of a run needs, and train nothing.

Nothing is written into the run directory, and it is not locked: the run may be training.
"""

import os
import sys
from pathlib import Path

from basics.errors import UserError, print_line
from preparation.ensure_dataset import is_complete, verify_digests
from processes.command_line import Options
from processes.launch import Process, num_gpus
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from run_config import Run, load_run
from tokens.batches import RunData
from tokens.tokenizer import TOKENIZER_FILE, load_tokenizer
from trainer.compilation import CACHE_VARIABLE, keep_compiled_code
from trainer.microbatch_search import try_microbatch
from trainer.models import DOWNLOADED, model_directory
from trainer.startup import prepare_run

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
    if run.train.compile is False:
        print_line("compiled code: none, as train.json says")
    elif num_gpus() == 0 and run.train.compile is None:
        print_line("compiled code: skipped, there is no GPU here, and the run is not compiled on a"
                   " CPU")
    else:
        _compile(script, run, process.world_size)
    print_line(f"{run.name}: all that a launch needs is on this machine")


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


def _compile(script: str, run: Run, num_processes: int) -> None:
    """Train a few steps under torchrun, one process for each GPU, so that their code is there."""
    keep_compiled_code()
    size = run.train.microbatch_size
    if not try_microbatch([script, *sys.argv[1:]], size, num_processes, prefetches=True).fits:
        raise UserError(f"{run.train_path}: microbatch_size {size} does not fit into the memory;"
                        " make it smaller, or set head_chunks 8 (--find-max-microbatch measures"
                        " what fits)")
    print_line(f"compiled code: {os.environ.get(CACHE_VARIABLE, 'in a temporary directory')},"
               f" of {num_processes} process{'es' if num_processes > 1 else ''}")
