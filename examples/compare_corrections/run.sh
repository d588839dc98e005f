#!/usr/bin/env bash
# Train a run for each correction and seed, compare them, draw the curves of the first seed. Run it in the
# repository; arguments, such as run.if_exists=archive, are passed to every run.
set -euo pipefail

python tools/compare_corrections.py examples/compare_corrections/compare.yaml "$@"
runs=(runs/compare_int4_{none,tis,icepop}_s1)
python tools/figures/curve.py examples/compare_corrections/curve.svg "${runs[@]}" \
    --panel rollout_corr/rollout_is_eff_sample_size "Effective sample size"
