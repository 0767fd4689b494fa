"""Three ranks of which one, rank 1, does wrong; to see what the trace says of it (docs/faults/find-the-rank.md).

torchrun --nproc-per-node 3 examples/trace_faults.py missing     rank 1 is busy elsewhere
torchrun --nproc-per-node 3 examples/trace_faults.py mismatch    rank 1 has a tensor of another size
torchrun --nproc-per-node 3 examples/trace_faults.py died        rank 1 is killed
"""

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def step(elements: int = 1000) -> None:
    """One step of a training loop."""
    dist.all_reduce(torch.ones(elements))


def main(fault: str) -> None:
    """Does five steps, then the one that goes wrong."""
    dist.init_process_group("fastcoll", timeout=timedelta(seconds=2))
    for _ in range(5):
        step()
    odd = dist.get_rank() == 1
    if odd and fault == "missing":
        time.sleep(4)
        return
    if odd and fault == "died":
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(dist.DistBackendError):
        step(1001 if odd and fault == "mismatch" else 1000)
    time.sleep(1)  # torchrun ends all ranks when the first one ends


if __name__ == "__main__":
    main(sys.argv[1])
