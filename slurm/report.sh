#!/usr/bin/env bash
# A job for one command of Python, where Python lives: the last one of a comparison. Checks nothing, trains nothing.
#   sbatch slurm/report.sh tools/compare_corrections.py RECIPE ... --summary
#SBATCH --ntasks=1
#SBATCH --time=00:30:00
#SBATCH --output=runs/slurm/%x_%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
source slurm/place.sh
exec "${here[@]}" "$SITE_VENV/bin/python" "$@"
