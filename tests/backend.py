"""The backend under test, and marks for tests that gloo or an older torch cannot run."""

import os
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

BACKEND = os.environ.get("FASTCOLL_TEST_BACKEND", "fastcoll")
"""Name for ``init_process_group``: ``fastcoll``, or ``gloo`` to check the tests themselves."""

IS_GLOO = BACKEND == "gloo"

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The running minor release, such as (2, 13)."""

# Names of torch 2.13; torch 2.11 and 2.12 have only the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def backend_of(group: dist.ProcessGroup | None = None) -> dist.Backend:
    """Return a group's backend for CPU tensors."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait for each of these works."""
    for work in works:
        assert work.wait()


def beyond_gloo(reason: str) -> pytest.MarkDecorator:
    """Mark a test, or a parameter, that gloo cannot pass; it runs with any other backend."""
    return pytest.mark.skipif(IS_GLOO, reason=f"beyond gloo: {reason}")


def since(minor: int, feature: str) -> pytest.MarkDecorator:
    """Mark a test, or a parameter, of a feature that torch has since release 2.``minor``."""
    return pytest.mark.skipif(
        (2, minor) > TORCH, reason=f"torch {TORCH[0]}.{TORCH[1]} has no {feature}"
    )


def name_of(value: object) -> str | None:
    """Return a parameter's name in a test's id: ``float`` for ``torch.float``."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def shared_bytes() -> int:
    """Return the shared memory, in bytes, that this process's groups have reserved; 0 with other backends."""
    from fastcoll.info import groups

    return max((group.get("shared_bytes", 0) for group in groups()), default=0)
