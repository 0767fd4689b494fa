"""Algorithms that move data by NCCL: ``nccl`` and ``all_to_all``.

nccl: NCCL's own all-reduce. A list, or a tensor with a factor, goes through one bucket: copy-in, all-reduce, copy-out.
    Phases: the library's. Bytes: 2 (n - 1) / n of the message, as in a ring. Steps: 2 (n - 1), as in a ring; fewer if
    NCCL uses a tree or the switch. Launches: 3; a tensor by itself is left to C++, which makes one call.
    Chosen for messages that no other algorithm serves faster, and for dtypes and operations without a kernel. NCCL
    chooses the order of the sum, and rounds 16-bit partial sums.

all_to_all: one rounding over NCCL, by an all-to-all, a fused sum in float32 and an all-gather.
    Phases: cast to the wire dtype (not if the message has that dtype and divides evenly); send each rank its share; sum
    the received shares in float32 by the CPU's tree, round once, and write over the own share; gather the shares; cast
    back. Bytes: 2 (n - 1) W / n. Steps: 2 (the library's). Launches: 3 kernels and 2 NCCL calls; on one rank only the
    casts.
    Chosen for narrower wires if ranks do not map each other's memory, and for sums in fixed order. A reduce-scatter is
    its first half: bytes (n - 1) W / n, 1 kernel and 1 NCCL call. A reduce sends the shares' sums to the root: (n - 1)
    W / n more, and a third NCCL call. PREMUL_SUM first gathers the ranks' factors. The error is one rounding for any
    number of ranks. The bits are those of one_shot and two_shot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastcoll._load_cuda import CUDA
from fastcoll.buckets import BLOCK, GRAIN, address_table
from fastcoll.cuda.algorithms.call import COPIED, Call, Topology, refuse_sum
from fastcoll.cuda.algorithms.launches import (
    NOTHING,
    Issued,
    Piece,
    PlanContext,
    Prepared,
    calls,
    copy_in,
    copy_out,
    layout_of,
    through_bucket,
)

__all__ = [
    "measured_all_to_all",
    "measured_nccl",
    "prepare_all_to_all",
    "prepare_nccl",
    "refuse_all_to_all",
    "refuse_nccl",
]

_FACTOR = 8  # bytes of a rank's factor
_OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")  # of a bucket: PREMUL_SUM has a factor of its own


def refuse_nccl(call: Call, topology: Topology) -> str:
    """Returns why NCCL's all-reduce cannot serve a call, or ""."""
    if call.wire is not None:
        return "NCCL rounds every partial sum to the dtype that travels; all_to_all does not"
    if call.is_plain:
        return ""
    if not topology.kernels:
        return "the kernels that fuse tensors need Triton on all ranks"
    if call.dtype not in COPIED:
        return f"no kernel fuses tensors of {call.dtype}"
    if call.op not in _OPS:
        return f"no bucket is reduced by {call.op}"
    return ""


def measured_nccl(call: Call, topology: Topology) -> int:
    """Returns the number of sums of squares that copying out of a bucket makes; NCCL itself measures nothing."""
    return 0 if call.is_plain else layout_of(call.sizes).blocks(BLOCK)


def prepare_nccl(call: Call, pieces: Sequence[Piece], context: PlanContext) -> Prepared:
    """Returns copy-in, all-reduce and copy-out of a bucket."""

    def all_reduce(address: int, elements: int) -> CUDA.PlannedCalls:
        whole = (address, elements)
        return calls([("all_reduce", call.dtype, call.op, -1, whole, whole)])

    return through_bucket(call, pieces, context, all_reduce, call.scale)


def refuse_all_to_all(call: Call, topology: Topology) -> str:
    """Returns why all_to_all cannot serve a call, or ""."""
    if not topology.kernels:
        return "the kernels need Triton on all ranks"
    if call.premul is None:
        return "the factor is on the device; a kernel needs a number"
    return refuse_sum(call, ("SUM", "AVG", "PREMUL_SUM"), COPIED)


def _is_uncopied(call: Call, ranks: int) -> bool:
    """Returns whether the message itself is cut into shares; depends only on what is equal on all ranks."""
    return call.wire is None and not call.is_list and call.elements % (ranks * GRAIN) == 0


def measured_all_to_all(call: Call, topology: Topology) -> int:
    """Returns the number of sums of squares that copying out of a bucket makes."""
    if call.collective != "all_reduce" or _is_uncopied(call, topology.ranks):
        return 0
    return layout_of(call.sizes).blocks(BLOCK)


