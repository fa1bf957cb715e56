"""Checks of a run: RAM, configs, dataset, batch, memory, checkpoints, the hub."""

import json
import shutil
from contextlib import suppress

from basics.errors import UserError
from basics.text import counted, gb, gib
from lab.doctor.checks import (
    OTHER_CONFIG,
    PROBLEM,
    Finding,
    Subject,
    existing,
    numbers,
    ok,
    problem,
    unknown,
    warn_unless,
    warning,
)
from lab.plan.estimate import (
    bytes_of_checkpoint,
    default_precision,
    most_checkpoints,
    num_checkpoints,
    pinned_bytes,
)
from lab.plan.memory import Setting, peak_memory
from preparation.ensure_dataset import STDLIB_DATASET, is_complete
from preparation.hub import ask_hub
from reporting.speed import find_gpu, usable_gib
from tokens.batch_plan import BatchPlan, accumulation_steps_of, plan_batches
from tokens.token_file import TokenFile

PROCESS_GIB, CPU_PROCESS_GIB = 3.0, 0.5  # of RAM, estimated: PyTorch with CUDA and without
UNLIMITED_TOKENS = 2**62  # of a dataset whose length is not known yet
MUCH_TOO_LARGE = 1.25  # times the memory there is: the estimate is not that far off
OWN_GIB = 1.0  # of a GPU, which CUDA and NCCL take beside a process's tensors
ASK_SECONDS = 8.0  # for one answer of the hub
TOKEN_FILES = ("train.safetensors", "validation.safetensors", "tokenizer.json")


def check_configs(subject: Subject) -> Finding | None:
    """Check that the run's files can be read, as the training does. Raises: UserError."""
    if subject.config_error:
        raise UserError(subject.config_error)
    if subject.run is None:
        return None
    try:
        subject.run.priced(None)
    except UserError as error:
        return warning(str(error), OTHER_CONFIG)
    return ok(f"model.json and train.json of {subject.run.run_dir} can be used")


def check_dataset(subject: Subject) -> Finding:
    """Check that the dataset is here, is made here, or can be downloaded. Raises: UserError."""
    name = subject.run.train.dataset
    place = subject.datasets_dir / name
    if is_complete(place):
        train, _ = (TokenFile(place / file) for file in TOKEN_FILES[:2])
        return ok(f"{place} has {train.num_tokens:,} training tokens")
    if name == STDLIB_DATASET:
        return ok(f"{place} is made from Python's own files when training starts")
    if "/" not in name:
        return problem(f"{place}: no dataset there", f"make it: prepare_dataset.py SOURCE {place},"
                       " or name a dataset on the hub (owner/name) in train.json")
    from huggingface_hub import HfApi

    info = ask_hub(name, lambda: HfApi().dataset_info(
        name, files_metadata=True, timeout=ASK_SECONDS), pauses=())
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if missing := [file for file in TOKEN_FILES[:2] if file not in sizes]:
        return problem(f"{name} on the hub has no {missing[0]}",
                       "name a dataset of token files, or make one with prepare_dataset.py")
    needed = sum(sizes.get(file, 0) for file in TOKEN_FILES)
    free = shutil.disk_usage(existing(subject.datasets_dir)).free
    text = f"{name} is on the hub: {gb(needed)} are downloaded when training starts"
    return ok(text) if needed < free else problem(
        f"{text}, {gb(free)} are free", "make room, or name another place with --datasets-dir")


def check_ram(subject: Subject) -> Finding:
    """Compare the RAM with what the processes and the snapshot of a checkpoint need."""
    on_gpu, available = bool(subject.gpus), subject.available_gib
    needed = subject.num_processes * (PROCESS_GIB if on_gpu else CPU_PROCESS_GIB)
    if subject.run is None:
        return warn_unless(
            available >= needed, f"{available:,.1f} GiB available; training needs {needed:,.1f} or"
            " more: name a run to have it counted", "end other programs")
    snapshot = (pinned_bytes if on_gpu else bytes_of_checkpoint)(subject.run) / 2**30
    needed += snapshot + (0 if on_gpu else subject.num_processes * training_gib(subject))
    found = warn_unless(
        available >= needed,
        f"{available:,.1f} GiB available; the run needs about {gib(needed * 2**30)},"
        f" {gib(snapshot * 2**30)} of them for the copy that checkpoints are written from"
        " (the dataset is memory-mapped)", "end other programs, or take a machine with more RAM"
        + ("" if on_gpu else "; a smaller microbatch_size or fewer processes need less"))
    return found if available >= needed / 2 else found._replace(verdict=PROBLEM)


def training_gib(subject: Subject) -> float:
    """Return the GiB of a process's tensors at the peak of a step, as `lab plan` estimates."""
    train, on_gpu = subject.run.train, bool(subject.gpus)
    precision = train.precision or "fp32"
    if on_gpu:
        precision = default_precision(train, find_gpu(subject.gpus[0].name or ""))
    setting = Setting(subject.run.model, train, precision, subject.world_size, on_gpu=on_gpu)
    return peak_memory(setting, train.microbatch_size).total / 2**30


