"""FSDP2: fully_shard over a mesh, which makes the process group itself."""

import os

import torch
import torch.distributed as dist
from measured import STEPS, Gpt, Measured, text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 8

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
data = text(STEPS * BATCH * dist.get_world_size())
loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
model = Gpt()
for layer in model.blocks.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
measured = Measured()
for tokens in loader:
    loss = model(tokens)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    measured.step(loss)
measured.report("torch")
dist.destroy_process_group()
