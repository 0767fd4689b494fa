"""Accelerate: the Accelerator prepares model, optimizer and loader; on CPU it names gloo."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from measured import STEPS, Measured, build_mlp, digits
from torch import nn
from torch.utils.data import DataLoader

BATCH = 64

accelerator = Accelerator(cpu=True)
set_seed(0)
loader = DataLoader(digits(STEPS * BATCH * accelerator.num_processes), BATCH, shuffle=True)
model = build_mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
measured = Measured()
for inputs, labels in loader:
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, labels)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    measured.step(loss)
right = accelerator.gather_for_metrics((outputs.argmax(dim=1) == labels).long())
assert right.numel() == BATCH * accelerator.num_processes
assert accelerator.reduce(torch.ones(()), "sum") == accelerator.num_processes
accelerator.wait_for_everyone()
measured.report("accelerate")
accelerator.end_training()
