#!/usr/bin/env bash
# Installs this project into .venv, or $VENV:   tools/install.sh cpu|gpu[,dev]
# Prints one resolved set of versions:          tools/install.sh --resolve cpu|gpu
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
GPU_TARGET=(--python-version 3.12 --python-platform x86_64-manylinux_2_28)

# venv EXTRA: makes the environment, with an interpreter for which the set of that name exists.
venv() {
  local versions='[(3, 11), (3, 12)]' wanted='Python 3.11 or 3.12'
  if [[ $1 == gpu ]]; then
    versions='[(3, 12)]' wanted='Python 3.12 (packages of the gpu set have no release for 3.11)'
  fi
  local check="import sys; sys.exit(sys.version_info[:2] not in $versions)"
  if [[ ! -x "$VENV/bin/python" ]]; then
    if [[ -z "$PYTHON" ]] || ! "$PYTHON" -c "$check"; then
      echo "install: $wanted is needed, found '${PYTHON:-none}'; choose one with: make PYTHON=/path/to/python3.12 ..." >&2
      exit 2
    fi
    "$PYTHON" -m venv "$VENV"
  elif ! "$VENV/bin/python" -c "$check"; then
    echo "install: $wanted is needed, $VENV holds $("$VENV/bin/python" --version); remove it, or choose another: VENV=.venv-$1 make ..." >&2
    exit 2
  fi
  # A package index chosen for pip serves uv too.
  local index
  index=${PIP_INDEX_URL:-$("$VENV/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
  if [[ -n $index ]]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
  [[ -x "$VENV/bin/uv" ]] || "$VENV/bin/python" -m pip install --disable-pip-version-check 'uv>=0.8'
}

# says COMMAND...: runs it and says every ten seconds that it does, where uv shows no progress of its own (no terminal).
says() {
  local teller='' status=0
  if [[ ! -t 2 ]]; then
    set +e  # what it counts comes and goes meanwhile
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
      echo "  ... $SECONDS s; $(count '*.dist-info') packages are there, $(count '*.pyc') files compiled" >&2
    done &
    teller=$!
    set -e
  fi
  "$@" || status=$?
  if [[ -n $teller ]]; then { kill "$teller" && wait "$teller"; } 2>/dev/null || true; fi
  return "$status"
}

count() { find "$VENV"/lib/python*/site-packages -name "$1" 2>/dev/null | wc -l; }

# uv does not read pip's configuration: hand over pip's wheel folders where they hold torch for this
# interpreter, else take torch from PyTorch's own CPU index. The +cpu pin refuses a CUDA build either way.
torch_source() {
  local links tag
  links=$("$VENV/bin/python" -m pip config get global.find-links 2>/dev/null || true)
  links=${PIP_FIND_LINKS:-$links}
  tag=$("$VENV/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  local -a found=()
  for link in $links; do
    if compgen -G "$link/torch-*+cpu-$tag-*.whl" >/dev/null; then found+=("$link"); fi
  done
  if ((${#found[@]})); then
    UV_FIND_LINKS=$(IFS=,; echo "${found[*]}")
    export UV_FIND_LINKS
  else
    export UV_TORCH_BACKEND=cpu
  fi
}

resolve() {
  local -a target=()
  if [[ $1 == gpu ]]; then target=("${GPU_TARGET[@]}"); else torch_source; target=(--python-version 3.11); fi
  "$VENV/bin/uv" pip compile --quiet pyproject.toml --extra "$1" --extra dev \
    --overrides "constraints/overrides-$1.txt" "${target[@]}" --no-header --no-annotate
}

compile_jobs() {
  awk -v cores="$(nproc)" '/^MemAvailable/ { jobs = int($2 / 2831155); print jobs < 1 ? 1 : jobs < cores ? jobs : cores }' /proc/meminfo
}

install() {
  local extra=${1%%,*}
  # compiled now, once: an engine that compiles vLLM for itself starts in 14 seconds instead of 8
  local -a options=(--compile-bytecode --python "$VENV/bin/python" --overrides "constraints/overrides-$extra.txt" --constraints "constraints/$extra.txt")
  if [[ $extra == gpu ]]; then
    says "$VENV/bin/uv" pip install "${options[@]}" torch nvidia-cuda-crt nvidia-cuda-cccl setuptools wheel
    # Transformer Engine's torch binding has no wheel for this torch. A compiler of it takes 2.7 GB at most.
    local site wheel jobs=${MAX_JOBS:-$(compile_jobs)}
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    echo "compiling Transformer Engine's binding: three minutes of a core"
    wheel=$(PYTHON=$VENV/bin/python JOBS=$jobs bash tools/te_binding.sh "$site" build/te_binding | tail -1)
    says "$VENV/bin/uv" pip install "${options[@]}" --find-links "$(dirname "$wheel")" --editable ".[$1]"
  else
    torch_source
    says "$VENV/bin/uv" pip install "${options[@]}" --editable ".[$1]"
  fi
}

if [[ $1 == --resolve ]]; then
  venv any
  resolve "$2"
else
  echo "installing megatron-rl[$1] into $VENV"
  venv "${1%%,*}"
  install "$1"
fi
