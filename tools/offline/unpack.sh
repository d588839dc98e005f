#!/usr/bin/env bash
# Installs what bundle.sh has made, on the machine without network:
#   bash build/offline/base/unpack.sh             takes the pieces beside it, makes the environment
#   bash build/offline/base/unpack.sh PIECE ...   unpacks these in the background, returns at once:
#                                                 where pieces arrive one by one; then once without
# PREFIX=/tmp/megatron-rl   where it goes: 4 GB
# PYTHON=python3            the machine's own, 3.12; CUDA's libraries are those beside its torch
# CUDA_HOME=/usr/local/cuda its compiler and headers
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PREFIX=${PREFIX:-/tmp/megatron-rl}
PYTHON=${PYTHON:-python3}
site=$PREFIX/env/lib/python3.12/site-packages
arrived=$PREFIX/pieces
mkdir -p "$arrived" "$PREFIX/out"

if [[ ! -x $PREFIX/env/bin/python ]]; then
  if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    echo "unpack: Python 3.12 is needed; name it: PYTHON=/path/to/python3.12 bash $0" >&2
    exit 2
  fi
  "$PYTHON" -m venv --without-pip "$PREFIX/env"
fi
# moved into place: the process of an earlier piece may be reading the script just now
if ! cmp -s "$here/pieces.py" "$PREFIX/pieces.py"; then
  cp "$here/pieces.py" "$PREFIX/pieces.new"
  mv "$PREFIX/pieces.new" "$PREFIX/pieces.py"
fi

# of another bundle nothing has been unpacked yet
if ! cmp -s "$here/index.json" "$PREFIX/index.json"; then
  rm -f "$arrived"/*.done
  cp "$here/index.json" "$PREFIX/index.json"
fi

take() {  # PIECE: copies it and unpacks it in a session of its own, which outlives this command
  local piece=$arrived/${1##*/}
  rm -f "$piece.done"
  cp "$1" "$piece"
  # shellcheck disable=SC2016  # expanded by the inner shell
  setsid nohup bash -c '"$1" "$2/pieces.py" unpack "$3" "$4" >"$4.log" 2>&1 &&
      grep -q "blocks" "$4.log" && mv "$4.log" "$4.done"
    rm -f "$4"' unpack "$PYTHON" "$PREFIX" "$site" "$piece" >/dev/null 2>&1 </dev/null &
}

for piece in "$@"; do
  take "$piece"
done
if (($#)); then
  echo "unpacking in the background: $*"
  exit
fi

count=$("$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["pieces"])' <"$here/index.json")
names=()
for number in $(seq 0 $((count - 1))); do
  name=$(printf 'p%02d' "$number")
  names+=("$name")
  if [[ ! -f $arrived/$name && ! -f $arrived/$name.done ]]; then
    if [[ ! -f $here/../$name ]]; then
      echo "unpack: piece $name of $count is missing: neither beside $here nor unpacked before" >&2
      exit 2
    fi
    take "$here/../$name"
  fi
done
for name in "${names[@]}"; do
  for _ in $(seq 3000); do
    [[ -f $arrived/$name ]] || break
    sleep 0.2
  done
  if [[ ! -f $arrived/$name.done ]]; then
    echo "unpack: piece $name failed: $(tail -n 1 "$arrived/$name.log")" >&2
    exit 2
  fi
done

# CUDA: carried, or the machine's own beside its torch
if [[ ! -d $site/nvidia || -L $site/nvidia/cu13 ]]; then
  own=$("$PYTHON" -c 'import nvidia; print(list(nvidia.__path__)[0])') || {
    echo "unpack: $PYTHON has no CUDA libraries (package nvidia): bundle with CUDA=1" >&2
    exit 2
  }
  mkdir -p "$site/nvidia"
  for folder in "$own"/*/; do
    ln -sfn "${folder%/}" "$site/nvidia/"
  done
fi
cuda=${CUDA_HOME:-/usr/local/cuda}
ptxas=$(command -v ptxas ||
  find -L "$cuda" "$site/nvidia" -name ptxas 2>/dev/null | head -1) || true

# the project: a copy of its own, replaced when another one arrives
unpack_project() {  # ARCHIVE FOLDER
  if ! cmp -s "$1" "$2.tar.xz"; then
    rm -rf "$2"
    mkdir -p "$2"
    tar -C "$2" -xJf "$1"
    cp "$1" "$2.tar.xz"
  fi
}
unpack_project "$here/project.tar.xz" "$PREFIX/project"
if [[ -f $here/before.tar.xz ]]; then
  unpack_project "$here/before.tar.xz" "$PREFIX/before"
fi
echo "$PREFIX/project" >"$site/project.pth"
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$PREFIX/project/megatron_rl/__init__.py")
info=$site/megatron_rl-$version.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: megatron-rl\nVersion: %s\n' "$version" >"$info/METADATA"
printf '[console_scripts]\nmegatron-rl = megatron_rl.cli:main\n' >"$info/entry_points.txt"
printf '#!%s\nimport sys\nfrom megatron_rl.cli import main\nsys.exit(main())\n' \
  "$PREFIX/env/bin/python" >"$PREFIX/env/bin/megatron-rl"
chmod +x "$PREFIX/env/bin/megatron-rl"
ln -sf "$site/bin/ninja" "$PREFIX/env/bin/ninja"
if [[ -f $here/caches.tar.xz && ! -d $PREFIX/caches ]]; then
  tar -C "$PREFIX" -xJf "$here/caches.tar.xz"
fi
mkdir -p "$PREFIX/caches"

libraries=$(find -L "$site/nvidia" "$site/torch" -maxdepth 2 -type d -name lib | paste -sd:)
cat >"$PREFIX/env.sh" <<V
export VENV=$PREFIX/env VIRTUAL_ENV=$PREFIX/env PATH=$PREFIX/env/bin:$cuda/bin:\$PATH
export LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export CUDA_HOME=$cuda NVTE_CUDA_INCLUDE_DIR=$cuda/include TRITON_PTXAS_PATH=$ptxas
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export WANDB_MODE=disabled PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR=$PREFIX/caches/triton TORCHINDUCTOR_CACHE_DIR=$PREFIX/caches/inductor
export VLLM_CACHE_ROOT=$PREFIX/caches/vllm CUDA_CACHE_PATH=$PREFIX/caches/cuda
V
# byte code in the background; modules that are imported before make their own
setsid nohup "$PREFIX/env/bin/python" -m compileall -q -j "$(nproc)" "$site" \
  >/dev/null 2>&1 </dev/null &
echo "ready: source $PREFIX/env.sh; then megatron-rl, in $PREFIX/project"
if [[ -z $ptxas ]]; then
  echo "unpack: no ptxas found: set CUDA_HOME, or Triton's kernels will not compile" >&2
fi
