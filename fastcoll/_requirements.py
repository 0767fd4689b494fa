"""What CUDA tensors need beside torch, in the words of pip."""

from __future__ import annotations

from importlib import metadata

__all__ = ["nccl_packages"]

_NEWEST = "13"


def nccl_packages() -> str:
    """Returns the command that installs CuPy and NCCL.

    They are for the CUDA release of this torch; where it has none, for that of an installed CuPy.
    """
    import torch

    major = (torch.version.cuda or _cuda_of_cupy() or _NEWEST).partition(".")[0]
    return f"pip install cupy-cuda{major}x nvidia-nccl-cu{major}"


def _cuda_of_cupy() -> str | None:
    for major in (_NEWEST, "12"):
        try:
            metadata.distribution(f"cupy-cuda{major}x")
        except metadata.PackageNotFoundError:
            continue
        return major
    return None
