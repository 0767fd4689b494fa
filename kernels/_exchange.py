"""Rounds over staging: how one_shot and two_shot keep ranks apart without a barrier.

A message goes piece by piece. In each round a program copies its piece to one half of its channel's staging, posts
READY with the number of the round to all peers, waits for READY of all peers, and reads their halves. Odd and even
rounds take turns with the halves.

Why a half may be written again two rounds later, by whichever of these algorithms: rank r writes half t % 2 in round
t + 2 after it saw READY(t + 1) of every peer p, and p posts READY(t + 1) after it read everything of round t. The
post is a release behind those reads, r's wait an acquire before those writes, and both are by the same channel, whose
programs follow each other in the stream. So one wait for all ranks in every round is what reuse rests on; no
algorithm may leave it out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels._signals import (
    flags_at_peers,
    give_up,
    own_flags,
    post,
    state_of,
    wait,
)

__all__ = [
    "begin",
    "end",
    "half_of",
    "meet",
    "part_of",
    "stage_address",
    "table_at",
]


@triton.jit
def table_at(address):
    """Returns a pointer to the 64-bit words at `address`."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def part_of(source, out, rank, channels, EVERY_RANK: tl.constexpr):
    """Returns this program's channel, rank, source and out: a launch is one rank's, or EVERY_RANK's.

    Then there are `channels` programs for each rank, and `source` and `out` are the addresses of tables.
    """
    program = tl.program_id(0)
    if EVERY_RANK:
        rank = program // channels
        return (
            program % channels,
            rank,
            tl.load(table_at(source) + rank),
            tl.load(table_at(out) + rank),
        )
    else:
        return program, rank, source.to(tl.int64), out.to(tl.int64)


@triton.jit
def begin(peers, world, rank, channel, COUNTER: tl.constexpr):
    """Returns whether the buffers are free of faults, and how far this channel's counter is; int64."""
    state = state_of(peers, world, rank)
    # Not a load: each thread would do its own, and another program may record its fault in between.
    alive = tl.atomic_add(state, tl.zeros([], tl.int64), sem="relaxed", scope="gpu") == 0
    return alive, tl.load(state + 16 * (1 + channel) + COUNTER)


@triton.jit
def end(peers, world, rank, channel, COUNTER: tl.constexpr, number, alive):
    """Keeps the counter for the next launch."""
    if alive:
        tl.store(state_of(peers, world, rank) + 16 * (1 + channel) + COUNTER, number)


@triton.jit
def half_of(channel, number, stage_bytes):
    """Returns how far behind the start of a rank's staging this round's half lies, in bytes; int64."""
    return tl.multiple_of((channel * 2 + (number & 1)).to(tl.int64) * stage_bytes, 128)


@triton.jit
def stage_address(peers, world, rank):
    """Returns the address of this rank's staging; int64."""
    return tl.load(peers + world + rank)


@triton.jit
def meet(peers, world, rank, channel, KIND: tl.constexpr, STEP: tl.constexpr, number, spins):
    """Posts `number` to all ranks and waits for theirs.

    Returns:
        Whether all came; if not, the status says who did not.
    """
    theirs, there = flags_at_peers(peers, world, channel, KIND, rank)
    post(theirs, there, number)
    mine, there = own_flags(peers, world, channel, KIND, rank)
    missing = wait(mine, there, number, spins, peers, world, rank)
    if missing >= 0:
        absent = tl.zeros([], tl.int64)
        give_up(peers, world, rank, STEP, missing, channel, number, absent)
    return missing < 0
