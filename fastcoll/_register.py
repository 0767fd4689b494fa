"""Registers the name "fastcoll" in ``torch.distributed``.

torch calls ``register`` at the end of ``import torch`` (entry point group ``torch.backends``). torch 2.14 and
later call it again when the name is used (group ``torch.distributed.backends``). An exception in the first call
would break ``import torch`` in every program. So this module imports no compiled code, no CuPy and no Triton, and
raises nothing. A broken installation is reported when a process group is created.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from fastcoll._C import Options, ProcessGroupFastcoll

__all__ = ["NAME", "create_backend", "register", "registration_error"]

NAME = "fastcoll"

_error: Exception | None = None


def create_backend(
    dist_backend_opts: _DistributedBackendOptions, pg_options: Options | None
) -> ProcessGroupFastcoll:
    """Creates the backend of one group; torch calls it once per group on each member."""
    from fastcoll._backend import create

    return create(dist_backend_opts, pg_options)


def register() -> None:
    """Registers the backend. May be called any number of times and never raises."""
    global _error
    try:
        import torch.distributed as dist

        if not dist.is_available() or NAME in dist.Backend.backend_list:
            return
        # torch makes fastcoll the default of each device that the map lacks. Restore it: the user decides.
        defaults = dist.Backend.default_device_backend_map
        before = dict(defaults)
        dist.Backend.register_backend(
            NAME, create_backend, extended_api=True, devices=["cpu", "cuda"]
        )
        defaults.clear()
        defaults.update(before)
        _error = None
        if any(os.environ.get(name) for name in ("FASTCOLL_DEFAULT", "FASTCOLL_REPLACE")):
            from fastcoll import names

            names.apply()
    except Exception as error:
        _error = error
        if os.environ.get("FASTCOLL_DEBUG", "").upper() != "OFF":
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                print(f"[fastcoll] not registered as requested: {error}", file=sys.stderr)


def registration_error() -> Exception | None:
    """Returns the error of the last ``register``, or None; ``fastcoll info`` prints it."""
    return _error
