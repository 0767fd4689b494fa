#!/usr/bin/env bash
# Runs an unmodified Gloo script twice: plainly, and on fastcoll by FASTCOLL_REPLACE=gloo. Compares the final loss and
# the step time.
#
#     bash examples/no_edit.sh
#
# Expected output, with other times. These are of an idle machine with 2 cores, the middle of three runs:
#
#     Gloo:     epoch 2: loss 0.043463, 8.11 ms a step
#     fastcoll: epoch 2: loss 0.043463, 4.06 ms a step
#     The final losses are equal: 0.043463
#     To switch back, unset FASTCOLL_REPLACE.
#
# For your own job, put its command in place of `command`, and change `loss` to read its log.
set -euo pipefail

export OMP_NUM_THREADS=1 # without it, torchrun prints a warning
command=(python -m torch.distributed.run --standalone --nproc-per-node 2 "$(dirname "$0")/ddp.py" --backend gloo)
loss() { grep -o 'loss [0-9.e+-]*' <<<"$1" | cut -d ' ' -f 2; }

gloo=$("${command[@]}" | tail -n 1)
echo "Gloo:     $gloo"
fastcoll=$(FASTCOLL_REPLACE=gloo "${command[@]}" | tail -n 1)
echo "fastcoll: $fastcoll"

if [ "$(loss "$gloo")" = "$(loss "$fastcoll")" ]; then
    echo "The final losses are equal: $(loss "$gloo")"
else
    echo "The final losses differ: $(loss "$gloo") with Gloo, $(loss "$fastcoll") with fastcoll"
fi
echo "To switch back, unset FASTCOLL_REPLACE."
