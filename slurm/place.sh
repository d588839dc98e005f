# shellcheck shell=bash
# Sourced by job scripts in the repository's folder: the site's settings, its modules and secrets, and how a command is run
# in the Python environment.
# shellcheck disable=SC2034  # used by the scripts that source this file

source slurm/site.env
source slurm/network.env
# shellcheck source=/dev/null
if [[ -n $SITE_SECRETS ]]; then set -a; source "$SITE_SECRETS"; set +a; fi
if [[ -n $SITE_MODULES ]]; then read -r -a modules <<<"$SITE_MODULES"; module load "${modules[@]}"; fi

# How a command is run on the nodes: with flags of srun, or inside of another command; `here`: how on this one.
# --overlap: on a simulated cluster, and where the learner leaves cores of its nodes free, steps share the unused ones
srun_flags=(--overlap) inside=() here=()
case ${SITE_CONTAINER:+$SITE_CONTAINER_TOOL} in
  '')
    if [[ ! -x $SITE_VENV/bin/megatron-rl ]]; then
      echo "slurm: no $SITE_VENV/bin/megatron-rl in $PWD; run 'make install' there, and submit from that folder" >&2
      exit 2
    fi ;;
  pyxis)
    srun_flags+=(--container-image="$SITE_CONTAINER" --container-workdir="$PWD"
      --container-mounts="$PWD:$PWD${SITE_MOUNTS:+,$SITE_MOUNTS}")
    here=(srun "${srun_flags[@]}" --nodelist="$SLURMD_NODENAME" --nodes=1 --ntasks=1) ;;
  apptainer)
    inside=(apptainer exec --nv --bind "$PWD${SITE_MOUNTS:+,$SITE_MOUNTS}" "$SITE_CONTAINER")
    here=("${inside[@]}") ;;
  *) echo "slurm: SITE_CONTAINER_TOOL=$SITE_CONTAINER_TOOL in slurm/site.env: use pyxis or apptainer" >&2; exit 2 ;;
esac
