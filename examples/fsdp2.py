"""Trains a model sharded by FSDP2, saves it by torch.distributed.checkpoint, and goes on from the checkpoint.

    torchrun --nproc-per-node 2 examples/fsdp2.py               the checkpoint goes to ./checkpoint
    torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER

``reduce_dtype=torch.float32`` belongs to ``wire_dtype=torch.bfloat16``: gradients travel as bfloat16, and their sum
is float32. Without ``fastcoll.fsdp.apply`` the script runs too, with gradients sent as float32.

Expected output, with other losses on another machine:

    step 0: loss 1.010236
    step 1: loss 0.966743
    step 2: loss 0.924894
    saved
    step 3: loss 0.884510
    loaded
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


def show(text: str) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(folder: str) -> None:
    """Trains as one rank."""
    dist.init_process_group("fastcoll")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fastcoll.fsdp.apply(model, wire_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(32, 64)

    def step(number: int) -> None:
        loss = nn.functional.mse_loss(model(data), data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(f"step {number}: loss {loss.item():.6f}")

    for number in range(3):
        step(number)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder)
    show("saved")
    step(3)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    show("loaded")
    step(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoint")
