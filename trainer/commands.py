"""What `ddp_train.py` does without torchrun: start it, search for a microbatch, prefetch."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np

from basics.device import first_device
from basics.errors import FAILED, STOP_SIGNALS, UserError, one_line, print_line, says_out_of_memory
from basics.files import write_atomically
from basics.json_files import read_json_object, set_number, to_json
from basics.text import counted, dollars, gib
from preparation.ensure_dataset import splits_of, verify_digests
from processes.command_line import Options
from processes.distributed import Process, num_gpus, spans_nodes, start_torchrun
from processes.startup_agreement import Agreement
from processes.startup_progress import StartupProgress
from reporting.clock import PhaseClock
from reporting.machine_time import record_search
from reporting.speed import CARDS_GIB, estimated_startup_seconds, usable_gib
from reporting.summary import duration, final_status, read_summary
from run_config import OLD_NAME, Run, load_run, make_run_dir
from settings.data import token_file_name
from tokens.batch_plan import divided
from tokens.tokenizer import TOKENIZER_FILE, load_tokenizer
from trainer.microbatch_trial import TOO_SLOW, TRIAL_VARIABLE, Trial
from trainer.models import DOWNLOADED, model_directory
from trainer.resuming import stages_left
from trainer.startup import prepare_run, print_if_finished
from trainer.user_commands import execute_when_done

MAX_TRIALS = 8
GROWTH = 4  # times the largest that fits: tried without a line, and trusted of its prediction
SAFETY = 0.9  # share of a larger prediction that is tried: small microbatches may mislead
MAX_GROWTH = 64  # times the largest that fits: never extrapolate further
ROUNDING = 1e-6  # of the prediction
TRIAL_STEPS_SECONDS = 10.0  # an estimate of the steps of a trial


def launch_run(options: Options, clock: PhaseClock, agreement: Agreement) -> int:
    """Check a run in this process, then train it under torchrun; return its exit status.

    The workers check it again: `prepare_run` says why.
    """
    num_processes = options.nproc_per_node or max(1, num_gpus())
    if options.find_max_microbatch:
        search(run_to_search(options, num_processes), options, num_processes)
        return 0
    device = first_device()
    process = Process(rank=0, local_rank=0, world_size=num_processes, device=device)
    if options.prefetch:
        prefetch_run(options, process)
        return 0
    progress = StartupProgress(
        options.run, lambda: f"checking {agreement.step}", clock.launch_seconds, is_active=True
    )
    with closing(progress):
        prepared = prepare_run(options, process, clock, agreement)
    if prepared.resume.is_finished:
        print_if_finished(prepared, process)
        execute_when_done(prepared.run, options, process, was_finished=True, stop_signal=0)
        return 0
    print_line(f"{options.run}: starting {counted(num_processes, 'process', 'processes')}")
    clock.export_to_children()
    before = read_summary(prepared.run)
    status = start_torchrun(num_processes)
    after = read_summary(prepared.run)
    if status - 128 in STOP_SIGNALS and ("global_step" not in after or after == before):
        # Not in order, as before the first step: then the workers have printed no summary.
        print_line(f"{options.run}: stopped at once; the same command goes on")
    return final_status(prepared.run, status)


def prefetch_run(options: Options, process: Process) -> None:
    """Fetch and verify a run's dataset, tokenizer, initial weights and compiled code.

    Nothing is written into the run directory, and it is not locked: the run may be training.
    `process` stands for all processes of the run.
    """
    prepared = prepare_run(options, process, PhaseClock(), Agreement.in_one_process())
    run, data, config = prepared.run, prepared.data, prepared.run.config
    for warning in prepared.warnings:
        print_line(f"warning: {warning}")
    _verify(
        "dataset",
        options.datasets_dir / config.dataset,
        [*map(token_file_name, splits_of(config)), TOKENIZER_FILE],
    )
    for name in config.validation_datasets:
        _verify("validation set", options.datasets_dir / name, [token_file_name("validation")])
    for index in range(data.plan.num_tokens // data.plan.tokens_per_microbatch):
        data.training[index]  # checks its ids
    for microbatches in data.validation_sets.values():
        for _ in microbatches:
            pass
    print_line(f"token ids: all are in the vocabulary of {data.training.vocab_size:,}")
    if data.tokenizer_name is not None:
        load_tokenizer(data.tokenizer_name, data.tokenizer_path)  # fetches GPT-2's vocabulary
    print_line(
        "tokenizer: "
        + str(
            data.tokenizer_path or data.tokenizer_name or "not known, so there will be no samples"
        )
    )
    if config.init_from and prepared.resume.checkpoint is None:
        _verify("initial weights", model_directory(config.init_from, options.runs_dir), DOWNLOADED)
    size = config.microbatch_size
    compiles = num_gpus() > 0 if config.compile is None else config.compile
    # A run that grows compiles twice; both are in the cache then, so the growth waits less.
    depths = {stage.model.n_layers for stage in stages_left(run, data.plan, prepared.resume)}
    for n_layers in sorted(depths) if compiles else ():
        trial = try_microbatch(size, process.world_size, prefetches=True, n_layers=n_layers)
        if not trial.fits:
            raise UserError(
                f"{run.train_path}: microbatch_size {size} does not fit into the memory;"
                " make it smaller, or set head_chunks 8 (--find-max-microbatch measures"
                " what fits)"
            )
    print_line(
        f"compiled code: of {process.world_size} processes"
        if compiles
        else "compiled code: none, the run is not compiled here"
    )
    print_line(f"{run.name}: all that a launch needs is on this machine")


def _verify(what: str, directory: Path, patterns: list[str]) -> None:
    files = sorted(path for pattern in patterns for path in directory.glob(pattern))
    size = sum(path.stat().st_size for path in files) / 1e6
    print_line(
        f"{what}: {directory}: {size:,.2f} MB, {verify_digests(files)} of {len(files)} files"
        " compared with the hub's digests"
    )


def search(run: Run, options: Options, num_processes: int) -> None:
    """Find the largest microbatch of a run, and print it. One process; it starts the others.

    A trial that fails for another reason than memory, or takes too long, ends the search with what
    it has found until then.

    Raises: UserError: not even a microbatch of 1 fits, or its trial failed for another reason.
    """
    on_gpu = num_gpus() > 0
    batch = run.config.global_batch_size
    most = None if batch is None else max(1, batch // num_processes)  # that the run can use
    print_line(cost_of_search(run, options, most, on_gpu=on_gpu))
    print_line(f"microbatch {'memory' if on_gpu else 'mapped memory':>14}     tokens/s")

    def try_size(size: int) -> Trial | None:
        try:
            trial = try_microbatch(size, num_processes, on_gpu=on_gpu)
        except UserError as error:
            if size == 1:
                raise
            print_line(f"warning: the search ends here: {one_line(str(error))}")
            return None
        print_line(
            f"{size:>10,} {gib(trial.demand_gib * 2**30):>14} {trial.tokens_per_second:>12,.0f}"
            if trial.fits
            else f"{size:>10,} {'out of memory':>14}"
        )
        return trial

    trials = find_max_microbatch(try_size, most)
    fitting, failure = by_size(trials)
    if not fitting:
        raise UserError(
            f"{run.run_dir}: not even a microbatch of 1 fits; make the model or its"
            " context_length smaller, or use a larger card (see: lab plan)"
        )
    largest = fitting[-1].microbatch_size
    if largest == most:
        limit = f" (all of a process's share of global_batch_size {batch:,})"
    elif failure == largest + 1:
        limit = ""
    elif len(trials) < MAX_TRIALS:
        limit = " (more may fit)"
    else:
        limit = f" (limit of {MAX_TRIALS} trials: more may fit)"
    print_line(f"largest microbatch: {largest:,}{limit}")
    fastest = max(fitting, key=lambda trial: trial.tokens_per_second)
    print_line(
        f"fastest microbatch: {fastest.microbatch_size:,}"
        f" ({fastest.tokens_per_second:,.0f} tokens/s)"
    )
    if on_gpu and len(fitting) > 1 and (line := fit_memory(fitting)):
        slope, fixed = line
        sizes = [
            f"{card} GiB {max(0, int((usable_gib(reported) - fixed) / slope)):,}"
            for card, reported in CARDS_GIB.items()
        ]
        print_line(
            f"other cards, by the line {fixed:.3g} GiB + {slope:.3g} GiB a sequence through the two"
            f" largest: {', '.join(sizes)}"
        )
    if options.save:
        print_line(save_result(run, trials, num_processes))
    record_search(run, options.usd_per_hour)


def cost_of_search(run: Run, options: Options, most: int | None, *, on_gpu: bool) -> str:
    """Say what a search takes at most: each trial is a launch, and compiles its own sizes."""
    num_trials = min(MAX_TRIALS, most or MAX_TRIALS)
    compiles = on_gpu if run.config.compile is None else run.config.compile
    each = estimated_startup_seconds(int(compiles)) + TRIAL_STEPS_SECONDS
    price = options.usd_per_hour or run.config.usd_per_hour
    usd = f", US${dollars(num_trials * each / 3600 * price)}" if price else ""
    return (
        f"estimate: at most {duration(num_trials * each)}{usd}, for"
        f" {counted(num_trials, 'launch', 'launches')} of {each:.0f} s:"
        f" start-up, {'compilation, ' if compiles else ''}a few steps"
    )


def run_to_search(options: Options, num_processes: int) -> Run:
    """Return the run, if it can be searched. Raises: UserError."""
    run = load_run(options.runs_dir, options.run)
    if spans_nodes():
        raise UserError(
            "--find-max-microbatch runs on one machine: start it there without"
            " torchrun, or with --nnodes 1"
        )
    if not num_gpus() and options.memory_limit_gib is None:
        raise UserError(
            "--find-max-microbatch without a GPU: give --memory-limit-gib, the memory"
            " that a process may use"
        )
    if options.save:
        divided(run, world_size=num_processes)  # or an error: nothing could be saved
    return run


def try_microbatch(
    microbatch_size: int,
    num_processes: int,
    *,
    on_gpu: bool = True,
    prefetches: bool = False,
    n_layers: int | None = None,
) -> Trial:
    """Train a few steps under torchrun, with the arguments of this process.

    On a CPU libraries fail in many ways where the address space is at its limit, so each failure of
    a microbatch above 1 counts as one that does not fit. One that `prefetches` compiles the
    validation too, and fails where another program uses the GPU. With `n_layers` the model has only
    so many layers.

    Raises: UserError: they failed for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        result_path = Path(folder) / "result.json"
        os.environ[TRIAL_VARIABLE] = json.dumps(
            {
                "microbatch_size": microbatch_size,
                "path": str(result_path),
                "prefetches": prefetches,
                "n_layers": n_layers,
            }
        )
        try:
            status = start_torchrun(num_processes, logs_dir=Path(folder) / "logs")
        finally:
            del os.environ[TRIAL_VARIABLE]
        if status - 128 in STOP_SIGNALS:
            sys.exit(status)
        if result_path.exists():
            return Trial(**json.loads(result_path.read_text()))
        # The rank that failed first says why; others say that they have lost a peer.
        failures = sorted(
            Path(folder).glob("result.rank*"),
            reverse=True,
            key=lambda path: path.stat().st_mtime_ns,
        )
        said = "\n".join(
            path.read_text(errors="replace")
            for path in (*Path(folder).rglob("stderr.log"), *failures)
        )
    is_slow = TOO_SLOW in said
    if not is_slow and (says_out_of_memory(said) or not on_gpu and microbatch_size > 1):
        return Trial(microbatch_size, fits=False)
    reason = (said.strip() or f"exit status {status}").splitlines()[-1].strip()
    raise UserError(f"microbatch {microbatch_size} failed: {reason}", FAILED)


