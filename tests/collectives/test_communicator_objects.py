"""Objects by fastcoll.communicator: of all sizes, with buffers of their own, and those that cannot travel."""

import contextlib
import dataclasses
import pickle
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from backend import beyond_gloo
from on_ranks import on_ranks
from world import worlds_fixture

import fastcoll
from fastcoll._communicator import BLOCK, LONG, PIECE

pytestmark = [beyond_gloo("fastcoll's communicator"), *on_ranks(2)]


@dataclasses.dataclass
class Item:
    name: str
    arrays: list[np.ndarray]

    def __eq__(self, other) -> bool:
        same = len(self.arrays) == len(other.arrays)
        pairs = zip(self.arrays, other.arrays, strict=True)
        return same and self.name == other.name and all(np.array_equal(*pair) for pair in pairs)


def of_size(size: int, rank: int = 0) -> bytes:
    return bytes([rank % 251]) * size


def item(*sizes: int, rank: int = 0) -> Item:
    return Item(str(sizes), [np.full(size, rank, dtype=np.uint8) for size in sizes])


SIZES = [0, 1, BLOCK // 2, BLOCK - 64, BLOCK, BLOCK + 1]
SIZES += [LONG - 64, LONG - 1, LONG, LONG + 1, 3_000_000]


class Clears:
    """An object whose pickling changes another one."""

    def __init__(self, other: bytearray) -> None:
        self.other = other

    def __reduce__(self):
        self.other.clear()
        return Clears, (bytearray(),)


LONG_PIECES = {
    "texts": ["é" * PIECE, "a" * (LONG - 1), "b" * (3 * PIECE)],
    "bytes among short values": [
        1,
        b"a" * PIECE,
        "two",
        b"b" * 2 * PIECE,
        (3, b"c" * 70),
        b"d" * PIECE,
    ],
    "bytes in a row": [b"a" * PIECE, b"b" * PIECE],
    "the same bytes twice": [b"a" * PIECE] * 2,
    "bytearrays": {"one": bytearray(b"a" * PIECE), "two": bytearray(b"b" * 5)},
    "long frames": list(range(100_000)),
    "integers": [1 << (9 * PIECE), -1 << 2000],
    "arrays and bytes": (np.arange(LONG), b"a" * PIECE, np.arange(3), "a" * PIECE),
    "an array that may not be written": np.frombuffer(b"ab" * LONG, dtype=np.uint8),
}


@pytest.mark.parametrize("name", LONG_PIECES)
def test_long_pieces_of_a_pickle(name):
    comm = fastcoll.communicator()
    value = LONG_PIECES[name]
    found = comm.broadcast_object(value if comm.rank == 0 else None, 0)
    assert pickle.dumps(found) == pickle.dumps(value)
    for each in comm.all_gather_object(value):
        assert pickle.dumps(each) == pickle.dumps(value)


def test_what_changes_while_it_is_pickled_arrives_as_it_was():
    comm = fastcoll.communicator()
    long = bytearray(b"a" * PIECE)
    found = comm.broadcast_object([long, Clears(long)] if comm.rank == 0 else None, 0)
    assert (len(found[0]), found[0][:1]) == ((0, b"") if comm.rank == 0 else (PIECE, b"a"))


@pytest.mark.parametrize("root", [0, 2])
@on_ranks(3)
def test_broadcast(root):
    comm = fastcoll.communicator()
    values = [None, 7, "text", {"a": [1, 2.5]}, torch.arange(5.0).tolist()]
    values += [of_size(size) for size in SIZES]
    values += [item(size) for size in SIZES]
    values += [item(), item(1, 2, 3), item(10, LONG, 5, 2 * LONG, 0)]
    values += [np.arange(600_000.0).reshape(1000, 600)[:, ::2].tolist()[0]]
    for value in values:
        given = value if comm.rank == root else "ignored"
        found = comm.broadcast_object(given, root)
        assert found == value
        assert (found is given) == (comm.rank == root)


@on_ranks(1, 2, 3)
def test_all_gather():
    comm = fastcoll.communicator()
    for size in SIZES:
        # Some ranks have a long object, and others a short one.
        mine = of_size(size if comm.rank % 2 else 3, comm.rank)
        expected = [of_size(size if rank % 2 else 3, rank) for rank in range(comm.size)]
        found = comm.all_gather_object(mine)
        assert found == expected
        assert found[comm.rank] is mine
        items = comm.all_gather_object(item(size, 5, rank=comm.rank))
        assert items == [item(size, 5, rank=rank) for rank in range(comm.size)]


def test_arrays_that_arrive_can_be_written_and_are_the_receivers_own():
    comm = fastcoll.communicator()
    for size in (3, LONG):
        first = comm.broadcast_object(np.zeros(size), 0)
        again = comm.broadcast_object(np.ones(size), 0)
        if comm.rank == 1:
            first += 5.0
            assert first.tolist() == [5.0] * size and again.tolist() == [1.0] * size
    strided = np.arange(40_000.0)[::2]
    assert comm.broadcast_object(strided, 0).tolist() == np.arange(0.0, 40_000.0, 2.0).tolist()


def test_tensors():
    comm = fastcoll.communicator()
    whole = torch.arange(100_000.0).view(250, 400)
    layer = torch.nn.Linear(300, 300)
    tensors = [
        *(whole, whole.half(), whole > 5, whole.to(torch.complex64), whole.bfloat16()),
        *(whole.t(), whole[:, ::2], whole[:0], whole.to_sparse(), torch.tensor(3.0)),
        *(
            whole.to(torch.complex64).conj(),
            torch.nn.Parameter(whole),
            whole.clone().requires_grad_(),
        ),
    ]
    for tensor in tensors:
        found = comm.broadcast_object(tensor if comm.rank == 0 else None, 0)
        assert type(found) is type(tensor) and found.requires_grad == tensor.requires_grad
        assert (found.dtype, found.shape, found.layout) == (
            tensor.dtype,
            tensor.shape,
            tensor.layout,
        )
        assert torch.equal(found.detach().to_dense(), tensor.detach().to_dense())
    state = comm.broadcast_object(layer.state_dict() if comm.rank == 0 else None, 0)
    if comm.rank == 1:
        state["weight"] += 1.0  # memory of its own, which can be written
    resized = comm.broadcast_object(whole.clone() if comm.rank == 0 else None, 0)
    sent = whole.clone()
    comm.broadcast_object(sent, 0)
    for tensor in (resized, sent):  # as without the exchange, unlike what numpy has seen
        tensor.resize_(3)
        tensor.untyped_storage().resize_(0)
    found = comm.all_gather_object({"w": whole[:200].clone(), "rank": comm.rank})
    assert [torch.equal(one["w"], whole[:200]) for one in found] == [True, True]


class Unpicklable:
    def __init__(self, error: type[Exception], text: str) -> None:
        self.error, self.text = error, text

    def __reduce__(self):
        raise self.error(self.text)


UNPICKLABLE = {
    "lock": (threading.Lock(), TypeError, "cannot pickle"),
    "lambda": (lambda: 0, (pickle.PicklingError, AttributeError), "pickle"),
    "long text": (Unpicklable(ValueError, "x" * 100_000), ValueError, "xxx"),
    "other kind": (Unpicklable(KeyError, "key"), TypeError, "key"),
}


@pytest.mark.parametrize("name", ["lock", "lambda", "long text", "other kind"])
@on_ranks(3)
def test_what_cannot_be_pickled_raises_on_all_ranks(name):
    comm = fastcoll.communicator()
    value, kind, text = UNPICKLABLE[name]
    for call in (
        lambda: comm.broadcast_object(value if comm.rank == 1 else None, 1),
        lambda: comm.all_gather_object(value if comm.rank == 1 else of_size(LONG)),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert comm.all_gather_object(comm.rank) == [0, 1, 2]


def refuse() -> None:
    raise ValueError("this is not for me")


class Poison:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return refuse, ()


@on_ranks(3)
def test_what_cannot_be_unpickled_raises_where_it_arrives():
    comm = fastcoll.communicator()
    if comm.rank == 1:
        assert isinstance(comm.broadcast_object(Poison(), 1), Poison)
    else:
        with pytest.raises(ValueError, match="not for me"):
            comm.broadcast_object(None, 1)
    with pytest.raises(ValueError, match="not for me"):
        comm.all_gather_object([Poison(), of_size(LONG * (comm.rank + 1))])
    assert comm.all_gather_object(comm.rank) == [0, 1, 2]


def test_another_default_device():
    comm = fastcoll.communicator()
    values = [of_size(BLOCK), of_size(LONG)]
    with torch.device("meta"):
        found = [comm.broadcast_object(value if comm.rank == 0 else None, 0) for value in values]
    assert found == values


@contextlib.contextmanager
def without_more_memory(*, limited: bool):
    """Leaves this process 64 MB of address space."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    left = pages * resource.getpagesize() + 2**26 if limited else before[0]
    resource.setrlimit(resource.RLIMIT_AS, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# Ranks that have run other tests may have so much free memory that they need no more.
new_world = worlds_fixture("launcher", scope="function")


@pytest.mark.parametrize("parts", [1, 5000], ids=["one long part", "many short ones"])
@on_ranks(3, world="new_world")
def test_a_rank_without_memory_raises_on_all_ranks(parts):
    comm = fastcoll.communicator()
    value = [np.zeros(2**28 // parts, dtype=np.uint8) for _ in range(parts)]
    comm.all_gather_object(item(LONG, rank=comm.rank))  # maps the group's memory
    for root in range(comm.size):
        comm.broadcast_object(item(2 * LONG), root)
    text = r"rank 2 lacks the memory for an object of rank 1 \(268\d{6} bytes\)"
    with without_more_memory(limited=comm.rank == 2), pytest.raises(MemoryError, match=text):
        comm.broadcast_object(value if comm.rank == 1 else None, 1)
    with without_more_memory(limited=comm.rank == 2), pytest.raises(MemoryError, match=text):
        comm.all_gather_object(value if comm.rank == 1 else of_size(LONG))
    assert comm.all_gather_object(comm.rank) == [0, 1, 2]
