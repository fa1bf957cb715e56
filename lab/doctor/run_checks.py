"""Checks of a run: configs, RAM, dataset, batch, memory, checkpoints."""

import shutil

from basics.errors import UserError
from basics.files import existing
from basics.text import counted, gb, gib
from lab.doctor import machine_checks
from lab.doctor.machine_checks import Finding, Subject, ok, ok_if, problem
from lab.plan import estimate
from lab.plan.memory import Setting, peak_memory
from preparation.ensure_dataset import STDLIB_DATASET, is_complete, splits_of
from preparation.hub import ask_hub
from reporting.reference import find_reference
from reporting.speed import find_gpu, usable_gib
from tokens.batch_plan import BatchPlan, microbatch_warning, plan_batches
from tokens.token_file import TokenFile

PROCESS_GIB = 3.0  # of RAM, estimated: PyTorch with CUDA
CPU_PROCESS_GIB = 0.5  # without
MUCH_TOO_LARGE = 1.25  # times the memory there is: the estimate is not that far off
OWN_GIB = 1.0  # of a GPU, which CUDA and NCCL take beside a process's tensors
ASK_SECONDS = 8.0  # for an answer of the hub
TOKEN_FILES = ("train.safetensors", "validation.safetensors", "tokenizer.json")


def check_configs(subject: Subject) -> Finding:
    """Warn of a run that needs a price: the training command may be given one on its line.

    Raises: UserError: the run's reference cannot be found.
    """
    try:
        subject.run.priced(None)
    except UserError as error:
        return machine_checks.warning(str(error), machine_checks.OTHER_CONFIG)
    run = subject.run.compared_with(None)
    if run.config.reference:
        find_reference(run.config.reference, run.run_dir.parent, run.run_dir)
    return ok(f"model.json and train.json of {run.run_dir} can be used")


