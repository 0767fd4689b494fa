"""What the ranks of the tests of kernels between ranks run: memory that all map, and calls compared with the oracle.

Imported by the tests for the names of these functions, and by the ranks, which interpret the kernels. Only functions
import kernels, as the test process may have compiled ones.
"""

import itertools
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_oracle
import torch
from world import here

__all__ = [
    "Case",
    "assert_same",
    "barrier",
    "expected_of",
    "interpret",
    "open_buffers",
    "play",
    "values_of",
]

ALL_REDUCE = ("one_shot", "two_shot", "ring")
SPINS = 100_000
"""Polls before a wait gives up: more than a minute of the interpreter."""


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


def interpret() -> SimpleNamespace:
    """Imports the kernels and returns their modules."""
    import quick_interpreter

    quick_interpreter.install()
    from fastcoll.kernels import one_shot, peers, ring, two_shot

    return SimpleNamespace(
        one_shot=one_shot,
        peers=peers,
        ring=ring,
        two_shot=two_shot,
    )


def mapped(name: str, size: int) -> list[torch.Tensor]:
    """Returns a piece of memory of every rank, zero at first, mapped by all: uint8 [size] each."""
    folder = here().scratch
    own = folder / f"{name}{here().rank}"
    with open(own.with_suffix(".new"), "wb") as file:
        file.truncate(size)
    os.rename(own.with_suffix(".new"), own)
    paths = [folder / f"{name}{rank}" for rank in range(here().size)]
    for path in paths:
        _await(path)
    return [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]


def open_buffers(layout: Any, spins: int = SPINS, words: torch.Tensor | None = None) -> Any:
    """Returns this rank's PeerBuffers over memory that all ranks map."""
    regions = mapped("region", layout.bytes)
    buffers = interpret().peers.PeerBuffers(
        here().rank,
        regions[here().rank],
        [region.data_ptr() for region in regions],
        layout,
        spins,
        words,
    )
    buffers.regions = regions  # kept mapped
    return buffers


def barrier(name: str, ranks: int | None = None) -> None:
    """Waits until that many ranks (all) have come."""
    folder = here().scratch
    (folder / f"{name}-{here().rank}").touch()
    while len(list(folder.glob(f"{name}-*"))) < (here().size if ranks is None else ranks):
        time.sleep(0.002)


def play(
    cases: list[Case], jitter: int, channels: int = 2, slots: int = 4, slow: int | None = None
) -> int:
    """Runs the cases on one set of buffers, with pauses between, and compares each with the oracle, bit by bit.

    The rank `slow` dawdles after each poll of a flag, hence within launches.

    Returns:
        Number of elements compared.
    """
    import quick_interpreter

    modules = interpret()
    quick_interpreter.dawdle[0] = 0.02 if here().rank == slow else 0.0
    buffers = open_buffers(modules.peers.PeerLayout(channels, 1024, slots, 512))
    pauses = random.Random(jitter * 100 + here().rank)
    compared = 0
    for number, case in enumerate(cases):
        if pauses.random() < 0.4:
            time.sleep(pauses.random() * 0.02)
        compared += _call(case, modules, buffers, f"case {number}: {case}")
    return compared


def _call(case: Case, modules: SimpleNamespace, buffers: Any, name: str) -> int:
    rank, ranks = here().rank, here().size
    gathers = case.collective == "all_gather"
    chunks = ranks if case.collective == "reduce_scatter" else 1
    inputs = [values_of(case, number, case.count * chunks) for number in range(ranks)]
    out_elements = case.count * (ranks if gathers else 1)
    space = torch.zeros(case.offset + inputs[rank].numel(), dtype=case.dtype)
    source = space[case.offset :]
    source.copy_(inputs[rank])
    guard = 3
    space = torch.full((case.offset + out_elements + guard,), 7, dtype=case.dtype)
    out = space[case.offset : case.offset + out_elements]
    if case.in_place and case.collective == "all_reduce":
        out = source
    elif case.in_place and case.collective == "reduce_scatter":
        out = source[rank * case.count : (rank + 1) * case.count]
    elif case.in_place:
        out[rank * case.count : (rank + 1) * case.count] = source
        source = out[rank * case.count : (rank + 1) * case.count]
    expected = expected_of(case, inputs)[rank]
    arguments: dict[str, Any] = {}
    if not gathers:
        arguments = {"op": case.op, "scale": case.scale, "wire_dtype": case.wire}
    prepare = getattr(getattr(modules, case.algorithm), f"prepare_{case.collective}")
    prepare(source, out, buffers, **arguments)()
    result = out.clone()
    buffers.check()
    assert_same(result, expected, f"rank {rank}, {name}")
    assert torch.all(space[: case.offset] == 7) and torch.all(space[-guard:] == 7), name
    return result.numel()


def values_of(case: Case, rank: int, count: int) -> torch.Tensor:
    """Returns `count` numbers that a rank gives to the call."""
    generator = torch.Generator().manual_seed(case.seed * 64 + rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    if case.op in ("min", "max") and count:
        values[torch.randint(count, (1,), generator=generator)] = float("nan")
    if case.seed % 3 == 0:  # subnormal numbers of the type too
        values *= torch.exp2(torch.randint(-140, 20, (count,), generator=generator).double())
    if not case.dtype.is_floating_point:
        return (values * 100).to(case.dtype)
    return values.to(case.dtype)


def expected_of(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what each rank must get."""
    if case.collective == "all_gather":
        return [kernel_oracle.all_gather(inputs)] * len(inputs)
    arguments = [inputs, case.op, case.scale, case.wire]
    if case.collective == "reduce_scatter":
        return kernel_oracle.ring_reduce_scatter(*arguments) if case.count else inputs
    name = "ring_all_reduce" if case.algorithm == "ring" else "all_reduce"
    return [getattr(kernel_oracle, name)(*arguments)] * len(inputs)


def assert_same(result: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Fails unless both hold the same bits, whatever the kind of NaN and the sign of zero."""
    same = (result == expected) | ((result != result) & (expected != expected))
    wrong = torch.nonzero(~same).flatten().tolist()
    first = wrong[:1]
    assert not wrong, (
        f"{name}: {len(wrong)} of {result.numel()} elements differ, first at {first}: "
        f"{result[first].tolist()}, expected {expected[first].tolist()}"
    )


def _await(path: Path) -> None:
    for _ in itertools.count():
        if path.exists():
            return
        time.sleep(0.002)
