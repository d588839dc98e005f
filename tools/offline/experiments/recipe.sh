#!/usr/bin/env bash
# The recipe for one GPU at its model's own size with random weights, to hold against its plan:
#   recipe.sh OUT NAME [KEY=VALUE ...]      OUT/NAME.*: plan, metrics, memory, logs, summary, traces
# MODEL=Qwen3-0.6B a card of conf/model; STEPS=6; TRACE=1 records the step before the last, which
# takes up to a minute more. VENV: the environment; called in the project's root.
set -uo pipefail

out=$1
name=$2
shift 2
MODEL=${MODEL:-Qwen3-0.6B}
STEPS=${STEPS:-6}
bin=${VENV:-.venv}/bin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=recipes/grpo-qwen3_0.6b-1n1g-int8.yaml
data=data/experiments/$name
run=runs/experiment_$name
mkdir -p "$out"
rm -rf "$data" "$run"

# the toy's tokenizer and questions, and a config.json of the model's own size
"$bin/megatron-rl" toy "$data" >/dev/null || exit
"$bin/python" -c 'import json, sys
target, card = sys.argv[1:]
toy = json.load(open(target))
model = json.load(open(card))
model |= {key: value for key, value in toy.items() if key.endswith("_token_id")}
json.dump(model, open(target, "w"))' "$data/model/config.json" "conf/model/$MODEL.json" || exit

settings=("model.path=$data/model" model.init=random "data.train=$data/train.jsonl" data.eval=null
  data.chat_template_kwargs=null data.prompt_key=prompt data.answer_key=answer
  reward.name=exact_match reward.overlong_buffer=0
  "run.name=experiment_$name" run.if_exists=archive "run.steps=$STEPS"
  eval.every=0 checkpoint.every=0 checkpoint.export_hf=false
  rollout.prompts_per_step=32 rollout.samples_per_prompt=8 rollout.dynamic_sampling=false
  rollout.max_prompt_tokens=12 rollout.max_response_tokens=512)
if [[ -n ${TRACE:-} ]]; then
  settings+=("log.profile_steps=[$((STEPS - 1))]")
fi
"$bin/megatron-rl" plan "$recipe" "${settings[@]}" "$@" --assume response=1 >"$out/$name.plan.txt"

copy_results() {
  cp "$run/metrics.jsonl" "$out/$name.metrics.jsonl" 2>/dev/null
  cp "$run/timeline.jsonl" "$out/$name.timeline.jsonl" 2>/dev/null
}
# every few seconds, so that a run that is killed leaves the steps that it has done
(while sleep 5; do copy_results; done) &
helpers=($!)
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=timestamp,memory.used --format=csv,noheader,nounits --loop-ms=200 \
    >"$out/$name.memory.csv" &
  helpers+=($!)
fi
# shellcheck disable=SC2329  # by the trap
finish() {
  kill "${helpers[@]}" 2>/dev/null
  copy_results
  # torch's own lines: where the driver repeats a rank's, they are the same
  grep -rhsI "Recompiling function" "$run" "$out/$name.output" | sort -u >"$out/$name.recompiled"
  find "$run" -name '*.log' -size -8M -exec tail -n 400 {} \; >"$out/$name.logs" 2>/dev/null
  for trace in "$run"/dumps/profile_*/*.json.gz; do
    if [[ -f $trace ]]; then
      echo "$(basename "$trace"):"
      "$bin/python" "$here/trace_summary.py" "$trace"
    fi
  done >"$out/$name.trace.txt"
  "$bin/python" "$here/run_summary.py" "$out" "$name" | tee "$out/$name.summary.txt"
}
trap finish EXIT
trap 'exit 143' TERM
TORCH_LOGS=recompiles "$bin/megatron-rl" train "$recipe" "${settings[@]}" run.device=cuda "$@" \
  2>&1 | tee "$out/$name.output"
exit "${PIPESTATUS[0]}"
