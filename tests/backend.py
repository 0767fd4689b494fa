"""The backend under test, and the mark of what the stock CPU backend cannot do."""

import os

import pytest
import torch
import torch.distributed as dist

__all__ = [
    "BACKEND",
    "IS_GLOO",
    "TORCH",
    "all_gather_single",
    "backend_of",
    "beyond_gloo",
    "name_of",
    "reduce_scatter_single",
    "shared_bytes",
    "since",
]

BACKEND = os.environ.get("FASTCOLL_TEST_BACKEND", "fastcoll")
"""Name given to ``init_process_group``: ``fastcoll``, or ``gloo`` to check the tests themselves."""

IS_GLOO = BACKEND == "gloo"

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The minor release that runs, such as (2, 13)."""

# The names of torch 2.13, under which 2.11 and 2.12 know the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def backend_of(group: dist.ProcessGroup | None = None) -> dist.Backend:
    """Return what carries out a group's calls on CPU tensors."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def beyond_gloo(reason: str) -> pytest.MarkDecorator:
    """Mark a test, or a parameter, of what gloo cannot do; with any other backend it runs."""
    return pytest.mark.skipif(IS_GLOO, reason=f"beyond gloo: {reason}")


def since(minor: int, feature: str) -> pytest.MarkDecorator:
    """Mark a test, or a parameter, of what torch has had since its release 2.``minor``."""
    return pytest.mark.skipif(
        (2, minor) > TORCH, reason=f"torch {TORCH[0]}.{TORCH[1]} has no {feature}"
    )


def name_of(value: object) -> str | None:
    """Name a parameter in a test's id: ``float`` for ``torch.float``."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def shared_bytes() -> int:
    """Return the shared memory that the groups of this process have reserved; 0 with other backends."""
    from fastcoll.info import groups

    return max((group.get("shared_bytes", 0) for group in groups()), default=0)
