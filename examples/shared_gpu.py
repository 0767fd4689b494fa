"""Trains a model sharded by FSDP2 with several ranks on one GPU, to debug a job of many GPUs.

    FASTCOLL_SHARE_GPU=1 torchrun --nproc-per-node 4 examples/shared_gpu.py

NCCL alone refuses two ranks of a host on one GPU. With the setting its data goes through sockets, so the times mean
nothing. The loss is that of 4 GPUs. Without a GPU, the ranks are on the CPU.

Expected output without a GPU, with other losses on another machine:

    4 ranks on the CPU: torch finds no GPU
    step 0: loss 1.010236
    step 1: loss 0.966743
    step 2: loss 0.924894
    rank 0 has 8272 of 33088 parameters
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fastcoll.info

GPUS = torch.cuda.device_count()
DEVICE = "cuda" if GPUS else "cpu"


def main() -> None:
    """Trains as one rank."""
    if GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % GPUS)
    dist.init_process_group("fastcoll")
    first, size = dist.get_rank() == 0, dist.get_world_size()
    if first:
        print(f"{size} ranks on {f'{GPUS} GPUs' if GPUS else 'the CPU: torch finds no GPU'}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(DEVICE)
    data = torch.randn(32, 64).to(DEVICE)
    mesh = dist.init_device_mesh(DEVICE, (size,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = nn.functional.mse_loss(model(data), data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if first:
            print(f"step {step}: loss {loss.item():.6f}")
    if first:
        own = sum(one.to_local().numel() for one in model.parameters())
        print(f"rank 0 has {own} of {sum(one.numel() for one in model.parameters())} parameters")
        for one in fastcoll.info.groups()[0].get("communicators", ()):
            print(f"NCCL has {one['bytes']} bytes on the GPU for rank 0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
