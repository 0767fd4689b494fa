"""Trains from a checkpoint; once, amid the training, rank 1 is killed."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, network

STEPS, DEATH = 6, 3
checkpoint = Path(sys.argv[1])
died = Path(f"{checkpoint}.died")
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group(os.environ["FASTCOLL_TEST_BACKEND"])
model = DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    first = state["step"]
    model.module.load_state_dict(state["model"])
for step in range(first, STEPS):
    optimizer.zero_grad()
    loss = loss_of(model, dist.get_rank(), step)
    if step == DEATH and dist.get_rank() == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save({"step": step + 1, "model": model.module.state_dict()}, f"{checkpoint}.new")
        os.rename(f"{checkpoint}.new", checkpoint)
    dist.barrier()
print(f"rank {dist.get_rank()} ends in life {life}, having started at step {first}")
dist.destroy_process_group()
