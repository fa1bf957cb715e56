"""The set-up script, as far as a machine without a network of its own and without a GPU allows."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.workplace import PROJECT_DIR

SCRIPT = PROJECT_DIR / "setup_lambda.sh"


def stand_in(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def box(tmp_path: Path) -> dict[str, str]:
    """A fresh box: a copy of the script, a home of its own, and stand-ins for what it calls."""
    shutil.copy(SCRIPT, tmp_path / "setup_lambda.sh")
    commands = tmp_path / "commands"
    commands.mkdir()
    calls = tmp_path / "calls"
    for name in ("bash", "dirname", "id", "grep", "rm", "mkdir", "cat", "chmod", "sh", "env"):
        (commands / name).symlink_to(shutil.which(name))
    stand_in(commands, "fc-list", "exit 0")
    stand_in(commands, "sudo", f'echo "sudo $*" >> {calls}; shift; "$@"')
    stand_in(commands, "apt-get", f'echo "apt-get $*" >> {calls}')
    stand_in(commands, "curl", f'echo "curl $*" >> {calls}; echo "mkdir -p $HOME/.local/bin; '
             f'cp {tmp_path}/uv $HOME/.local/bin/uv"')
    (commands / "cp").symlink_to(shutil.which("cp"))
    stand_in(tmp_path, "uv", f'echo "uv $*" >> {calls}; '
             '[ "$2" = python ] && [ "$3" = -c ] && echo 8; exit 0')
    return {"PATH": str(commands), "HOME": str(tmp_path / "home"), "root": str(tmp_path)}


def run_setup(box: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (Path(box["root"]) / "calls").write_text("")
    return subprocess.run(["bash", f"{box['root']}/setup_lambda.sh"], capture_output=True,
                          text=True, env=box, timeout=60)


def calls(box: dict[str, str]) -> str:
    return (Path(box["root"]) / "calls").read_text()


def test_a_fresh_box_is_made_ready_and_a_second_time_does_no_harm(box: dict[str, str]) -> None:
    first = run_setup(box)
    assert first.returncode == 0, first.stderr
    assert "curl" in calls(box) and "fonts-humor-sans" in calls(box)
    assert "uv sync --compile-bytecode" in calls(box)
    last_line = first.stdout.strip().splitlines()[-1]
    assert last_line == "uv run torchrun --standalone --nproc_per_node=8 ddp_train.py demo"
    second = run_setup(box)
    assert second.returncode == 0 and "curl" not in calls(box) and "uv sync" in calls(box)


def test_without_the_official_installer_pip_is_used(box: dict[str, str]) -> None:
    commands = Path(box["PATH"])
    stand_in(commands, "curl", "exit 6")
    stand_in(commands, "python3", f'echo "python3 $*" >> {box["root"]}/calls; '
             f'mkdir -p {box["HOME"]}/.local/bin; cp {box["root"]}/uv {box["HOME"]}/.local/bin/uv')
    result = run_setup(box)
    assert result.returncode == 0, result.stderr
    assert "python3 -m pip install --user uv" in calls(box)


def test_a_missing_font_is_a_warning(box: dict[str, str]) -> None:
    stand_in(Path(box["PATH"]), "apt-get", "exit 100")
    result = run_setup(box)
    assert result.returncode == 0
    assert "warning: no font installed" in result.stderr


def test_a_failing_step_stops_the_script(box: dict[str, str]) -> None:
    stand_in(Path(box["root"]), "uv", "exit 1")
    result = run_setup(box)
    assert result.returncode != 0 and "ready" not in result.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_are_clean() -> None:
    result = subprocess.run(["shellcheck", SCRIPT, PROJECT_DIR / ".ci" / "run"],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert os.access(SCRIPT, os.X_OK) and "set -euo pipefail" in SCRIPT.read_text()
