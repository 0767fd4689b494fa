"""How ranks meet for NCCL's init, and what each is told when they do not."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_list import plays
from nccl_ranks import Tensors, create, engine_of, on_stand_in, stand_in, store
from own_threads import in_threads
from suite_rules import bound, until
from world import here

from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_rendezvous import Rendezvous, Start

UNIQUE = bytes(range(128))


class Looks(threading.Event):
    """Is not set, and counts for each thread how often it was asked: between two looks into the store."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[int] = Counter()

    def cause(self) -> str:
        self.of[threading.get_ident()] += 1
        return "rank 3 has ended" if self.is_set() else ""


class Meeting:
    """Ranks as threads that exchange an id; no NCCL."""

    def __init__(self, size: int, shared: dist.Store | None = None, timeout: float = 30) -> None:
        self.size = size
        self.store = dist.HashStore() if shared is None else shared
        self.timeout = timeout
        self.cancelled = Looks()
        self.outcomes: dict[int, Any] = {}

    def rank(self, number: int, version: int = 22907, parents: Sequence[bytes] = ()) -> Rendezvous:
        end = time.monotonic() + self.timeout
        common = version, end, self.timeout, self.cancelled.cause, parents
        return Rendezvous(self.store, Member("g", number, self.size), 0, *common)

    def run(
        self,
        ranks: list[int],
        versions: dict[int, int] | None = None,
        parents: dict[int, list[bytes]] | None = None,
        **others: Any,
    ) -> None:
        def exchange(number: int) -> None:
            make_id: Callable[[], bytes] = others.get("make_id", lambda: UNIQUE)
            try:
                version = (versions or {}).get(number, 22907)
                meeting = self.rank(number, version, (parents or {}).get(number, ()))
                self.outcomes[number] = meeting.exchange(make_id)
            except Exception as error:
                self.outcomes[number] = error

        self.threads = [threading.Thread(target=exchange, args=(number,)) for number in ranks]
        for thread in self.threads:
            thread.start()

    def wait_for_looks(self) -> None:
        """Waits until each rank has found that others are missing, and looked again."""
        for thread in self.threads:
            while self.cancelled.of[thread.ident or 0] < 3:
                assert thread.is_alive(), self.outcomes
                time.sleep(0.001)

    def end(self) -> dict[int, Any]:
        for thread in self.threads:
            thread.join(60)
        return self.outcomes

    def texts(self) -> dict[int, str]:
        outcomes = self.end()
        assert all(isinstance(one, dist.DistBackendError) for one in outcomes.values()), outcomes
        return {rank: str(error) for rank, error in outcomes.items()}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_get_the_id_of_rank_0(size):
    meeting = Meeting(size)
    meeting.run(list(range(size)))
    assert meeting.end() == dict.fromkeys(range(size), Start(UNIQUE))


@pytest.mark.parametrize(
    ("parents", "chosen"),
    [
        (["ab", "ab", "ab"], "a"),
        (["cba", "xab", "ab"], "b"),  # the order of rank 0 counts
        (["ab", "c", "ab"], ""),
        (["", "a", "a"], ""),
        (["a", "a", ""], ""),
        (["abcdefghij", "ji", "i"], ""),  # more than a record holds
    ],
)
def test_all_split_the_first_communicator_of_rank_0_that_all_have(parents, chosen):
    keys = {rank: [letter.encode() * 8 for letter in text] for rank, text in enumerate(parents)}
    meeting = Meeting(3)
    meeting.run([0, 1, 2], parents=keys)
    (start,) = set(meeting.end().values())
    assert start.parent == chosen.encode() * 8
    assert (start.token == UNIQUE) == (not chosen)


@pytest.mark.parametrize(
    ("present", "absent"),
    [([0], "ranks 1, 2 have"), ([1, 2], "rank 0 has"), ([0, 2], "rank 1 has")],
)
def test_ranks_that_have_not_come_are_named(present, absent):
    meeting = Meeting(3, timeout=0.4)
    meeting.run(present)
    for rank, text in meeting.texts().items():
        assert text.startswith(
            f"fastcoll.nccl_init [group 'g', rank {rank}/3]: timed out after 400 ms: {absent} not arrived to "
            "create the NCCL communicator. "
        )


def met_after(last: Meeting, first: list[int], others: list[int]) -> None:
    """Some ranks look into the store that a generation has left, the others come, and all meet."""
    now = Meeting(3, last.store)
    now.run(first)
    now.wait_for_looks()
    started = now.threads
    now.run(others)
    now.threads += started
    assert now.end() == dict.fromkeys(range(3), Start(UNIQUE))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_restarted_rank_is_not_deceived_by_what_the_last_generation_left(first):
    last = Meeting(3)
    last.run([0, 1, 2], make_id=lambda: b"\xff" * 128)
    assert last.end()[1].token == b"\xff" * 128  # nothing was deleted
    met_after(last, [first], [rank for rank in range(3) if rank != first])


def test_ranks_are_named_also_where_the_last_generation_left_their_records():
    last = Meeting(3)
    last.run([0, 1, 2])
    last.end()
    now = Meeting(3, last.store, timeout=0.5)
    now.run([0, 2])
    texts = now.texts()
    assert all(
        "timed out after 500 ms: rank 1 has not arrived" in text for text in texts.values()
    ), texts


def test_different_versions_of_nccl_are_named():
    meeting = Meeting(3)
    meeting.run([0, 1, 2], versions={1: 22809})
    texts = meeting.texts()
    assert "expected the same NCCL on all ranks, got 2.28.9 here and 2.29.7 on rank 0" in texts[1]
    assert all("got 2.29.7 here and 2.28.9 on rank 1" in texts[rank] for rank in (0, 2)), texts