def check_dataset(subject: Subject) -> Finding:
    """Check that the dataset is here, is made here, or can be downloaded. Raises: UserError.

    Of validation sets it looks only for those that are neither made nor downloaded.
    """
    config, name = subject.run.config, subject.run.config.dataset
    place = subject.datasets_dir / name
    for set_name, path in config.validation_paths(subject.datasets_dir).items():
        source = config.validation[set_name]
        comes_later = source in config.validation_datasets and "/" in source
        if not path.is_file() and not comes_later and source != STDLIB_DATASET:
            return problem(
                f"validation set {set_name}: {path} is not there",
                "make it with prepare_dataset.py, or correct validation in train.json",
            )
    if is_complete(place, splits_of(config)):
        train, *_ = (TokenFile(place / f"{split}.safetensors") for split in splits_of(config))
        return ok(f"{place} has {train.num_tokens:,} training tokens")
    if name == STDLIB_DATASET:
        return ok(f"{place} is made from Python's own files when training starts")
    if "/" not in name:
        return problem(
            f"{place}: no dataset there",
            f"make it: prepare_dataset.py SOURCE {place},"
            " or name a dataset on the hub (owner/name) in train.json",
        )
    from huggingface_hub import HfApi

    info = ask_hub(
        name,
        lambda: HfApi().dataset_info(name, files_metadata=True, timeout=ASK_SECONDS),
        pauses=(),
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if missing := [file for file in TOKEN_FILES[:2] if file not in sizes]:
        return problem(
            f"{name} on the hub has no {missing[0]}",
            "name a dataset of token files, or make one with prepare_dataset.py",
        )
    needed = sum(sizes.get(file, 0) for file in TOKEN_FILES)
    free = shutil.disk_usage(existing(subject.datasets_dir)).free
    return ok_if(
        needed < free,
        f"{name} is on the hub: {gb(needed)} are downloaded when training"
        f" starts, {gb(free)} are free",
        "make room, or name another place with --datasets-dir",
        is_fatal=True,
    )


def check_ram(subject: Subject) -> Finding:
    """Compare the RAM with what the processes and the snapshot of a checkpoint need."""
    run = subject.run
    available = subject.available_gib
    advice = "end other programs, or take a machine with more RAM"
    if subject.gpus:
        process_gib = PROCESS_GIB
        snapshot = estimate.pinned_bytes(run)
    else:
        process_gib = CPU_PROCESS_GIB + training_gib(subject)
        snapshot = estimate.bytes_of_checkpoint(run)
        advice += "; a smaller microbatch_size or fewer processes need less"
    needed = subject.num_processes * process_gib + snapshot / 2**30
    return ok_if(
        available >= needed,
        f"{available:,.1f} GiB available; training needs about {gib(needed * 2**30)}",
        advice,
        is_fatal=available < needed / 2,
    )


def training_gib(subject: Subject) -> float:
    """Return the GiB of a process's tensors at the peak of a step, as `lab plan` estimates."""
    config = subject.run.config
    on_gpu = bool(subject.gpus)
    precision = config.precision or "fp32"
    if on_gpu:
        precision = estimate.default_precision(config, find_gpu(subject.gpus[0].name or ""))
    setting = Setting(subject.run.model, config, precision, subject.world_size, on_gpu=on_gpu)
    return peak_memory(setting, config.microbatch_size).total / 2**30


def plan_of(subject: Subject) -> BatchPlan:
    """Divide the run's tokens among its processes. Raises: UserError."""
    path = subject.datasets_dir / subject.run.config.dataset / "train.safetensors"
    num_tokens = TokenFile(path).num_tokens if path.is_file() else estimate.UNLIMITED_TOKENS
    return plan_batches(subject.run, world_size=subject.world_size, file_tokens=num_tokens)


def check_batch(subject: Subject) -> Finding:
    """Check that the global batch can be divided among the processes. Raises: UserError."""
    plan = plan_of(subject)
    text = (
        f"microbatch {plan.microbatch_size:,} x accumulation"
        f" {plan.gradient_accumulation_steps:,} x"
        f" {counted(plan.world_size, 'process', 'processes')} ="
        f" {plan.global_batch_size:,} sequences"
    )
    return ok("; ".join(filter(None, [text, microbatch_warning(subject.run)])))


def check_microbatch(subject: Subject) -> Finding | None:
    """Compare the memory that `lab plan` estimates for a process with that of a GPU."""
    free = {
        number: gpu.memory_total_gib - (gpu.memory_used_gib or 0.0)
        for number, gpu in enumerate(subject.gpus)
        if gpu.memory_total_gib
    }
    if not free:
        if not subject.gpus:
            return None
        return machine_checks.unknown("the driver does not tell the GPUs' memory")
    there = usable_gib(min(subject.gpus[number].memory_total_gib for number in free))
    needed = training_gib(subject)
    text = (
        f"microbatch {subject.run.config.microbatch_size:,} takes about"
        f" {gib(needed * 2**30)} of the {gib(there * 2**30)} of a GPU (estimate)"
    )
    # Another process may have taken a GPU's memory, such as one that a kill left.
    fullest = min(free, key=free.__getitem__)
    if free[fullest] - OWN_GIB < needed <= there and not subject.is_training:
        return problem(
            f"{text}; GPU {fullest} has {gib(free[fullest] * 2**30)} free: other processes use the"
            " rest",
            "find them with nvidia-smi and end them: a run that was killed may have left some",
        )
    return ok_if(
        needed <= there,
        text,
        "lower microbatch_size, or set head_chunks 8 or"
        " activation_checkpointing; ddp_train.py --find-max-microbatch measures what fits",
        is_fatal=needed > MUCH_TOO_LARGE * there,
    )


def check_checkpoints(subject: Subject) -> Finding:
    """Check that the disk has room for the next checkpoint, and for all that the run keeps."""
    run = subject.run
    size = estimate.bytes_of_checkpoint(subject.run)
    free = shutil.disk_usage(existing(run.checkpoints_dir)).free
    text = f"{gb(size)} each, {gb(free)} free"
    advice = "make room, set keep_checkpoints, or name another place with --runs-dir"
    has_length = run.config.min_train_tokens != -1 or is_complete(
        subject.datasets_dir / run.config.dataset
    )
    if free < size or not (has_length or run.config.keep_checkpoints):
        return ok_if(free >= size, text, advice, is_fatal=True)
    try:
        number = estimate.most_checkpoints(run, plan_of(subject))
    except UserError:
        return ok(text)  # the line on the batch tells it
    present = [
        path for path in run.checkpoints_dir.glob("*") if path.is_dir() and not path.is_symlink()
    ]
    return ok_if(
        (number - len(present)) * size <= free,
        f"{text}; at most {number:,} are kept: {gb(number * size)}",
        advice,
    )


RUN_CHECKS = {
    "configs": check_configs,
    "RAM": check_ram,
    "dataset": check_dataset,
    "batch": check_batch,
    "microbatch": check_microbatch,
    "checkpoints": check_checkpoints,
}
