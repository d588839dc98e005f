#!/usr/bin/env bash
# One server of a split job, as one task of srun: slurm/serve.sh FIRST_PORT GPUS RECIPE [key=value ...]
# Listens on its node's address, takes the GPUs of its place on the node, and is started again when it ends by itself.
set -uo pipefail

port=$(($1 + SLURM_PROCID)) gpus=$2
shift 2
source slurm/site.env
if command -v nvidia-smi >/dev/null; then
  CUDA_VISIBLE_DEVICES=$(seq -s, $((SLURM_LOCALID * gpus)) $((SLURM_LOCALID * gpus + gpus - 1)))
  export CUDA_VISIBLE_DEVICES
fi
host=$(scontrol -o show node "$SLURMD_NODENAME" | sed 's/.*NodeAddr=\([^ ]*\).*/\1/')
for start in $(seq 20); do
  "$SITE_VENV/bin/megatron-rl" serve "$@" --host "$host" --port "$port" && exit 0
  echo "serve: start $start has ended with status $?; again in 5 s" >&2
  sleep 5
done
exit 1
