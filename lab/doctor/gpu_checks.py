"""Checks of the GPUs: what the driver says of them, and what PyTorch does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from basics.gpu_readings import GpuReading
from lab.doctor.check import Finding, Subject, ok, problem, skipped, warning

BUSY_MEMORY_SHARE = 0.1  # of a GPU that somebody uses; an idle one's driver takes less
BUSY_PERCENT = 30
NO_ANSWER = "the driver does not answer"
HOT_C = 85  # most cards slow down a few degrees above
INSTALL_TORCH = "install a PyTorch that is built for this GPU: https://pytorch.org"
Facts = Mapping[str, Any]  # what `torch_facts` of `load_process.py` reports


def visible_gpus(gpus: Sequence[GpuReading], variable: str | None) -> list[GpuReading]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it; all if it is not set.

    Parts of a GPU (MIG) count as the GPU.
    """
    if variable is None:
        return list(gpus)
    found: list[GpuReading] = []
    for entry in map(str.strip, variable.split(",")):
        if entry.isdigit() and int(entry) < len(gpus):
            found.append(gpus[int(entry)])
            continue
        named = [gpu for gpu in gpus if gpu.uuid and len(entry) > 4 and (
            gpu.uuid.startswith(entry) or entry.startswith("MIG-"))]
        if not named:
            break  # CUDA ignores what follows an entry that names no GPU
        found.append(named[0])
    return found


def in_use(gpus: Sequence[GpuReading]) -> str:
    """Return which GPUs others use; empty if none is in use."""
    busy = [f"GPU {number} ({_use(gpu)})" for number, gpu in enumerate(gpus)
            if (gpu.use_percent or 0) >= BUSY_PERCENT or (gpu.memory_used_gib or 0) >=
            BUSY_MEMORY_SHARE * (gpu.memory_total_gib or float("inf"))]
    return ", ".join(busy)


def _use(gpu: GpuReading) -> str:
    return f"{gpu.memory_used_gib or 0:,.1f} GiB, {gpu.use_percent or 0:.0f}%"


def numbers(indices: Sequence[int]) -> str:
    """Name GPUs by their numbers: "GPU 3", "GPUs 0 and 2"."""
    texts = [str(index) for index in indices]
    if len(texts) == 1:
        return f"GPU {texts[0]}"
    return f"GPUs {', '.join(texts[:-1])} and {texts[-1]}"


def check_gpus(subject: Subject, facts: Facts) -> Finding:
    """Compare the GPUs that the driver sees with those that PyTorch sees."""
    seen, by_torch = len(subject.gpus), facts.get("num_gpus")
    cause, remedy = facts.get("problem") or ("", "")
    if cause:
        return problem(f"PyTorch {facts['version']} cannot use them: {cause}", remedy)
    if not subject.all_gpus and not by_torch:
        return _no_gpu(subject)
    names = Counter(gpu.name or "a GPU that does not answer" for gpu in subject.gpus)
    text = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    if not subject.all_gpus:
        return warning(f"{by_torch} seen by PyTorch, but the driver cannot be read"
                       f" ({subject.nvml_failure}): the tests that load them are left out",
                       "a training's speed line shows what they do")
    if None in [gpu.name for gpu in subject.gpus]:
        return problem(text, "restart the machine, or take another one: that GPU is lost")
    if by_torch is not None and by_torch != seen:
        return problem(f"{text}; PyTorch sees {by_torch}", "restart the machine if its driver was"
                       " renewed; check CUDA_VISIBLE_DEVICES and the container's --gpus")
    if seen and subject.num_processes != seen:
        judge = problem if subject.num_processes > seen else warning
        return judge(f"{text}; number of processes: {subject.num_processes}",
                     f"set --nproc_per_node to {seen}")
    if (hidden := len(subject.all_gpus) - seen) > 0:
        return warning(f"{text}; {hidden} of {len(subject.all_gpus)} are hidden by"
                       " CUDA_VISIBLE_DEVICES", "unset it to train on all of them")
    return ok(text) if len(names) < 2 else warning(
        text, "all wait for the slowest in each step; hide it with CUDA_VISIBLE_DEVICES")


def _no_gpu(subject: Subject) -> Finding:
    if subject.nvml_failure == NO_ANSWER:
        return problem(NO_ANSWER, "restart the machine, or take another one")
    text = f"none ({subject.nvml_failure})" if subject.nvml_failure else "none"
    return warning(f"{text}: training runs on the CPU, slowly",
                   "if the machine has GPUs, install their driver, or start the container with"
                   " --gpus all")


