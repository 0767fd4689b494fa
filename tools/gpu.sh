#!/usr/bin/env bash
# The kernels and the engine on this machine's GPU: tests, then benchmarks.
#   tools/gpu.sh                               all parts, and what they print into OUT/gpu.txt
#   tools/gpu.sh tests|experiment|gradients    one part, of at most 10 minutes
# PYTHON (python3) has torch, CuPy, Triton, NCCL and pytest, so no network is needed. Results go to OUT (bench/results).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(realpath --no-symlinks "$(type -P "${PYTHON:-python3}")")
mkdir -p "${OUT:=bench/results}"
out=$(cd "$OUT" && pwd)
status=0

if [ $# = 0 ]; then
  export PYTHONUNBUFFERED=1 # so that the log has what a part printed before its time was up
  {
    for part in tests experiment gradients; do
      OUT=$out PYTHON=$python bash tools/gpu.sh "$part" || status=$? # one part goes on when another fails
    done
    (cd build/package && "$python" -m fastcoll info) || status=$?
    exit $status
  } 2>&1 | tee "$out/gpu.txt"
  exit
fi

# Compiles the extension in place and installs nothing. torch finds the backend by the entry points beside the package,
# as if it were installed.
"$python" setup.py --quiet build_ext --inplace
bash tools/link_package.sh
"$python" setup.py --quiet egg_info --egg-base build/package
cd build/package
export PYTHONPATH=$PWD

tests() {
  timeout "$1" "$python" -m pytest -c ../../pyproject.toml --rootdir ../.. -m gpu "${@:2}" || status=$?
}

measure() {
  timeout "$1" "$python" -m "${@:2}" || status=$?
}

case $1 in
  tests)
    tests 220 ../../tests/kernels
    tests 350 ../../tests/gpu
    ;;
  experiment)
    # Eight ranks as streams, with what ships: many rounds compared bit by bit, then times by size and room. Between
    # them, one of two ranks is killed (NCCL 2.30.3 or newer).
    export FASTCOLL_TEST_SOAK=130
    tests 180 ../../tests/kernels/test_peer_streams.py -k rounds_of_any_calls -s
    tests 50 ../../tests/gpu/test_gpu_engine.py -k killed -s
    measure 180 fastcoll.bench.kernels --seconds 145 --json "$out/kernels_cuda.jsonl"
    measure 70 fastcoll.bench.engine --json "$out/engine_cuda.jsonl"
    measure 110 fastcoll.bench.clipped_step --json "$out/clipped_step_cuda.jsonl"
    ;;
  gradients)
    # What surrounds the collectives of a training step, at one rank. There fastcoll would hand lists of tensors to NCCL
    # one by one: by FASTCOLL_ALGO=nccl they go through a bucket, as between several ranks.
    export FASTCOLL_ALGO=nccl
    measure 350 fastcoll.bench ddp resnet50 gpt2-medium --device cuda --nproc 1 \
      --profile --json "$out/ddp_cuda_1rank.jsonl" \
      --backend nccl,nccl-batched,nccl-bf16,fastcoll,fastcoll-fused,fastcoll-fused-bf16,fastcoll-sync,fastcoll-sync-bf16
    # A step in fixed order beside NCCL's. Two ranks share the GPU, which NCCL takes for two hosts: sockets move the data.
    FASTCOLL_ORDER=fixed measure 120 torch.distributed.run --standalone --no-python --nproc-per-node 2 bash -c \
      "LOCAL_RANK=0 NCCL_HOSTID=rank-\$RANK exec '$python' -m fastcoll.bench ddp resnet50 --device cuda \
        --backend nccl,fastcoll,fastcoll-fused --json '$out/ddp_fixed_cuda_2ranks.jsonl'"
    ;;
  *)
    echo "tools/gpu.sh: expected tests, experiment or gradients, got $1" >&2
    exit 2
    ;;
esac
exit $status
