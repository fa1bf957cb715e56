"""Why PyTorch cannot use a machine's GPUs (texts of torch.cuda.init()); the code's version."""

import re
import subprocess
from unittest.mock import Mock

import pytest
import torch

from basics import machine as facts
from basics.errors import UserError
from processes.launch import num_gpus

PREFIX = ("Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before"
          " calling NumCudaDevices() that might have already set an error? Error ")
CASES = {
    "The NVIDIA driver on your system is too old (found version 12040). Please update":
        ("The NVIDIA driver on your system is too old (found version 12040)", "setup_lambda.sh"),
    f"{PREFIX}802: system not yet initialized":
        ("Error 802: system not yet initialized", "nvidia-fabricmanager"),
    f"{PREFIX}304: OS call failed": ("Error 304: OS call failed", "--gpus all"),
    f"{PREFIX}803: system has": ("Error 803: system has", "LD_LIBRARY_PATH"),
    f"{PREFIX}804: forward": ("Error 804: forward", "LD_LIBRARY_PATH"),
    f"{PREFIX}999: unknown error\nand": ("Error 999: unknown error", "nvidia-smi"),
    "No CUDA GPUs are available": ("No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
    "Found no NVIDIA driver on your system. Please": (
        "Found no NVIDIA driver on your system", "image"),
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose GPUs PyTorch was built for, and does not find; return its /dev."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(facts, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("sees_gpus", [True, False])
def test_each_cause_is_named_with_what_helps(machine, monkeypatch, sees_gpus):
    if sees_gpus:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    else:
        (machine / "nvidia0").touch()  # the driver's library cannot be asked
    for text, (cause, remedy) in CASES.items():
        monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(text)))
        with pytest.raises(UserError, match="this machine has GPUs, but PyTorch") as caught:
            num_gpus()
        assert f"use them: {cause}; " in str(caught.value) and remedy in str(caught.value)


def test_a_machine_without_gpus_and_one_that_hides_them_train_on_the_cpu(machine, monkeypatch):
    assert num_gpus() == 0
    (machine / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_gpus() == 0


IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "ddp_train.py").write_text("first")
    monkeypatch.setattr(facts, "PROJECT_DIR", tmp_path)
    return tmp_path


def git(project, *arguments):
    return subprocess.run(["git", *IDENTITY, *arguments], cwd=project, check=True,
                          capture_output=True, text=True).stdout.strip()


def test_it_is_the_commit_with_a_digest_of_changed_files(project):
    git(project, "init", "-q"), git(project, "add", "."), git(project, "commit", "-qm", "first")
    commit = git(project, "rev-parse", "--short=12", "HEAD")
    git(project, "tag", "v1")  # no tag takes the commit's place
    (project / "README.md").write_text("not the code")
    assert facts.code_version() == commit
    (project / "ddp_train.py").write_text("second")
    second = facts.code_version()
    assert re.fullmatch(rf"{commit}\+[0-9a-f]{{12}}", second)
    (project / "ddp_train.py").write_text("third")
    assert facts.code_version() not in (second, commit)


def test_without_its_own_repository_it_is_the_version_and_a_digest(project, monkeypatch):
    git(project, "init", "-q"), git(project, "add", "."), git(project, "commit", "-qm", "first")
    (project / "inside").mkdir()
    monkeypatch.setattr(facts, "PROJECT_DIR", project / "inside")
    first = facts.code_version()
    assert re.fullmatch(r"[0-9.]+\+[0-9a-f]{12}", first)
    (project / "inside/ddp_train.py").write_text("second")
    assert facts.code_version() != first
