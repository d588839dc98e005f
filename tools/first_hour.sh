#!/usr/bin/env bash
# The first hour on a node with GPUs: installs the gpu set, runs tests/gpu, measures a sync, and takes two steps of every
# recipe that fits this node. A part that fails does not stop the others.
#   tools/first_hour.sh [part ...]      parts: machine install imports update tests quickstart sync turns size recipes
# What came of it is one file to send back, first_hour.md, and a log of each part in first_hour/.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

BIN=${VENV:-.venv}/bin
LIMIT_S=${LIMIT_S:-1200}   # of one part, or of one recipe
report=first_hour.md
experiments=tools/offline/experiments
mkdir -p first_hour

part() {  # NAME COMMAND [ARGUMENT ...]
  local name=$1 log=first_hour/$1.log began=$SECONDS status=0
  shift
  echo "$name: $*" >&2
  timeout "$LIMIT_S" "$@" >"$log" 2>&1 </dev/null || status=$?
  {
    echo
    echo "## $name: $([[ $status == 0 ]] && echo "done" || echo "failed, status $status"), $((SECONDS - began)) s"
    echo
    echo '```'
    echo "\$ $*"
    tail -n "$([[ $status == 0 ]] && echo "${TAIL:-15}" || echo 60)" "$log"
    echo '```'
  } >>"$report"
  return "$status"
}

machine() {
  TAIL=80 part machine bash -c 'git log -1 --oneline; date -u; uname -r; nproc; free -g; df -h . /dev/shm
nvidia-smi; nvidia-smi topo -m'
}

install() { part install make EXTRA=gpu install-dev; }

imports() {
  part imports "$BIN/python" -c 'import torch, transformer_engine.pytorch, vllm, flashinfer, nccl.m2n
import megatron.core.extensions.transformer_engine as extension
print(torch.__version__, torch.cuda.device_count(), torch.cuda.get_device_name(), extension.HAVE_TE)'
}

update() { TAIL=60 part update "$BIN/python" "$experiments/update.py" . first_hour; }

tests() { TAIL=40 part tests "$BIN/python" -m pytest tests/gpu -ra --durations=10; }

quickstart() { part quickstart "$BIN/megatron-rl" quickstart run.steps=20; }

sync() { part sync "$BIN/python" tools/bench/sync.py --formats none int8 fp8 --repeats 3; }

on_toy() {  # FOLDER: sets `toy`, what a recipe needs to run on the model and rows that are there
  toy=("model.path=$1/model" model.init=random "data.train=$1/train.jsonl" data.eval=null data.chat_template_kwargs=null
    data.prompt_key=prompt data.answer_key=answer reward.name=exact_match reward.overlong_buffer=0 rollout.max_prompt_tokens=12)
}

two_steps() {  # RECIPE NAME [KEY=VALUE ...]: with a small random model of its family where its own is not here
  local recipe=$1 name=$2 model shrunk
  shift 2
  model=$("$BIN/python" -c 'import sys; from pathlib import Path; from megatron_rl.config import load; print(load(Path(sys.argv[1]), sys.argv[2:]).model.path)' "$recipe" "$@")
  shrunk=(run.steps=2 "run.name=first_hour_$name" run.if_exists=archive eval.every=0 checkpoint.every=0 checkpoint.export_hf=false
    rollout.prompts_per_step=16 rollout.samples_per_prompt=8 rollout.max_response_tokens=512 rollout.dynamic_sampling=false)
  if [[ ! -d $model ]]; then
    "$BIN/megatron-rl" toy "data/first_hour/$name" --like "$(basename "$model")" >/dev/null || return
    on_toy "data/first_hour/$name"
    shrunk+=("${toy[@]}" rollout.max_response_tokens=8)
  fi
  if "$BIN/megatron-rl" train "$recipe" "${shrunk[@]}" "$@" --dry-run >"first_hour/$name.plan" 2>&1; then
    part "$name" "$BIN/megatron-rl" train "$recipe" "${shrunk[@]}" "$@"
  else
    echo "- $name is left out: $(grep -m1 "error" "first_hour/$name.plan")" >>"$report"
  fi
}

# Parts of a colocated node, one more each time: engine sleep, learner offload, weight handover.
turns() {
  local one=recipes/grpo-qwen3_0.6b-1n1g-int8.yaml
  two_steps "$one" turns_kept sampler.sleep=offload
  two_steps "$one" turns_discarded sampler.sleep=discard
  two_steps "$one" turns_optimizer sampler.sleep=discard learner.offload=optimizer
  two_steps "$one" turns_ipc sampler.sleep=discard learner.offload=optimizer sync.transport=ipc
  two_steps recipes/grpo-qwen3_1.7b-1n8g-int8.yaml turns_engines learner.offload=optimizer
}

# The recipe for one GPU with a model of its own size, of random weights: its plan, time and memory by phase, a trace of
# step 5 of 6 by kind of kernel, recompilations; and FP8 on both sides.
size() {
  TRACE=1 sized size_int8
  sized size_fp8 quantization=fp8 learner.megatron.fp8=e4m3 learner.megatron.fp8_recipe=blockwise
}

sized() {  # NAME [KEY=VALUE ...]
  local name=$1
  VENV=${VENV:-.venv} TAIL=30 part "$name" bash "$experiments/recipe.sh" first_hour "$@" || return
  head -n 60 "first_hour/$name.trace.txt" >>"$report"
}

# From one GPU to as many as fit here, with each recipe's own layout and formats.
recipes() {
  local recipe
  for recipe in $(printf '%s\n' recipes/*-*.yaml | sort -t- -k3,3V -k2,2V); do
    two_steps "$recipe" "$(basename "$recipe" .yaml)"
  done
}

chosen=("$@")
((${#chosen[@]})) || chosen=(machine install imports update tests quickstart sync turns size recipes)
echo "# The first hour" >"$report"
for each in "${chosen[@]}"; do
  case $each in
    machine | install | imports | update | tests | quickstart | sync | turns | size | recipes) "$each" || echo "$each: failed; see $report" >&2 ;;
    *) echo "first_hour: no part $each; see the head of $0" >&2; exit 2 ;;
  esac
done
echo "send back: $report" >&2
