"""Regions that all ranks of a group map, made once for a device: one_shot, two_shot and ring work in them.

The ranks agree on every step through the store, because a rank that took another path would leave the others waiting:
1. what each rank has: host, device, Triton, tuning table, FASTCOLL_ALGO. Rank 0 decides, and the others read that;
2. whether kernels run on each rank;
3. whether each rank could allocate;
4. whether each rank could map;
5. whether the kernels between ranks compile on each rank, and then whether they are right (self_test.py).
If one rank fails, all ranks use NCCL, and rank 0 logs the reason once.

A group whose ranks map nothing takes step 2 at its first call that a kernel may serve: a list, or one with options
(``Region.vote``). So a program that makes no such call imports no Triton and compiles nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from fastcoll import env
from fastcoll.cuda.algorithms.call import Topology
from fastcoll.cuda.channels import ChannelShare
from fastcoll.cuda.consensus import Consensus, Refused
from fastcoll.cuda.errors import Member
from fastcoll.cuda.mapping import MAPPERS, TorchSymmetricMemory
from fastcoll.cuda.mapping_decision import (
    MappingRequest,
    RegionSizes,
    Verdict,
    decide,
    record_of,
)
from fastcoll.cuda.self_test import prepare_peers, require_lists, require_peers
from fastcoll.cuda.thresholds import Thresholds

__all__ = ["PeerMemory", "Region", "open_region"]

_log = logging.getLogger("fastcoll.cuda")

_TEST_WAIT = 5.0
"""Seconds that a kernel of the self-test waits for its peers; all ranks have arrived then."""


@dataclass(eq=False, repr=False)
class PeerMemory:
    """The regions of all ranks, as this rank maps them: the kernels' buffers, and behind them a bucket.

    Attributes:
        buffers: A ``PeerBuffers`` of fastcoll.kernels, over the first part of the regions. Its memory is this rank's
            region, and keeps the peers' regions mapped.
        bucket_at: Offset of the bucket in a region, in bytes.
        share: The programs that the launches may have.
        unmap: Frees a region.
        buckets: Addresses of all ranks' buckets: int64 [ranks], on the device.
    """

    buffers: Any
    bucket_at: int
    share: ChannelShare
    unmap: Callable[[Tensor], None]

    def __post_init__(self) -> None:
        # A region begins with its state, whose addresses are the fourth row.
        self.buckets: Tensor = self.buffers.table[3] + self.bucket_at

    def bucket(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns this rank's bucket.

        Raises:
            ValueError: The bucket is too small.
        """
        bucket: Tensor = self.buffers.memory[self.bucket_at :]
        size = elements * dtype.itemsize
        if size > bucket.numel():
            raise ValueError(
                f"expected a bucket of at most {bucket.numel()} bytes, got {size}. Use fewer tensors."
            )
        return bucket[:size].view(dtype)

    def limit_waits(self, timeout: float) -> None:
        """Sets the wait limit of launches prepared from now on: later than the group's timeout, in seconds.

        The watchdog ends a wait at the timeout, with a better error.
        """
        self.buffers.seconds = 2 * timeout

    def close(self) -> None:
        """Refuses to prepare launches; call it when no launch is running and none that exists will run."""
        self.buffers.close()
        self.share.close()

    def free(self) -> None:
        """Frees the memory; call it after ``close``. Waits for the device, without the GIL."""
        self.unmap(self.buffers.memory)


@dataclass(frozen=True)
class Region:
    """The result of ``open_region``; the topology is equal on all ranks.

    Attributes:
        topology: What the group can do.
        thresholds: Those of rank 0 and its device's name, because devices of other hosts may differ.
        peers: The memory, if it is mapped.
        vote: Agrees whether kernels run on all ranks, and returns the topology with that; None: it is known. All ranks
            call it at the same place among their calls. It raises DistBackendError as ``open_region`` does.
    """

    topology: Topology
    thresholds: Thresholds
    peers: PeerMemory | None = None
    vote: Callable[[], Topology] | None = None


