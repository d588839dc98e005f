# Sourced by every batch script: reads the site's lines, checks the job, places learner and servers on its nodes, and runs
# the recipe. Expects RECIPE; takes OVERRIDES ("key=value key=value", or one on a line) from the environment. The job goes
# on with a run of its name; stopped at its time limit, it is queued again, at most REQUEUES times (20), as long as it
# comes further each time.

set -euo pipefail

# What the job is asked is kept from here on, and told to the ranks once they are there.
asked= limit=
trap 'asked=${asked:-USR1} limit=1' USR1
trap 'asked=INT' TERM INT

cd "${SLURM_SUBMIT_DIR:-$PWD}"
source slurm/site.env
source slurm/network.env
if [[ -n $SITE_SECRETS ]]; then set -a; source "$SITE_SECRETS"; set +a; fi
if [[ -n $SITE_MODULES ]]; then read -r -a modules <<<"$SITE_MODULES"; module load "${modules[@]}"; fi

# How a command is run on the nodes: with flags of srun, or inside of another command.
srun_flags=() inside=()
case ${SITE_CONTAINER:+$SITE_CONTAINER_TOOL} in
  '')
    if [[ ! -x $SITE_VENV/bin/megatron-rl ]]; then
      echo "slurm: no $SITE_VENV/bin/megatron-rl in $PWD; run 'make install' there, and submit from that folder" >&2
      exit 2
    fi ;;
  pyxis)
    srun_flags=(--container-image="$SITE_CONTAINER" --container-workdir="$PWD"
      --container-mounts="$PWD:$PWD${SITE_MOUNTS:+,$SITE_MOUNTS}") ;;
  apptainer) inside=(apptainer exec --nv --bind "$PWD${SITE_MOUNTS:+,$SITE_MOUNTS}" "$SITE_CONTAINER") ;;
  *) echo "slurm: SITE_CONTAINER_TOOL=$SITE_CONTAINER_TOOL in slurm/site.env: use pyxis or apptainer" >&2; exit 2 ;;
esac
if [[ ! -f $RECIPE ]]; then
  echo "slurm: RECIPE=$RECIPE: no such file in $PWD" >&2
  exit 2
fi

overrides=(run.if_exists=resume)
if [[ ${OVERRIDES:-} == *$'\n'* ]]; then
  mapfile -t -O 1 overrides <<<"$OVERRIDES"
else
  read -r -a words <<<"${OVERRIDES:-}"
  overrides+=("${words[@]}")
fi

