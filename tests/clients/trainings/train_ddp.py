"""DistributedDataParallel, as in torch's own examples: nobody names a backend."""

import torch
import torch.distributed as dist
from measured import STEPS, Measured, build_mlp, digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 64

dist.init_process_group()
data = digits(STEPS * BATCH * dist.get_world_size())
loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
model = DistributedDataParallel(build_mlp())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
measured = Measured()
for inputs, labels in loader:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    measured.step(loss)
measured.report("torch")
dist.destroy_process_group()
