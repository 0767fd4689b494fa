"""The roster, by which the ranks of a group come together: who reads what, and what an earlier life cannot do."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest
import suite_rules
import torch.distributed as dist
from odd_stores import Between
from own_threads import in_threads

from fastcoll._load_cuda import CUDA

_nonces = count(1)


class Watched(Between):
    """A store that counts how often each key is asked for, by thread."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore())
        self.asked: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def check(self, keys: Sequence[str]) -> bool:
        self.asked[threading.get_ident()].update(keys)
        return super().check(keys)


def roster(store: dist.Store, rank: int, size: int) -> CUDA.Roster:
    return CUDA.Roster(store, "g", rank, size, b"magic" + next(_nonces).to_bytes(8, "big"), 5)


def until(seconds: float) -> Callable[[], None]:
    end = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() >= end:
            raise TimeoutError("nobody came")

    return look


def come_together(one: CUDA.Roster, rank: int) -> tuple[str, list[bytes]]:
    one.publish()
    said = None
    while said is None:
        one.gather(until(30))
        said = one.exchange("first", b"%d" % rank, until(30), watch=True)
    return one.id, said


@pytest.mark.parametrize("size", [1, 2, 7])
def test_all_hear_what_all_say(size):
    store = dist.HashStore()
    ones = [roster(store, rank, size) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(come_together, ones, range(size)))
    assert [said for _, said in found] == [[b"%d" % rank for rank in range(size)]] * size
    assert len({one_id for one_id, _ in found}) == 1
    for one in ones:
        one.erase()
    assert store.num_keys() == 0


def test_reads_grow_with_the_ranks_and_not_with_their_square():
    size = 24
    store = Watched()
    ones = [roster(store, rank, size) for rank in range(size)]
    asked: dict[int, set[str]] = {}

    def one_rank(rank: int) -> None:
        come_together(ones[rank], rank)
        asked[rank] = set(store.asked[threading.get_ident()])

    assert in_threads(*(partial(one_rank, rank) for rank in range(size))) == []
    records = {f"g/r/{rank}" for rank in range(1, size)}
    votes = {f"g/{ones[0].id}/first/{rank}" for rank in range(1, size)}
    assert asked[0] == records | votes
    for rank in range(1, size):
        assert asked[rank] == {"g/roster", f"g/{ones[0].id}/first"}


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_of_an_earlier_life_is_waited_for(late):
    store, size = Watched(), 3
    with ThreadPoolExecutor(size) as pool:
        last = [roster(store, rank, size) for rank in range(size)]
        list(pool.map(come_together, last, range(size)))
        now = [roster(store, rank, size) for rank in range(size)]
        store.asked.clear()
        waiting = [pool.submit(come_together, now[r], r) for r in range(size) if r != late]
        # Each has asked for the same thing again and again.
        suite_rules.until(
            lambda: (
                [max(each.values(), default=0) > 5 for each in store.asked.copy().values()]
                == [True] * 2
            )
        )
        assert not any(future.done() for future in waiting)
        found = come_together(now[late], late)
        assert [future.result(30) for future in waiting] == [found, found]
    assert found[0] != last[0].id


def test_a_fault_is_told_once():
    store = dist.HashStore()
    ones = [roster(store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(come_together, ones, range(2)))
    assert ones[1].told() is None
    ones[0].tell("rank 0: first")
    ones[1].tell("rank 1: second")
    assert ones[0].told() == ones[1].told() == "rank 0: first"


def test_a_fault_is_cut_between_letters():
    one = roster(dist.HashStore(), 0, 1)
    come_together(one, 0)
    one.tell("a" + 600 * "\u00e9")
    text = one.told()
    assert text is not None
    assert text.startswith("a" + 400 * "\u00e9")
    assert set(text[1:].rstrip("?")) == {"\u00e9"}


@pytest.mark.parametrize(
    "value, text",
    [
        ("B1700000000000 text", "text"),
        *((value, None) for value in ("", "B", "B17 ", "B text", "B17x text", "X17 text")),
    ],
)
def test_only_what_has_the_form_of_a_fault_is_one(value, text):
    store = dist.HashStore()
    one = roster(store, 0, 1)
    come_together(one, 0)
    store.set(f"fastcoll/f/g{one.id}", value)
    assert one.told() == text


def test_what_ends_a_wait_comes_out():
    one = roster(dist.HashStore(), 0, 2)
    one.publish()
    with pytest.raises(TimeoutError, match="nobody came"):
        one.gather(until(0.05))


def test_what_a_round_left_ends_with_the_next():
    store, size = dist.HashStore(), 3
    ones = [roster(store, rank, size) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(come_together, ones, range(size)))
        before = store.num_keys()
        list(pool.map(lambda one: one.exchange("second", b"", until(30)), ones))
    assert store.num_keys() == before


def test_a_rank_erases_what_it_wrote_under_a_roster_that_is_over():
    store = dist.HashStore()
    ones = [roster(store, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(come_together, ones, range(2)))
    last = ones[1].id
    again = roster(store, 0, 2)
    again.publish()
    again.gather(until(30))
    assert again.id != last
    assert ones[1].exchange("second", b"1", until(30), watch=True) is None
    ones[1].erase()
    assert not any(store.check([f"g/{last}/{round_}/1"]) for round_ in ("first", "second"))


def texts(*all_texts: bytes) -> bytes:
    """What rank 0 publishes of all ranks; see csrc/group/roster.hpp."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in all_texts)


@pytest.mark.parametrize(
    "entries",
    [b"what is this", texts(b"a"), texts(b"a", b"b") + b"\0", texts(b"a", b"b")[:-1]],
    ids=["text", "short", "long", "cut"],
)
def test_a_list_of_somebody_else_is_refused(entries):
    store = dist.HashStore()
    one = CUDA.Roster(store, "g", 1, 2)
    store.set("g/first", entries)
    with pytest.raises(
        dist.DistStoreError,
        match="the store holds an invalid entry of fastcoll: the entries of round 'first'",
    ):
        one.exchange("first", b"", until(30))
