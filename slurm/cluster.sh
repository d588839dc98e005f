#!/usr/bin/env bash
# Sourced, with the number of nodes: `source slurm/cluster.sh 2`. Starts a Slurm cluster made for the occasion on this
# machine, which pretends to be n1, n2, ...; SLURM_CONF leads to it. When the sourcing script ends, so do its jobs, then its
# daemons, and what they wrote is removed. CLUSTER_READONLY=n2:FOLDER is a node that cannot write there.
# Needs Debian's slurm-wlm and munge, and root.

for tool in munged slurmctld slurmd sbatch; do
  command -v "$tool" >/dev/null || { echo "cluster: no $tool; install Debian's slurm-wlm and munge" >&2; exit 2; }
done

work=$(mktemp -d /tmp/megatron-rl-slurm-XXXXXX)
chmod 755 "$work"
pids=()
declare -A daemons=()  # process ids of the nodes' daemons
# The daemons live in sessions of their own: Ctrl-C ends them only after the jobs, which need them to terminate.
end_cluster() {
  trap '' INT TERM HUP
  if [[ ${SLURM_CONF:-} == "$work/slurm.conf" ]]; then  # this cluster's jobs, and not another's
    for _ in $(seq 60); do
      mapfile -t jobs < <(squeue -h -o %A 2>/dev/null)
      ((${#jobs[@]})) || break
      scancel "${jobs[@]}" 2>/dev/null || true
      sleep 1
    done
  fi
  pids+=("${daemons[@]}")
  for ((i = ${#pids[@]} - 1; i >= 0; i--)); do kill "${pids[i]}" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap end_cluster EXIT
trap "exit 130" INT TERM HUP

port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

dd if=/dev/urandom of="$work/munge.key" bs=1 count=1024 status=none
chmod 400 "$work/munge.key"
setsid munged --force --foreground --key-file="$work/munge.key" --socket="$work/munge.socket" \
  --pid-file="$work/munged.pid" --seed-file="$work/munge.seed" --log-file="$work/munged.log" >"$work/munged.out" 2>&1 &
pids+=($!)

# The tasks of a learner are more than this machine's cores: a node pretends to have enough of them. Ports follow from the
# number of the job, and two clusters may be here at the same time.
cat >"$work/slurm.conf" <<CONF
ClusterName=rehearsal
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$(port)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool_%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd_%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
FirstJobId=$((RANDOM % 19000 + 1))
ReturnToService=2
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
for ((i = 1; i <= $1; i++)); do
  echo "NodeName=n$i NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$(port) CPUs=$(($(nproc) * 8)) State=UNKNOWN"
done >>"$work/slurm.conf"
mkdir -p "$work/state"
export SLURM_CONF=$work/slurm.conf
setsid slurmctld -D >"$work/slurmctld.out" 2>&1 &
pids+=($!)

start_node() {
  local folder=${CLUSTER_READONLY:-}
  if [[ $folder == "$1":* ]]; then
    folder=${folder#*:}
    # shellcheck disable=SC2016  # expanded by the inner shell
    setsid unshare --mount bash -c 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec slurmd -D -N "$0"' \
      "$1" "$folder" >"$work/$1.out" 2>&1 &
  else
    setsid slurmd -D -N "$1" >"$work/$1.out" 2>&1 &
  fi
  daemons[$1]=$!
}
for ((i = 1; i <= $1; i++)); do start_node "n$i"; done

idle() { [[ $(sinfo -h -N -o %T 2>/dev/null | grep -c '^idle$') == "$1" ]]; }
for _ in $(seq 60); do idle "$1" && break; sleep 0.5; done
idle "$1" || { echo "cluster: the nodes did not come up:" >&2; tail -n 20 "$work"/*.log >&2; exit 1; }
