"""Trains a residual network twice on three ranks. In the second run, one sample of rank 2 differs in step 37.

    python examples/two_runs_that_differ.py

`fastcoll trace --against` names this step's first bucket of gradients, and rank 2 (docs/faults/compare-runs.md).

Expected output, at its end:

    first difference: seq 75 of group '0', the input of rank 2
      all_reduce(float32[1290], op AVG)
    ...
"""

import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

CHANGED = 37


class Block(nn.Module):
    """x + f(x), with two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.f(x))


def train(other: bool) -> None:
    """Trains for 40 steps; `other`: with the sample that differs."""
    dist.init_process_group("fastcoll")
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 10))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(), Block(), head)
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(40):
        images, labels = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
        if other and step == CHANGED and dist.get_rank() == 2:
            images[5, 0, 0, 0] += 0.001
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__" and "RANK" in os.environ:
    train(sys.argv[1] == "other")
elif __name__ == "__main__":
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with tempfile.TemporaryDirectory() as folder:
        for run in ("one", "other"):
            os.environ |= {"FASTCOLL_DIGEST": "all", "FASTCOLL_TRACE_STACKS": "1"}
            os.environ["FASTCOLL_TRACE_DUMP"] = f"{folder}/{run}_"
            subprocess.run([*torchrun, __file__, run], check=True)
        prefixes = (f"{folder}/one_", f"{folder}/other_")
        subprocess.run([sys.executable, "-m", "fastcoll", "trace", "--against", *prefixes])
