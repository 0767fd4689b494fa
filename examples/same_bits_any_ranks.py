"""Trains with 8 logical ranks, and prints a hash of all parameters: the same one on 1 to 8 ranks.

    torchrun --nproc-per-node 3 examples/same_bits_any_ranks.py

Expected output, with another hash on another kind of processor:

    300 steps on 3 ranks: 992e0598
"""

import zlib

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from fastcoll.ddp import GradientSynchronizer

LOGICAL_RANKS = 8

dist.init_process_group("fastcoll")
torch.set_num_threads(1)  # the model's kernels must not depend on the number of threads
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
synchronizer = GradientSynchronizer(model, logical_ranks=LOGICAL_RANKS)
console = Console(stderr=True)
for step in track(range(300), "training", console=console, disable=dist.get_rank() != 0):
    optimizer.zero_grad()
    for shard in synchronizer.shards():  # those of this rank
        data = torch.Generator().manual_seed(step * LOGICAL_RANKS + shard)
        inputs = torch.randn(16, 32, generator=data)
        (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    number = zlib.crc32(parameters.numpy().tobytes())
    print(f"300 steps on {dist.get_world_size()} ranks: {number:08x}")
dist.destroy_process_group()
