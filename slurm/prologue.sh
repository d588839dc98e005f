#!/usr/bin/env bash
# Sourced by every batch script: reads the site's lines, checks the job, places learner and servers on its nodes, and runs
# the recipe. Expects RECIPE; takes OVERRIDES ("key=value key=value", or one on a line, each ended) from the environment. The job goes
# on with a run of its name; stopped at its time limit, it is queued again, at most REQUEUES times (20), as long as it
# comes further each time.

set -euo pipefail

# Signals to the job are kept from here on, and forwarded to the ranks once these run.
asked="" limit="" by_hand=""
trap 'asked=${asked:-USR1} limit=1' USR1
trap 'asked=INT by_hand=1' TERM INT

cd "${SLURM_SUBMIT_DIR:-$PWD}"
source slurm/place.sh
if [[ ! -f $RECIPE ]]; then
  echo "slurm: RECIPE=$RECIPE: no such file in $PWD" >&2
  exit 2
fi

overrides=(run.if_exists=resume)
if [[ ${OVERRIDES:-} == *$'\n'* ]]; then
  mapfile -t -O 1 overrides <<<"${OVERRIDES%$'\n'}"
else
  read -r -a words <<<"${OVERRIDES:-}"
  overrides+=("${words[@]}")
fi

# Who works where: the first nodes learn, the others serve.
roles=$("${here[@]}" "$SITE_VENV/bin/python" -m megatron_rl.preflight.roles "$RECIPE" "${overrides[@]}") || exit 2
read -r ranks servers server_gpus shared_dir _ <<<"$roles"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
tasks_per_node=${SLURM_NTASKS_PER_NODE:-$(((ranks + ${#nodes[@]} - 1) / ${#nodes[@]}))}
learning=$(((ranks + tasks_per_node - 1) / tasks_per_node))
serving=$((servers ? ${#nodes[@]} - learning : 0))
if ((learning + (servers > 0) > ${#nodes[@]})); then
  echo "slurm: $RECIPE has $ranks ranks ($tasks_per_node on a node) and $servers servers elsewhere, and the job has" \
    "${#nodes[@]} node(s); slurm/submit asks for the right number" >&2
  exit 2
fi
joined() { local IFS=,; echo "$*"; }
on_each_node=(srun "${srun_flags[@]}" --nodes=${#nodes[@]} --ntasks=${#nodes[@]} --ntasks-per-node=1 --cpus-per-task=1)
# Where the nodes are reached: at the address of the interface that the site names, or at the one that Slurm knows.
declare -A address=()
while read -r node where; do address[$node]=$where; done < <(
  if [[ -n ${MEGATRON_RL_INTERFACE:-} ]]; then
    # shellcheck disable=SC2016  # expanded on the nodes
    "${on_each_node[@]}" bash -c 'read -r _ _ _ found _ < <(ip -4 -o addr show dev "$0") && echo "$SLURMD_NODENAME ${found%/*}"' \
      "$MEGATRON_RL_INTERFACE"
  else
    scontrol -o show node "$SLURM_JOB_NODELIST" | sed 's/^NodeName=\([^ ]*\).*NodeAddr=\([^ ]*\).*/\1 \2/'
  fi
)
for node in "${nodes[@]}"; do
  [[ -n ${address[$node]:-} ]] && continue
  echo "slurm: node $node has no address on MEGATRON_RL_INTERFACE=${MEGATRON_RL_INTERFACE:-}; see slurm/network.env" >&2
  exit 2
done
if ((servers)); then
  servers_per_node=$(((servers + serving - 1) / serving))
  first_port=$((40000 + SLURM_JOB_ID * 64 % 20000))
  MEGATRON_RL_FLEET_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # of this job alone; in no file, no argument
  export MEGATRON_RL_FLEET_KEY
  places=()
  for ((i = 0; i < servers; i++)); do
    places+=("${address[${nodes[learning + i / servers_per_node]}]}:$((first_port + i))")
  done
  overrides+=("sampler.addresses=[$(joined "${places[@]/#/http://}")]")
  mkdir -p "$shared_dir"
fi

# Models of the Hugging Face hub, once for all ranks; where nothing is missing this needs no network.
"${here[@]}" "$SITE_VENV/bin/megatron-rl" fetch "$RECIPE" "${overrides[@]}" || exit 2

# Anything a login node can know is checked here, before the other nodes are made to wait; the number of tasks too.
"${here[@]}" env --ignore-signal=USR1 SLURM_NTASKS="$ranks" "$SITE_VENV/bin/megatron-rl" \
  train "$RECIPE" "${overrides[@]}" --dry-run --ranks slurm

if ((learning == 1)); then
  # One temporary folder for all ranks of the node, as megatron_rl/processes/scratch.py makes them: locked by this shell,
  # removed with what it lists at the end, or by the next start. The ranks meet in a file there and talk over the loopback
  # interface: no port is open to others.
  scratch=$(mktemp -d "${TMPDIR:-/tmp}/megatron-rl-run-XXXXXXXX")
  exec {lock}>"$scratch/owner.lock.new"
  flock "$lock"
  echo "$(</proc/sys/kernel/random/boot_id) $(uname -n) $$" >&"$lock"
  mv "$scratch/owner.lock.new" "$scratch/owner.lock"
  touch "$scratch/elsewhere"
  trap 'xargs -r -d "\n" rm -rf <"$scratch/elsewhere"; rm -rf "$scratch"' EXIT
  meeting=(TMPDIR="$scratch" MEGATRON_RL_RENDEZVOUS="file://$scratch/store" GLOO_SOCKET_IFNAME=lo)
else
  meeting=(MASTER_ADDR="${address[${nodes[0]}]}" MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)))
fi
# Threads per rank: a share of the task's cores; more would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export PYTHONUNBUFFERED=1

# Checks that each node fits the recipe. The first node reports the ones that do not, with the reason; what a node lacks may be its own fault.
starts=$((${SLURM_RESTART_COUNT:-0} + 1))
job_says() { scontrol -o show job "$SLURM_JOB_ID" | sed "s/.* $1=\([^ ]*\).*/\1/"; }
queue_again() {  # WHY [NODES to leave out]
  echo "job $SLURM_JOB_ID is queued again: $1"
  if [[ -z ${2:-} ]]; then scontrol requeue "$SLURM_JOB_ID"; return; fi
  # only of a job that waits can this be said, and Slurm ends what still runs of one that is queued again: TERM first
  (
    trap '' TERM
    scontrol requeuehold "$SLURM_JOB_ID"
    for _ in {1..15}; do scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$2" && break; sleep 1; done
    scontrol release "$SLURM_JOB_ID"
  )
}
known=() status=0
for node in "${nodes[@]}"; do known+=("$node=${address[$node]}"); done
bad=$("${on_each_node[@]}" --job-name=nodes env --ignore-signal=USR1 MEGATRON_RL_NODES="$(joined "${known[@]}")" \
  MEGATRON_RL_PORT=$((20000 + SLURM_JOB_ID % 20000)) "${inside[@]}" \
  "$SITE_VENV/bin/python" -m megatron_rl.apps.nodes.check "$learning" "$RECIPE" "${overrides[@]}") || status=$?
[[ -z $by_hand ]] || exit 130
if ((status)); then
  [[ ${EXCLUDE_BAD_NODE:-} == 1 ]] || bad=
  if ((starts <= ${REQUEUES:-20})) && [[ -n $bad || $status == 75 ]]; then
    left_out=$(job_says ExcNodeList)
    [[ $left_out != '(null)' ]] || left_out=
    queue_again "its nodes were not ready${bad:+; it leaves out $bad}" "${bad:+${left_out:+$left_out,}$bad}"
  fi
  exit 2
fi

where=$(joined "${nodes[@]:0:learning}")
echo "job $SLURM_JOB_ID, start $starts: $RECIPE on $SLURM_JOB_NODELIST, $ranks ranks on $where"

step_named() { squeue -h -s -j "$SLURM_JOB_ID" -o '%i %j' | awk -v name="$1" '$2 == name { print $1 }'; }
serving_step=
if ((servers)); then
  logs=runs/slurm/$SLURM_JOB_ID/start_$starts
  mkdir -p "$logs"
  where=$(joined "${nodes[@]:learning}")
  echo "job $SLURM_JOB_ID: $servers servers of $server_gpus GPU(s) on $where; tail -F $logs/server_*.log"
  srun "${srun_flags[@]}" --job-name=servers --nodelist="$where" --nodes="$serving" --ntasks="$servers" \
    --ntasks-per-node="$servers_per_node" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --output="$logs/server_%t.log" \
    "${inside[@]}" slurm/serve.sh "$(joined "${places[@]}")" "$server_gpus" "$RECIPE" "${overrides[@]}" &
  serving_step=$!
  until [[ -n $(step_named servers) ]]; do
    kill -0 $serving_step 2>/dev/null || { echo "slurm: the servers did not start; see $logs" >&2; exit 1; }
    sleep 0.5
  done
fi

# USR1 comes before the time limit (see --signal): the driver finishes its step, or gives it up where there is no time
# for that, saves what stands, and stops. A rank starts with USR1 held, and acts on it once it can.
# srun does not take --cpus-per-task over from sbatch (since Slurm 22.05): without it every task has one core.
srun "${srun_flags[@]}" --job-name=learner --kill-on-bad-exit=1 --nodelist="$(joined "${nodes[@]:0:learning}")" --nodes=$learning \
  --ntasks="$ranks" --ntasks-per-node="$tasks_per_node" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  env --block-signal=USR1 "${meeting[@]}" "${inside[@]}" "$SITE_VENV/bin/megatron-rl" \
  train "$RECIPE" "${overrides[@]}" --ranks slurm &
step=$!

# `wait` returns early when a trap has run. No process can receive the signal before the step runs: retry until it does.
while kill -0 "$step" 2>/dev/null; do
  if [[ -n $asked ]]; then
    learner=$(step_named learner)
    if [[ -n $learner ]] && scancel --ctld --signal="$asked" "$learner"; then asked=; else sleep 1; continue; fi
  fi
  wait "$step" || true
done
status=0
wait "$step" || status=$?
if [[ -n $serving_step ]]; then
  # asked first: scancel alone kills at once
  servers_step=$(step_named servers)
  if [[ -n $servers_step ]] && scancel --ctld --signal=TERM "$servers_step"; then
    for _ in $(seq 30); do kill -0 "$serving_step" 2>/dev/null || break; sleep 1; done
  fi
  if [[ -n $(step_named servers) ]]; then scancel "$servers_step" || true; fi
  wait "$serving_step" || true
fi

# A job that is finished or was stopped by hand is not queued again; nor one that came no further than the start before it.
ended_as=""
if ((status)) && [[ -z $by_hand && $(job_says JobState) == RUNNING ]]; then ended_as=failed; fi
if [[ -n $limit ]]; then ended_as=stopped,failed; fi
if [[ -n $ended_as ]] && ((starts <= ${REQUEUES:-20})); then
  again=("$SITE_VENV/bin/python" -m megatron_rl.supervision.attempts "$ended_as" "$RECIPE" "${overrides[@]}")
  if why=$("${here[@]}" "${again[@]}"); then
    queue_again "$why"
  else
    echo "job $SLURM_JOB_ID is not queued again: $why"
  fi
fi
exit "$status"
