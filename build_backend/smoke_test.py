"""Tests an installed fastcoll: a group by its name, an all-reduce, a step of DDP. Start it by torchrun."""

from importlib import metadata

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("fastcoll")
rank, size = dist.get_rank(), dist.get_world_size()
assert dist.get_backend() == "fastcoll"

summed = torch.full((100_000,), float(rank + 1))
dist.all_reduce(summed)
assert summed.unique().tolist() == [size * (size + 1) / 2]

torch.manual_seed(0)
model = torch.nn.Linear(64, 8)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
ddp(torch.full((4, 64), float(rank))).square().mean().backward()
optimizer.step()
weights = [torch.empty_like(model.weight) for _ in range(size)]
dist.all_gather(weights, model.weight.detach())
assert all(torch.equal(weight, weights[0]) for weight in weights)

if rank == 0:
    from fastcoll import info  # here, because the name must work without an import
    from fastcoll._load_cuda import CUDA

    assert CUDA.Communicators().find(0, -1) is None  # the other module loads too

    (group,) = info.groups()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("fastcoll", "torch"))
    print(f"smoke test: {versions}, {size} ranks over {group['transport']}: well")
dist.destroy_process_group()
