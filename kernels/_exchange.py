"""Rounds over staging: how one_shot and two_shot reuse staging without a barrier.

A message is processed in pieces. In each round a program copies its piece to one half of its channel's staging and
posts READY with the round's number to all peers. Then it waits for READY of all peers and reads their halves. Odd and
even rounds alternate between the halves.

A half may be written again two rounds later, by either algorithm. Rank r writes half t % 2 in round t + 2 after it saw
READY(t + 1) of every peer p. Peer p posts READY(t + 1) after it read everything of round t. The post is a release after
those reads, and r's wait is an acquire before those writes. Both are of the same channel, whose programs follow each
other in the stream. So reuse depends on one wait for all ranks in every round; no algorithm may leave it out.
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
]


@triton.jit
def begin(peers, world, rank, channel, COUNTER: tl.constexpr):
    """Returns whether the buffers are free of faults, and the value of this channel's counter; int64."""
    state = state_of(peers, world, rank)
    # Not a load: each thread would load by itself, and another program may record a fault in between.
    alive = tl.atomic_add(state, tl.zeros([], tl.int64), sem="relaxed", scope="gpu") == 0
    return alive, tl.load(state + 16 * (1 + channel) + COUNTER)


@triton.jit
def end(peers, world, rank, channel, COUNTER: tl.constexpr, number, alive):
    """Keeps the counter for the next launch."""
    if alive:
        tl.store(state_of(peers, world, rank) + 16 * (1 + channel) + COUNTER, number)


@triton.jit
def half_of(channel, number, stage_bytes):
    """Returns the offset of this round's half in a rank's staging, in bytes; int64."""
    return tl.multiple_of((channel * 2 + (number & 1)).to(tl.int64) * stage_bytes, 128)


@triton.jit
def meet(peers, world, rank, channel, KIND: tl.constexpr, STEP: tl.constexpr, number, limit):
    """Posts `number` to all ranks and waits for theirs.

    Returns:
        Whether all arrived; if not, the status names a missing rank.
    """
    theirs, there = flags_at_peers(peers, world, channel, KIND, rank)
    post(theirs, there, number)
    mine, there = own_flags(peers, world, channel, KIND, rank)
    missing = wait(mine, there, number, limit, peers, world, rank, channel)
    if missing >= 0:
        absent = tl.zeros([], tl.int64)
        give_up(peers, world, rank, STEP, missing, channel, number, absent)
    return missing < 0
