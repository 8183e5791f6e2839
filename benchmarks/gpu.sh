#!/bin/sh
# Measure on a machine with Python 3.12, torch and a GPU, without network. The wheels of all else come from a
# folder that benchmarks/gpu_wheels.sh has filled; without that folder the environment is used as it is.
#
#   benchmarks/gpu.sh [options of benchmarks/gpu.py]
#   WHEELS=FOLDER  default: .wheels          PYTHON=python3.12  default: python3
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels=${WHEELS:-.wheels}
if [ -d "$wheels" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
  PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONPATH
fi
export HF_HUB_OFFLINE=1
"$python" benchmarks/gpu.py "$@"
