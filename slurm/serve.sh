#!/usr/bin/env bash
# One server of a split job, as one task of srun: slurm/serve.sh HOST:PORT,HOST:PORT,... GPUS RECIPE [key=value ...]
# Listens at its place of them, takes the GPUs of its place on the node, and is started again when it ends by itself.
set -uo pipefail

IFS=, read -r -a places <<<"$1"
place=${places[SLURM_PROCID]} gpus=$2
shift 2
source slurm/site.env
if command -v nvidia-smi >/dev/null; then
  CUDA_VISIBLE_DEVICES=$(seq -s, $((SLURM_LOCALID * gpus)) $((SLURM_LOCALID * gpus + gpus - 1)))
  export CUDA_VISIBLE_DEVICES
fi
# Slurm signals all of a task, and ends what is left of it as soon as its first process has ended: that one waits.
server=""
trap 'wait "$server"; exit 143' TERM INT
for start in $(seq 20); do
  "$SITE_VENV/bin/megatron-rl" serve "$@" --host "${place%:*}" --port "${place##*:}" &
  server=$!
  wait "$server" && exit 0
  echo "serve: start $start has ended with status $?; again in 5 s" >&2
  sleep 5
done
exit 1
