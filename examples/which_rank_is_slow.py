"""Trains on four ranks, of which rank 2 loads its data slowly. `fastcoll top` names it (docs/faults/find-the-rank.md).

    python examples/which_rank_is_slow.py

The script starts the ranks by torchrun, without any setting, and then types this:

    fastcoll top PID --once

Expected output; the first line of the table is rank 2:

    RANK      PID   LOST STATE      SINCE     MOVES  CALL
       2     4373  47.4% outside   2.0 ms 25.6 kB/s  all_reduce float32[1] #675
       ...

With `--watch` it shows the live table until you press q.
"""

import argparse
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SLOW_RANK = 2


def load(step: int) -> torch.Tensor:
    """Returns a batch. The slow rank needs longer for every fifth one."""
    if dist.get_rank() == SLOW_RANK and step % 5 == 0:
        time.sleep(0.02)
    return torch.randn(16, 64)


def train(seconds: float) -> None:
    """Trains until the time is over."""
    dist.init_process_group("fastcoll")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end, step = time.monotonic() + seconds, 0
    going = torch.ones(1)
    while going.item():
        optimizer.zero_grad()
        model(load(step)).square().mean().backward()
        optimizer.step()
        step += 1
        going.fill_(time.monotonic() < end)
        dist.all_reduce(going, dist.ReduceOp.MIN)  # all ranks stop after the same step
        if dist.get_rank() == 0 and step == 100:
            print("training", flush=True)
    dist.destroy_process_group()


def look(seconds: float, watch: bool) -> None:
    """Starts the ranks, and looks at them when they train."""
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"
    with subprocess.Popen(
        [sys.executable, *torchrun, __file__, "--seconds", str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "training\n"
        time.sleep(2)
        top = [sys.executable, "-m", "fastcoll", "top", str(job.pid)]
        subprocess.run(top if watch else [*top, "--once"], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10, help="how long to train")
    parser.add_argument("--watch", action="store_true", help="show the live table")
    options = parser.parse_args()
    train(options.seconds) if "RANK" in os.environ else look(options.seconds, options.watch)
