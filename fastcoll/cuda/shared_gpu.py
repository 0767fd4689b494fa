"""Several ranks on one GPU, to debug a job of many GPUs (``FASTCOLL_SHARE_GPU=1``).

NCCL refuses two ranks of a host on one GPU ("Duplicate GPU detected"). It takes the host's name from ``NCCL_HOSTID``.
With a name for each process, each rank counts as a host, and data goes through NCCL's sockets. The GPU runs the
processes in time slices, so such a job shows results, memory and errors, but no speed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

__all__ = ["let_ranks_share_gpus"]

_ONE_HOST = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
}
"""NCCL's variables if all ranks are on this host."""

_ALWAYS = {
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",  # the kernels of all ranks wait on one GPU
}


def let_ranks_share_gpus(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets NCCL's variables so that ranks may share a GPU; call it before NCCL is loaded.

    A variable that is set stays as it is.
    """
    ours = {"NCCL_HOSTID": f"{socket.gethostname()}-{os.getpid()}", **_ALWAYS}
    ranks, here = environ.get("WORLD_SIZE"), environ.get("LOCAL_WORLD_SIZE")
    if ranks is not None and ranks == here:
        ours.update(_ONE_HOST)
    for name, value in ours.items():
        environ.setdefault(name, value)
