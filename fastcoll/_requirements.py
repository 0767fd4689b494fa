"""What CUDA tensors need beside torch, in the words of pip."""

from __future__ import annotations

from importlib import metadata

__all__ = ["CUPY", "nccl_packages"]

CUPY = 14
"""The least major release of CuPy: earlier ones take no unique id of bytes, and cannot split a communicator."""

_NEWEST = "13"


def nccl_packages() -> str:
    """Returns the command that installs CuPy, and NCCL where torch does not bring its own.

    They are for the CUDA release of this torch; where it has none, for that of an installed CuPy. Beside a torch for
    CUDA no package of NCCL is named: those for CUDA 12 and 13 install the same file, which torch's wheel asks for in
    a release of its own.
    """
    import torch

    major = (torch.version.cuda or _cuda_of_cupy() or _NEWEST).partition(".")[0]
    library = "" if torch.version.cuda else f" nvidia-nccl-cu{major}"
    return f"pip install 'cupy-cuda{major}x>={CUPY}'{library}"


def _cuda_of_cupy() -> str | None:
    for major in (_NEWEST, "12"):
        try:
            metadata.distribution(f"cupy-cuda{major}x")
        except metadata.PackageNotFoundError:
            continue
        return major
    return None
