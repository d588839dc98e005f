# Sourced by every batch script: finds the environment, checks it, exports what ranks need to meet, runs the recipe.
# Expects RECIPE; takes OVERRIDES ("key=value key=value") from the environment. The job goes on with a run of its name;
# stopped at its time limit, it is queued again, at most REQUEUES times (20), as long as it comes further each time.

set -euo pipefail

# What the job is asked is kept from here on, and told to the ranks once they are there.
asked= limit=
trap 'asked=${asked:-USR1} limit=1' USR1
trap 'asked=INT' TERM INT

cd "${SLURM_SUBMIT_DIR:-$PWD}"

if [[ ! -x .venv/bin/megatron-rl ]]; then
  echo "slurm: no .venv/bin/megatron-rl in $PWD; run 'make install' there, and submit from that folder" >&2
  exit 2
fi
if [[ ! -f $RECIPE ]]; then
  echo "slurm: RECIPE=$RECIPE: no such file in $PWD" >&2
  exit 2
fi

read -r -a overrides <<<"run.if_exists=resume ${OVERRIDES:-}"

# Anything a login node can know is checked here, before the other nodes are made to wait; the number of tasks too.
env --ignore-signal=USR1 .venv/bin/megatron-rl train "$RECIPE" "${overrides[@]}" --dry-run --ranks slurm

if [[ $SLURM_JOB_NUM_NODES == 1 ]]; then
  # One temporary folder for all ranks of the node, as megatron_rl/processes/scratch.py makes them: locked by this shell, removed
  # with what it lists at the end, or by the next start. The ranks meet in a file there and talk over the loopback
  # interface: no port is open to others.
  TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/megatron-rl-run-XXXXXXXX")
  exec {lock}>"$TMPDIR/owner.lock.new"
  flock "$lock"
  echo "$(</proc/sys/kernel/random/boot_id) $(uname -n) $$" >&"$lock"
  mv "$TMPDIR/owner.lock.new" "$TMPDIR/owner.lock"
  touch "$TMPDIR/elsewhere"
  trap 'xargs -r -d "\n" rm -rf <"$TMPDIR/elsewhere"; rm -rf "$TMPDIR"' EXIT
  export TMPDIR MEGATRON_RL_RENDEZVOUS=file://$TMPDIR/store GLOO_SOCKET_IFNAME=lo
else
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
  export MASTER_ADDR MASTER_PORT
fi
# Threads per rank: a share of the task's cores; more would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export PYTHONUNBUFFERED=1

[[ $asked != INT ]] || exit 130
starts=$((${SLURM_RESTART_COUNT:-0} + 1))
echo "job $SLURM_JOB_ID, start $starts: $RECIPE on $SLURM_JOB_NODELIST, $SLURM_NTASKS ranks"

# USR1 comes before the time limit (see --signal): the driver finishes its step, or gives it up where there is no time
# for that, saves what stands, and stops. A rank starts with USR1 held, and acts on it once it can.
# srun does not take --cpus-per-task over from sbatch (since Slurm 22.05): without it every task has one core.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" env --block-signal=USR1 \
  .venv/bin/megatron-rl train "$RECIPE" "${overrides[@]}" --ranks slurm &
step=$!

# `wait` returns early when a trap has run. There is nobody to tell before the step runs: try until it does.
while kill -0 "$step" 2>/dev/null; do
  if [[ -n $asked ]]; then
    if scancel --signal="$asked" "$SLURM_JOB_ID.0"; then asked=; else sleep 1; continue; fi
  fi
  wait "$step" || true
done
status=0
wait "$step" || status=$?

# A job that has failed, or is finished, is not queued again; nor one that came no further than the start before it.
if [[ -n $limit && $starts -le ${REQUEUES:-20} ]]; then
  if why=$(.venv/bin/python -m megatron_rl.runs.attempts "$RECIPE" "${overrides[@]}"); then
    echo "job $SLURM_JOB_ID is queued again: $why"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "job $SLURM_JOB_ID is not queued again: $why"
  fi
fi
exit "$status"
