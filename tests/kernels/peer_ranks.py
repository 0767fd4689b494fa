"""What the ranks of the tests of kernels between ranks run: memory that all map, and calls compared with the oracle.

Imported by the tests for the names of these functions, and by the ranks, which interpret the kernels. Only functions
import kernels, as the test process may have compiled ones.
"""

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import kernel_oracle
import torch
from world import here

SECONDS = 90.0
"""Until a wait of the interpreter times out."""

DEVICE_SECONDS = 5.0
"""The same of a GPU."""

_GUARD = 5


@dataclass(frozen=True)
class Case:
    """One collective call of all ranks."""

    collective: str
    algorithm: str
    dtype: torch.dtype
    count: int
    wire: torch.dtype | None = None
    op: str = "sum"
    scale: float = 1.0
    offset: int = 0
    in_place: bool = False
    seed: int = 0


def prepare(algorithm: str, collective: str, *sides: Any, **options: Any) -> Any:
    """Returns a launch of what ``ring.prepare_all_reduce`` and its like prepare."""
    from fastcoll.kernels import ring, staged

    ways = {"ring": ring, "one_shot": staged.one_shot, "two_shot": staged.two_shot}
    return getattr(ways[algorithm], f"prepare_{collective}")(*sides, **options)


def mapped(name: str, size: int) -> list[torch.Tensor]:
    """Returns a piece of memory of every rank, zero at first, mapped by all: uint8 [size] each."""
    folder = here().scratch
    own = folder / f"{name}{here().rank}"
    with open(own.with_suffix(".new"), "wb") as file:
        file.truncate(size)
    os.rename(own.with_suffix(".new"), own)
    paths = [folder / f"{name}{rank}" for rank in range(here().size)]
    for path in paths:
        while not path.exists():
            time.sleep(0.002)
    return [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]


def open_buffers(*layout: int, seconds: float = SECONDS, words: torch.Tensor | None = None) -> Any:
    """Returns this rank's PeerBuffers over memory that all ranks map, and interprets from then on.

    Args:
        layout: Of a PeerLayout: channels, bytes of staging, slots and bytes of a slot; 2, 1024, 4, 512 if not given.
        seconds: Until a wait times out.
        words: What the host shares with the kernels.
    """
    import quick_interpreter

    quick_interpreter.install()
    from fastcoll.kernels.peers import PeerBuffers, PeerLayout

    parts = PeerLayout(*(layout or (2, 1024, 4, 512)))
    regions = mapped("region", parts.bytes)
    addresses = [region.data_ptr() for region in regions]
    buffers = PeerBuffers(here().rank, regions[here().rank], addresses, parts, seconds, words)
    buffers.regions = regions  # kept mapped
    return buffers


def buffers_on(
    device: torch.device | str, ranks: int, layout: Any, seconds: float = DEVICE_SECONDS
) -> list[Any]:
    """Returns the PeerBuffers of each rank, over one allocation of this process."""
    from fastcoll.kernels.peers import PeerBuffers

    space = torch.zeros(ranks * layout.bytes + 128, dtype=torch.uint8, device=device)
    start = -space.data_ptr() % 128
    regions = space[start : start + ranks * layout.bytes].view(ranks, layout.bytes)
    addresses = [region.data_ptr() for region in regions]
    return [PeerBuffers(rank, regions[rank], addresses, layout, seconds) for rank in range(ranks)]


def fault_of(buffers: Any) -> tuple[int, int, list[int], str] | None:
    """Returns whom a wait gave up, in which step, who launched nothing, and the error's text; None without a fault."""
    from fastcoll.kernels.peers import PeerFault

    try:
        buffers.check()
    except PeerFault as fault:
        return fault.peer, fault.step, fault.absent, str(fault)
    return None


def play(
    cases: list[Case], jitter: int, channels: int = 2, slots: int = 4, slow: int | None = None
) -> None:
    """Runs the cases on one set of buffers, with pauses between, and compares each with the oracle, bit by bit.

    The rank `slow` dawdles after each poll of a flag, hence within launches.
    """
    buffers = open_buffers(channels, 1024, slots, 512)
    import quick_interpreter

    rank = here().rank
    quick_interpreter.dawdle[0] = 0.02 if rank == slow else 0.0
    pauses = random.Random(jitter * 100 + rank)
    for case in cases:
        if pauses.random() < 0.4:
            time.sleep(pauses.random() * 0.02)
        call = Call.of(case, here().size, "cpu")
        call.launch(rank, buffers)
        buffers.check()
        call.compare(rank)


