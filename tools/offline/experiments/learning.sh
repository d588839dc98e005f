#!/usr/bin/env bash
# Does a larger model learn as well with an INT8 sampler as with a BF16 one, and what does it cost?
#   learning.sh OUT      OUT/learning_*: metrics and summaries of a warm start and of both runs
# recipes/reasoning.yaml with a Qwen3 of 71 million parameters; from one warm start each format
# trains STEPS=100 steps on the same questions. REASONING: the task's folder (made by bundle.sh);
# OVERRIDES="KEY=VALUE ..." of all runs; VENV: the environment; called in the project's root.
set -uo pipefail

out=$1
STEPS=${STEPS:-100}
bin=${VENV:-.venv}/bin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
task=${REASONING:-$here/../reasoning}
data=data/experiments/reasoning
rm -rf "$data"
mkdir -p "$out" data/experiments
cp -r "$task" "$data" || exit
"$bin/python" -c 'import json, sys
path, *sizes = sys.argv[1:]
config = json.load(open(path))
config |= {name: int(size) for name, size in (each.split("=") for each in sizes)}
json.dump(config, open(path, "w"))' "$data/model/config.json" hidden_size=640 num_hidden_layers=12 \
  intermediate_size=2560 num_attention_heads=10 num_key_value_heads=2 head_dim=64 || exit

read -r -a given <<<"run.device=cuda ${OVERRIDES:-}"
settings=("data.train=$data/train.jsonl" "data.eval=$data/test.jsonl" reward.name=exact_match
  run.if_exists=archive learner.tensor_parallel=1 sampler.vllm.gpu_memory_utilization=0.3
  checkpoint.every=0 "${given[@]}")

run() {  # NAME RECIPE [KEY=VALUE ...]
  local name=learning_$1 recipe=$2 status=0
  shift 2
  "$bin/megatron-rl" train "$recipe" "${settings[@]}" "run.name=$name" "$@" &
  local pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    cp "runs/$name/metrics.jsonl" "$out/$name.metrics.jsonl" 2>/dev/null
    sleep 2
  done
  wait "$pid" || status=$?
  cp "runs/$name/metrics.jsonl" "$out/$name.metrics.jsonl" 2>/dev/null
  "$bin/python" "$here/run_summary.py" "$out" "$name" >"$out/$name.summary.txt"
  grep accuracy "$out/$name.summary.txt"
  echo "$name: status $status, $SECONDS s so far"
  return "$status"
}

trap 'kill $(jobs -p) 2>/dev/null; exit 143' TERM
run warm recipes/reasoning_sft.yaml "model.path=$data/model" optim.lr=6e-4 checkpoint.export_hf=true || exit
for format in int8 none; do
  run "$format" recipes/reasoning.yaml model.path=runs/learning_warm/model optim.lr=5e-5 \
    optim.min_lr=5e-6 "quantization=$format" "run.steps=$STEPS" eval.every=20 checkpoint.export_hf=false ||
    exit
done
