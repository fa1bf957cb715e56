"""The launch of a run without torchrun: check it, then start torchrun."""

import sys

import torch

from processes.command_line import Options
from processes.launch import Process, num_gpus, start_torchrun
from processes.startup_agreement import Agreement
from reporting.clock import PhaseClock
from reporting.summary import final_status
from trainer.microbatch_search import search
from trainer.prefetch import prefetch_run
from trainer.side_processes import run_when_done
from trainer.startup import prepare_run


def launch(script: str, options: Options, clock: PhaseClock, agreement: Agreement) -> int:
    """Check a run in this process, then train it under torchrun; return its exit status.

    Raises: UserError: the run cannot be trained, and nothing was written; or it is finished, and
        the command of --when-done failed.
    """
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
