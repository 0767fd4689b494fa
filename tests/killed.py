"""One rank of a group is killed: the error that the others get, and after how many seconds."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def killed(backend: str, device: str, seconds: float) -> tuple[str, float]:
    """Kills rank 1 between two calls of a group with this timeout.

    Returns:
        The error of another rank's next call, "" if there is none after twice the timeout; and how long it took.
    """
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
    x = torch.ones(3, device=device)
    dist.all_reduce(x, group=group)
    x.cpu()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        work = dist.all_reduce(x, group=group, async_op=True)
        while time.monotonic() - start < 2 * seconds:
            work.is_completed()  # torch's backend for NCCL notices an error here
            if error := work.exception():
                raise error
            time.sleep(0.01)
    except Exception as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start