def find_max_microbatch(
    try_size: Callable[[int], Trial | None], most: int | None = None
) -> list[Trial]:
    """Try larger microbatches, then ones in between, until the largest that fits is known.

    With `most` none is larger: the largest that fits, or `most`.

    A line through the memory of the two largest that fit predicts the next one to try. In smaller
    ones the optimizer's step sets the peak, not the microbatch. The first trial has a size of 1.
    A `try_size` that returns None ends the search.
    """
    trials: list[Trial] = []
    size = 1
    while len(trials) < MAX_TRIALS and (trial := try_size(size)) is not None:
        trials.append(trial)
        fitting, failure = by_size(trials)
        if not fitting:
            break
        low = fitting[-1].microbatch_size
        if low == most or failure == low + 1:
            break
        predicted: float = low * GROWTH
        if len(fitting) > 1 and (line := fit_memory(fitting)):
            slope, fixed = line
            predicted = (fitting[-1].capacity_gib - fixed) / slope * (1 - ROUNDING)
        if predicted > low * GROWTH:
            predicted = min(predicted * SAFETY, low * MAX_GROWTH)
        size = max(int(predicted), low + 1 + low // 100)
        if failure is not None and size >= failure:  # the line does not know the allocator's waste
            size = (low + failure) // 2
        if most is not None:
            size = min(size, most)
    return trials


def fit_memory(fitting: list[Trial]) -> tuple[float, float] | None:
    """Fit GiB a sequence and fixed GiB through the two largest trials; None if they do not rise."""
    sizes = [trial.microbatch_size for trial in fitting[-2:]]
    memory = [trial.demand_gib for trial in fitting[-2:]]
    slope, fixed = np.polyfit(sizes, memory, 1)
    return (slope, fixed) if slope > 0 else None


def by_size(trials: list[Trial]) -> tuple[list[Trial], int | None]:
    """Return the trials that fitted, by size, and the smallest microbatch that did not fit."""
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda one: one.microbatch_size)
    return fitting, min((one.microbatch_size for one in trials if not one.fits), default=None)


