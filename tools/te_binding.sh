#!/usr/bin/env bash
# Compiles Transformer Engine's torch binding and leaves it as a wheel:
#   tools/te_binding.sh SITE OUT      prints the wheel's path as its last line
# SITE: folder of packages with the torch to compile against; OUT: folder of the work and the wheel.
# The binding is 33 files of C++ without CUDA. torch's headers are most of the work, so the files
# are joined into a few that include them once: 3 minutes of a core, where the package's own build
# takes 24. Kernels are in libtransformer_engine.so: the optimization level hardly matters here.
# PYTHON: an interpreter of the set's version with pip, setuptools, wheel. JOBS: compilers at once.
set -euo pipefail

site=$(realpath "$1")
mkdir -p "$2"
PYTHON=$(command -v "${PYTHON:-python3}")
PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/${PYTHON##*/}
JOBS=${JOBS:-1}
GROUPS_OF_FILES=$((JOBS > 6 ? JOBS : 6))

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=$(sed -n 's/^transformer-engine-torch==//p' "$root/constraints/gpu.txt")
torch=$(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$site/torch/version.py")
out=$(realpath "$2")/te-$version-torch-$torch
name=transformer_engine_torch-$version

wheel() { find "$out" -maxdepth 1 -name "$name-*.whl" 2>/dev/null | head -1; }

if [[ -n $(wheel) ]]; then
  wheel
  exit
fi

# the source of the locked version; its setup script looks for the headers that the wheels bring
if [[ ! -d $out/$name ]]; then
  mkdir -p "$out"
  (
    cd "$out"
    export PYTHONPATH=$site NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE
    "$PYTHON" -m pip download --quiet --no-deps --no-binary=:all: --no-build-isolation \
      "transformer_engine_torch==$version"
    tar xzf "$name.tar.gz"
  ) >&2
fi
source=$out/$name

flags=(-std=c++20 "${OPT:--O1}" -g0 -fPIC -fvisibility=hidden -w -DNDEBUG
  -DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=transformer_engine_torch
  -DNVTE_WITH_NCCL_EP -DUSE_NCCL -D_GLIBCXX_USE_CXX11_ABI=1)
include=(-I"$site/torch/include" -I"$site/torch/include/torch/csrc/api/include")
include+=(-I"$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')")
for folder in "$site"/nvidia/*/include; do
  include+=(-I"$folder")
done
headers=$source/common_headers
# csrc last: it has a common.h, too
include+=(-I"$headers" -I"$headers/common" -I"$headers/common/include" -I"$source/csrc")

# groups of about the same size, largest file first
"$PYTHON" - "$source/csrc" "$out" "$GROUPS_OF_FILES" <<'P'
import sys
from pathlib import Path

csrc = Path(sys.argv[1])
out = Path(sys.argv[2])
files = sorted(csrc.rglob("*.cpp"), key=lambda path: -path.stat().st_size)
groups = [[] for _ in range(min(int(sys.argv[3]), len(files)))]
for path in files:
    smallest = min(groups, key=lambda group: sum(one.stat().st_size for one in group))
    smallest.append(path)
for number, group in enumerate(groups):
    text = "".join(f'#include "{path}"\n' for path in sorted(group))
    unit = out / f"group_{number}.cpp"
    if not unit.exists() or unit.read_text() != text:
        unit.write_text(text)
P

compile() {
  local unit=$1 object=${1%.cpp}.o began=$SECONDS
  if [[ $object -nt $unit ]]; then
    return
  fi
  "${CXX:-g++}" "${flags[@]}" "${include[@]}" -c "$unit" -o "$object.part"
  mv "$object.part" "$object"
  echo "  $(basename "$unit"): $((SECONDS - began)) s" >&2
}

pids=()
for unit in "$out"/group_*.cpp; do
  while (($(jobs -rp | wc -l) >= JOBS)); do
    wait -n
  done
  compile "$unit" &
  pids+=($!)
done
for pid in "${pids[@]}"; do
  wait "$pid"
done

# a wheel, so that every installer takes it
content=$out/content
info=$content/$name.dist-info
rm -rf "$content"
mkdir -p "$info"
suffix=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
"${CXX:-g++}" -shared -s "$out"/group_*.o -L"$site/torch/lib" -ltorch -ltorch_cpu -ltorch_python \
  -lc10 -lc10_cuda -ltorch_cuda -o "$content/transformer_engine_torch$suffix"
cp "$source/PKG-INFO" "$info/METADATA"
tag=$("$PYTHON" -c 'import sys, sysconfig
python = "cp%d%d" % sys.version_info[:2]
print(python, python, sysconfig.get_platform().replace("-", "_").replace(".", "_"), sep="-")')
printf 'Wheel-Version: 1.0\nGenerator: te_binding\nRoot-Is-Purelib: false\nTag: %s\n' "$tag" \
  >"$info/WHEEL"
"$PYTHON" -m wheel pack "$content" --dest-dir "$out" >&2
wheel
