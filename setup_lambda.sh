#!/usr/bin/env bash
# Set up a fresh Ubuntu or Debian machine for training, with or without a GPU.
# Safe to run again: finished steps are skipped. Says what each step does and how long it took.
set -euo pipefail
cd "$(dirname "$0")"

began=$SECONDS step_began=''
say() { printf '\n==> %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
end_step() { [ -z "$step_began" ] || echo "took $((SECONDS - step_began)) s"; }
step() {
    end_step
    step_began=$SECONDS
    say "$*"
}
as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi; }
has() { command -v "$1" >/dev/null; }

# The driver decides which PyTorch can work: its present version needs CUDA 13, so a driver from 580
# on, and a container cannot renew its driver. PyTorch 2.11 for CUDA 12.8 runs on those from 525 on.
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
old_driver=''
if [[ $driver =~ ^([0-9]+)\. ]]; then
    if [ "${BASH_REMATCH[1]}" -lt 525 ]; then
        warn "NVIDIA driver $driver is too old: take a machine with driver 525 or newer, best 580"
        exit 2
    fi
    [ "${BASH_REMATCH[1]}" -ge 580 ] || old_driver=$driver
fi
[ -z "$old_driver" ] || say "NVIDIA driver $driver, older than 580: PyTorch 2.11 for CUDA 12.8 it is"

caller_path=$PATH
export PATH="$HOME/.local/bin:$PATH" # where both installers install uv

step "1/4 System packages: what uv needs, and a hand-drawn font for the charts"
packages=()
has curl || packages+=(ca-certificates curl)
has git || packages+=(git)
has python3 || packages+=(python3)
has uv || python3 -m pip --version >/dev/null 2>&1 || packages+=(python3-pip)
if [ -e /dev/nvidia0 ]; then # PyTorch compiles C for a GPU
    has cc || packages+=(gcc libc6-dev)
    compgen -G '/usr/include/python3*/Python.h' >/dev/null || packages+=(python3-dev)
fi
fc-list 2>/dev/null | grep -iE 'xkcd|humor ?sans' >/dev/null ||
    packages+=(fontconfig fonts-humor-sans)
if [ "${#packages[@]}" -eq 0 ]; then
    echo "already installed"
elif as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null; then
    rm -rf "${XDG_CACHE_HOME:-$HOME/.cache}/matplotlib" # its font cache is out of date
    echo "installed ${packages[*]}"
else
    warn "not installed: ${packages[*]}; charts use matplotlib's font, other steps may fail"
fi

step "2/4 uv, which installs Python packages"
if has uv; then
    echo "already installed: $(uv --version)"
elif curl -LsSf https://astral.sh/uv/install.sh 2>/dev/null | sh; then
    echo "installed with its official installer"
else
    warn "the official installer could not be downloaded; trying pip"
    python3 -m pip install --quiet --user uv ||
        python3 -m pip install --quiet --user --break-system-packages uv
fi

step "3/4 Python packages, 5.5 GiB, nearly all of it PyTorch with CUDA"
if [ -n "$old_driver" ]; then # `uv sync` and `uv run` would install a PyTorch for newer drivers
    [ -d .venv ] || uv venv
    uv pip install --no-config --torch-backend=cu128 --compile-bytecode "torch==2.11.*" -e .
    export UV_NO_SYNC=1
    for file in "$HOME/.bashrc" "$HOME/.profile"; do # of new shells: with and without a login
        grep -qs '^export UV_NO_SYNC=1$' "$file" || echo 'export UV_NO_SYNC=1' >>"$file"
    done
else
    for file in "$HOME/.bashrc" "$HOME/.profile"; do # a newer driver than the last time
        [ ! -e "$file" ] || sed -i '/^export UV_NO_SYNC=1$/d' "$file"
    done
    unset UV_NO_SYNC
    uv sync --compile-bytecode # otherwise eight processes compile at once at the first launch
fi

step "4/4 Is this machine fit to train?"
fit=0
uv run lab doctor || fit=$?
end_step

num_processes=$(uv run python -c 'import torch; print(max(1, torch.cuda.device_count()))')
if [ "$fit" -ne 0 ]; then
    say "Set up in $((SECONDS - began)) s, but training would fail: see the problems above"
    exit "$fit"
fi
say "Done in $((SECONDS - began)) s. To try it, run:"
if ! (export PATH="$caller_path" && has uv); then
    # shellcheck disable=SC2016 # printed, not expanded
    echo 'export PATH="$HOME/.local/bin:$PATH"'
fi
[ -z "$old_driver" ] || echo 'export UV_NO_SYNC=1 # new shells have it'
echo "uv run torchrun --standalone --nproc_per_node=$num_processes ddp_train.py demo"
