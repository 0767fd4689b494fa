"""All ranks of a collective as one process has them on one GPU: their memory, their calls, and the comparison.

Only functions import kernels, so that a process can set its environment before.
"""

from dataclasses import dataclass
from typing import Any

import torch
from peer_ranks import Case, assert_same, expected_of, values_of

__all__ = ["SPINS", "Call", "buffers_on"]

SPINS = 4_000_000
"""Polls before a wait gives up: seconds on a GPU."""

_GUARD = 5


def buffers_on(device: torch.device, ranks: int, layout: Any, spins: int = SPINS) -> list[Any]:
    """Returns the PeerBuffers of each rank, over one allocation."""
    from fastcoll.kernels.peers import PeerBuffers

    space = torch.zeros(ranks * layout.bytes + 128, dtype=torch.uint8, device=device)
    start = -space.data_ptr() % 128
    regions = space[start : start + ranks * layout.bytes].view(ranks, layout.bytes)
    addresses = [region.data_ptr() for region in regions]
    return [PeerBuffers(rank, regions[rank], addresses, layout, spins) for rank in range(ranks)]


@dataclass
class Call:
    """The tensors of all ranks for one call.

    Attributes:
        case: What is called.
        sources: The message of each rank.
        outs: What each rank's result goes to.
        spaces: The memory around the results, 7 at first.
        expected: The result of each rank, on the CPU.
        options: Further arguments of the call.
    """

    case: Case
    sources: list[torch.Tensor]
    outs: list[torch.Tensor]
    spaces: list[torch.Tensor]
    expected: list[torch.Tensor]
    options: dict[str, Any]

    @classmethod
    def of(cls, case: Case, ranks: int, device: torch.device) -> "Call":
        """Makes the tensors of a case."""
        gathers = case.collective == "all_gather"
        chunks = ranks if case.collective == "reduce_scatter" else 1
        inputs = [values_of(case, rank, case.count * chunks) for rank in range(ranks)]
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
            outs = list(sources)
        options: dict[str, Any] = {}
        if not gathers:
            options = {"op": case.op, "scale": case.scale, "wire_dtype": case.wire}
        return cls(case, sources, outs, spaces, expected_of(case, inputs), options)

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
