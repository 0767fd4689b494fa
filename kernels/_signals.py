"""Flags between ranks: a 64-bit word per (channel, kind, source rank) in the memory of the rank that waits for it.

A flag holds a number that only grows: the round (or the segment) that its source has reached. A wait is for "at least",
so a peer that is ahead never appears to be behind, and no flag is ever reset. At one round a microsecond 64 bits last
for 290 000 years, so nothing wraps.

**Posting.** The threads of a program write their data with ordinary stores. `tl.debug_barrier` is a barrier of the
program's threads. Then one lane per peer exchanges the flag with release semantics at system scope. Release is
cumulative in the PTX memory model: the barrier orders the other threads' stores before it, so a rank that acquires the
flag sees them. In SASS: BAR, MEMBAR.ALL.SYS, ATOMG.EXCH.STRONG.SYS.

**Waiting.** One lane per peer adds 0 to its flag with acquire semantics at system scope (ATOMG.ADD.STRONG.SYS, then
CCTL.IVALL, which empties the L1 cache of the multiprocessor). A barrier of the program's threads follows. Later loads
of all threads are ordered after the peers' stores. While a flag is behind, polls are relaxed, because other programs of
the multiprocessor need their L1 cache. The final acquire reads the value that the poll saw or, because a flag only
grows, one that its source released later. Data from peers is read with `.cg`, past the L1 cache, although the model
requires only a plain load: such data is read once, and correctness then does not depend on how L1 is invalidated. `.cg`
loads keep their 128 bits; volatile loads would not.

**Reading before a peer overwrites.** In the same way, loads are ordered before a later release of the same program:
their values were stored or summed before the barrier. A peer that acquired that flag may overwrite the memory.

**Timing out.** A wait lasts `limit` nanoseconds of the device's clock, less if the host ends it. Then the program
records the peer and the step of the wait in the status word of its own rank. It does not touch peers' memory again, and
ends. A later launch reads the status word and ends at once: after a fault the buffers are unusable.

**The host.** It has two words in its own memory, which the device maps, so neither side needs the driver. A first word
other than 0 ends waits; the second one gets a copy of the status.

**One decision.** A wait reads the clock and the host's first word (volatile) every POLLS_PER_LOOK polls. Each thread
reads for itself, and the values may differ. So one thread exchanges what it found with a word of the channel (a scalar
atomic), whose result, what was found before, is the same for all threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcoll.kernels.peers import FLAG_KINDS, MAX_RANKS

__all__ = [
    "ARRIVED",
    "CONSUMED",
    "FILLED",
    "KINDS",
    "LANES",
    "READY",
    "REDUCED",
    "absent_ranks",
    "announce",
    "flag_of",
    "flags_at_peers",
    "give_up",
    "own_flags",
    "post",
    "state_of",
    "wait",
]

LANES = tl.constexpr(MAX_RANKS)
"""Flags of one kind: one for each possible rank, and one lane of a warp for each flag."""

POLLS_PER_LOOK = tl.constexpr(64)
"""Polls between two reads of the host's word, which is beyond PCIe: a read takes as long as some polls."""

OVER = tl.constexpr(2)
"""The word of a channel's state that tells all threads whether a wait is over; its counters are before it."""

READY = tl.constexpr(0)
REDUCED = tl.constexpr(1)
FILLED = tl.constexpr(2)
CONSUMED = tl.constexpr(3)
ARRIVED = tl.constexpr(4)
KINDS = tl.constexpr(FLAG_KINDS)


@triton.jit
def flag_of(base, channel, kind, source):
    """Returns the address, in bytes, of the flag of `source` in the flags at `base`; int64."""
    return base + ((channel * KINDS + kind) * LANES + source).to(tl.int64) * 8


@triton.jit
def flags_at_peers(bases, world, channel, kind, rank):
    """Returns pointers to this rank's flag in each peer's memory, its own included, and which lanes have one.

    `bases` points to the addresses of the ranks' flags.
    """
    lanes = tl.arange(0, LANES)
    there = lanes < world
    base = tl.load(bases + lanes, mask=there, other=0)
    return flag_of(base, channel, kind, rank + lanes * 0).to(tl.pointer_type(tl.int64)), there


@triton.jit
def own_flags(bases, world, channel, kind, rank):
    """Returns pointers to the flags that peers set in this rank's memory, and which lanes have one."""
    lanes = tl.arange(0, LANES)
    base = tl.load(bases + rank)
    return flag_of(base, channel, kind, lanes).to(tl.pointer_type(tl.int64)), lanes < world


