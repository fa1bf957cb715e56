"""A launch without torchrun: check the run, then train it, search, or only prepare it."""

import sys
from pathlib import Path

import torch

from basics.errors import UserError, print_line
from preparation.ensure_dataset import verify_digests
from processes.command_line import Options
from processes.launch import Process, num_gpus, start_torchrun
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from reporting.summary import final_status
from tokens.tokenizer import TOKENIZER_FILE, load_tokenizer
from trainer.microbatch_search import search, try_microbatch
from trainer.models import DOWNLOADED, model_directory
from trainer.side_processes import run_when_done
from trainer.startup import prepare_run


def launch(script: str, options: Options, clock: PhaseClock, agreement: Agreement) -> int:
    """Check a run in this process, then train it under torchrun; return its exit status."""
    num_processes = options.nproc_per_node or max(1, num_gpus())
    if options.find_max_microbatch:
        search(script, options, num_processes)
        return 0
    if options.find_learning_rate:  # the processes check the run
        return start_torchrun(script, sys.argv[1:], num_processes=num_processes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    process = Process(rank=0, local_rank=0, world_size=num_processes, device=device)
    if options.prefetch:
        prefetch_run(script, options, process)
        return 0
    prepared = prepare_run(options, process, clock, agreement)
    if prepared.is_finished:
        prepared.say_if_finished(process)
        run_when_done(prepared, process, stop_signal=0)
        return 0
    clock.export_to_children()
    status = start_torchrun(script, sys.argv[1:], num_processes=num_processes)
    return final_status(prepared.run, status)


def prefetch_run(script: str, options: Options, process: Process) -> None:
    """Fetch and verify a run's dataset, tokenizer, initial weights and compiled code.

    Nothing is written into the run directory, and it is not locked: the run may be training.
    `process` stands for all processes of the run.
    """
    prepared = prepare_run(options, process, PhaseClock(), Agreement.in_one_process())
    run, data, config = prepared.run, prepared.data, prepared.config
    for warning in prepared.warnings:
        print_line(f"warning: {warning}")
    _verify("dataset", options.datasets_dir / config.dataset,
            ["train.safetensors", "validation.safetensors", TOKENIZER_FILE])
    for index in range(data.plan.num_tokens // data.plan.tokens_per_microbatch):
        data.train[index]  # checks its ids
    for _ in data.validation or ():
        pass
    print_line(f"token ids: all are in the vocabulary of {data.train.vocab_size:,}")
    if data.tokenizer_name is not None:
        load_tokenizer(data.tokenizer_name, data.tokenizer_path)  # fetches GPT-2's vocabulary
    print_line("tokenizer: " + str(data.tokenizer_path or data.tokenizer_name
                                   or "not known, so there will be no samples"))
    if config.init_from and prepared.resume_from is None:
        _verify("initial weights", model_directory(config.init_from, options.runs_dir), DOWNLOADED)
    size = config.microbatch_size
    compiles = num_gpus() > 0 if config.compile is None else config.compile
    if compiles and not try_microbatch(script, size, process.world_size, prefetches=True).fits:
        raise UserError(f"{run.train_path}: microbatch_size {size} does not fit into the memory;"
                        " make it smaller, or set head_chunks 8 (--find-max-microbatch measures"
                        " what fits)")
    print_line(f"compiled code: of {process.world_size} processes" if compiles
               else "compiled code: none, the run is not compiled here")
    print_line(f"{run.name}: all that a launch needs is on this machine")


def _verify(what: str, directory: Path, patterns: list[str]) -> None:
    files = sorted(path for pattern in patterns for path in directory.glob(pattern))
    size = sum(path.stat().st_size for path in files) / 1e6
    print_line(f"{what}: {directory}: {size:,.2f} MB, {verify_digests(files)} of {len(files)} files"
               " compared with the hub's digests")
