#!/usr/bin/env bash
# Write the rows and a tiny model, train a warm start, train with RL, draw the curve. Run it in the repository;
# arguments, such as run.if_exists=archive, are passed to both trainings.
set -euo pipefail

python examples/countdown/countdown.py data/countdown
if [[ ! -d data/countdown/model ]]; then
    megatron-rl toy data/countdown --tokenizer data/countdown/train.jsonl --like Qwen3-8B
fi
megatron-rl train examples/countdown/sft.yaml "$@"
megatron-rl train examples/countdown/rl.yaml "$@"
python tools/figures/curve.py examples/countdown/curve.svg runs/countdown \
    --panel reward/own/valid "Valid expressions"
