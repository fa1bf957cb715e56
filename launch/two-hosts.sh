#!/usr/bin/env bash
# Train a run on two hosts (or more): the same command on each of them.
#
#     launch/two-hosts.sh FIRST_HOST RUN [OPTION...]
#
# FIRST_HOST is the name or address under which all of them reach one of them, at port 29400 and at
# those that NCCL and gloo choose. runs/ must be shared between them. NUM_HOSTS=4 for four. Run
# ./setup_lambda.sh on each of them first; NVIDIA drivers from 580 on are best.
set -euo pipefail
cd "$(dirname "$0")/.."
first_host=${1:?name the first host: launch/two-hosts.sh FIRST_HOST RUN}
run=${2:?name a run: launch/two-hosts.sh FIRST_HOST RUN}
shift 2

num_gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
num_processes=$((num_gpus > 0 ? num_gpus : 1))
exec .venv/bin/torchrun --nnodes="${NUM_HOSTS:-2}" --nproc_per_node="$num_processes" \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT \
    --rdzv-backend=c10d --rdzv-id="$run" --rdzv-endpoint="$first_host:29400" \
    ddp_train.py "$run" "$@"