def prepare_all_to_all(call: Call, pieces: Sequence[Piece], context: PlanContext) -> Prepared:
    """Returns cast, exchange of shares, sum, all-gather and cast back; of the others, `_prepare_shares`."""
    from fastcoll.kernels.reduce import prepare_reduce

    member = context.member
    if call.collective != "all_reduce":
        return _prepare_shares(call, pieces[0], context)
    wire, item, ranks = call.wire_dtype, call.wire_dtype.itemsize, member.size
    uncopied = _is_uncopied(call, ranks)
    elements = call.elements if uncopied else layout_of(call.sizes).elements
    share = -(-elements // (ranks * GRAIN)) * GRAIN
    size = ranks * share * item
    room = size if uncopied else 2 * size
    memory = context.workspace(room + _FACTOR * ranks)
    received = memory.data_ptr()
    factors, before, held = _factors(call, received + room, context)
    own_share = received + member.rank * share * item
    flat = received + size
    behind: list[CUDA.Launch] = []
    if not uncopied:
        bucket = context.view(flat, elements, wire)
        before.append(copy_in(pieces, call.dtype, bucket, context))
        behind.append(copy_out(pieces, call.dtype, bucket, context))
    # The padding of the last shares is sent, but never summed.
    own = max(0, min(share, elements - member.rank * share))
    summed = prepare_reduce(
        [received + rank * share * item for rank in range(ranks)],
        own_share,
        own,
        wire,
        context.device,
        op=call.op,
        scale=call.scale,
        factors=factors,
    )
    if (
        ranks == 1
        and call.scale == 1.0
        and not factors
        and (not uncopied or pieces[0].source == pieces[0].out)
    ):
        # the sum of one rank is the cast message
        return Prepared((*before, *behind), tables=not uncopied, held=(memory, held))
    sent, result = (0, 0) if uncopied else (flat, flat)  # offsets in the message, or addresses
    gather = ("all_gather", wire, "", -1, (own_share, share), (result, ranks * share))
    steps: tuple[CUDA.Launch | CUDA.PlannedCalls, ...] = (
        *before,
        _exchange(
            wire, [share] * ranks, member.rank, sent, received, share * item, from_source=uncopied
        ),
        summed,
        calls([gather], to_out=uncopied),
        *behind,
    )
    return Prepared(steps, tables=not uncopied, held=(memory, held))


def _factors(
    call: Call, address: int, context: PlanContext
) -> tuple[int, list[CUDA.Launch | CUDA.PlannedCalls], object]:
    """Returns where the ranks' factors of a PREMUL_SUM lie, steps that gather them there, and what holds the own one.

    For other operations, 0 and no steps. Factors may differ between ranks, as with NCCL. A kernel multiplies after the
    exchange, so products of 16-bit elements are not rounded on their way.
    """
    if call.op != "PREMUL_SUM":
        return 0, [], None
    from fastcoll.kernels._configuration import double_bits

    assert call.premul is not None, "refused before"
    own = address_table([double_bits(call.premul)], context.device)
    every = (address, context.member.size)
    gather = ("all_gather", torch.float64, "", -1, (own.data_ptr(), 1), every)
    return address, [calls([gather])], own


def _prepare_shares(call: Call, piece: Piece, context: PlanContext) -> Prepared:
    """Returns exchange and sum of a reduce-scatter; of a reduce, the root then receives the sums, in its result."""
    from fastcoll.kernels.reduce import prepare_reduce

    rank, ranks = context.member.rank, context.member.size
    dtype, item = call.dtype, call.dtype.itemsize
    rooted = call.collective == "reduce"
    grain = ranks * GRAIN if rooted else ranks  # a scatter's shares are given
    share = -(-call.elements // grain) * (grain // ranks)
    lengths = [max(0, min(share, call.elements - to * share)) for to in range(ranks)]
    apart = -(-share // GRAIN) * GRAIN * item  # so that all parts are aligned
    memory = context.workspace(ranks * (apart + _FACTOR))
    received = memory.data_ptr()
    factors, steps, held = _factors(call, received + ranks * apart, context)
    own = received + rank * apart
    summed = prepare_reduce(
        [received + sender * apart for sender in range(ranks)],
        own if rooted else piece.out,
        lengths[rank],
        dtype,
        context.device,
        op=call.op,
        factors=factors,
        out_at=-1 if rooted else 2,
    )
    steps += [_exchange(dtype, lengths, rank, 0, received, apart, from_source=True), summed]
    if rooted:
        collect: list[Issued] = [("send", dtype, "", call.root, (own, lengths[rank]), NOTHING)]
        for sender in range(ranks) if rank == call.root else ():
            part = (sender * share * item, lengths[sender])
            collect.append(("recv", dtype, "", sender, NOTHING, part))
        steps.append(calls((one for one in collect if _moves(one)), to_out=True))
    return Prepared(tuple(steps), held=(memory, held))


def _moves(issued: Issued) -> bool:
    return issued[4][1] > 0 or issued[5][1] > 0


def _exchange(
    dtype: torch.dtype,
    lengths: Sequence[int],
    own: int,
    sent: int,
    received: int,
    apart: int,
    *,
    from_source: bool,
) -> CUDA.PlannedCalls:
    """Returns the step that sends each rank its share and receives the shares of rank `own` from all.

    Shares have these `lengths`. Those to send lie one behind the other from `sent` on, those received `apart` bytes
    from each other.
    """
    every: list[Issued] = []
    start = sent
    for rank, length in enumerate(lengths):
        every += [
            ("send", dtype, "", rank, (start, length), NOTHING),
            ("recv", dtype, "", rank, NOTHING, (received + rank * apart, lengths[own])),
        ]
        start += length * dtype.itemsize
    return calls((one for one in every if _moves(one)), from_source=from_source)
