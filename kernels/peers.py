"""The memory that ranks share, as the kernels between ranks see it: its layout, and its faults.

Every rank has one region of the same layout that all ranks map: own state, flags that the peers set, staging for
messages, and the slots of the ring. This file does not depend on the mapper: torch symmetric memory, CUDA IPC, or
shared memory on the CPU, where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import torch

__all__ = ["FLAG_KINDS", "MAX_CHANNELS", "MAX_RANKS", "PeerBuffers", "PeerFault", "PeerLayout"]

MAX_RANKS = 32
MAX_CHANNELS = 128
FLAG_KINDS = 5

_LINE = 128
_STATE_WORDS = 16
_STEPS = {
    1: "to have its message ready",
    2: "to have reduced its share",
    3: "to have read this rank's message",
    4: "to send the next segment",
    5: "to free a slot for the next segment",
}


class PeerFault(RuntimeError):
    """A rank's wait for a peer timed out or was ended.

    Attributes:
        rank: The rank that waited.
        peer: The rank that it waited for.
        step: Number of the step.
        absent: Ranks that had not launched at all. Empty if all had, or if the algorithm waits for all ranks directly,
            so that `peer` is the right one.
    """

    def __init__(self, message: str, rank: int, peer: int, step: int, absent: list[int]) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.step = step
        self.absent = absent


@dataclass(frozen=True)
class PeerLayout:
    """Layout of a rank's region. Equal on all ranks.

    Attributes:
        channels: Programs that a launch may have. A channel has its own flags, staging and slots, so launches with
            different numbers of channels may follow each other.
        stage_bytes: Size of one of the two halves of a channel's staging; multiple of 128.
        slots: Segments of the ring that may be in flight from a rank to the next, for each channel; at least 2.
        slot_bytes: Size of a slot; multiple of 128.
    """

    channels: int
    stage_bytes: int
    slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        _expect(
            "channels", self.channels, 1 <= self.channels <= MAX_CHANNELS, f"1 to {MAX_CHANNELS}"
        )
        _expect("slots", self.slots, self.slots >= 2, "at least 2")
        for name in ("stage_bytes", "slot_bytes"):
            size = getattr(self, name)
            _expect(name, size, size > 0 and size % _LINE == 0, f"a multiple of {_LINE}, not 0")

    @property
    def flags_at(self) -> int:
        """Offset of the flags in the region, in bytes."""
        return 8 * _STATE_WORDS * (1 + self.channels)

    @property
    def staging_at(self) -> int:
        """Offset of the staging in the region, in bytes."""
        return self.flags_at + self.channels * FLAG_KINDS * MAX_RANKS * 8

    @property
    def slots_at(self) -> int:
        """Offset of the slots in the region, in bytes."""
        return self.staging_at + self.channels * 2 * self.stage_bytes

    @property
    def bytes(self) -> int:
        """Size of the region."""
        return self.slots_at + self.channels * self.slots * self.slot_bytes


@dataclass(eq=False, repr=False)
class PeerBuffers:
    """The regions of all ranks, as one rank maps them: mapped already, and zero.

    Launches on one object must follow each other in one stream, in the same order on all ranks and with the same
    arguments (count, dtypes, operation, channels). No barrier is needed between them.

    Args:
        rank: This rank.
        memory: This rank's own region: uint8 [at least layout.bytes], contiguous, on the device.
        addresses: Address of each rank's region as this rank's device sees it, in rank order.
        layout: Layout of the regions; the same on all ranks.
        seconds: Until a wait times out. A new limit applies to launches prepared from then on.
        words: int64 [2] on the host, zero, where the device can read and write it (pinned). A first word other than 0
            ends all waits; the second word gets the status of a kernel whose wait failed.

    Raises:
        ValueError: An address is unusable for kernels.

    Attributes:
        world_size: Number of ranks.
        table: int64 [5, world_size] on the device: addresses of the ranks' flags, staging, slots and state (a rank
            touches only its own state), and of `words`.
        closed: Whether ``close`` was called.
    """

    rank: int
    memory: torch.Tensor
    addresses: InitVar[Sequence[int]]
    layout: PeerLayout
    seconds: float = 30.0
    words: torch.Tensor | None = None
    world_size: int = field(init=False)
    table: torch.Tensor = field(init=False)
    closed: bool = field(init=False, default=False)

    def __post_init__(self, addresses: Sequence[int]) -> None:
        own, expected = addresses[self.rank], self.memory.data_ptr()
        meant = f"the address of memory, {hex(expected)}"
        _expect("addresses[rank]", hex(own), own == expected, meant)
        for peer, address in enumerate(addresses):
            _expect(
                f"address of rank {peer}",
                hex(address),
                address != 0 and address % _LINE == 0,
                f"a multiple of {_LINE}, not 0",
            )
        self.world_size = len(addresses)
        offsets = (self.layout.flags_at, self.layout.staging_at, self.layout.slots_at, 0)
        rows = [[address + offset for address in addresses] for offset in offsets]
        rows.append([0 if self.words is None else self.words.data_ptr()] * self.world_size)
        self.table = torch.tensor(rows, dtype=torch.int64, device=self.device)

    @property
    def device(self) -> torch.device:
        """The device of the regions."""
        return self.memory.device

    @property
    def limit(self) -> int:
        """Nanoseconds until a wait times out."""
        return min(int(self.seconds * 1e9), (1 << 63) - 1)

    @property
    def state(self) -> torch.Tensor:
        """This rank's state: int64 [1 + channels, 16]; row 0 is the status, then a row of counters per channel."""
        words = self.memory[: self.layout.flags_at].view(torch.int64)
        return words.view(1 + self.layout.channels, _STATE_WORDS)

    def check(self) -> None:
        """Raises the fault that launches have recorded so far, if any. Waits for one word from the device.

        Raises:
            PeerFault: This rank's wait for a peer failed.
        """
        code = int(self.state[0, 0])
        if code == 0:
            return
        step, peer, channel, number = code & 7, code >> 3 & 31, code >> 8 & 255, code >> 16 & 0xFFFF
        absent = [rank for rank in range(self.world_size) if code >> (32 + rank) & 1]
        missing = ", ".join(map(str, absent))
        hint = f" Not launched at all on rank {missing}." if absent else ""
        raise PeerFault(
            f"fastcoll.kernels [rank {self.rank}/{self.world_size}, channel {channel}, number {number}]: expected "
            f"rank {peer} {_STEPS.get(step, f'to do step {step}')} within {self.seconds:g} s, got no sign of it."
            f"{hint} Find out why that rank is late.",
            self.rank,
            peer,
            step,
            absent,
        )

    def close(self) -> None:
        """Refuses to prepare launches on these buffers. Drop those that exist before the peers' memory is unmapped."""
        self.closed = True

    def require_open(self) -> None:
        """Checks that the buffers are open.

        Raises:
            RuntimeError: The buffers are closed.
        """
        if self.closed:
            raise RuntimeError(
                f"fastcoll.kernels [rank {self.rank}/{self.world_size}]: expected open buffers, got closed ones: the "
                "peers' memory may be unmapped. Make new buffers, and prepare launches on them."
            )


def _expect(name: str, value: object, holds: bool, expectation: str) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expectation}, got {value}. Correct the argument.")
