# Sourced by every batch script: finds the environment, checks it, exports what ranks need to meet, runs the recipe.
# Expects RECIPE; takes OVERRIDES ("key=value key=value") from the environment.

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}"

if [[ ! -x .venv/bin/megatron-rl ]]; then
  echo "slurm: no .venv/bin/megatron-rl in $PWD; run 'make install' there, and submit from that folder" >&2
  exit 2
fi
if [[ ! -f $RECIPE ]]; then
  echo "slurm: RECIPE=$RECIPE: no such file in $PWD" >&2
  exit 2
fi

read -r -a overrides <<<"${OVERRIDES:-}"

# Anything a login node can know is checked here, before the other nodes are made to wait.
.venv/bin/megatron-rl train "$RECIPE" "${overrides[@]}" --dry-run

if [[ $SLURM_JOB_NUM_NODES == 1 ]]; then
  # Ranks of one node meet in a file and talk over the loopback interface: no port is open to others.
  meeting=$(mktemp -d /dev/shm/megatron-rl-rendezvous-XXXXXX)
  trap 'rm -rf "$meeting"' EXIT
  export MEGATRON_RL_RENDEZVOUS=file://$meeting/store GLOO_SOCKET_IFNAME=lo
else
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
  export MASTER_ADDR MASTER_PORT
fi
# Threads per rank: a share of the task's cores; more would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export PYTHONUNBUFFERED=1

echo "job $SLURM_JOB_ID: $RECIPE on $SLURM_JOB_NODELIST, $SLURM_NTASKS ranks"

# USR1 comes three minutes before the time limit (see --signal): the driver finishes its step and stops.
# srun does not take --cpus-per-task over from sbatch (since Slurm 22.05): without it every task has one core.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" .venv/bin/megatron-rl train "$RECIPE" "${overrides[@]}" --ranks slurm &
step=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID.0" || true' USR1
trap 'scancel --signal=INT "$SLURM_JOB_ID.0" || true' TERM INT

# `wait` returns early when a trap has run: wait again until the step has really ended.
status=0
while :; do
  if wait "$step"; then status=0; else status=$?; fi
  kill -0 "$step" 2>/dev/null || break
done
exit "$status"
