"""A small GPT with DistributedDataParallel, a loader that forks workers, and snapshots; the backend has a name."""

import os
import tempfile

import torch
import torch.distributed as dist
from measured import STEPS, Gpt, Measured, text
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BATCH = 8

dist.init_process_group(os.environ["BACKEND"])
data = text(STEPS * BATCH * dist.get_world_size())
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1, multiprocessing_context="fork")
model = DistributedDataParallel(Gpt())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
snapshot = os.path.join(tempfile.gettempdir(), f"snapshot_{os.environ['MASTER_PORT']}.pt")
measured = Measured()
for step, tokens in enumerate(loader):
    loss = model(tokens)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    measured.step(loss)
    if step == STEPS // 2:
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), snapshot)
        dist.barrier()
        model.module.load_state_dict(torch.load(snapshot))
        dist.barrier()
        if dist.get_rank() == 0:
            os.unlink(snapshot)
measured.report("torch")
dist.destroy_process_group()
