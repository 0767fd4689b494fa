"""What was prepared once for a call and is repeated when the same call comes again.

A key holds all that a plan depends on: collectives, dtypes, addresses, sizes, options and the stream. A tensor that
moved makes another key, so no plan is ever run for memory that it was not made for; one that was freed and made anew
at the same place is the same to a launch. Plans that are no longer used are dropped, the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from fastcoll.cuda.algorithms.algorithm import Prepared

__all__ = ["MOST_PLANS", "Plan", "PlanCache"]

MOST_PLANS = 256
"""Plans that a group keeps for a device: the buckets and lists of a model, some times over."""


class Plan:
    """The launches of a call.

    Attributes:
        prepared: As the algorithms made it.
        left: Which of the caller's tasks are none of it.
    """

    def __init__(self, prepared: Prepared, left: list[int] | None = None) -> None:
        self.prepared = prepared
        self.left = left or []

    def run(self) -> None:
        """Puts the launches on the current stream, or into the graph that captures it."""
        for launch in self.prepared.launches:
            launch()


class PlanCache:
    """Plans by key.

    Args:
        most: How many are kept.

    Attributes:
        built: How many were made so far.
    """

    def __init__(self, most: int = MOST_PLANS) -> None:
        self._most = most
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._pinned: list[Plan] = []
        self.built = 0

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: Hashable) -> Plan | None:
        """Returns a plan, which is then the last to be dropped."""
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
        return plan

    def add(
        self, key: Hashable, build: Callable[[], Prepared], left: list[int] | None = None
    ) -> Plan:
        """Makes a plan and returns it."""
        plan = self._plans[key] = Plan(build(), left)
        self.built += 1
        if len(self._plans) > self._most:
            self._plans.popitem(last=False)
        return plan

    def forget(self) -> None:
        """Drops the plans that no graph has."""
        self._plans.clear()

    def pin(self, plan: Plan) -> None:
        """Keeps a plan that a graph of the user's has captured: what its launches read must live as long."""
        if plan not in self._pinned:
            self._pinned.append(plan)

    def clear(self) -> None:
        """Drops all plans."""
        self._plans.clear()
        self._pinned.clear()
