#!/usr/bin/env bash
# Compiles all kernels for all GPUs with each Triton that a supported torch brings. Needs torch, and no GPU.
#   PYTHON=.venv/bin/python tools/kernels_matrix.sh [version]...     one of each minor release by default
# build/triton-VERSION.json gets the table of each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath --no-symlinks "$(type -P "${PYTHON:-python3}")")
root=$PWD
bash tools/link_package.sh
cd build/package
[ $# -gt 0 ] || set -- 3.6.0 3.7.1 3.8.0 3.9.0
for version in "$@"; do
  folder=$root/build/triton-$version
  if [ ! -d "$folder" ]; then
    rm -rf "$folder.part"
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps --target "$folder.part" "triton==$version"
    mv "$folder.part" "$folder"
  fi
  export PYTHONPATH="$folder:$PWD:$root/tests/kernels:$root/tools"
  "$python" -m kernel_table --json "$folder.json"
  "$python" -m fake_cuda
done
