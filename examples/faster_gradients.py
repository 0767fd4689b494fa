"""Measures the time that each way to average gradients adds to a step of one model.

    torchrun --nproc-per-node 2 examples/faster_gradients.py

The first line is the step without communication. The others are the times that the ways add to it: DDP, DDP with
fastcoll's hook, and ``GradientSynchronizer``, which replaces DDP. The last way sends gradients as bfloat16. If you
clip gradients, the last three ways also save a pass, by ``clip_in_step`` (docs/guides/gradients.md).

Expected output, with other times. These are of one run on an idle machine with 2 cores:

    one rank alone                   21.5 ms a step
    DDP                              +11.4 ms
    DDP, fused_allreduce_hook        +8.6 ms
    GradientSynchronizer             +4.9 ms
    GradientSynchronizer, bfloat16   +5.5 ms
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastcoll.ddp import FusedAllreduceState, GradientSynchronizer, fused_allreduce_hook

WAYS = "DDP", "DDP, fused_allreduce_hook", "GradientSynchronizer", "GradientSynchronizer, bfloat16"


def build(way: str) -> nn.Module:
    """Returns the model, with one way to average its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    if way.startswith("GradientSynchronizer"):
        GradientSynchronizer(model, wire_dtype=torch.bfloat16 if "bfloat16" in way else None)
    elif way.startswith("DDP"):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view="hook" in way)
        if "hook" in way:
            ddp.register_comm_hook(FusedAllreduceState(), fused_allreduce_hook)
        return ddp
    return model


def step_time(model: nn.Module) -> float:
    """Returns the time of one step, in ms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    optimizer.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    model(torch.ones(4, 1024)).square().mean().backward()
    optimizer.step()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    dist.init_process_group("fastcoll")
    models = [build(way) for way in ("one rank alone", *WAYS)]
    # The ways take turns, so other work on the machine changes all of them.
    rounds = [[step_time(model) for model in models] for _ in range(50)]
    alone, *others = (statistics.median(times) for times in zip(*rounds, strict=True))
    if dist.get_rank() == 0:
        print(f"{'one rank alone':32} {alone:.1f} ms a step")
        for way, step in zip(WAYS, others, strict=True):
            print(f"{way:32} {step - alone:+.1f} ms")
    dist.destroy_process_group()
