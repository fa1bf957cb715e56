#!/usr/bin/env bash
# Set up a fresh Ubuntu GPU machine for training. Safe to run again: finished steps are skipped.
set -euo pipefail
cd "$(dirname "$0")"

say() { printf '\n==> %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi; }

caller_path=$PATH
export PATH="$HOME/.local/bin:$PATH" # where both installers install uv

say "Installing uv"
if command -v uv >/dev/null; then
    echo "already installed: $(uv --version)"
elif curl -LsSf https://astral.sh/uv/install.sh 2>/dev/null | sh; then
    echo "installed with its official installer"
else
    warn "the official installer could not be downloaded; trying pip"
    python3 -m pip install --user uv || python3 -m pip install --user --break-system-packages uv
fi

say "Installing a hand-drawn font for the charts"
if fc-list 2>/dev/null | grep -iE 'xkcd|humor ?sans' >/dev/null; then
    echo "already installed"
elif as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq fontconfig fonts-humor-sans; then
    rm -rf "${XDG_CACHE_HOME:-$HOME/.cache}/matplotlib" # its font cache is out of date
    echo "installed fonts-humor-sans"
else
    warn "no font installed; the charts use matplotlib's default"
fi

say "Installing Python packages"
uv sync --compile-bytecode # otherwise eight processes compile at once at the first launch

say "GPUs found by PyTorch"
uv run python - <<'PYTHON'
import torch

print(f"PyTorch {torch.__version__}, {torch.cuda.device_count()} GPUs")
for i in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(i)
    print(f"  {i}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
if not torch.cuda.is_available():
    print("  no GPU: training runs on the CPU, slowly")
PYTHON

num_processes=$(uv run python -c 'import torch; print(max(1, torch.cuda.device_count()))')
say "Done. To try it, run:"
if ! (export PATH="$caller_path" && command -v uv >/dev/null); then
    # shellcheck disable=SC2016 # printed, not expanded
    echo 'export PATH="$HOME/.local/bin:$PATH"'
fi
echo "uv run torchrun --standalone --nproc_per_node=$num_processes ddp_train.py demo"
