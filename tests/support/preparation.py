"""Run prepare_dataset.py in the process of the test, and read the datasets that it writes."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from safetensors.numpy import load_file

import prepare_dataset


def prepare(*arguments: str) -> CompletedProcess[str]:
    """Run prepare_dataset.py in this process, with one worker unless it imports tokens."""
    stdout, stderr = io.StringIO(), io.StringIO()
    workers = [] if "--import" in arguments else ["--workers", "1"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(prepare_dataset, "start_fork_server", lambda _: None)  # one worker needs none
        with pytest.raises(SystemExit) as caught:
            prepare_dataset.main([*arguments, *workers], prog_name="prepare_dataset.py")
    return CompletedProcess(arguments, caught.value.code or 0, stdout.getvalue(),
                            stderr.getvalue())


def tokens_in(dataset_dir: Path) -> dict[str, np.ndarray]:
    """Return the tokens of a dataset by split."""
    return {split: load_file(dataset_dir / f"{split}.safetensors")["tokens"]
            for split in ("train", "validation")}
