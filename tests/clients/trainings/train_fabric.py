"""Lightning Fabric: a loop of one's own, with a strategy that takes the name of a backend."""

import os

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import DDPStrategy
from measured import STEPS, Measured, build_mlp, digits
from torch import nn
from torch.utils.data import DataLoader

BATCH = 64
RANKS = int(os.environ["WORLD_SIZE"])

strategy = DDPStrategy(process_group_backend=os.environ["BACKEND"])
fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
fabric.launch()
seed_everything(0)
model = build_mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
data = digits(STEPS * BATCH * fabric.world_size)
loader = fabric.setup_dataloaders(DataLoader(data, BATCH, shuffle=True))
measured = Measured()
for inputs, labels in loader:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    measured.step(loss)
assert fabric.all_reduce(torch.tensor(2), reduce_op="sum") == 2 * RANKS
assert fabric.all_gather(torch.tensor([fabric.global_rank])).flatten().tolist() == list(
    range(RANKS)
)
fabric.barrier()
measured.report("lightning")