@triton.jit
def announce(flags, there, number):
    """Sets the flags to `number`, relaxed: unordered with other accesses."""
    numbers = tl.zeros([LANES], tl.int64) + number
    tl.atomic_xchg(flags, numbers, mask=there, sem="relaxed", scope="sys")


@triton.jit
def post(flags, there, number):
    """Sets the flags to `number` (one for all or one each), after all earlier reads and writes of this program."""
    tl.debug_barrier()
    tl.atomic_xchg(
        flags, tl.zeros([LANES], tl.int64) + number, mask=there, sem="release", scope="sys"
    )


@triton.jit
def state_of(peers, world, rank):
    """Returns a pointer to this rank's state words."""
    return tl.load(peers + 3 * world + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def _words_of(peers, world, rank):
    """Returns the address of the host's words, or 0; int64."""
    return tl.load(peers + 4 * world + rank)


@triton.jit
def _is_over(over, late, peers, world, rank):
    """Returns what the look before found: a value other than 0 if the wait was late, or ended by the host.

    The same for all threads of a program; `over` points to the channel's word.
    """
    words = _words_of(peers, world, rank)
    ended = tl.load(words.to(tl.pointer_type(tl.int64)), mask=words != 0, other=0, volatile=True)
    return tl.atomic_xchg(over, late.to(tl.int64) + ended, sem="relaxed", scope="gpu")


@triton.jit
def wait(flags, there, number, limit, peers, world, rank, channel):
    """Waits until all flags hold at least `number` (one for all or one each), for `limit` nanoseconds.

    Args:
        flags: Pointers to the flags.
        there: Which lanes have a flag.
        number: The number to wait for.
        limit: Nanoseconds until the wait times out.
        peers: Pointer to the table of ``PeerBuffers``.
        world: Number of ranks.
        rank: This rank.
        channel: The program's channel.

    Returns:
        -1, or the first lane whose flag is behind; int32.
    """
    lanes = tl.arange(0, LANES)
    nothing = tl.zeros([LANES], tl.int64)
    seen = tl.atomic_add(flags, nothing, mask=there, sem="acquire", scope="sys")
    behind = tl.min(tl.where(there & (seen < number), lanes, LANES), 0)
    if behind < LANES:
        began = tl.extra.cuda.globaltimer()
        polls = tl.zeros([], tl.int32)
        ended = tl.zeros([], tl.int64)
        over = state_of(peers, world, rank) + 16 * (1 + channel) + OVER
        tl.atomic_xchg(over, ended, sem="relaxed", scope="gpu")
        while (behind < LANES) & (ended == 0):
            seen = tl.atomic_add(flags, nothing, mask=there, sem="relaxed", scope="sys")
            behind = tl.min(tl.where(there & (seen < number), lanes, LANES), 0)
            polls += 1
            if polls % POLLS_PER_LOOK == 0:
                late = tl.extra.cuda.globaltimer() - began >= limit
                ended = _is_over(over, late, peers, world, rank)
        seen = tl.atomic_add(flags, nothing, mask=there, sem="acquire", scope="sys")
        behind = tl.min(tl.where(there & (seen < number), lanes, LANES), 0)
    tl.debug_barrier()
    return tl.where(behind < LANES, behind, -1)


@triton.jit
def absent_ranks(flags, there, number):
    """Returns a bit for each lane whose flag is behind `number`; int64. Reads this rank's own memory only."""
    lanes = tl.arange(0, LANES).to(tl.int64)
    nothing = tl.zeros([LANES], tl.int64)
    seen = tl.atomic_add(flags, nothing, mask=there, sem="acquire", scope="sys")
    bits = tl.zeros([LANES], tl.int64) + 1
    return tl.sum(tl.where(there & (seen < number), bits << lanes, nothing), 0)


@triton.jit
def give_up(peers, world, rank, step, peer, channel, number, absent):
    """Records this rank's first wait that timed out or was ended, in its first state word and the host's second word.

    The code is step | peer << 3 | channel << 8 | low 16 bits of number << 16 | a bit for each absent rank << 32.
    """
    code = peer.to(tl.int64) * 8 + channel.to(tl.int64) * 256 + step
    code += ((number.to(tl.int64) & 0xFFFF) << 16) + (absent << 32)
    state = state_of(peers, world, rank)
    before = tl.atomic_cas(state, tl.zeros([], tl.int64), code, sem="relaxed", scope="gpu")
    words = _words_of(peers, world, rank)
    if (before == 0) & (words != 0):
        tl.store((words + 8).to(tl.pointer_type(tl.int64)), code, cache_modifier=".wt")