@dataclass
class Call:
    """The tensors of all ranks for one call."""

    case: Case
    sources: list[torch.Tensor]  # the message of each rank
    outs: list[torch.Tensor]  # what each rank's result goes to
    spaces: list[torch.Tensor]  # the memory around the results, 7 at first
    expected: list[torch.Tensor]  # the result of each rank, on the CPU
    options: dict[str, Any]  # further arguments of the call

    @classmethod
    def of(cls, case: Case, ranks: int, device: torch.device | str) -> "Call":
        """Makes the tensors of a case."""
        gathers = case.collective == "all_gather"
        scatters = case.collective == "reduce_scatter"
        inputs = [
            values_of(case, rank, case.count * (ranks if scatters else 1)) for rank in range(ranks)
        ]
        sources = []
        for values in inputs:
            memory = torch.empty(case.offset + len(values), dtype=case.dtype, device=device)
            sources.append(memory[case.offset :].copy_(values))
        elements = case.count * (ranks if gathers else 1)
        spaces = [
            torch.full((elements + case.offset + _GUARD,), 7, dtype=case.dtype, device=device)
            for _ in range(ranks)
        ]
        outs = [space[case.offset : -_GUARD] for space in spaces]
        if case.in_place:
            own = [slice(rank * case.count, (rank + 1) * case.count) for rank in range(ranks)]
            if gathers:
                sources = [
                    out[at].copy_(source)
                    for out, at, source in zip(outs, own, sources, strict=True)
                ]
            elif scatters:
                outs = [source[at] for source, at in zip(sources, own, strict=True)]
            else:
                outs = list(sources)
        options: dict[str, Any] = {}
        if not gathers:
            options = {"op": case.op, "scale": case.scale, "wire_dtype": case.wire}
        return cls(case, sources, outs, spaces, expected_of(case, inputs), options)

    def launch(self, rank: int, buffers: Any) -> None:
        """Launches one rank's kernel on the current stream."""
        self.prepared(rank, buffers)()

    def prepared(self, rank: int, buffers: Any) -> Any:
        """Returns one rank's launch."""
        sides = self.sources[rank], self.outs[rank], buffers
        return prepare(self.case.algorithm, self.case.collective, *sides, **self.options)

    def compare(self, *ranks: int) -> int:
        """Fails unless these ranks (all) have the oracle's bits, and nothing beside them; returns their number."""
        compared = 0
        for rank in ranks or range(len(self.outs)):
            name = f"rank {rank} of {len(self.outs)}, {self.case}"
            assert_same(self.outs[rank].cpu(), self.expected[rank], name)
            space = self.spaces[rank]
            assert bool((space[: self.case.offset] == 7).all() & (space[-_GUARD:] == 7).all()), name
            compared += len(self.expected[rank])
        return compared


def values_of(case: Case, rank: int, count: int) -> torch.Tensor:
    """Returns `count` numbers that a rank gives to the call."""
    generator = torch.Generator().manual_seed(case.seed * 64 + rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    if case.seed % 3 == 0:  # subnormal numbers of the type too
        values *= torch.exp2(torch.randint(-140, 20, (count,), generator=generator).double())
    if not case.dtype.is_floating_point:
        return (values * 100).to(case.dtype)
    return values.to(case.dtype)


def expected_of(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what each rank must get."""
    if case.collective == "all_gather":
        return [torch.cat(inputs)] * len(inputs)
    arguments = [inputs, case.op, case.scale, case.wire]
    if case.collective == "reduce_scatter":
        return kernel_oracle.ring_reduce_scatter(*arguments) if case.count else inputs
    return [kernel_oracle.all_reduce(*arguments, case.algorithm)] * len(inputs)


def assert_same(result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Fails unless both hold the same numbers, NaN in the same places, and whatever the sign of zero."""
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(result, expected, msg=lambda text: f"{name}: {text}", **exactly)
