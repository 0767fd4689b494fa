"""Plans: a call prepared once and repeated when such a call comes again.

A plan depends on the kind of a call: collectives, dtypes, sizes, options, the stream, and for each tensor whether it is
aligned and whether it is in place. Each run gets the tensors' addresses. Launches for lists read addresses from tables
on the device, which are kept too. The least recently used plans and tables are dropped first; those that a user's graph
has captured stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from fastcoll.cuda.algorithms import Algorithm, Call
from fastcoll.cuda.algorithms.launches import Prepared

__all__ = ["MOST_PLANS", "MOST_TABLES", "Part", "Placed", "Plan", "PlanCache", "Recent"]

MOST_PLANS = 256
"""Plans that a group keeps for a device: several times the buckets and lists of a model."""

MOST_TABLES = 1024
"""Lists of tensors whose addresses are kept on a device."""

_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class Part:
    """One algorithm's part of a plan.

    Attributes:
        algorithm: The algorithm.
        call: The call that it serves.
        indices: The caller's tasks in this call.
        prepared: Result of the algorithm's ``prepare``.
    """

    algorithm: Algorithm
    call: Call
    indices: tuple[int, ...]
    prepared: Prepared


class Plan:
    """The launches for a kind of call.

    Args:
        parts: In this order.
        left: The caller's tasks that the plan does not serve.

    Attributes:
        parts: As given.
        left: As given.
        uses_peers: Whether a launch works on the peers' memory.
    """

    def __init__(self, parts: Iterable[Part], left: list[int] | None = None) -> None:
        self.parts = tuple(parts)
        self.left = left or []
        self.uses_peers = any(part.algorithm.uses_peers for part in self.parts)

    @property
    def launches(self) -> int:
        """Number of launches."""
        return sum(len(part.prepared.launches) for part in self.parts)

    def run(self, places: Iterable[tuple[int, int]]) -> None:
        """Puts the launches on the current stream, or into the graph that captures it.

        Args:
            places: Of each part: addresses of input and output, or of tables on the device with all their addresses.
        """
        for part, place in zip(self.parts, places, strict=True):
            for launch in part.prepared.launches:
                launch(*place)


@dataclass(frozen=True)
class Placed:
    """A plan with the addresses of the tensors to run it for.

    Attributes:
        plan: The plan.
        places: As for ``Plan.run``.
        tables: Address tables on the device, to which `places` refer.
    """

    plan: Plan
    places: tuple[tuple[int, int], ...]
    tables: tuple[Tensor, ...]


class Recent(Generic[_Kept]):
    """The most recently used values, by key.

    Args:
        most: How many values are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Hashable) -> _Kept | None:
        """Returns the value, or None; a value found is then the last to be dropped."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def add(self, key: Hashable, made: _Kept) -> None:
        """Adds a value; drops the least recently used one if there are too many."""
        self._kept[key] = made
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def values(self) -> list[_Kept]:
        """Returns all values, the most recently used last."""
        return list(self._kept.values())

    def clear(self) -> None:
        """Drops all values."""
        self._kept.clear()


class PlanCache(Recent[Plan]):
    """Plans by kind.

    Args:
        most: How many plans are kept.

    Attributes:
        built: How many plans were made so far.
        lists: Plans with tables, by the exact tensors they were made for.
        pinned: Plans and tables that users' graphs have captured.
    """

    def __init__(self, most: int = MOST_PLANS) -> None:
        super().__init__(most)
        self.built = 0
        self.lists: Recent[Placed] = Recent(MOST_TABLES)
        self.pinned: list[object] = []

    def add(self, key: Hashable, made: Plan) -> None:
        """Adds a plan."""
        super().add(key, made)
        self.built += 1

    def pin(self, what: object) -> None:
        """Keeps what a user's graph has captured: the memory that its launches read must live as long."""
        if not any(what is known for known in self.pinned):
            self.pinned.append(what)

    def forget(self) -> None:
        """Drops the plans and tables that no graph has captured."""
        super().clear()
        self.lists.clear()

    def clear(self) -> None:
        """Drops all plans."""
        self.forget()
        self.pinned.clear()
