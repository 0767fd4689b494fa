"""The packages that CUDA tensors need besides torch."""

from __future__ import annotations

import os
from importlib import metadata

__all__ = ["CUPY", "installed_version", "nccl_owners", "nccl_packages"]

CUPY = 14
"""The oldest usable major release of CuPy: earlier ones take no unique id as bytes, and cannot split a communicator."""


def installed_version(*distributions: str) -> str | None:
    """Returns the version of the first of these distributions that is installed, without importing it."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def nccl_packages() -> str:
    """Returns the command that installs CuPy, and NCCL if torch does not bring its own.

    Both are for the CUDA release of this torch; if it has none, for that of an installed CuPy. For a torch with CUDA
    the command names no NCCL package. The NCCL packages for CUDA 12 and 13 install the same file, and torch's wheel
    requires a certain release of it.
    """
    import torch

    of_cupy = (major for major in ("13", "12") if installed_version(f"cupy-cuda{major}x"))
    major = (torch.version.cuda or next(of_cupy, "13")).partition(".")[0]
    library = "" if torch.version.cuda else f" nvidia-nccl-cu{major}"
    return f"pip install 'cupy-cuda{major}x>={CUPY}'{library}"


def nccl_owners(path: str) -> list[str]:
    """Returns the installed packages that contain a copy of NCCL, each with its version.

    There are several if one package has overwritten the file of another.

    Args:
        path: Path of the library.
    """
    owners = []
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        files = (file for file in package.files or () if file.name.startswith("libnccl.so"))
        brought = (os.path.realpath(str(package.locate_file(file))) for file in files)
        if os.path.realpath(path) in brought:
            owners.append(f"{name} {package.version}")
    return owners
