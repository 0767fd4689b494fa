"""Trains a model sharded by FSDP2, saves it with torch.distributed.checkpoint, and continues from the checkpoint.

    torchrun --nproc-per-node 2 examples/fsdp2.py               the checkpoint goes to ./checkpoint
    torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER

``reduce_dtype=torch.float32`` belongs to ``wire_dtype=torch.bfloat16``: gradients travel as bfloat16, and their sum
is float32. Without ``fastcoll.fsdp.apply`` the script runs too, with gradients sent as float32.

The checkpoint is saved before step 2. It is loaded after step 3, so both steps are done twice, with the same losses.

Expected output, with other losses on another machine:

    step 0: loss 1.010236
    step 1: loss 0.966743
    step 2: loss 0.924894
    step 3: loss 0.884510
    step 2: loss 0.924894
    step 3: loss 0.884510
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fastcoll.fsdp


def main(folder: str) -> None:
    """Trains as one rank."""
    dist.init_process_group("fastcoll")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fastcoll.fsdp.apply(model, wire_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(32, 64)

    def step(number: int) -> None:
        loss = nn.functional.mse_loss(model(data), data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss.item():.6f}", flush=True)

    step(0)
    step(1)
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments}
    dcp.save(saved, checkpoint_id=folder)
    step(2)
    step(3)
    dcp.load(saved, checkpoint_id=folder)  # in place
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    step(2)
    step(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoint")