# Who works where: the first nodes learn, the others serve.
roles=$("${inside[@]}" "$SITE_VENV/bin/python" -m megatron_rl.preflight.plan.roles "$RECIPE" "${overrides[@]}") || exit 2
read -r ranks servers server_gpus shared_dir <<<"$roles"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
tasks_per_node=${SLURM_NTASKS_PER_NODE:-$(((ranks + ${#nodes[@]} - 1) / ${#nodes[@]}))}
learning=$(((ranks + tasks_per_node - 1) / tasks_per_node))
serving=$((servers ? ${#nodes[@]} - learning : 0))
if ((learning + (servers > 0) > ${#nodes[@]})); then
  echo "slurm: $RECIPE has $ranks ranks ($tasks_per_node on a node) and $servers servers elsewhere, and the job has" \
    "${#nodes[@]} node(s); slurm/submit asks for the right number" >&2
  exit 2
fi
address() { scontrol -o show node "$1" | sed 's/.*NodeAddr=\([^ ]*\).*/\1/'; }
joined() { local IFS=,; echo "$*"; }
if ((servers)); then
  servers_per_node=$(((servers + serving - 1) / serving))
  first_port=$((40000 + SLURM_JOB_ID * 64 % 20000))
  MEGATRON_RL_FLEET_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # of this job alone; in no file, no argument
  export MEGATRON_RL_FLEET_KEY
  urls=()
  for ((i = 0; i < servers; i++)); do
    urls+=("http://$(address "${nodes[learning + i / servers_per_node]}"):$((first_port + i))")
  done
  overrides+=("sampler.fleet.addresses=[$(joined "${urls[@]}")]")
  mkdir -p "$shared_dir"
fi

# Anything a login node can know is checked here, before the other nodes are made to wait; the number of tasks too.
SLURM_NTASKS=$ranks env --ignore-signal=USR1 "${inside[@]}" "$SITE_VENV/bin/megatron-rl" \
  train "$RECIPE" "${overrides[@]}" --dry-run --ranks slurm

if ((learning == 1)); then
  # One temporary folder for all ranks of the node, as megatron_rl/processes/scratch.py makes them: locked by this shell,
  # removed with what it lists at the end, or by the next start. The ranks meet in a file there and talk over the loopback
  # interface: no port is open to others.
  TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/megatron-rl-run-XXXXXXXX")
  exec {lock}>"$TMPDIR/owner.lock.new"
  flock "$lock"
  echo "$(</proc/sys/kernel/random/boot_id) $(uname -n) $$" >&"$lock"
  mv "$TMPDIR/owner.lock.new" "$TMPDIR/owner.lock"
  touch "$TMPDIR/elsewhere"
  trap 'xargs -r -d "\n" rm -rf <"$TMPDIR/elsewhere"; rm -rf "$TMPDIR"' EXIT
  meeting=(TMPDIR="$TMPDIR" MEGATRON_RL_RENDEZVOUS="file://$TMPDIR/store" GLOO_SOCKET_IFNAME=lo)
else
  meeting=(MASTER_ADDR="$(address "${nodes[0]}")" MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)))
fi
# Threads per rank: a share of the task's cores; more would wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export PYTHONUNBUFFERED=1

[[ $asked != INT ]] || exit 130
starts=$((${SLURM_RESTART_COUNT:-0} + 1))
where=$(joined "${nodes[@]:0:learning}")
echo "job $SLURM_JOB_ID, start $starts: $RECIPE on $SLURM_JOB_NODELIST, $ranks ranks on $where"

learner_step=0 serving_step=
if ((servers)); then
  logs=runs/slurm/$SLURM_JOB_ID/start_$starts
  mkdir -p "$logs"
  where=$(joined "${nodes[@]:learning}")
  echo "job $SLURM_JOB_ID: $servers servers of $server_gpus GPU(s) on $where; tail -F $logs/server_*.log"
  # --overlap: on a pretended cluster, and where the learner leaves cores of its nodes, steps share what is not used
  srun "${srun_flags[@]}" --overlap --nodelist="$where" --nodes=$serving --ntasks="$servers" \
    --ntasks-per-node=$servers_per_node --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --output="$logs/server_%t.log" \
    "${inside[@]}" slurm/serve.sh $first_port "$server_gpus" "$RECIPE" "${overrides[@]}" &
  serving_step=$!
  until squeue -h -s -j "$SLURM_JOB_ID" -o %i | grep -q '\.0$'; do  # the learner's step is the next one
    kill -0 $serving_step 2>/dev/null || { echo "slurm: the servers did not start; see $logs" >&2; exit 1; }
    sleep 0.5
  done
  learner_step=1
fi

# USR1 comes before the time limit (see --signal): the driver finishes its step, or gives it up where there is no time
# for that, saves what stands, and stops. A rank starts with USR1 held, and acts on it once it can.
# srun does not take --cpus-per-task over from sbatch (since Slurm 22.05): without it every task has one core.
srun "${srun_flags[@]}" --overlap --kill-on-bad-exit=1 --nodelist="$(joined "${nodes[@]:0:learning}")" --nodes=$learning \
  --ntasks="$ranks" --ntasks-per-node="$tasks_per_node" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  env --block-signal=USR1 "${meeting[@]}" "${inside[@]}" "$SITE_VENV/bin/megatron-rl" \
  train "$RECIPE" "${overrides[@]}" --ranks slurm &
step=$!

# `wait` returns early when a trap has run. There is nobody to tell before the step runs: try until it does.
while kill -0 "$step" 2>/dev/null; do
  if [[ -n $asked ]]; then
    if scancel --signal="$asked" "$SLURM_JOB_ID.$learner_step"; then asked=; else sleep 1; continue; fi
  fi
  wait "$step" || true
done
status=0
wait "$step" || status=$?
if [[ -n $serving_step ]]; then
  scancel "$SLURM_JOB_ID.0" || true
  wait "$serving_step" || true
fi

# A job that has failed, or is finished, is not queued again; nor one that came no further than the start before it.
if [[ -n $limit && $starts -le ${REQUEUES:-20} ]]; then
  if why=$("${inside[@]}" "$SITE_VENV/bin/python" -m megatron_rl.runs.attempts "$RECIPE" "${overrides[@]}"); then
    echo "job $SLURM_JOB_ID is queued again: $why"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "job $SLURM_JOB_ID is not queued again: $why"
  fi
fi
exit "$status"
