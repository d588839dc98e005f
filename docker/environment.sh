#!/usr/bin/env bash
# Installs the pinned packages and this checkout into /opt/venv:   docker/environment.sh gpu|cpu
# With gpu, it compiles Transformer Engine's binding into a wheel and installs that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=python3 VENV=/opt/venv PIP_NO_CACHE_DIR=1 bash tools/install.sh "$1"

# neither belongs in an image
rm -rf build/te_binding ~/.cache/uv
