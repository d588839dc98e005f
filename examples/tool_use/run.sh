#!/usr/bin/env bash
# Write the rows and a tiny model, train a warm start, train with RL, draw the curve. Run it in the repository;
# arguments, such as run.if_exists=archive, are passed to both trainings.
set -euo pipefail

python examples/tool_use/tool_use.py data/tool_use
if [[ ! -d data/tool_use/model ]]; then
    megatron-rl toy data/tool_use --tokenizer data/tool_use/train.jsonl --like Qwen3-8B
fi
megatron-rl train examples/tool_use/sft.yaml "$@"
megatron-rl train examples/tool_use/rl.yaml "$@"
python tools/figures/curve.py examples/tool_use/curve.svg runs/tool_use \
    --panel reward/own/looked_up "Calls of the tool per conversation"
