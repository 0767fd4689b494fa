"""Counts what averaging gradients adds to a backward pass on one GPU: by DDP on NCCL, and by GradientSynchronizer.

    python examples/cuda_gradients.py

The model has 160 small gradients. DDP copies each into a bucket. GradientSynchronizer copies them by one Triton kernel
(*flatten*), NCCL reduces the bucket, and one kernel copies them back. One rank sends nothing. FASTCOLL_ALGO=nccl makes
it use a bucket all the same, as several ranks do. Host time is the time until all work is queued.

Without a GPU, the model is on the CPU, DDP is on Gloo, and each operator of torch counts as a launch.

Expected output without a GPU, with other times:

    640 launches and 1.50 ms added by DDP on gloo
    0 launches and 1.09 ms added by GradientSynchronizer
"""

import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from fastcoll.ddp import GradientSynchronizer

DEVICE, STOCK = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
WAYS = "alone", f"DDP on {STOCK}", "GradientSynchronizer"


def build(way: str) -> nn.Module:
    """Returns the model, with one way to average its gradients."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(80))).to(DEVICE)
    if way == "GradientSynchronizer":
        GradientSynchronizer(model, dist.new_group(backend="fastcoll"))
    elif way != "alone":
        return DistributedDataParallel(model, process_group=dist.new_group(backend=STOCK))
    return model


def backward(model: nn.Module) -> float:
    """Takes a backward pass; returns the host's time in ms."""
    model.zero_grad()
    loss = model(torch.ones(8, 64, device=DEVICE)).sum()
    start = time.perf_counter()
    loss.backward()
    return (time.perf_counter() - start) * 1e3


def launches(model: nn.Module) -> int:
    """Returns how many kernels a pass launches; on the CPU, operators that call no other."""
    with profile() as found:
        backward(model)
    events = [event for event in found.events() or () if not event.cpu_children]
    on_gpu = [event for event in events if event.device_type.name == "CUDA"]
    return len(on_gpu) or sum(event.name.startswith("aten::") for event in events)


if __name__ == "__main__":
    os.environ["FASTCOLL_ALGO"] = "nccl"
    dist.init_process_group(STOCK, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    models = [build(way) for way in WAYS]
    # The ways take turns; the first passes compile kernels.
    rounds = [[backward(model) for model in models] for _ in range(50)][10:]
    alone, *others = (statistics.median(times) for times in zip(*rounds, strict=True))
    least, *counts = (launches(model) for model in models)
    for way, count, spent in zip(WAYS[1:], counts, others, strict=True):
        print(f"{count - least} launches and {spent - alone:.2f} ms added by {way}")
    dist.destroy_process_group()
