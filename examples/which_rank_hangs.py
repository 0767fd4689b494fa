"""Runs three ranks, of which rank 1 fails. `fastcoll trace` then names this rank (docs/faults/find-the-rank.md).

    python examples/which_rank_hangs.py missing     rank 1 sleeps, and the others wait for it
    python examples/which_rank_hangs.py mismatch    rank 1 has a tensor of another size
    python examples/which_rank_hangs.py died        rank 1 is killed

The script starts the ranks like the next line, and then runs `fastcoll trace` on their files:

    FASTCOLL_TRACE_DUMP=traces/rank_ torchrun --nproc-per-node 3 examples/which_rank_hangs.py missing

With `--timeout 60 --sleep 120` there is time to look at the ranks while they hang.

Expected output of `missing`, below the messages of the ranks:

    dumps of ranks 0-2 (written because: a call failed; a group failed)

    group '0' (default_pg)
      rank  last completed  last called  state      call
      0, 2  5               6            failed     all_reduce(float32[1000], op SUM)
      1     5               5            completed  all_reduce(float32[1000], op SUM)
      first difference: seq 6, missing
    ...
    Look at rank 1 first.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def step(elements: int = 1000) -> None:
    """One step of a training loop."""
    dist.all_reduce(torch.ones(elements))


def main(fault: str, timeout: float, sleep: float) -> None:
    """Makes five steps, then the one that fails."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all when one dies: traces first
    dist.init_process_group("fastcoll", timeout=timedelta(seconds=timeout))
    for _ in range(5):
        step()
    odd = dist.get_rank() == 1
    if odd and fault == "missing":
        time.sleep(sleep)
        return
    if odd and fault == "died":
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(dist.DistBackendError):
        step(1001 if odd and fault == "mismatch" else 1000)


def start_ranks_and_compare() -> None:
    """Starts three ranks by torchrun, waits, and compares their traces."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FASTCOLL_TRACE_DUMP=f"{folder}/rank_", FASTCOLL_TRACE_STACKS="1")
        torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"
        subprocess.run([sys.executable, *torchrun, *sys.argv], check=False)
        subprocess.run([sys.executable, "-m", "fastcoll", "trace", f"{folder}/rank_"], check=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=["missing", "mismatch", "died"])
    parser.add_argument("--timeout", type=float, default=10, help="of the group, in seconds")
    parser.add_argument("--sleep", type=float, default=20, help="of rank 1, in seconds")
    options = parser.parse_args()
    main(**vars(options)) if "RANK" in os.environ else start_ranks_and_compare()
