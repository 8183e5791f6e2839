#!/bin/sh
# Fill a folder with the wheels that benchmarks/gpu.sh installs on a machine without network: all that
# `buckeye-rl[model]` needs for Python 3.12 on Linux but torch, and what comes with torch.
#
#   benchmarks/gpu_wheels.sh [FOLDER]      default: .wheels
set -eu
cd "$(dirname "$0")/.."
folder=${1:-.wheels}
python=${PYTHON:-.venv/bin/python}
needed=$(mktemp)
trap 'rm -f "$needed"' EXIT
"$python" -m uv pip compile pyproject.toml --extra model --python-version 3.12 \
  --python-platform x86_64-manylinux_2_28 --quiet --no-annotate --no-header |
  grep -v -E '^(torch|triton|numpy|sympy|mpmath|networkx|setuptools|hf-xet|(nvidia|cuda)-[a-z0-9-]+)==' >"$needed"
rm -rf "$folder"
mkdir -p "$folder"
platforms=""
for version in 2_34 2_31 2_28 2_27 2_24 2_17; do platforms="$platforms --platform manylinux_${version}_x86_64"; done
# shellcheck disable=SC2086
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  $platforms --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$folder" --requirement "$needed"
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $(ls "$folder" | wc -l) wheels, $size MiB"
test "$size" -le 45