def check_use(subject: Subject, _: Facts) -> Finding | None:
    if subject.busy:
        return warning(f"{subject.busy}: the tests that load the machine are left out",
                       "run this again when it is idle")
    return None


def check_driver(subject: Subject, facts: Facts) -> Finding | None:
    """Show the CUDA that the driver supports and the one that PyTorch was built for."""
    if not subject.gpus:
        return None
    version = next((gpu.driver_version for gpu in subject.gpus if gpu.driver_version), "unknown")
    if not facts:
        return ok(version)
    built, theirs = facts["cuda"], facts["driver_cuda"]
    if not built:
        return problem(f"driver {version}; PyTorch {facts['version']} was built without CUDA",
                       INSTALL_TORCH)
    text = f"{version} for CUDA {theirs or '?'}; PyTorch {facts['version']} was built with {built}"
    return ok(text)  # whether that is enough, PyTorch says: `check_gpus`


def check_architectures(_: Subject, facts: Facts) -> Finding | None:
    """Check that PyTorch has code for each card, or for an older one that it can compile anew."""
    cards, known = facts.get("cards") or [], facts.get("architectures") or []
    if not cards or not known:
        return None
    wrong = [number for number, card in enumerate(cards)
             if not runs_on(tuple(card["capability"]), known)]
    found = ", ".join(dict.fromkeys(f"sm_{major}{minor}" for major, minor in
                                    (card["capability"] for card in cards)))
    if wrong:
        return problem(f"{numbers(wrong)}: {found}, but PyTorch was built for {', '.join(known)}",
                       INSTALL_TORCH)
    return ok(f"{found}, which PyTorch was built for")


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether code for some architectures runs on a GPU.

    Machine code (sm_) runs on the same major version from its minor one on; code that is compiled
    when it is loaded (compute_) on all newer GPUs. A suffix, as in sm_90a, means this one alone.
    """
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
        if not found:
            continue
        theirs = int(found[2]), int(found[3])
        is_newer = theirs <= capability and (found[1] == "compute" or theirs[0] == capability[0])
        if theirs == capability or (is_newer and not found[4]):
            return True
    return False


def check_bf16(subject: Subject, facts: Facts) -> Finding | None:
    """Check that the GPUs have bf16, which a run may insist on."""
    cards = facts.get("cards") or []
    if not cards:
        return None
    without = [number for number, card in enumerate(cards) if not card["has_bf16"]]
    if not without:
        return ok("supported")
    text = f"{numbers(without)} without it"
    wanted = subject.run and "bf16" in (subject.run.train.precision,
                                        subject.run.train.residual_dtype)
    return problem(text, "remove precision and residual_dtype from train.json, or take a newer"
                   " GPU") if wanted else warning(text, "training uses fp16, with a loss scale")


def check_temperature(subject: Subject, _: Facts) -> Finding | None:
    """Check how hot the GPUs are before they are loaded."""
    known = {number: gpu.temperature_c for number, gpu in enumerate(subject.gpus)
             if gpu.temperature_c is not None}
    if not known:
        return None
    hot = [number for number, degrees in known.items() if degrees >= HOT_C]
    text = f"{min(known.values()):.0f} to {max(known.values()):.0f} °C before the tests"
    return ok(text) if not hot else warning(
        f"{text}; {numbers(hot)} at {HOT_C} or more",
        "its clock falls when it gets hotter; look for other programs on it, or take another"
        " machine")


def check_ecc(subject: Subject, _: Facts) -> Finding | None:
    """Check the memory of the GPUs for errors that could not be corrected."""
    known = {number: gpu.uncorrected_ecc_errors for number, gpu in enumerate(subject.gpus)
             if gpu.uncorrected_ecc_errors is not None}
    wrong = [number for number, count in known.items() if count]
    if wrong:
        return warning(f"{numbers(wrong)}: {sum(known.values()):,} uncorrected errors since the"
                       " driver was loaded", "restart the machine, or take another one: such an"
                       " error ends a training")
    return ok("no uncorrected errors") if known else (
        skipped("not told by these GPUs") if subject.gpus else None)


CHECKS = {"GPUs": check_gpus, "use": check_use, "driver": check_driver,
          "architecture": check_architectures, "bf16": check_bf16,
          "temperature": check_temperature, "ECC memory": check_ecc}
