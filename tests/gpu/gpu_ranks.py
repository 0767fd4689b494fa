"""What makes a rank share this machine's GPU with others."""

import os

import torch


def own_host() -> None:
    """Before NCCL reads it: it takes several ranks on one GPU only where they say that they are on several hosts."""
    os.environ["NCCL_HOSTID"] = f"rank-of-process-{os.getpid()}"
    torch.cuda.set_device(0)
