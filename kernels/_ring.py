"""Ring all-reduce, reduce-scatter and all-gather: every rank sends to its right neighbour only.

Formula: out[i] = scale * (x_{q+1}[i] + x_{q+2}[i] + ... + x_q[i]) for the elements of chunk q, indices modulo n.
Each chunk is summed in the order of its path round the ring, which differs from chunk to chunk. So the bits are equal
on all ranks and from run to run, but differ from those of one_shot. Between ranks a partial sum is float32, so the
result is rounded once.

Phases: steps 0 to n - 1 reduce; step n - 1 completes the chunk, scales and rounds it; steps n - 1 to 2 n - 2 gather.
In step s rank r handles chunk (r - s - 1) mod n. It takes a segment from its slot, which the left neighbour has
filled. It combines the segment with its own message, and writes the result to a slot of the right neighbour.
Bytes for a message of S bytes, on the link: (n - 1) / n of the partials' bytes, and (n - 1) / n W; in memory S read
and S written, besides the slots, which are written and read once for each byte on the link.
Bound: bytes on the link / bandwidth of one direction of it, plus (2 n - 2) hops for the first segment.

Order of the work: a channel takes every `channels`-th segment. Half as many as there are slots form a group; each step
processes all segments of the group. So other segments are processed while one travels. The k-th operation of a program
waits only for operations up to number k minus the group size, on any rank, so nothing deadlocks.

Slots: FILLED counts segments that the left neighbour has written, CONSUMED those that the right one has read. A rank
fills a slot only after the slot's previous segment was consumed, so slots are reused within and across launches without
a barrier. Both counts only grow; between launches a channel's counts are equal on all ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels._arithmetic import averager, factor_of, finish
from fastcoll.kernels._dtypes import addressed, narrow, widen
from fastcoll.kernels._exchange import begin, end
from fastcoll.kernels._pieces import NARROW, as_mask, pointer, whole
from fastcoll.kernels._signals import (
    ARRIVED,
    CONSUMED,
    FILLED,
    LANES,
    absent_ranks,
    announce,
    flag_of,
    flags_at_peers,
    give_up,
    own_flags,
    post,
    wait,
)

__all__ = ["ring_kernel"]


@triton.jit
def _block(
    message, incoming, outgoing, out, start, length, receives, sends, scale, average,
    PHASE: tl.constexpr, MESSAGE: tl.constexpr, WIRE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    there = at < length
    message = pointer(message, MESSAGE, WIDE)
    out = pointer(out, MESSAGE, WIDE)
    incoming = pointer(incoming, tl.float32 if PHASE < 2 else WIRE, WIDE)
    outgoing = pointer(outgoing, tl.float32 if PHASE == 0 else WIRE, WIDE)
    if PHASE < 2:
        value = widen(tl.load(message + at, mask=there), MESSAGE, tl.float32)
        if receives:
            value = tl.load(incoming + at, mask=there, cache_modifier=".cg") + value
    if PHASE == 0:
        tl.store(outgoing + at, value, mask=there)
    elif PHASE == 1:
        result = narrow(finish(value, scale, average), WIRE)
        tl.store(outgoing + at, result, mask=as_mask(there & sends))
        tl.store(out + at, narrow(widen(result, WIRE, tl.float32), MESSAGE), mask=there)
    elif PHASE == 2:
        result = tl.load(incoming + at, mask=there, cache_modifier=".cg")
        tl.store(outgoing + at, result, mask=as_mask(there & sends))
        if WIRE == MESSAGE:
            tl.store(out + at, result, mask=there)
        else:
            tl.store(out + at, narrow(widen(result, WIRE, tl.float32), MESSAGE), mask=there)
    else:
        result = tl.load(message + at, mask=there)
        tl.store(outgoing + at, result, mask=as_mask(there & sends))
        tl.store(out + at, result, mask=there)


@triton.jit
def _segment(
    message, incoming, outgoing, out, length, aligned, receives, sends, scale, average,
    PHASE: tl.constexpr, MESSAGE: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Processes one segment. PHASE 0 reduces, 1 reduces and finishes, 2 passes on, 3 begins to gather.

    `message`, `out` and the slots `incoming` and `outgoing` are addresses. Slots hold float32 while partial sums
    travel, else WIRE.
    """
    most = whole(length, aligned)
    for start in range(0, most, BLOCK):
        _block(
            message, incoming, outgoing, out, start, most, receives, sends, scale, average,
            PHASE, MESSAGE, WIRE, True, BLOCK,
        )  # fmt: skip
    for start in range(most, length, BLOCK // NARROW):
        _block(
            message, incoming, outgoing, out, start, length, receives, sends, scale, average,
            PHASE, MESSAGE, WIRE, False, BLOCK // NARROW,
        )  # fmt: skip


@triton.jit
def _wait_for_neighbours(
    peers, world, rank, channel, left, right, filled, consumed, receives, sends, arrived, limit
):
    """Waits until the left rank has filled `filled` segments and the right one consumed `consumed`, in one poll.

    Returns:
        Whether they have; if not, the status has the late rank, and the ranks that have not launched at all.
    """
    lanes = tl.arange(0, LANES)
    base = tl.load(peers + rank)
    address = tl.where(
        lanes == 0,
        flag_of(base, channel, FILLED, left + lanes * 0),
        flag_of(base, channel, CONSUMED, right + lanes * 0),
    )
    there = as_mask(((lanes == 0) & receives) | ((lanes == 1) & sends))
    numbers = tl.where(lanes == 0, filled, consumed)
    flags = address.to(tl.pointer_type(tl.int64))
    missing = wait(flags, there, numbers, limit, peers, world, rank, channel)
    if missing >= 0:
        flags, all_there = own_flags(peers, world, channel, ARRIVED, rank)
        absent = absent_ranks(flags, all_there, arrived)
        late = tl.where(missing == 0, left, right)
        number = tl.where(missing == 0, filled, consumed)
        give_up(peers, world, rank, 4 + missing, late, channel, number, absent)
    return missing < 0


@triton.jit
def _tell_neighbours(peers, rank, channel, left, right, filled, consumed, receives, sends):
    """Posts to the right that its slot is filled, and to the left that its segment was consumed."""
    lanes = tl.arange(0, LANES)
    there = as_mask(((lanes == 0) & sends) | ((lanes == 1) & receives))
    base = tl.load(peers + tl.where(lanes == 0, right, left), mask=there, other=0)
    address = tl.where(
        lanes == 0,
        flag_of(base, channel, FILLED, rank + lanes * 0),
        flag_of(base, channel, CONSUMED, rank + lanes * 0),
    )
    post(address.to(tl.pointer_type(tl.int64)), there, tl.where(lanes == 0, filled, consumed))


@triton.jit
def ring_kernel(
    source, out, peers, rank, world, channels, count, chunk, source_stride, out_stride,
    segment, slots, slot_bytes, first, last, scale, divisor, limit, aligned,
    MESSAGE: tl.constexpr, WIRE: tl.constexpr, REDUCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps `first` to `last` of one rank, a program per channel; see the head of the file."""
    channel = tl.program_id(0)
    source = source.to(tl.int64)
    out = out.to(tl.int64)
    peers = addressed(peers, tl.int64)
    alive, sent = begin(peers, world, rank, channel, 1)
    received = sent
    arrived = sent + 1
    item: tl.constexpr = MESSAGE.primitive_bitwidth // 8
    count = count.to(tl.int64)
    chunk = chunk.to(tl.int64)
    factor = factor_of(scale, tl.float32)
    average = averager(divisor)
    left = (rank + world - 1) % world
    right = (rank + 1) % world
    of_channel = channel.to(tl.int64) * slots * slot_bytes
    own_slots = tl.load(peers + 2 * world + rank) + of_channel
    right_slots = tl.load(peers + 2 * world + right) + of_channel
    if alive:
        theirs, there = flags_at_peers(peers, world, channel, ARRIVED, rank)
        announce(theirs, there, arrived)
    segments = (chunk + segment - 1) // segment
    index = channel.to(tl.int64)
    while (index < segments) & alive:
        members = (segments - index + channels - 1) // channels
        members = tl.minimum(members, (slots // 2).to(tl.int64))
        step = first + 0
        while (step <= last) & alive:
            owner = (rank + 2 * world - step - 1) % world
            receives = step > first
            sends = step < last
            member = members * 0
            while (member < members) & alive:
                start = (index + member * channels) * segment
                length = tl.minimum(tl.minimum(chunk, count - owner * chunk) - start, segment)
                alive = _wait_for_neighbours(
                    peers, world, rank, channel, left, right, received + 1, sent + 1 - slots,
                    receives, sends, arrived, limit,
                )  # fmt: skip
                if alive:
                    incoming = own_slots + received % slots * slot_bytes
                    outgoing = right_slots + sent % slots * slot_bytes
                    message = source + (owner * source_stride + start) * item
                    result = out + (owner * out_stride + start) * item
                    if REDUCES:
                        if step < world - 1:
                            _segment(
                                message, incoming, outgoing, result, length, aligned, receives, sends,
                                factor, average, 0, MESSAGE, WIRE, BLOCK,
                            )  # fmt: skip
                        elif step == world - 1:
                            _segment(
                                message, incoming, outgoing, result, length, aligned, receives, sends,
                                factor, average, 1, MESSAGE, WIRE, BLOCK,
                            )  # fmt: skip
                    elif step == first:
                        _segment(
                            message, incoming, outgoing, result, length, aligned, receives, sends,
                            factor, average, 3, MESSAGE, WIRE, BLOCK,
                        )  # fmt: skip
                    if step >= world:
                        _segment(
                            message, incoming, outgoing, result, length, aligned, receives, sends,
                            factor, average, 2, MESSAGE, WIRE, BLOCK,
                        )  # fmt: skip
                    sent += sends.to(tl.int64)
                    received += receives.to(tl.int64)
                    _tell_neighbours(
                        peers, rank, channel, left, right, sent, received, receives, sends
                    )
                member += 1
            step += 1
        index += members * channels
    end(peers, world, rank, channel, 1, sent, alive)
