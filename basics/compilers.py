"""What PyTorch compiles with: a C or C++ compiler, and Python's headers."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def find_compiler(*, on_gpu: bool) -> tuple[str, str]:
    """Return the compiler's path, and what is missing for compiling: one of them is empty.

    On a GPU Triton compiles its launchers in C, on a CPU PyTorch its kernels in C++.
    """
    variable, names = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    named = os.environ.get(variable)
    found = next(filter(None, map(shutil.which, [named] if named else names)), "")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if found and header.is_file():
        return found, ""
    if found:
        return "", f"no {header}"
    return "", f"{variable} is {named}, which is not there" if named else f"no {' or '.join(names)}"
