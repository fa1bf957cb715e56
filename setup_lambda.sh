#!/usr/bin/env bash
# Makes a fresh Ubuntu GPU box ready to train. Safe to run again: each step looks first.
set -euo pipefail
cd "$(dirname "$0")"

say() { printf '\n==> %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi; }

caller_path=$PATH
export PATH="$HOME/.local/bin:$PATH" # where both installers put uv

say "uv, which installs everything else"
if command -v uv >/dev/null; then
    echo "already here: $(uv --version)"
elif curl -LsSf https://astral.sh/uv/install.sh 2>/dev/null | sh; then
    echo "installed with its official installer"
else
    warn "the official installer could not be fetched; trying pip"
    python3 -m pip install --user uv || python3 -m pip install --user --break-system-packages uv
fi

say "a hand-drawn font for the charts"
if fc-list 2>/dev/null | grep -iE 'xkcd|humor ?sans' >/dev/null; then
    echo "already here"
elif as_root apt-get update -qq && as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq fontconfig fonts-humor-sans; then
    rm -rf "${XDG_CACHE_HOME:-$HOME/.cache}/matplotlib" # its list of fonts, now out of date
    echo "installed fonts-humor-sans"
else
    warn "no font installed; the charts use matplotlib's own"
fi

say "Python packages"
uv sync --compile-bytecode # else eight processes do it at once, in the first minute that is paid for

say "what PyTorch sees of this machine"
uv run python - <<'PYTHON'
import torch

print(f"PyTorch {torch.__version__}, {torch.cuda.device_count()} GPUs")
for i in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(i)
    print(f"  {i}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
if not torch.cuda.is_available():
    print("  no GPU: training works, slowly, on the CPU")
PYTHON

num_processes=$(uv run python -c 'import torch; print(max(1, torch.cuda.device_count()))')
say "ready; try it, then train"
if ! (export PATH="$caller_path" && command -v uv >/dev/null); then
    # shellcheck disable=SC2016 # for the reader to type
    echo 'export PATH="$HOME/.local/bin:$PATH"'
fi
echo "uv run torchrun --standalone --nproc_per_node=$num_processes ddp_train.py demo"
