"""Tensor parallelism: the columns of one linear layer and the rows of the next, over all ranks."""

import os

import torch
import torch.distributed as dist
from measured import STEPS, Measured, build_mlp, digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
plan = {
    "0": ColwiseParallel(),
    "2": RowwiseParallel(),
    "4": ColwiseParallel(),
    "6": RowwiseParallel(),
}
model = parallelize_module(build_mlp(), mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
measured = Measured()
for inputs, labels in DataLoader(digits(STEPS * 64), 64):  # every rank sees every sample
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    measured.step(loss)
measured.report("torch")
dist.destroy_process_group()
