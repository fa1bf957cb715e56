"""Everything that is checked before the first collective, and the run that is ready to train."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import checkpointing
from basics.checkpoint_files import Identity, read_identity, read_manifest, write_identity
from basics.device import is_cpu
from basics.errors import UserError, print_line
from basics.failpoints import failpoint
from basics.files import existing, write_atomically
from basics.json_files import to_json
from basics.machine import num_cpu_cores
from basics.text import gb
from checkpointing import TrainingState
from ops.schedule import schedule_warning
from preparation.ensure_dataset import provide_datasets
from processes.command_line import Options
from processes.distributed import Process, unused_gpus
from processes.run_lock import seconds_before
from processes.startup_agreement import Agreement
from reporting.clock import DOWNLOAD, PhaseClock, nearest_limit
from reporting.metrics_file import read_metrics, remove_metrics_from, spent_before
from reporting.reference import ReferenceCurve, find_reference
from reporting.speed import checkpoint_bytes
from reporting.summary import FINISHED, read_summary, spent_at_end, write_status
from reporting.tracker import check_tracker
from run_config import Run, load_run, setting_warnings
from tokens.batch_plan import BatchPlan, divided, largest_divisor, microbatch_warning
from tokens.batches import RunData, open_run_data
from trainer.growth import shallow_state
from trainer.loss_functions import build_training_state
from trainer.models import check_initial_tokenizer, initial_model
from trainer.precision import check_attention, has_precision, resolve_for_device
from trainer.resuming import (
    ResumePoint,
    agree_on_checkpoint,
    copied_from,
    find_resume_point,
    identity_of_launch,
)


@dataclass(frozen=True)
class PreparedRun:
    """What the start-up of a launch has read and checked."""

    run: Run  # with what its config leaves open: `decide_for_device` is next
    data: RunData
    resume: ResumePoint
    reference: ReferenceCurve | None
    warnings: list[str]
    energy_kwh: float = 0.0  # that earlier launches have used


class OpenedDir(NamedTuple):
    """What a launch has made of its run directory."""

    identity: Identity  # of what is saved from now on
    # With the files as they were, and the checkpoints that the run does not go on from, if any.
    aside_dir: Path | None


def prepare_run(
    options: Options, process: Process, clock: PhaseClock, agreement: Agreement
) -> PreparedRun:
    """Check everything that can be checked before the first collective. Every rank.

    Without torchrun in the command it is called twice. First in the launcher, for all processes of
    the run: an error of the user, or a finished run, ends it there, with one line and without the
    seconds that torchrun and its processes take to start. Downloads are done then, too. Second in
    each worker: it needs the configs and data itself, may be on another machine, with other files,
    and may have been started by torchrun alone, or again after a failure.

    Raises: AgreedError: something is wrong with the run, its data, its checkpoints or the machine,
        or the processes read different ones.
    """
    run = agreement.do("configs", configured_run, options, process.world_size)
    config = run.config
    failpoint("prepare")

    # Before the data, which may be downloaded for an hour: all that can be refused without them.
    agreement.do_if(process.is_main, "tracker", check_tracker, config.tracker)
    curve = agreement.do("reference", reference_of, run)
    checkpoint_name, checkpoint_warnings = agree_on_checkpoint(run, options, agreement)
    initial_tokenizer = None
    if config.init_from and checkpoint_name is None:
        # One process of a node may download the weights; `build_state` finds them there later.
        initial_tokenizer = agreement.do_if(
            process.is_main_of_node, "initial weights", initial_tokenizer_name, run, options
        )

    with clock.phase(DOWNLOAD):
        agreement.do_if(
            process.is_main_of_node, "dataset", provide_datasets, options.datasets_dir, config
        )
    data = agreement.do(
        "data",
        open_run_data,
        run,
        options.datasets_dir / config.dataset,
        world_size=process.world_size,
        validation_paths=config.validation_paths(options.datasets_dir),
    )

    # After the data, since all of these are compared with them.
    agreement.do("tokenizers", check_initial_tokenizer, run, initial_tokenizer, data.tokenizer_name)
    reference, reference_warning = agreement.do("comparison", made_comparable, curve, run, data)
    resume, copy_warning = find_resume_point(run, data, checkpoint_name, process, agreement)

    # After the checkpoint is known: what is spent and not recorded there is lost.
    records = [] if options.fresh else agreement.do("records", read_metrics, run.metrics_path)
    energy_kwh, price_warning = book_earlier_launches(
        run, resume, records, options, clock, agreement
    )
    # After the booking: what earlier launches have spent counts for the budget. Each node may have
    # a train.json of its own, so every process takes this step.
    agreement.do_if(not resume.has_no_step_left, "room", check_room, run, clock, process)

    # Nodes may have run directories of their own: all must be about to train the same.
    checkpoint = resume.checkpoint
    saved = checkpoint and (checkpoint.name, checkpoint.validation, read_manifest(checkpoint.path))
    agreement.require_same("run", (run.model, config, data.plan, data.fingerprints, saved))
    warnings = [
        *checkpoint_warnings,
        copy_warning,
        microbatch_warning(run),
        reference_warning,
        *setting_warnings(run),
        price_warning,
        learning_rate_warning(run, data.plan, resume, records),
    ]
    return PreparedRun(run, data, resume, reference, list(filter(None, warnings)), energy_kwh)


def configured_run(options: Options, world_size: int) -> Run:
    """Return the run with the settings of the command line. Raises: UserError."""
    run = load_run(options.runs_dir, options.run)
    run = run.priced(options.usd_per_hour).compared_with(options.reference)
    return divided(run, world_size=world_size)


def initial_tokenizer_name(run: Run, options: Options) -> str | None:
    """Load the initial weights; return the name of their tokenizer. Raises: UserError."""
    return initial_model(run, options.runs_dir).tokenizer_name


def book_earlier_launches(
    run: Run,
    resume: ResumePoint,
    records: list[dict[str, Any]],
    options: Options,
    clock: PhaseClock,
    agreement: Agreement,
) -> tuple[float, str]:
    """Book the time and the dollars of earlier launches; set the price of this one. Every rank.

    Each part is what a later source knows beyond the earlier ones, so their order counts:

    1. The checkpoint has the seconds and dollars of each phase until then. The summary has them
       until the end of the launch, if one ended in order after the checkpoint's step.
    2. Records and summary have the totals of a later moment. The difference is lost.
    3. The price comes after them: without one in this launch, it is that of all hours so far; and
       where none of these hours has a price, they get that of this launch.
    4. The heartbeat file of a killed launch has only seconds. They become dollars at that price.

    Returns the kWh that they have used, and a warning about prices or an empty string.

    Raises: AgreedError: the summary cannot be read.
    """
    checkpoint = resume.checkpoint
    if checkpoint is not None:
        latest = checkpoint.validation or checkpoint.meta  # the later of the two records
        at_end = spent_at_end(run, checkpoint.meta.global_step)
        seconds_by_phase, usd_by_phase = at_end or (latest.seconds, latest.usd)
        clock.resume(seconds_by_phase, usd_by_phase)
    if options.fresh:
        return 0.0, clock.set_price(run.config.usd_per_hour)
    seconds, usd, energy_kwh = agreement.do("spent", spent_before, records, run.summary_path)
    clock.count_lost(seconds, usd)
    warning = clock.set_price(run.config.usd_per_hour)
    clock.count_lost(seconds_before(run.run_dir))
    return energy_kwh, warning


def learning_rate_warning(
    run: Run, plan: BatchPlan, resume: ResumePoint, records: list[dict[str, Any]]
) -> str:
    """Return a warning if the learning rate rises after the checkpoint, or an empty string."""
    if resume.checkpoint is None:
        return ""
    meta = resume.checkpoint.meta
    rates = {
        record["global_step"]: record["learning_rate"]
        for record in records
        if record.get("learning_rate") is not None
    }
    return schedule_warning(
        run.config,
        meta.global_step,
        rates.get(meta.global_step),
        num_steps=plan.num_steps,
        changed=resume.changes if meta.settings else None,
    )


def reference_of(run: Run) -> ReferenceCurve | None:
    """Return the curve that the run is compared with, if any, as its file has it.

    Raises: UserError: there is no such curve.
    """
    name = run.config.reference
    return find_reference(name, run.run_dir.parent, run.run_dir) if name else None


def made_comparable(
    curve: ReferenceCurve | None, run: Run, data: RunData
) -> tuple[ReferenceCurve | None, str]:
    """Return the curve in nats per token of the run, and a warning or an empty string.

    Raises: UserError: it cannot be compared with this run.
    """
    if curve is None:
        return None, ""
    # The length of tokens is counted in the validation text, which takes a while.
    curve = curve.in_units_of(
        data.tokenizer_name, run.model.vocab_size, lambda: data.bytes_per_token
    )
    limit = run.config.stop_if_behind
    if limit and limit.std and curve.train_std is None and curve.validation_std is None:
        raise UserError(
            f"{run.train_path}: stop_if_behind has std, but the noise of reference {curve.name} is"
            " not known; set loss instead"
        )
    tokens = data.plan.num_tokens
    first = min(point[0] for point in (*curve.train, *curve.validation))
    if first <= tokens:
        return curve, ""
    problem = f"reference {curve.name} begins at {first:,.0f} tokens, and the run has {tokens:,}"
    if limit:
        raise UserError(f"{run.train_path}: {problem}, so stop_if_behind would do nothing")
    return curve, f"{problem}: nothing is compared"


def decide_for_device(run: Run, plan: BatchPlan, device: torch.device) -> tuple[Run, list[str]]:
    """Return the run with all keys of its config decided, and warnings; initialise CUDA.

    Raises: UserError: the device cannot compute what the config asks for.
    """
    config = resolve_for_device(run.config, device)
    check_attention(run.model, config, device)
    warnings = []
    if not has_precision(device, config.precision or "fp32"):
        warnings.append(
            f'{run.train_path}: precision is "{config.precision}", in which'
            " this device is no faster than in fp32; without this key the fastest"
            " one is taken"
        )
    warnings += unused_gpus()
    if is_cpu(device) and config.global_batch_size and plan.world_size == 1:
        num_processes = largest_divisor(plan.gradient_accumulation_steps, num_cpu_cores())
        if num_processes > 1:  # 1.4 times as fast, on two cores
            warnings.append(
                f"one process trains on {num_cpu_cores()} cores: with --nproc-per-node"
                f" {num_processes} a small model trains faster, on the same batches"
            )
    return run.decided(config), warnings


def print_if_finished(prepared: PreparedRun, process: Process) -> None:
    """Print that nothing is left to do, if so. Rank 0 prints."""
    if not (prepared.resume.is_finished and process.is_main):
        return
    run, plan, num_steps = prepared.run, prepared.data.plan, prepared.resume.first_step
    wanted = "" if num_steps == plan.num_steps else f", {plan.num_steps:,} were wanted"
    original = copied_from(run)
    copy = f" in {original}, of which this is a copy" if original else ""
    print_line(
        f"{run.name} is complete: {num_steps:,} steps{wanted},"
        f" {plan.tokens_of(num_steps):,} tokens{copy}; --fresh starts it over"
    )


def open_run_dir(
    run: Run,
    data: RunData,
    resume: ResumePoint,
    reference: ReferenceCurve | None,
    options: Options,
    clock: PhaseClock,
) -> OpenedDir:
    """Remove records, and move checkpoints away, that this launch does not continue. Rank 0.

    Called when all ranks agree. If something is lost by that, all files are copied before the first
    one changes. Ordered so that a kill leaves no other run's files to go on from, and that the next
    launch does the rest.

    Raises: UserError: the disk is full.
    """
    identity = identity_of_launch(run, resume.checkpoint, options)
    if ends_a_state(run, resume, options, identity):
        checkpointing.copy_aside(run.run_dir)
    failpoint("open.identity")
    write_identity(run.run_dir, identity)
    for path in (run.metrics_path, run.samples_path, run.evaluations_path):
        failpoint("open.records")
        remove_metrics_from(path, resume.first_step, lacks_validation=resume.lacks_validation)
    # The charts and the page read it here, where it moves with the run.
    failpoint("open.reference")
    if reference is None:
        run.reference_path.unlink(missing_ok=True)
    else:
        write_atomically(run.reference_path, to_json(reference.model_dump()) + "\n")
    failpoint("open.status")
    write_status(
        run,
        clock,
        status="running",
        reason=None,
        num_steps=data.plan.num_steps,
        tokenizer=data.tokenizer_name,
        bytes_per_token=data.training.token_file.bytes_per_token,
    )
    return OpenedDir(identity, checkpointing.clean_up(run.run_dir, from_step=resume.first_step))


def ends_a_state(run: Run, resume: ResumePoint, options: Options, identity: Identity) -> bool:
    """Return whether a launch leaves checkpoints or records that no later launch writes again.

    It does if it starts over, goes on from an earlier checkpoint, or makes a finished run longer;
    also if steps of a launch that ended in order are taken again. After a kill it does not: the
    steps after the checkpoint are taken again as they were.
    """
    if checkpointing.paths_to_leave(run.run_dir, from_step=resume.first_step):
        return True
    if not any(path.exists() for path in (run.summary_path, run.metrics_path)):
        return False  # no launch has been here
    summary = read_summary(run)
    last_step = summary.get("global_step")  # only the summary of a launch that ended has it
    return (
        options.fresh
        or read_identity(run.run_dir) not in (None, identity)
        or summary.get("status") == FINISHED
        or (isinstance(last_step, int) and last_step >= resume.first_step)
    )


def build_state(
    run: Run, data: RunData, resume: ResumePoint, options: Options, process: Process
) -> TrainingState:
    """Build the model and its optimizer; load what the run resumes from, or starts from."""
    if resume.checkpoint is not None:
        model = run.model.with_layers(resume.checkpoint.meta.model.n_layers)
        state = build_training_state(model, run.config, process)
        checkpointing.load_checkpoint(resume.checkpoint, state)
        return state
    first = run.stages(data.plan.num_steps)[0].model
    if first.n_layers < run.model.n_layers:
        return shallow_state(run, first.n_layers, process)
    state = build_training_state(run.model, run.config, process)
    if run.config.init_from:
        initial = initial_model(run, options.runs_dir)
        state.model.load_state_dict(initial.model.state_dict())
    return state


def check_room(run: Run, clock: PhaseClock, process: Process) -> None:
    """Refuse to train without budget or without disk space for a checkpoint. Raises: UserError."""
    seconds_left, spent = nearest_limit(run.config, clock)
    if seconds_left <= 0:
        raise UserError(f"{run.train_path}: {spent}; raise it to go on")
    disk = shutil.disk_usage(existing(run.checkpoints_dir))
    needed = checkpoint_bytes(run.model, run.config)
    if process.is_main and disk.free < needed and disk.total:  # object stores may have no size
        raise UserError(
            f"{run.run_dir}: a checkpoint takes {gb(needed)}, and the disk has"
            f" {gb(disk.free)} free; free some, or set --runs-dir"
        )
