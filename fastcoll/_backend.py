"""Creates the backend object of a process group from what torch hands over."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch.distributed as dist

from fastcoll import tuning
from fastcoll._load import C
from fastcoll.env import Env

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Backend, Store, _DistributedBackendOptions

__all__ = ["create", "create_device_engine", "create_gloo"]


def create_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    """Creates the Gloo backend that carries a group whose ranks cannot share memory.

    torch picks the network device: GLOO_SOCKET_IFNAME if set, else the address of the host name.

    Args:
        store: A store for this backend alone.
        rank: This process in the group.
        size: Number of processes of the group.
        timeout: Of each operation.

    Raises:
        RuntimeError: This torch was built without Gloo.
    """
    if not dist.is_gloo_available():
        raise RuntimeError(
            "fastcoll: the ranks of this group cannot share memory and this torch has no Gloo to connect "
            "them. Run all ranks on one host as one user, or install a torch with Gloo."
        )
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def create_device_engine(
    store: Store, group: str, rank: int, size: int, timeout: timedelta, device_type: str
) -> object:
    """Creates the half in Python of a group's engine of device tensors, at the first of them.

    Raises:
        ImportError: CuPy or NCCL is missing, or there are two copies of NCCL.
    """
    from fastcoll.cuda.engine import CudaEngine

    return CudaEngine(
        *(store, group, rank, size, timeout, device_type),
        thresholds_on=tuning.load().thresholds_on,
        algorithm=Env.read().algo,
    )


def create(
    dist_backend_opts: _DistributedBackendOptions, pg_options: C.Options | None
) -> C.ProcessGroupFastcoll:
    """Creates the backend of one group on this rank.

    Args:
        dist_backend_opts: Store, rank, size, timeout, name and global ranks of the group.
        pg_options: What the caller gave ``init_process_group`` or ``new_group``; it is not modified. Its
            timeout counts only where the caller left torch's own ``timeout`` argument at the default.

    Raises:
        TypeError: pg_options is of another class.
    """
    if pg_options is not None and not isinstance(pg_options, C.Options):
        raise TypeError(
            "fastcoll.init_process_group: expected pg_options of type fastcoll.Options or None, "
            f"got {type(pg_options).__module__}.{type(pg_options).__qualname__}. "
            'Pass pg_options=fastcoll.Options(...); for a group of two backends, such as "cpu:fastcoll,'
            'cuda:nccl", leave it out, since torch gives the same object to both.'
        )
    options = C.Options() if pg_options is None else copy.copy(pg_options)
    given = dist_backend_opts.timeout
    if pg_options is None or given != dist.distributed_c10d.default_pg_timeout:
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


C.set_gloo_factory(create_gloo)
C.set_device_factory(create_device_engine)
