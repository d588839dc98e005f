#!/usr/bin/env bash
# Makes build/offline: this checkout and its GPU packages, for a machine without network.
#   tools/offline/bundle.sh      needs a package index, Python 3.12, a C++ compiler; no GPU
# README.md beside this file says how it is used. A second call repeats only what has changed.
#   ARCH=90       compute capability of the GPUs: code of others is not carried
#   CUDA=1        carry CUDA's libraries too, for a machine whose Python has none
#   MIB=54        size of a piece at most; PRESET=6 of xz is an eighth smaller and four times slower
#   BEFORE=REV    carry this revision of the project too, for the experiment compare
#   CACHE=FOLDER  downloads and installed packages, about 20 GB; PYTHON, JOBS
set -euo pipefail
cd "$(dirname "$0")/../.."

here=tools/offline
out=build/offline
lock=constraints/gpu.txt
ARCH=${ARCH:-90}
CUDA=${CUDA:-}
MIB=${MIB:-54}
PRESET=${PRESET:-1}
JOBS=${JOBS:-$(nproc)}
CACHE=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-rl-offline}

report() { echo "[$SECONDS s] $*"; }

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

for candidate in "${PYTHON:-}" python3 python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python; do
  if [[ -n $candidate ]] && is_312 "$candidate"; then
    python=$candidate
    break
  fi
done
if [[ -z ${python:-} ]]; then
  echo "bundle: Python 3.12 is needed; name it: PYTHON=/path/to/python3.12 $0" >&2
  exit 2
fi

work=$CACHE/$(sha256sum "$lock" | cut -c1-16)
site=$work/site
tools=$CACHE/tools/bin
mkdir -p "$out" "$work"
if [[ ! -x $tools/uv ]]; then
  "$python" -m venv "$CACHE/tools"
  "$tools/python" -m pip install -q uv setuptools wheel
fi

install() {  # FOLDER: requirements on standard input
  UV_CACHE_DIR=$CACHE/uv "$tools/uv" pip install -q --python "$python" --no-deps --target "$1" -r -
}

# 1. Packages of the lock. CUDA's libraries lie apart: the machine usually has its own.
libraries='cublas|cuda-cccl|cuda-crt|cuda-cupti|cuda-nvcc|cuda-nvrtc|cuda-runtime|cudnn-cu13|cufft'
libraries+='|cufile|curand|cusolver|cusparse|cusparselt-cu13|nccl-cu13|nvjitlink|nvshmem-cu13'
libraries+='|nvtx|nvvm'
of_cuda="^(nvidia-($libraries)|cuda-toolkit)=="
if [[ ! -f $work/installed ]]; then
  grep -vE "$of_cuda|^transformer-engine-torch==" "$lock" | install "$site"
  grep -E "$of_cuda" "$lock" | install "$work/cuda"
  mkdir -p "$site/nvidia"
  for folder in "$work"/cuda/nvidia/*; do
    ln -sfn "$folder" "$site/nvidia/"
  done
  touch "$work/installed"
  report "packages are installed"
fi

# 2. Transformer Engine's binding, which has to be compiled against the torch above.
wheel=$(PYTHON=$tools/python bash tools/te_binding.sh "$site" "$work/binding" | tail -1)
if [[ ! -f $work/binding_installed ]]; then
  echo "$wheel" | install "$site"
  touch "$work/binding_installed"
  report "Transformer Engine's binding is compiled"
fi

# 3. Pieces: without left_out.txt, without GPU code of other architectures.
settings=$(cat "$lock" "$here"/{left_out.txt,stage.py,strip_fatbin.py,pieces.py} \
  <(echo "$MIB $PRESET $ARCH $CUDA") | sha256sum | cut -c1-16)
if [[ $(cat "$out/settings" 2>/dev/null) != "$settings" ]]; then
  stage=$work/stage
  list=$here/left_out.txt
  if [[ -n $CUDA ]]; then
    list=$work/left_out.txt
    grep -v '^nvidia$' "$here/left_out.txt" >"$list"
  fi
  "$python" "$here/stage.py" "$site" "$stage" "$list"
  dropped=()
  if ((ARCH >= 90)); then
    # FlashAttention 2 is for GPUs before Hopper
    dropped=(--drop _vllm_fa2_C.abi3.so)
  fi
  "$python" "$here/strip_fatbin.py" --arch "$ARCH" "${dropped[@]}" --jobs "$JOBS" "$stage"
  report "staged: $(du -sm "$stage" | cut -f1) MB"
  rm -f "$out"/p[0-9][0-9] "$out"/block_*
  "$python" "$here/pieces.py" pack "$stage" "$out" --mib "$MIB" --preset "$PRESET" --jobs "$JOBS"
  echo "$settings" >"$out/settings"
fi

# 4. What changes between transfers: the project, these scripts, caches of an earlier run.
base=$out/base
rm -rf "$base"
mkdir -p "$base"
cp -r "$here"/{unpack.sh,pieces.py,run.sh,experiments} "$out/index.json" "$base/"
rm -rf "$base"/experiments/__pycache__
git ls-files -z | tar --null -T - -cJf "$base/project.tar.xz"
if [[ -n ${BEFORE:-} ]]; then
  git archive "$BEFORE" | xz >"$base/before.tar.xz"
fi
if [[ -f $out/caches.tar.xz ]]; then
  cp "$out/caches.tar.xz" "$base/"
fi
# the learning experiment's task: made here, because reasoning-gym is not carried
PYTHONPATH=$PWD:$site "$python" -c 'import sys
from pathlib import Path
from megatron_rl.data.toy import write_reasoning
write_reasoning(Path(sys.argv[1]))' "$base/reasoning"

pieces=("$out"/p[0-9][0-9])
report "${#pieces[@]} pieces, $(du -cm "${pieces[@]}" | tail -1 | cut -f1) MB in all;" \
  "beside each of them base/: $(du -sk "$base" | cut -f1) kB"
