"""The set-up script, run with fake system commands: no network, no root, no GPU."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.workplace import PROJECT_DIR

SCRIPT = PROJECT_DIR / "setup_lambda.sh"


def fake_command(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def machine(tmp_path):
    """A fresh machine: a copy of the script, an empty home, and fakes of the commands it calls."""
    shutil.copy(SCRIPT, tmp_path / "setup_lambda.sh")
    commands = tmp_path / "commands"
    commands.mkdir()
    calls = tmp_path / "calls"
    for name in ("bash", "dirname", "id", "grep", "rm", "mkdir", "cat", "chmod", "sh", "env",
                 "head", "sed"):
        (commands / name).symlink_to(shutil.which(name))
    fake_command(commands, "python3", "exit 0")
    fake_command(commands, "fc-list", "exit 0")
    fake_command(commands, "sudo", f'echo "sudo $*" >> {calls}; shift; "$@"')
    fake_command(commands, "apt-get", f'echo "apt-get $*" >> {calls}')
    fake_command(commands, "curl", f'echo "curl $*" >> {calls}; echo "mkdir -p $HOME/.local/bin; '
                 f'cp {tmp_path}/uv $HOME/.local/bin/uv"')
    (commands / "cp").symlink_to(shutil.which("cp"))
    fake_command(tmp_path, "uv", f'echo "uv $*" >> {calls}; '
                 '[ "$2" = python ] && [ "$3" = -c ] && echo 8; exit 0')
    return {"PATH": str(commands), "HOME": str(tmp_path / "home"), "root": str(tmp_path)}


def run_setup(machine):
    (Path(machine["root"]) / "calls").write_text("")
    return subprocess.run(["bash", f"{machine['root']}/setup_lambda.sh"], capture_output=True,
                          text=True, env=machine, timeout=60)


def calls(machine):
    return (Path(machine["root"]) / "calls").read_text()


def test_a_fresh_machine_can_be_set_up_twice(machine):
    first = run_setup(machine)
    assert first.returncode == 0, first.stderr
    assert "curl" in calls(machine) and "fonts-humor-sans" in calls(machine)
    assert "uv sync --compile-bytecode\n" in calls(machine)  # no test tools on a rented machine
    assert "uv run lab doctor\n" in calls(machine)
    packages = calls(machine).split("--no-install-recommends ")[1].split("\n")[0]
    assert packages == "git fontconfig fonts-humor-sans"  # curl and Python are there
    assert len(re.findall(r"^==> [1-4]/4 .*(?:\n(?!==>).*)*\ntook \d+ s$", first.stdout,
                          re.MULTILINE)) == 4, first.stdout
    last_line = first.stdout.strip().splitlines()[-1]
    assert last_line == "uv run torchrun --standalone --nproc_per_node=8 ddp_train.py demo"
    second = run_setup(machine)
    assert second.returncode == 0 and "curl" not in calls(machine) and "uv sync" in calls(machine)


OLD = 'uv pip install --no-config --torch-backend=cu128 --compile-bytecode torch==2.11.* -e .'


@pytest.mark.parametrize(("driver", "is_old"), [
    ("580.65.06", False), ("570.133.20", True), ("525.60.13", True), ("", False)])
def test_the_driver_decides_which_pytorch_is_installed(machine, driver, is_old):
    commands, home = Path(machine["PATH"]), Path(machine["HOME"])
    home.mkdir()
    (home / ".bashrc").write_text("alias ll='ls -l'\nexport UV_NO_SYNC=1\n")  # of an earlier time
    fake_command(commands, "nvidia-smi", f"echo '{driver}'; echo '{driver}'; [ -n '{driver}' ]")
    for _ in range(2):
        result = run_setup(machine)
        assert result.returncode == 0, result.stderr
    assert (OLD in calls(machine)) == is_old == ("uv venv" in calls(machine))
    assert ("uv sync" in calls(machine)) != is_old
    assert (home / ".bashrc").read_text().count("export UV_NO_SYNC=1\n") == is_old
    assert (home / ".profile").exists() == is_old == ("UV_NO_SYNC" in result.stdout)


def test_a_driver_that_no_pytorch_supports_ends_it_before_any_download(machine):
    fake_command(Path(machine["PATH"]), "nvidia-smi", "echo 470.256.02")
    result = run_setup(machine)
    assert result.returncode == 2 and calls(machine) == ""
    assert result.stderr == ("warning: NVIDIA driver 470.256.02 is too old: take a machine with"
                             " driver 525 or newer, best 580\n")


def test_pip_is_used_if_the_installer_fails_and_a_missing_font_is_a_warning(machine):
    commands = Path(machine["PATH"])
    fake_command(commands, "curl", "exit 6")
    fake_command(commands, "apt-get", "exit 100")
    fake_command(commands, "python3", f'echo "python3 $*" >> {machine["root"]}/calls; '
                 '[ "$3" = install ] || exit 0; '
                 f'mkdir -p $HOME/.local/bin; cp {machine["root"]}/uv $HOME/.local/bin/uv')
    result = run_setup(machine)
    assert result.returncode == 0, result.stderr
    assert "python3 -m pip install --quiet --user uv" in calls(machine)
    assert "warning: not installed: git fontconfig fonts-humor-sans; charts use" in result.stderr


def test_a_failing_step_and_a_machine_that_is_not_fit_are_failures(machine):
    fake_command(Path(machine["root"]), "uv", '[ "$3" = doctor ] && exit 1; echo 1; exit 0')
    result = run_setup(machine)
    assert result.returncode == 1 and "training would fail: see the problems" in result.stdout
    (Path(machine["HOME"]) / ".local/bin/uv").write_text("#!/bin/bash\nexit 1\n")
    result = run_setup(machine)
    assert result.returncode != 0 and "Done" not in result.stdout


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("debootstrap") is None,
                    reason="needs root and debootstrap")
def test_an_empty_debian_is_set_up_twice_and_trains(tmp_path):
    """Every command is one of the documentation; it takes some minutes and 12 GB of disk."""
    root = tmp_path / "root"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", root], check=True)
    for name in ("resolv.conf", "hosts"):  # torchrun asks for the address of the own name
        shutil.copy(f"/etc/{name}", root / "etc")
    authorities = root / "etc/authorities.crt"  # this machine's: its network may have its own
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", authorities)
    trusted = {name: "/etc/authorities.crt" for name in ("SSL_CERT_FILE", "PIP_CERT")}
    subprocess.run(["git", "clone", "-q", PROJECT_DIR, root / "root/ddp-train"], check=True)
    commands = "mount -t proc proc /proc; mount -t sysfs sys /sys; cd /root/ddp-train; "

    def inside(command):
        result = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "chroot", root, "bash", "-c",
             commands + command], capture_output=True, text=True,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                 "HOME": "/root", "USER": "root"} | trusted)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
        return result.stdout

    inside("apt-get update -qq && apt-get install -y -qq git")
    first = inside("./setup_lambda.sh")
    assert first.count("\ntook ") == 4 and "installed ca-certificates curl python3" in first
    assert "already installed\n" in inside("./setup_lambda.sh")
    train = first.strip().splitlines()[-2:]
    assert "demo finished at step" in inside("; ".join(train))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_are_clean():
    result = subprocess.run(["shellcheck", SCRIPT, PROJECT_DIR / ".ci" / "run"],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert os.access(SCRIPT, os.X_OK) and "set -euo pipefail" in SCRIPT.read_text()
