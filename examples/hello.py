"""Adds one number over two ranks, and prints the backend and the transport.

    python examples/hello.py                         the script starts its own two ranks
    torchrun --nproc-per-node 2 examples/hello.py    torchrun starts the ranks

Expected output, in any order:

    rank 0: sum 3, backend fastcoll, transport shm
    rank 1: sum 3, backend fastcoll, transport shm

``shm`` is shared memory. A warning about ``OMP_NUM_THREADS`` is harmless.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

import fastcoll


def main() -> None:
    """Runs one rank."""
    dist.init_process_group("fastcoll")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    backend, transport = dist.get_backend(), fastcoll.info.groups()[0]["transport"]
    line = f"rank {dist.get_rank()}: sum {total.item():g}, backend {backend}, transport {transport}"
    print(f"{line}\n", end="")  # one write, so lines of two ranks do not mix
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # without it, torchrun prints a warning
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
