#!/usr/bin/env bash
# Runs a batch script on a Slurm cluster made for the occasion: this machine, pretending to be one node.
#   slurm/rehearse.sh slurm/dapo_int8.sbatch [RECIPE [key=value ...]]
# Needs Debian's slurm-wlm and munge, and root. Everything it starts and writes is gone when it ends.
set -euo pipefail

script=${1:?usage: slurm/rehearse.sh SCRIPT [RECIPE [key=value ...]]}
recipe=${2:-recipes/quickstart.yaml}
shift $(($# < 2 ? $# : 2))

for tool in munged slurmctld slurmd sbatch; do
  command -v "$tool" >/dev/null || { echo "rehearse: no $tool; install Debian's slurm-wlm and munge" >&2; exit 2; }
done

work=$(mktemp -d /tmp/megatron-rl-slurm-XXXXXX)
chmod 755 "$work"
pids=()
# The daemons live in sessions of their own: Ctrl-C ends them only after the job, which nobody could end without them.
cleanup() {
  trap '' INT TERM HUP
  if [[ ${SLURM_CONF:-} == "$work/slurm.conf" ]]; then  # this cluster's jobs, and not another's
    for _ in $(seq 60); do
      jobs=$(squeue -h -o %A 2>/dev/null) && [[ -n $jobs ]] || break
      scancel $jobs 2>/dev/null || true
      sleep 1
    done
  fi
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill "${pids[i]}" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap cleanup EXIT
trap "exit 130" INT TERM HUP

port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
cores=$(nproc)

dd if=/dev/urandom of="$work/munge.key" bs=1 count=1024 status=none
chmod 400 "$work/munge.key"
setsid munged --force --foreground --key-file="$work/munge.key" --socket="$work/munge.socket" \
  --pid-file="$work/munged.pid" --seed-file="$work/munge.seed" --log-file="$work/munged.log" >"$work/munged.out" 2>&1 &
pids+=($!)

# The tasks of a learner are more than this machine's cores: the node pretends to have enough of them.
cat >"$work/slurm.conf" <<CONF
ClusterName=rehearsal
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$(port)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=15
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$(port) CPUs=$((cores * 8)) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
mkdir -p "$work/state" "$work/spool"
export SLURM_CONF=$work/slurm.conf
setsid slurmctld -D >"$work/slurmctld.out" 2>&1 &
pids+=($!)
setsid slurmd -D -N n1 >"$work/slurmd.out" 2>&1 &
pids+=($!)

for _ in $(seq 60); do
  [[ $(sinfo -h -o %T 2>/dev/null) == idle ]] && break
  sleep 0.5
done
[[ $(sinfo -h -o %T 2>/dev/null) == idle ]] || { echo "rehearse: the node did not come up:" >&2; tail -n 20 "$work"/*.log >&2; exit 1; }

tasks=$(.venv/bin/python -c 'import sys; from megatron_rl.config import load; from megatron_rl.models.layout import Layout
print(Layout.from_config(load(sys.argv[1], sys.argv[2:]).learner).world)' "$recipe" "$@")

# No GPUs here, and fewer cores: only the request for resources differs from what a cluster is asked for.
job=$(RECIPE=$recipe OVERRIDES=$* sbatch --parsable --gres=none --ntasks-per-node="$tasks" --cpus-per-task=1 \
  --time="${REHEARSE_TIME:-30}" --signal="B:USR1@${REHEARSE_SIGNAL_S:-180}" --output="$work/job.log" "$script")
echo "rehearse: job $job, $tasks ranks, $recipe $*"
touch "$work/job.log"
tail -f "$work/job.log" &
pids+=($!)
state=PENDING
for _ in $(seq "${REHEARSE_WAIT_S:-1800}"); do
  state=$(scontrol -o show job "$job" | sed 's/.*JobState=\([A-Z_]*\).*/\1/')
  if [[ $state == PENDING ]]; then scontrol update JobId="$job" StartTime=now 2>/dev/null || true; fi  # queued again
  case $state in PENDING | CONFIGURING | RUNNING | COMPLETING) sleep 1 ;; *) break ;; esac
done
code=$(scontrol -o show job "$job" | sed 's/.*ExitCode=\([0-9]*\):.*/\1/')
sleep 1
echo "rehearse: job $job ended as $state with status $code"
[[ $state == COMPLETED ]]
