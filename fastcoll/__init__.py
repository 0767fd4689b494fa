"""fastcoll: a ``torch.distributed`` backend.

After installation ``torch.distributed.init_process_group("fastcoll")`` needs no import, because torch
calls ``fastcoll._register.register``. Importing this package registers the name too. The compiled code
is loaded when an attribute first needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastcoll._command import starts_command, stop_without_torch
from fastcoll._register import register
from fastcoll._version import __version__

if TYPE_CHECKING:
    from fastcoll import ddp, fsdp, info
    from fastcoll._C import Options
    from fastcoll._check_same import check_same
    from fastcoll._communicator import communicator
    from fastcoll._compile import compile
    from fastcoll._monitored_barrier import monitored_barrier
    from fastcoll.coalesced import all_reduce_coalesced
    from fastcoll.names import make_default
    from fastcoll.shared_tensor import empty_shared, share

__all__ = [
    "Options",
    "__version__",
    "all_reduce_coalesced",
    "check_same",
    "communicator",
    "compile",
    "ddp",
    "empty_shared",
    "fsdp",
    "info",
    "is_available",
    "make_default",
    "monitored_barrier",
    "share",
]

_HOMES = {
    "all_reduce_coalesced": "fastcoll.coalesced",
    "check_same": "fastcoll._check_same",
    "communicator": "fastcoll._communicator",
    "compile": "fastcoll._compile",
    "empty_shared": "fastcoll.shared_tensor",
    "make_default": "fastcoll.names",
    "monitored_barrier": "fastcoll._monitored_barrier",
    "share": "fastcoll.shared_tensor",
}

_PACKAGES = ("ddp", "fsdp", "info")

stop_without_torch()
if not starts_command():
    register()


def is_available() -> bool:
    """Returns whether this torch has ``torch.distributed`` and fastcoll's compiled part loads.

    ``fastcoll info`` prints the reason if it does not.
    """
    try:
        import torch.distributed

        import fastcoll._load  # noqa: F401
    except ImportError:
        return False
    return torch.distributed.is_available()


def __getattr__(name: str) -> Any:
    if name == "Options":
        from fastcoll._load import C

        return C.Options
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"fastcoll.{name}")
    raise AttributeError(f"module 'fastcoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
