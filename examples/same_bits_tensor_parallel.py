"""A row-parallel layer with the same bits on 1, 2 and 4 ranks, as for a trainer and a generator of different sizes.

    torchrun --nproc-per-node 2 examples/same_bits_tensor_parallel.py

The inner dimension of its product is split into 4 blocks, whatever the number of ranks. Each block is a product of one
shape, so its own sums have one order. A rank adds its blocks in pairs, and fastcoll adds the ranks' sums in pairs.

Expected output, with another hash on another kind of processor:

    4 blocks on 2 ranks: 1917dc73
"""

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

BLOCKS, INNER, OUTER = 4, 256, 64


def row_parallel(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    """Returns [rows, OUTER]; ``inputs`` are this rank's columns, ``weights`` its blocks of [OUTER, INNER / BLOCKS]."""
    columns = inputs.tensor_split(len(weights), dim=1)
    sums = [part @ weight.T for part, weight in zip(columns, weights, strict=True)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    dist.all_reduce(sums[0])  # of CUDA tensors: in a group with order="fixed"
    return sums[0]


if __name__ == "__main__":
    dist.init_process_group("fastcoll")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # a product must not depend on the number of threads
    data = torch.Generator().manual_seed(0)
    weights = torch.randn(BLOCKS, OUTER, INNER // BLOCKS, generator=data).unbind()
    inputs = torch.randn(8, INNER, generator=data).tensor_split(ranks, dim=1)[rank]
    mine = BLOCKS // ranks
    outputs = row_parallel(inputs, list(weights[rank * mine : (rank + 1) * mine]))
    if rank == 0:
        print(f"{BLOCKS} blocks on {ranks} ranks: {zlib.crc32(outputs.numpy().tobytes()):08x}")
    dist.destroy_process_group()
