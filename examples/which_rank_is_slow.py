"""Trains on four ranks, of which rank 2 loads its data slowly. `fastcoll top` names it (docs/faults/find-the-rank.md).

    python examples/which_rank_is_slow.py

The script starts the ranks by torchrun, without any setting, and then types `fastcoll top PID --once`. With `--watch`
it shows the live table until you press q.

Expected output; rank 2 comes first:

    RANK      PID   LOST STATE      SINCE     MOVES  CALL
       2     4373  47.4% outside   2.0 ms 25.6 kB/s  all_reduce float32[1] #675
       ...
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

SECONDS = 10


def train() -> None:
    """Trains until the time is over. The slow rank needs longer for every fifth batch."""
    dist.init_process_group("fastcoll")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end, step, going = time.monotonic() + SECONDS, 0, torch.ones(1)
    while going.item():
        if dist.get_rank() == 2 and step % 5 == 0:
            time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        step += 1
        going.fill_(time.monotonic() < end)
        dist.all_reduce(going, dist.ReduceOp.MIN)  # all ranks stop after the same step
        if dist.get_rank() == 0 and step == 100:
            print("training", flush=True)
    dist.destroy_process_group()


def look(*options: str) -> None:
    """Starts the ranks, and looks at them when they train."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    with subprocess.Popen([*torchrun, __file__], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "training\n"
        time.sleep(2)
        subprocess.run(
            [sys.executable, "-m", "fastcoll", "top", str(job.pid), *options], check=True
        )


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        look(*([] if "--watch" in sys.argv else ["--once"]))