def test_the_version_of_a_record_of_the_last_generation_does_not_count():
    last = Meeting(3)
    last.run([0, 1, 2], versions=dict.fromkeys(range(3), 22809))
    last.end()
    met_after(last, [0, 1], [2])


def test_all_hear_why_rank_0_has_no_id():
    def make_id() -> bytes:
        raise dist.DistBackendError("no network")

    meeting = Meeting(2)
    meeting.run([0, 1], make_id=make_id)
    texts = meeting.texts()
    assert texts[0] == "no network"
    assert texts[1].endswith("rank 0 made no unique id: no network")


@pytest.mark.parametrize("garbage", ["", "00", "x" * 28, "fcnccl02"])
def test_what_others_write_into_the_store_is_refused(garbage):
    shared = dist.HashStore()
    shared.set("fastcoll/nccl/g/0/r/1", garbage)
    meeting = Meeting(2, shared)
    meeting.run([0])
    error = meeting.end()[0]
    assert type(error) is dist.DistStoreError
    assert "the store holds an invalid entry of fastcoll: the record of rank 1" in str(error)


def test_a_second_process_of_the_same_rank_is_told():
    meeting = Meeting(3, timeout=0.5)
    meeting.run([0, 1])
    meeting.wait_for_looks()
    other = Meeting(3, meeting.store, timeout=0.4)
    other.run([1])
    assert "Another process has joined as rank 1 too." in meeting.texts()[1]
    other.end()


def test_waiting_is_cancelled():
    meeting = Meeting(2)
    meeting.run([0])
    meeting.cancelled.set()
    assert "the communicator was aborted before it was made: rank 3 has ended" in meeting.texts()[0]


def test_of_a_store_nothing_is_left_when_all_went_well():
    meeting = Meeting(2)
    ranks = [meeting.rank(0), meeting.rank(1)]
    made = partial(ranks[0].exchange, lambda: UNIQUE), partial(ranks[1].exchange, None)
    assert in_threads(*made) == []
    for one in ranks:
        one.enter()
    assert meeting.store.num_keys() > 0 and ranks[0].not_entered() == []
    for one in ranks:
        one.clean_up()
    assert meeting.store.num_keys() == 0


@on_stand_in(2)
def test_a_rank_that_never_comes_is_named_in_the_set_time():
    """Rank 1 never makes it, and rank 0 gives up; then both do."""
    if here().rank == 0:
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as caught:
            create(timeout=0.7)
        assert 0.7 <= time.monotonic() - start < bound(2.0)
        assert "timed out after 700 ms: rank 1 has not arrived" in str(caught.value)
    shared = store("done")
    shared.set(f"{here().rank}", "")
    shared.wait(["0", "1"], timedelta(seconds=bound(15)))
    assert create(name="again").destroy()


@plays(67)
@on_stand_in(2)
def test_an_init_that_hangs_is_given_up_by_all():
    """NCCL's init of rank 1 does not end. Both give up, rank 0 long before its own timeout, and leave it behind."""
    if here().rank == 1:
        stand_in.inject("hang", "initRank")
    with pytest.raises(dist.DistBackendError) as caught:
        create(timeout=0.7 if here().rank == 1 else 60)
    assert (
        "timed out after 700 ms: all ranks began NCCL's init, which has not ended here"
        if here().rank == 1
        else "another rank failed: rank 1: fastcoll.nccl_init [group 'g', rank 1/2]: timed out"
    ) in str(caught.value)
    assert stand_in.names()[-1] == "initRank"  # an abort might free what the init still uses


@on_stand_in(1)
def test_an_init_in_progress_is_not_waited_for_without_end():
    stand_in.inject("in_progress", "initRank", 10**9)
    with pytest.raises(dist.DistBackendError) as caught:
        create(timeout=0.5)
    assert stand_in.names()[-1] == "abort"
    assert "timed out after 500 ms: NCCL is still running" in str(caught.value)


@plays(67)
@pytest.mark.parametrize(("size", "status"), [(2, 2), (1, 1), (1, 8)])
@on_stand_in()
def test_an_init_that_fails_is_told_to_all(size, status):
    """Of the last rank."""
    fails = here().rank == size - 1
    if fails:
        stand_in.inject("fail", "initRank", status)
    with pytest.raises(dist.DistBackendError) as caught:
        create()
    text = str(caught.value)
    assert f"(status {status}): injected into initRank" in text
    told = "fastcoll.nccl_init [group 'g', rank 0/2]: another rank failed: rank 1: "
    assert fails or text.startswith(told)


@on_stand_in(2)
def test_aborted_while_made():
    if here().rank == 0:
        engine, before = engine_of("g"), store("g").num_keys()

        def abort() -> None:
            # Its record is there: it waits for rank 1, or will.
            until(lambda: store("g").num_keys() > before)
            engine.communicators.abort_all("rank 3 has ended")

        thread = threading.Thread(target=abort)
        thread.start()
        with pytest.raises(
            dist.DistBackendError, match="aborted before it was made: rank 3 has ended"
        ):
            engine.prepare(0, -1, False)
        thread.join()


@on_stand_in(2)
def test_generations():
    """The same store serves one communicator after the other, of one name."""
    tensor = torch.ones(1)
    for generation in range(3):
        made = create(generation=generation % 2)
        Tensors(made).all_reduce(tensor, tensor)
        assert made.abort()
    assert tensor.item() == here().size ** 3
