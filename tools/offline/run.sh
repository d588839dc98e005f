#!/usr/bin/env bash
# Experiments on the machine with the GPU, after unpack.sh:
#   bash build/offline/base/run.sh NAME[:SECONDS] ...      order.md says what each answers
# Names: imports machine update compare fp8 recipe engine engine8b ipc tests larger learning caches
# One after another, each with its time limit; every number is written to $OUT (PREFIX/out) at once.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PREFIX=${PREFIX:-/tmp/megatron-rl}
if [[ ! -f $PREFIX/env.sh ]]; then
  echo "run: $PREFIX/env.sh is missing: run unpack.sh first, with the same PREFIX" >&2
  exit 2
fi
# shellcheck source=/dev/null
source "$PREFIX/env.sh"
cd "$PREFIX/project" || exit 2
OUT=${OUT:-$PREFIX/out}
mkdir -p "$OUT"
python=$PREFIX/env/bin/python
experiments=$here/experiments
export PREFIX OUT python here experiments

declare -A limits=([imports]=600 [machine]=45 [update]=230 [compare]=200 [fp8]=60 [recipe]=240
  [engine]=120 [engine8b]=400 [ipc]=150 [tests]=200 [larger]=300 [learning]=590 [caches]=30)

imports() {
  "$python" -m pytest --gpu-set tests/gpu_set/test_set.py -k "imports and not flashinfer" \
    -q -p no:cacheprovider
}

machine() {
  nvidia-smi
  nproc
  free -g
  df -h /tmp
  "$python" "$experiments/machine.py" "$OUT"
}

update() { "$python" "$experiments/update.py" . "$OUT" --rounds 2; }

compare() {
  if [[ ! -d $PREFIX/before ]]; then
    echo "compare: no earlier revision was carried: bundle with BEFORE=REV" >&2
    return 2
  fi
  local revision
  for revision in before project; do
    "$python" "$experiments/update.py" "$PREFIX/$revision" "$OUT" --name "compare_$revision" \
      --rounds 2 --only logprobs update anchored body bare trace || return
  done
}

fp8() {
  "$python" "$experiments/update.py" . "$OUT" --name update_fp8 --fp8 blockwise --rounds 2 \
    --only logprobs update body
}

recipe() { bash "$experiments/recipe.sh" "$OUT" recipe; }

engine() {
  local core
  for core in inside apart; do
    "$python" "$experiments/bare_engine.py" . "$OUT" 0.6B:int8 --core "$core" || return
  done
}

engine8b() {
  "$python" "$experiments/bare_engine.py" . "$OUT" 8B:none 8B:fp8 8B:int8 \
    --sequences 64 256 --prompt 128 --response 1024
}

ipc() { STEPS=3 bash "$experiments/recipe.sh" "$OUT" ipc sync.transport=ipc; }

tests() {
  "$python" -m pytest "${TESTS:-tests/gpu/test_gpu_learner.py}" -q -ra -p no:cacheprovider
}

# 16 x 8 responses of 1,024 tokens, for which others have published a step
larger() {
  MODEL=Qwen3-1.7B STEPS=4 bash "$experiments/recipe.sh" "$OUT" larger rollout.prompts_per_step=16 \
    rollout.max_response_tokens=1024 sampler.vllm.gpu_memory_utilization=0.55
}

learning() { bash "$experiments/learning.sh" "$OUT"; }

# what engines and compilers have made: beside the pieces, the next bundle carries it
caches() {
  tar -C "$PREFIX" -cJf "$OUT/caches.tar.xz" caches
  ls -l "$OUT/caches.tar.xz"
}

for each in "$@"; do
  name=${each%%:*}
  limit=${each#*:}
  if [[ $limit == "$each" ]]; then
    limit=${limits[$name]:-}
  fi
  if [[ -z ${limits[$name]:-} ]]; then
    echo "run: no experiment $name; there are: ${!limits[*]}" >&2
    exit 2
  fi
  began=$SECONDS
  status=0
  echo "== $name, at most $limit s"
  export -f "${name?}"
  timeout --kill-after=10 "$limit" bash -c "$name" >"$OUT/$name.log" 2>&1 </dev/null || status=$?
  tail -n "${TAIL:-40}" "$OUT/$name.log"
  echo "== $name: status $status, $((SECONDS - began)) s"
done
