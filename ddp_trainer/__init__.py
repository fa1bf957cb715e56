"""The installed commands.

A wheel has all other files of the project in this folder, so that only one name is beside other
people's packages. In a checkout they are beside this folder, and `uv sync` puts that on the path.
"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if (HERE / "gpt.py").exists():
    sys.path.insert(0, str(HERE))


def train() -> None:
    """Be `ddp-train`."""
    runpy.run_module("ddp_train", run_name="__main__", alter_sys=True)


def prepare() -> None:
    """Be `ddp-train-prepare`."""
    runpy.run_module("prepare_dataset", run_name="__main__", alter_sys=True)


def lab() -> None:
    """Be `lab`."""
    runpy.run_module("lab", run_name="__main__", alter_sys=True)
