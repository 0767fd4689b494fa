"""Trains a network twice on three ranks. In the second run, one pixel of rank 2 differs in step 37.

    python examples/two_runs_that_differ.py

`fastcoll trace --against` names this step's first bucket of gradients, and rank 2 (docs/faults/compare-runs.md).

Expected output:

    one/rank_ and other/rank_: ranks 0-2
    Calls with a digest in both runs: 123.

    first difference: seq 115 of group '0', input
      one/rank_, other/rank_: all_reduce(float32[1930], op SUM)
        at two_runs_that_differ.py:47 in train
        from two_runs_that_differ.py:67 in <module>

    The input of rank 2 differs at all_reduce(float32[1930], op SUM).
    No earlier result differs, so rank 2 computed other values before this call.
    Earlier calls of the group that are equal on rank 2: 114.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def train(other: bool) -> None:
    """Trains for 40 steps; `other`: with the pixel that differs."""
    dist.init_process_group("fastcoll")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(20)]
    model: nn.Module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 10))
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(40):
        images, labels = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
        if other and step == 37 and dist.get_rank() == 2:
            images[5, 0, 0, 0] += 0.001
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


def compare() -> None:
    """Runs both, and compares their traces."""
    start = [sys.executable, "-m"]
    torchrun = [*start, "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    os.environ |= {"FASTCOLL_DIGEST": "all", "FASTCOLL_TRACE_STACKS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for run in ("one", "other"):
            Path(folder, run).mkdir()
            os.environ["FASTCOLL_TRACE_DUMP"] = f"{folder}/{run}/rank_"
            subprocess.run([*torchrun, Path(__file__).resolve(), run], check=True)
        prefixes = ["one/rank_", "other/rank_"]
        subprocess.run([*start, "fastcoll", "trace", "--against", *prefixes], cwd=folder)


if __name__ == "__main__":
    train(sys.argv[1] == "other") if "RANK" in os.environ else compare()
