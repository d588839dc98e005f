#!/usr/bin/env bash
# Runs a batch script on a Slurm cluster made for the occasion: this machine, pretending to be one node or several.
#   slurm/rehearse.sh slurm/dapo_int8.sbatch [RECIPE [key=value ...]]
#   REHEARSE_NODES=3 slurm/rehearse.sh slurm/dapo_split.sbatch recipes/quickstart.yaml sampler.dedicated_nodes=true sampler.engines=2 sync.dir=/tmp/s
#   REHEARSE_EVENT=rank slurm/rehearse.sh slurm/dapo_int8.sbatch recipes/quickstart.yaml checkpoint.every=2
# REHEARSE_EVENT, after REHEARSE_AFTER steps (2): usr1, scancel, requeue, limit (the time limit comes near), rank, server,
# daemon (the last node's, which comes back). REHEARSE_SPARE: nodes that the job does not ask for.
# Needs Debian's slurm-wlm and munge, and root. It terminates and removes everything that it starts and writes.
set -euo pipefail

script=${1:?usage: slurm/rehearse.sh SCRIPT [RECIPE [key=value ...]]}
recipe=${2:-recipes/quickstart.yaml}
shift $(($# < 2 ? $# : 2))
case ${REHEARSE_EVENT:-} in
  '' | usr1 | scancel | requeue | limit | rank | server | daemon) ;;
  *) echo "rehearse: REHEARSE_EVENT=$REHEARSE_EVENT: use usr1, scancel, requeue, limit, rank, server or daemon" >&2; exit 2 ;;
esac

placed=$(.venv/bin/python -m megatron_rl.preflight.roles "$recipe" "$@") || exit 2
read -r ranks servers _ _ run <<<"$placed"
count=${REHEARSE_NODES:-$((1 + (servers > 0)))}
learning=$((servers > 0 ? count - 1 : count))  # servers share one node, unless REHEARSE_LEARNING says otherwise
learning=${REHEARSE_LEARNING:-$learning}
tasks=$(((ranks + learning - 1) / learning))
# shellcheck source=slurm/cluster.sh
source slurm/cluster.sh $((count + ${REHEARSE_SPARE:-0}))

# No GPUs here, and fewer cores: only the request for resources differs from what a cluster is asked for.
job=$(RECIPE=$recipe OVERRIDES=$* sbatch --parsable --gres=none --nodes="$count" --ntasks-per-node="$tasks" --cpus-per-task=1 \
  --time="${REHEARSE_TIME:-30}" --signal="B:USR1@${REHEARSE_SIGNAL_S:-180}" --output="$work/job.log" "$script")
echo "rehearse: job $job, $ranks ranks, $servers servers, $count node(s), $recipe $*"
touch "$work/job.log"
tail -f "$work/job.log" &
pids+=($!)

about() { scontrol -o show job "$job" | sed "s/.*$1=\([A-Za-z0-9_:-]*\).*/\1/"; }
# The last task of a step, on the job's last node that has one.
task() {
  local step
  step=$(squeue -h -s -j "$job" -o '%i %j' | awk -v name="$1" '$2 == name { print $1 }')
  for node in "${!daemons[@]}"; do scontrol listpids "$step" "$node" 2>/dev/null; done |
    awk '$5 ~ /^[0-9]+$/ && $5 >= last { last = $5; pid = $1 } END { print pid }'
}
strike() {
  echo "rehearse: $REHEARSE_EVENT after $(wc -l <"$run/metrics.jsonl") steps"
  case $REHEARSE_EVENT in
    usr1) scancel --batch --signal=USR1 "$job" ;;
    scancel) scancel "$job" ;;
    requeue) scontrol requeue "$job" ;;
    limit) scontrol update JobId="$job" TimeLimit=$((($(date +%s) - $(date -d "$(about StartTime)" +%s)) / 60 + 2)) ;;
    rank) kill -KILL "$(task learner)" ;;
    server) kill -KILL "$(pgrep -P "$(task servers)")" ;;
    daemon)
      kill -KILL "${daemons[n$count]}"
      while [[ $(about JobState) == RUNNING ]]; do sleep 1; done  # until Slurm has missed the node
      start_node "n$count" ;;
  esac
}

waited=0 state=PENDING struck=${REHEARSE_EVENT:+no}
for _ in $(seq "${REHEARSE_WAIT_S:-1800}"); do
  state=$(about JobState)
  case $state in
    PENDING)  # queued again: no reason to wait for minutes, but Slurm may still be ending the steps of the same number
      ((++waited % 20 == 0)) || { sleep 1; continue; }
      scontrol update JobId="$job" StartTime=now TimeLimit="${REHEARSE_TIME:-30}" 2>/dev/null || true
      scontrol release "$job" 2>/dev/null || true ;;
    RUNNING)
      if [[ $struck == no && -f $run/metrics.jsonl && $(wc -l <"$run/metrics.jsonl") -ge ${REHEARSE_AFTER:-2} ]]; then
        struck=
        strike
      fi ;;
    CONFIGURING | COMPLETING | REQUEUED) ;;
    *) break ;;
  esac
  sleep 1
done
sleep 1
echo "rehearse: job $job ended as $state with status $(about ExitCode)${struck:+, before the event}"
[[ $state == COMPLETED && -z $struck ]]
