"""How the ranks of a run agree, apart from everything that is measured: through the store."""

from __future__ import annotations

import json
from typing import Any

from torch._C._distributed_c10d import Store

__all__ = ["Control"]


class Control:
    """Barriers and exchange of small values among all ranks.

    Args:
        store: Reached by all ranks; used for nothing else.
        rank: This process.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._sequence = 0

    def barrier(self) -> None:
        """Waits, asleep, for all ranks; they leave within some tens of microseconds."""
        key = self._next("barrier")
        if self._store.add(key, 1) == self.world_size:
            self._store.set(f"{key}/open", "1")
        self._store.wait([f"{key}/open"])

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order; they must be of types that JSON has."""
        key = self._next("value")
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def _next(self, kind: str) -> str:
        self._sequence += 1
        return f"{kind}/{self._sequence}"
