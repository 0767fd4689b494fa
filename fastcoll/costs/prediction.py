"""The time of an algorithm on a platform, with the protocol that suits the size best."""

from __future__ import annotations

from dataclasses import dataclass

from fastcoll.costs.algorithms import ALGORITHMS
from fastcoll.costs.cost import Cost
from fastcoll.costs.machine import Platform

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True)
class Prediction:
    """What the model says of one call.

    Attributes:
        algorithm: Its name.
        protocol: The one with the shortest time.
        seconds: Of a call.
        cost: Steps and bytes.
    """

    algorithm: str
    protocol: str
    seconds: float
    cost: Cost


def predict(collective: str, ranks: int, size: int, platform: Platform) -> list[Prediction]:
    """Returns a prediction for each algorithm that so many ranks can use.

    Args:
        collective: A key of ``ALGORITHMS``.
        ranks: On one node, or on full ones.
        size: Bytes of the message.
        platform: Whose constants are used.

    Raises:
        ValueError: The collective has no models, the size is negative, or the ranks do not fill nodes.
    """
    if collective not in ALGORITHMS:
        raise ValueError(
            f"fastcoll.costs.predict: expected one of {', '.join(ALGORITHMS)}, got {collective!r}"
        )
    if size < 0:
        raise ValueError(f"fastcoll.costs.predict: expected a size of 0 or more, got {size}")
    machines = {name: platform.machine(name) for name in platform.protocols}
    found = []
    for name, algorithm in ALGORITHMS[collective].items():
        options = []
        for protocol, machine in machines.items():
            if not algorithm.unsupported(ranks, machine):
                cost = algorithm.cost(ranks, size, machine)
                options.append(Prediction(name, protocol, float(cost.seconds(machine)), cost))
        if options:
            found.append(min(options, key=lambda option: option.seconds))
    return found
