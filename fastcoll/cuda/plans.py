"""What was prepared once for a call and is repeated when such a call comes again.

A plan depends on the kind of a call: collectives, dtypes, sizes, options, the stream, and of each tensor whether it is
aligned and its own result. Where the tensors lie is given to each run. What reads many addresses reads them from tables
on the device, which are kept too. Plans and tables that are no longer used are dropped, the oldest first; what a graph
of the user's has captured stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from fastcoll.cuda.algorithms.algorithm import Place, Prepared
from fastcoll.cuda.algorithms.call import Call

__all__ = ["MOST_PLANS", "MOST_TABLES", "Part", "Placed", "Plan", "PlanCache", "Recent"]

MOST_PLANS = 256
"""Plans that a group keeps for a device: the buckets and lists of a model, some times over."""

MOST_TABLES = 1024
"""Lists of tensors whose addresses are kept on a device."""

_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class Part:
    """What one algorithm does of a plan.

    Attributes:
        algorithm: Its name.
        call: What it serves.
        indices: Which of the caller's tasks that is.
        prepared: As the algorithm made it.
    """

    algorithm: str
    call: Call
    indices: tuple[int, ...]
    prepared: Prepared


class Plan:
    """The launches of a kind of call.

    Args:
        parts: One behind the other.
        left: Which of the caller's tasks are none of it.

    Attributes:
        parts: As given.
        left: As given.
        uses_peers: Whether a launch works on the peers' memory.
    """

    def __init__(self, parts: Iterable[Part], left: list[int] | None = None) -> None:
        self.parts = tuple(parts)
        self.left = left or []
        self.uses_peers = any(part.prepared.uses_peers for part in self.parts)

    @property
    def launches(self) -> int:
        """How many there are."""
        return sum(len(part.prepared.launches) for part in self.parts)

    def run(self, places: Iterable[Place]) -> None:
        """Puts the launches on the current stream, or into the graph that captures it.

        Args:
            places: Where the tensors of each part lie.
        """
        for part, place in zip(self.parts, places, strict=True):
            for launch in part.prepared.launches:
                launch(place)


@dataclass(frozen=True)
class Placed:
    """A plan, and where the tensors lie that it is run for.

    Attributes:
        plan: As made.
        places: Those of each part.
        tables: On the device, that places tell of.
    """

    plan: Plan
    places: tuple[Place, ...]
    tables: tuple[Tensor, ...]


class Recent(Generic[_Kept]):
    """What was used last, by key.

    Args:
        most: How much is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Hashable) -> _Kept | None:
        """Returns what is kept, which is then the last to be dropped."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def add(self, key: Hashable, made: _Kept) -> None:
        """Keeps it, and drops what was not used longest if there is too much."""
        self._kept[key] = made
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def values(self) -> list[_Kept]:
        """Returns all that is kept, what was used last at the end."""
        return list(self._kept.values())

    def clear(self) -> None:
        """Drops all of it."""
        self._kept.clear()


class PlanCache(Recent[Plan]):
    """Plans by kind.

    Args:
        most: How many are kept.

    Attributes:
        built: How many were made so far.
        lists: Plans with tables, by the very tensors they were made for.
        pinned: What graphs of the user's have captured.
    """

    def __init__(self, most: int = MOST_PLANS) -> None:
        super().__init__(most)
        self.built = 0
        self.lists: Recent[Placed] = Recent(MOST_TABLES)
        self.pinned: list[object] = []

    def add(self, key: Hashable, made: Plan) -> None:
        """Keeps a plan."""
        super().add(key, made)
        self.built += 1

    def pin(self, what: object) -> None:
        """Keeps what a graph of the user's has captured: what its launches read must live as long."""
        if not any(what is known for known in self.pinned):
            self.pinned.append(what)

    def forget(self) -> None:
        """Drops what no graph has."""
        super().clear()
        self.lists.clear()

    def clear(self) -> None:
        """Drops all plans."""
        self.forget()
        self.pinned.clear()
