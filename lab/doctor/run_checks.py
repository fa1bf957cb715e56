"""Checks of a run's own things: configs, dataset, batch, memory of its processes, checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from basics.errors import UserError
from basics.files import check_inside
from basics.text import gb, gib
from lab.doctor.check import Finding, Subject, ok, problem, skipped, warning
from lab.doctor.gpu_checks import numbers
from lab.doctor.host_checks import existing, training_gib
from lab.plan.estimate import bytes_of_checkpoint, most_checkpoints, num_checkpoints
from preparation.ensure_dataset import STDLIB_DATASET, is_complete
from reporting.speed import usable_gib
from tokens.batch_plan import BatchPlan, accumulation_steps_of, plan_batches
from tokens.token_file import TokenFile

UNLIMITED_TOKENS = 2**62  # of a dataset whose length is not known yet
MUCH_TOO_LARGE = 1.25  # times the memory there is: the estimate is not that far off
OWN_GIB = 1.0  # of a GPU, which CUDA and NCCL take beside a process's tensors


def check_configs(subject: Subject) -> Finding | None:
    """Check that the run's files can be read, as the training does."""
    if subject.run_name is None:
        return None
    if subject.run is None:
        return problem(*_split(subject.config_error))
    lines = list(subject.run.warnings)
    try:
        subject.run.priced(None)
    except UserError as error:
        lines.append(str(error))
    if lines:
        texts, advice = zip(*map(_split, lines), strict=True)
        return warning("; ".join(texts), "; ".join(dict.fromkeys(advice)))
    return ok(f"model.json and train.json of {subject.run.run_dir} can be used")


def check_dataset(subject: Subject) -> Finding | None:
    """Check a dataset that is here, or is made here; `network_checks` has the hub's."""
    if subject.run is None:
        return None
    name = subject.run.train.dataset
    place = subject.datasets_dir / name
    try:
        check_inside(place, subject.datasets_dir, "--datasets-dir")
        if is_complete(place):
            train, _ = (TokenFile(place / f"{split}.safetensors")
                        for split in ("train", "validation"))
            return ok(f"{place} has {train.num_tokens:,} training tokens")
    except UserError as error:
        return problem(*_split(str(error)))
    if "/" in name:
        return None
    if name == STDLIB_DATASET:
        return ok(f"{place} is made from Python's own files when training starts")
    return problem(f"{place}: no dataset there", f"make it: prepare_dataset.py SOURCE {place}, or"
                   " name a dataset on the hub (owner/name) in train.json")


def plan_of(subject: Subject) -> BatchPlan:
    """Divide the run's tokens among its processes. Raises: UserError."""
    path = subject.datasets_dir / subject.run.train.dataset / "train.safetensors"
    num_tokens = TokenFile(path).num_tokens if path.is_file() else UNLIMITED_TOKENS
    return plan_batches(subject.run, world_size=subject.world_size, file_tokens=num_tokens)


def check_batch(subject: Subject) -> Finding | None:
    """Check that the global batch can be divided among the processes."""
    if subject.run is None:
        return None
    train, world_size = subject.run.train, subject.world_size
    try:
        plan_of(subject)
        steps = accumulation_steps_of(subject.run, world_size=world_size)
    except UserError as error:
        return problem(*_split(str(error)))
    size = train.microbatch_size * steps * world_size
    return ok(f"microbatch {train.microbatch_size:,} x accumulation {steps:,} x"
              f" {num_processes(world_size)} = {size:,} sequences")


def num_processes(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def check_microbatch(subject: Subject) -> Finding | None:
    """Compare the memory that `lab plan` estimates for a process with what there is."""
    if subject.run is None:
        return None
    needed = training_gib(subject)
    if subject.gpus:
        sizes = [gpu.memory_total_gib for gpu in subject.gpus if gpu.memory_total_gib]
        if not sizes:
            return skipped("the driver does not tell the GPUs' memory")
        there, where = usable_gib(min(sizes)), "a GPU"
        if needed <= there and not subject.is_training and (taken := _check_free(subject, needed)):
            return taken
    else:
        there, where = subject.available_gib / subject.num_processes, "a process"
    text = (f"microbatch {subject.run.train.microbatch_size:,} takes about {gib(needed * 2**30)}"
            f" of the {gib(there * 2**30)} of {where} (estimate)")
    if needed <= there:
        return ok(text)
    advice = ("lower microbatch_size, or set head_chunks 8 or activation_checkpointing;"
              " ddp_train.py --find-max-microbatch measures what fits")
    return problem(text, advice) if needed > MUCH_TOO_LARGE * there else warning(text, advice)


def _check_free(subject: Subject, needed: float) -> Finding | None:
    """Check that no other process has taken a GPU's memory, such as one that a kill left."""
    free = {number: gpu.memory_total_gib - (gpu.memory_used_gib or 0)
            for number, gpu in enumerate(subject.gpus) if gpu.memory_total_gib}
    taken = [number for number, gib in free.items() if gib - OWN_GIB < needed]
    if not taken:
        return None
    return problem(
        f"microbatch {subject.run.train.microbatch_size:,} takes about {gib(needed * 2**30)} of a"
        f" GPU (estimate); {numbers(taken)} {'has' if len(taken) == 1 else 'have'}"
        f" {gib(min(free.values()) * 2**30)} free: other processes use the rest",
        "find them with nvidia-smi and end them: a run that was killed may have left some")


def check_checkpoints(subject: Subject) -> Finding | None:
    """Check that the disk has room for the next checkpoint, and for all that the run keeps."""
    if subject.run is None:
        return None
    run, size = subject.run, bytes_of_checkpoint(subject.run)
    place = existing(run.checkpoints_dir)
    free = shutil.disk_usage(place).free
    text = f"{gb(size)} each, {gb(free)} free"
    advice = "make room, set keep_checkpoints, or name another place with --runs-dir"
    if free < size:
        return problem(text, advice)
    number = _num_kept(subject)
    if number is None:
        return ok(text)
    text += f"; at most {number:,} are kept"
    missing = (number - _num_present(run.checkpoints_dir)) * size
    return ok(text) if missing <= free else warning(
        f"{text}: {gb(number * size)}", advice)


def _num_kept(subject: Subject) -> int | None:
    """Return the most checkpoints at one time; None if the length of the run is not known."""
    train = subject.run.train
    if train.min_train_tokens == -1 and not is_complete(subject.datasets_dir / train.dataset):
        return most_checkpoints(train, None)
    try:
        total = num_checkpoints(subject.run, plan_of(subject))
    except UserError:
        return None
    return most_checkpoints(train, total)


def _num_present(checkpoints_dir: Path) -> int:
    if not checkpoints_dir.is_dir():
        return 0
    return sum(path.is_dir() and not path.is_symlink() for path in checkpoints_dir.iterdir())


def _split(line: str) -> tuple[str, str]:
    """Return what is wrong and what to do, which an error's line has behind a semicolon."""
    text, _, advice = line.partition("; ")
    return text, advice or "see docs/configuration.md"


CHECKS = {"configs": check_configs, "dataset": check_dataset, "batch": check_batch,
          "microbatch": check_microbatch, "checkpoints": check_checkpoints}
