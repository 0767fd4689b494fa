"""What a rank does so that a fault meets it in a call, and not on its way there."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from backend import IS_GLOO
from fault_rank import Rank

import fastcoll.trace


def once_in_call(then: Callable[[], None], calls: int = 1) -> None:
    """Call a function, in a thread, when this process has begun so many collectives and messages more.

    The thread counts the calls, each of which counts from its begin on.
    """
    before = _begun()

    def look() -> None:
        while _begun() < before + calls:
            time.sleep(0.002)
        then()

    threading.Thread(target=look, daemon=True).start()


def tell_in_call(rank: Rank, calls: int = 1) -> None:
    """Tell the test "in call" when this process has begun so many collectives and messages more.

    The last of the calls must not be one that ends by itself: the rank's next word could come before this one.
    """
    once_in_call(lambda: rank.tell("in call"), calls)


def others_first(rank: Rank, last: int, seconds: float) -> None:
    """Let rank ``last`` wait for the test and time out soon, and the others tell that they are in the call."""
    if rank.rank == last:
        rank.pause()
        soon(seconds)
    else:
        tell_in_call(rank)


def soon(seconds: float, group: dist.ProcessGroup | None = None) -> None:
    """Let the group's calls time out after so many seconds from here on.

    What came before had a long timeout, because it waited for ranks that start slowly.
    """
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=seconds))


def _begun() -> int:
    """Return how many calls this process has begun."""
    if IS_GLOO:
        groups = list(dist.distributed_c10d._world.pg_map)
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return sum(backend._get_sequence_number_for_group() for backend in backends)
    try:
        return fastcoll.trace.dump()["fastcoll"]["recorded"]
    except RuntimeError:  # there is no group yet
        return 0
