#!/usr/bin/env bash
# Makes build/package, a folder of links in which `import fastcoll` finds fastcoll.kernels, as where it is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rm -rf build/package
mkdir -p build/package/fastcoll
ln -s "$PWD"/fastcoll/* "$PWD"/{kernels,bench,examples} build/package/fastcoll/
