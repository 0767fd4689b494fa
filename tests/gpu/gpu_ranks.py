"""What makes a rank share this machine's GPU with others."""

import torch


def first_gpu() -> None:
    """Selects the GPU that the ranks share."""
    torch.cuda.set_device(0)