def save_result(run: Run, trials: list[Trial], num_processes: int) -> str:
    """Write the largest microbatch that keeps `global_batch_size` into `train.json`; say so.

    The trials go into `microbatch-search.json`, for `lab plan` and `lab compare`.
    """
    fitting, _ = by_size(trials)
    size, batch = fitting[-1].microbatch_size, run.config.global_batch_size
    accumulation = run.config.gradient_accumulation_steps
    if batch is not None:
        size = divided(run, world_size=num_processes, most=size).config.microbatch_size
        accumulation = batch // num_processes // size
    make_run_dir(run)
    key = OLD_NAME if OLD_NAME in read_json_object(run.train_path) else "microbatch_size"
    set_number(run.train_path, key, size)
    write_atomically(
        run.search_path,
        to_json(
            {
                "tokens_per_second": np.interp(
                    size,
                    [trial.microbatch_size for trial in fitting],
                    [trial.tokens_per_second for trial in fitting],
                ),
                "machine": {"device": fitting[-1].device, "processes": num_processes},
                "model": run.model.model_dump(),
                "train": run.config.model_dump() | {"microbatch_size": size},
                "trials": [asdict(trial) for trial in trials],
            },
            indent=2,
        )
        + "\n",
    )
    return (
        f"saved in {run.train_path}: microbatch_size {size}; x accumulation {accumulation}"
        f" x {num_processes} = global batch {size * accumulation * num_processes}"
        f" ({'kept' if batch else 'it follows the microbatch; global_batch_size fixes it'})"
    )