def open_region(
    store: Store,
    member: Member,
    device: torch.device,
    timeout: float,
    request: MappingRequest,
    abort_cause: Callable[[], str],
    instance: str = "",
) -> Region:
    """Agrees on what the ranks of a group can do together, and maps their memory if they can; all ranks call it.

    Args:
        store: For this call only.
        member: This rank.
        device: Device of this rank's tensors.
        timeout: Seconds for each step.
        request: This rank's settings.
        abort_cause: Returns why the group was aborted meanwhile, or "".
        instance: Equal on all ranks, and unique among the groups of this process.

    Raises:
        DistBackendError: A rank did not arrive in time, the group was aborted, or the settings differ.
    """
    mapper = MAPPERS.get(device.type)
    share = ChannelShare(device, request.sizes.channels)
    with contextlib.ExitStack() as unless_mapped:
        unless_mapped.callback(share.close)
        consensus = Consensus(store, member, timeout, abort_cause)
        own = json.dumps(record_of(mapper, device, request, share.programs))
        verdict = Verdict(**json.loads(consensus.decided("record", own, decide)))
        if verdict.difference:
            raise member.fault("init", verdict.difference)
        thresholds = Thresholds(**verdict.thresholds)
        without = functools.partial(_without, member, thresholds)
        reason = verdict.reason
        if member.size == 1 and request.algorithm in ("auto", "nccl"):
            reason = reason or "there is one rank"
        if not verdict.triton or mapper is None:
            return without(False, reason)

        def vote() -> Topology:
            try:
                consensus.together("kernels", lambda: _try_lists(mapper, device))
            except Refused as refused:
                return without(False, str(refused), unexpected=True).topology
            return Topology(member.size, kernels=True, reason=reason)

        if reason:
            return replace(without(False, reason), vote=vote)
        topology = vote()
        if not topology.kernels:
            return Region(topology, thresholds)
        share.agree(verdict.channels)
        sizes = replace(request.sizes, channels=share.programs)
        try:
            peers = _map_regions(consensus, mapper, device, instance, verdict.devices, sizes, share)
        except Refused as refused:
            return without(True, str(refused), unexpected=True)
        unless_mapped.pop_all()
    peers.limit_waits(timeout)
    topology = Topology(member.size, True, True, request.sizes.bucket_bytes)
    return Region(topology, thresholds, peers)


def _try_lists(mapper: TorchSymmetricMemory, device: torch.device) -> None:
    where = mapper.kernel_device(device)
    with mapper.apart(where):
        require_lists(where)


def _map_regions(
    consensus: Consensus,
    mapper: TorchSymmetricMemory,
    device: torch.device,
    instance: str,
    identities: Sequence[str],
    sizes: RegionSizes,
    share: ChannelShare,
) -> PeerMemory:
    """Returns the memory of all ranks, on which each kernel has passed its self-test.

    Raises:
        Refused: A rank failed.
    """
    from fastcoll.kernels.peers import PeerBuffers

    member = consensus.member
    bucket_at = -(-sizes.bytes // 256) * 256
    where = mapper.kernel_device(device)

    def allocate() -> Tensor:
        mapper.require_atomics(where, identities)
        with mapper.apart(where):  # it must be zero before the peers, which write flags, get it
            return mapper.allocate(bucket_at + sizes.bucket_bytes, where)

    memory = consensus.together("allocated", allocate)

    def map_all() -> PeerMemory:
        name = f"fastcoll/{member.group}/{instance}"
        store = PrefixStore("map", consensus.store)
        addresses = mapper.map(memory, name, member, store, consensus.patience)
        with mapper.apart(where):
            words = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=where.type == "cuda")
            seconds = min(consensus.patience / 2, _TEST_WAIT)
            buffers = PeerBuffers(member.rank, memory, addresses, sizes, seconds, words)
            return PeerMemory(buffers, bucket_at, share, mapper.free)

    peers = consensus.together("mapped", map_all)

    def apart(step: Callable[[PeerMemory], object]) -> None:
        with mapper.apart(where):
            step(peers)

    try:
        consensus.together("compiled", lambda: apart(prepare_peers))
        consensus.together("works", lambda: apart(require_peers))
    except BaseException:
        peers.close()
        raise
    return peers


def _without(
    member: Member,
    thresholds: Thresholds,
    kernels: bool,
    reason: str,
    unexpected: bool = False,
) -> Region:
    if member.rank == 0:
        asked = env.read()["FASTCOLL_DEBUG"] in ("INFO", "TRACE")
        level = logging.WARNING if unexpected or asked else logging.INFO
        _log.log(
            level, member.message("init", f"device tensors are reduced by NCCL alone: {reason}")
        )
    return Region(Topology(member.size, kernels, reason=reason), thresholds)
