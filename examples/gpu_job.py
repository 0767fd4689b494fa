"""Trains with stock NCCL for CUDA tensors, and fastcoll for what is on the CPU: objects, and a checkpoint.

    torchrun --nproc-per-node 2 examples/gpu_job.py

The only line for fastcoll is the name of the backends. Checkpoints are saved while the training goes on, by collectives
of CPU tensors and objects. Without a GPU, the model is on the CPU, and fastcoll serves its gradients too.

Expected output without a GPU:

    step 0: loss 1.980
    step 1: loss 0.737
    step 2: loss 0.274
    checkpoint of step 1: 2 files of tensors
    cpu tensors by fastcoll
    cuda tensors by fastcoll
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcoll

GPU = torch.cuda.is_available()


def main() -> None:
    """Runs one rank."""
    dist.init_process_group("cpu:fastcoll,cuda:nccl" if GPU else "fastcoll")
    rank, first = dist.get_rank(), dist.get_rank() == 0
    device = torch.device("cuda", rank % torch.cuda.device_count()) if GPU else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    folder = [tempfile.mkdtemp() if first else None]
    dist.broadcast_object_list(folder)
    for step in range(3):
        optimizer.zero_grad()
        loss = (model(torch.ones(8, 64, device=device)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if step == 1:
            saving: Any = checkpoint.async_save(model.state_dict(), checkpoint_id=folder[0])
        if first:
            print(f"step {step}: loss {loss.item():.3f}")
    saving.result()
    if first:
        files = len(list(Path(str(folder[0])).glob("*.distcp")))
        print(f"checkpoint of step 1: {files} files of tensors")
        for served, name in fastcoll.info.groups()[0]["backends"].items():
            print(f"{served} tensors by {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
