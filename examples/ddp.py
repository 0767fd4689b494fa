"""Trains a small network by DistributedDataParallel. One line differs from the loop of the PyTorch tutorial.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --backend gloo

The change is the name in ``dist.init_process_group``. With 2 ranks both backends print the same losses.

Expected output, with other times. These are of one run on an idle machine with 2 cores:

    epoch 0: loss 0.317752, 3.59 ms a step
    epoch 1: loss 0.082478, 3.22 ms a step
    epoch 2: loss 0.043463, 3.87 ms a step
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(backend: str) -> None:
    """Trains as one rank."""
    dist.init_process_group(backend)  # the tutorial has "gloo" or "nccl" here
    torch.manual_seed(0)
    inputs = torch.randn(2048, 256)
    dataset = TensorDataset(inputs, inputs[:, :8].sin())
    sampler = DistributedSampler[tuple[torch.Tensor, ...]](dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total, seconds = torch.zeros(1), []
        for x, y in loader:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean = total.item() / len(loader) / dist.get_world_size()
            step = statistics.median(seconds) * 1e3
            print(f"epoch {epoch}: loss {mean:.6f}, {step:.2f} ms a step", flush=True)
    del model, loss  # before their group
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastcoll", help="fastcoll or gloo")
    main(parser.parse_args().backend)
