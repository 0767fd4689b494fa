"""Creates the backend object of a process group from torch's arguments."""

from __future__ import annotations

import copy
import difflib
import functools
import os
import socket
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from fastcoll import env, tuning
from fastcoll._load import C
from fastcoll.names import replaced

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch._C._distributed_c10d import Backend, Store, _DistributedBackendOptions

__all__ = ["create", "create_device_engine", "create_gloo", "create_without_group"]


def create_gloo() -> Callable[[Store, int, int, timedelta], Backend]:
    """Returns a factory of Gloo backends for a group on several hosts.

    The factory takes a store for that backend alone, the rank, the size, and the limit of connecting. Its backends
    share one network device, and so one thread. The device is that of GLOO_SOCKET_IFNAME if set, else that of
    NCCL_SOCKET_IFNAME, else torch's choice, the address of the host name. fastcoll calls only send and recv of these
    backends, which need no threads of their own.

    Raises:
        RuntimeError: This torch was built without Gloo, or the interface has no address.
    """
    if not dist.is_gloo_available():
        raise RuntimeError(
            "the ranks of this group cannot share memory and this torch has no Gloo to connect them. Run all ranks "
            "on one host as one user, or install a torch with Gloo."
        )
    gloo: Any = dist.ProcessGroupGloo
    name = _interface()
    # Not lazy, even with TORCH_GLOO_LAZY_INIT=1: a lazy device ends with the first backend that ends.
    try:
        if name:
            device = gloo.create_device(interface=name, lazy_init=False)
        else:
            device = gloo.create_default_device(lazy_init=False)
    except RuntimeError as error:
        where = f"interface {name!r}" if name else "the address of the host's name"
        raise RuntimeError(
            f"Gloo cannot use {where}: {str(error).strip()}. Set GLOO_SOCKET_IFNAME to an interface of this host: "
            f"{', '.join(sorted(name for _, name in socket.if_nameindex()))}."
        ) from error

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
        options = gloo._Options()
        options._devices = [device]
        options._threads = 0
        options._timeout = timeout
        backend: Backend = gloo(store, rank, size, options)
        return backend

    return make


def _interface() -> str:
    """Returns the network interface that the environment names, or ""."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        return name.split(",")[0]
    # As in NCCL: "=eth0" is that interface, "eth" any with that prefix, "^eth" excludes those.
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "").split(",")[0]
    if not wanted or wanted.startswith("^"):
        return ""
    exact, wanted = wanted.startswith("="), wanted.lstrip("=")
    names = [name for _, name in socket.if_nameindex()]
    return next(
        (name for name in names if name == wanted or (not exact and name.startswith(wanted))), ""
    )


def create_device_engine(
    store: Store, group: str, rank: int, size: int, options: C.Options, device_type: str, order: str
) -> object:
    """Creates the Python half of a group's device engine, when the group gets its first device tensor.

    Raises:
        ImportError: CuPy or NCCL is missing, or there are two copies of NCCL.
    """
    from fastcoll.cuda.engine import CudaEngine

    return CudaEngine(
        *(store, group, rank, size, options.timeout, device_type),
        thresholds_on=tuning.load().thresholds_on,
        algorithm=env.read()["FASTCOLL_ALGO"],
        order=order,
        config=options.config,
    )


def create(
    dist_backend_opts: _DistributedBackendOptions, pg_options: object
) -> C.ProcessGroupFastcoll:
    """Creates the backend of one group on this rank.

    Args:
        dist_backend_opts: Store, rank, size, timeout, name and global ranks of the group.
        pg_options: The options given to ``init_process_group`` or ``new_group``; not modified. Their timeout
            counts only if torch's own ``timeout`` argument has its default.

    Raises:
        TypeError: pg_options has another type.
    """
    _look_at_variables()
    _set_variables()
    ours = _own_options(pg_options, dist_backend_opts.group_id)
    options = C.Options() if ours is None else copy.copy(ours)
    given = dist_backend_opts.timeout
    if ours is None or given != dist.distributed_c10d.default_pg_timeout:
        options.timeout = given
    if options.tuning is None:
        options.tuning = tuning.load().table
    options.group_name = dist_backend_opts.group_id
    options.global_ranks_in_group = list(dist_backend_opts.global_ranks_in_group)
    return C.ProcessGroupFastcoll(
        dist_backend_opts.store,
        dist_backend_opts.group_rank,
        dist_backend_opts.group_size,
        options,
    )


def create_without_group(
    store: Store, rank: int, size: int, timeout: timedelta | None = None
) -> C.ProcessGroupFastcoll:
    """Creates a backend that a program has made as torch's ``ProcessGroupGloo``, with the same arguments."""
    _look_at_variables()
    _set_variables()
    options = C.Options()
    if timeout is not None:
        options.timeout = timeout
    options.tuning = tuning.load().table
    options.group_name = "ProcessGroupGloo"
    return C.ProcessGroupFastcoll(store, rank, size, options)


def _own_options(given: object, group: str) -> C.Options | None:
    """Returns the options that a group was given; None: none, or the options of a backend that fastcoll replaces.

    Options of stock NCCL's backend are converted, as far as fastcoll has the same fields.

    Raises:
        TypeError: They are neither fastcoll's nor, while fastcoll replaces a backend, options of any backend.
    """
    if given is None or isinstance(given, C.Options):
        return given
    kind = f"{type(given).__module__}.{type(given).__qualname__}"
    if replaced() and isinstance(given, c10d.Backend.Options):
        if hasattr(given, "is_high_priority_stream") and hasattr(given, "config"):
            return C.Options(
                timeout=given._timeout,
                is_high_priority_stream=given.is_high_priority_stream,
                config=given.config,
            )
        warnings.warn(
            f"fastcoll: group '{group}' is made without its pg_options of {kind}, which are of another backend. "
            "The timeout of init_process_group or new_group counts. Pass fastcoll.Options to set others.",
            stacklevel=2,
        )
        return None
    raise TypeError(
        f"fastcoll: expected pg_options of type fastcoll.Options or None for group '{group}', got {kind}. Pass "
        "pg_options=fastcoll.Options(...) to init_process_group or new_group; for a group of two backends, such as "
        '"cpu:fastcoll,cuda:nccl", leave it out, since torch gives the same object to both.'
    )


@functools.cache
def _look_at_variables() -> None:
    """Warns of misspelt variables, once per process."""
    for name in env.unknown():
        near = difflib.get_close_matches(name, [one.name for one in env.VARIABLES], 1, 0.7)
        meant = f"Did you mean {near[0]}?" if near else "Run `fastcoll info` to list the variables."
        warnings.warn(f"fastcoll: unknown variable {name} is ignored. {meant}", stacklevel=2)


def _set_variables() -> None:
    """Sets variables that torch reads, unless the user has set them.

    Without devices, DDP should allocate its buckets by its backend. With devices it would allocate by NCCL too, so the
    user decides. With devices, ``symmetric_rendezvous`` also changes ``SYMMETRIC_SWITCHES`` for a while. They are set
    here, because adding a variable then would move the others while NCCL's threads read them.
    """
    if torch.version.cuda is None or torch.cuda.device_count() == 0:
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
        return
    for name in env.SYMMETRIC_SWITCHES:
        os.environ.setdefault(name, "0")


def load_cuda() -> None:
    """Loads ``fastcoll._cuda``, before the first device tensor of the process."""
    from fastcoll._load_cuda import CUDA

    CUDA.set_device_factory(create_device_engine)


C.set_gloo_factory(create_gloo)
C.set_device_loader(load_cuda)