def plan_of(subject: Subject) -> BatchPlan:
    """Divide the run's tokens among its processes. Raises: UserError."""
    path = subject.datasets_dir / subject.run.train.dataset / "train.safetensors"
    num_tokens = TokenFile(path).num_tokens if path.is_file() else UNLIMITED_TOKENS
    return plan_batches(subject.run, world_size=subject.world_size, file_tokens=num_tokens)


def check_batch(subject: Subject) -> Finding:
    """Check that the global batch can be divided among the processes. Raises: UserError."""
    size, world_size = subject.run.train.microbatch_size, subject.world_size
    plan_of(subject)
    steps = accumulation_steps_of(subject.run, world_size=world_size)
    return ok(f"microbatch {size:,} x accumulation {steps:,} x"
              f" {counted(world_size, 'process', 'processes')} ="
              f" {size * steps * world_size:,} sequences")


def check_microbatch(subject: Subject) -> Finding:
    """Compare the memory that `lab plan` estimates for a process with what there is."""
    there, where = subject.available_gib / subject.num_processes, "a process"
    if subject.gpus:
        sizes = [gpu.memory_total_gib for gpu in subject.gpus if gpu.memory_total_gib]
        if not sizes:
            return unknown("the driver does not tell the GPUs' memory")
        there, where = usable_gib(min(sizes)), "a GPU"
    needed = training_gib(subject)
    what = (f"microbatch {subject.run.train.microbatch_size:,} takes about {gib(needed * 2**30)}"
            f" of {{}} (estimate)")
    # Another process may have taken a GPU's memory, such as one that a kill left.
    free = {number: gpu.memory_total_gib - (gpu.memory_used_gib or 0)
            for number, gpu in enumerate(subject.gpus) if gpu.memory_total_gib}
    taken = [number for number, gib in free.items() if gib - OWN_GIB < needed]
    if needed <= there and taken and not subject.is_training:
        return problem(
            f"{what.format('a GPU')}; {numbers(taken)} {'has' if len(taken) == 1 else 'have'}"
            f" {gib(min(free.values()) * 2**30)} free: other processes use the rest",
            "find them with nvidia-smi and end them: a run that was killed may have left some")
    found = warn_unless(
        needed <= there, what.format(f"the {gib(there * 2**30)} of {where}"),
        "lower microbatch_size, or set head_chunks 8 or activation_checkpointing;"
        " ddp_train.py --find-max-microbatch measures what fits")
    return found if needed <= MUCH_TOO_LARGE * there else found._replace(verdict=PROBLEM)


def check_checkpoints(subject: Subject) -> Finding:
    """Check that the disk has room for the next checkpoint, and for all that the run keeps."""
    run, size, total = subject.run, bytes_of_checkpoint(subject.run), None
    free = shutil.disk_usage(existing(run.checkpoints_dir)).free
    text, advice = f"{gb(size)} each, {gb(free)} free", (
        "make room, set keep_checkpoints, or name another place with --runs-dir")
    if free < size:
        return problem(text, advice)
    is_here = is_complete(subject.datasets_dir / run.train.dataset)
    with suppress(UserError):  # the line on the batch tells it
        if is_here or run.train.min_train_tokens != -1:  # else the run's length is not known yet
            total = num_checkpoints(run, plan_of(subject))
    number = most_checkpoints(run.train, total)
    if number is None:
        return ok(text)
    present = sum(path.is_dir() and not path.is_symlink() for path in (
        run.checkpoints_dir.iterdir() if run.checkpoints_dir.is_dir() else ()))
    return warn_unless((number - present) * size <= free, f"{text}; at most {number:,} are kept:"
                       f" {gb(number * size)}", advice)


def check_hub(subject: Subject) -> Finding | None:
    """Ask the hub what its token may do, if the run needs it, or if asked to.

    Neither the token nor an error's text, which may repeat the request, is ever shown.
    """
    dataset = subject.run.train.dataset if subject.run else ""
    is_needed = "/" in dataset and not is_complete(subject.datasets_dir / dataset)
    if not (is_needed or subject.is_online):
        return None
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import get_session

    try:
        if not get_token():
            get_session().head(constants.ENDPOINT, timeout=ASK_SECONDS)
            return ok("answers; no token: enough for public datasets and models, not for lab"
                      " publish (uv run hf auth login)")
        about = HfApi().whoami()
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            return unknown(f"the hub answers {error.response.status_code}")
        return warning("refuses the token", "store another one: uv run hf auth login")
    except Exception as error:  # of whichever HTTP library the client uses
        return warning(f"{constants.ENDPOINT} does not answer ({type(error).__name__})",
                       "check the network, a proxy (HTTPS_PROXY) and the clock of this machine")
    token = (about.get("auth") or {}).get("accessToken") or {}
    may_write = token.get("role") == "write" or "repo.write" in json.dumps(token)
    return ok(f"answers; token of {about.get('name', 'an unknown user')}: " + (
        "may write" if may_write else "may not write, as lab publish must, or does not say so"))


CHECKS = {"RAM": check_ram, "configs": check_configs, "hub": check_hub}
OF_RUN = {"dataset": check_dataset, "batch": check_batch, "microbatch": check_microbatch,
          "checkpoints": check_checkpoints}
