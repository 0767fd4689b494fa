"""One table of the collectives: each call, and its expected result, for any type and layout."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend import IS_GLOO, all_gather_single, beyond_gloo, reduce_scatter_single, since
from collective_doors import call_direct, call_operator
from layouts import LAYOUTS, gaps_untouched, laid_out
from oracle import (
    BITWISE,
    COMPLEX,
    FLOAT8,
    FLOATS,
    GLOO_REDUCES,
    INTEGERS,
    OPS,
    allows,
    assert_reduced,
    assert_same,
    bits,
    reduce_op,
    reduced,
    sample,
)
from torch import Tensor

import fastcoll

REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"]
MOVING = ["broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all",
          "all_to_all_single", "ring"]  # fmt: skip
STACKING = ["reduce_scatter_single", "all_gather_single"]
REDUCED = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]
MOVED = [*REDUCED, *FLOAT8]


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective on one group; ``seed`` determines the inputs of all ranks."""

    collective: str  # name of a function of this module
    op: str = "SUM"
    dtype: torch.dtype = torch.float
    shape: tuple[int, ...] = (3, 5)  # of the call's smallest tensors
    # Of the inputs: one of LAYOUTS, or "shared" for the group's shared memory.
    given_layout: str = "contiguous"
    output_layout: str = "contiguous"  # of the outputs, and of tensors that are input and output
    root: int = 0  # a rank of the group; -1 is the last
    async_op: bool = False
    # What each rank sends to each in all_to_all, for as many ranks or more; (): equal lengths.
    splits: tuple[tuple[int, ...], ...] = ()
    stacked: bool = False  # whether the one tensor for all ranks has a dimension for the ranks
    members: tuple[int, ...] = ()  # of a group that the call makes; without it, the default group
    seed: int = 0
    device: str = "cpu"
    # Whether results on CPU have the oracle's bits, but for products of complex numbers.
    exact: bool = not IS_GLOO
    # "dist"; "direct": fastcoll.communicator; a "plan", called twice; "operator" of torch.ops.fastcoll.
    door: str = "dist"


def operations(collective: str, dtype: torch.dtype) -> list[str]:
    """Return the operations that a reducing collective has for a type."""
    if IS_GLOO and dtype not in GLOO_REDUCES:
        return []
    refused = ["PREMUL_SUM"] if IS_GLOO else []
    if collective == "all_reduce" and dtype in COMPLEX:
        refused.append("PRODUCT")  # by torch itself
    return [op for op in OPS if allows(op, dtype) and op not in refused]


def nccl_pairs() -> list[tuple[str, torch.dtype]]:
    """Return NCCL's operations and types: no 16-bit integers, and fewer operations."""
    types = [t for t in [*FLOATS, *INTEGERS, torch.bool] if t not in (torch.int16, torch.uint16)]
    found = [
        (op, t)
        for op in OPS
        for t in types
        if allows(op, t) and (op not in BITWISE or (t == torch.bool and op != "BXOR"))
    ]
    return found + [(op, t) for op in ("SUM", "AVG", "PREMUL_SUM") for t in COMPLEX]


def collectives(names: Iterable[str], dtypes: Iterable[torch.dtype], known: Iterable) -> list[Any]:
    """Return parameters: each collective with each type; gloo handles the types in ``known``."""
    return [
        pytest.param(
            *(name, dtype),
            marks=[
                *([] if dtype in known else [beyond_gloo("unknown type")]),
                *([beyond_gloo("complex")] if name == "gather" and dtype in COMPLEX else []),
                *([since(14, name), beyond_gloo(name)] if name == "gather_single" else []),
            ],
        )
        for name in names
        for dtype in dtypes
    ]


def run(case: Case) -> bytes:
    """Make the call, check its result, and return the bits of the outputs."""
    if not case.members:
        return Runner(case).check()
    group = dist.new_group(case.members)
    if dist.get_rank() not in case.members:
        return b""
    found = Runner(case, group).check()
    dist.destroy_process_group(group)
    return found


def run_all(cases: Iterable[Case]) -> None:
    for case in cases:
        run(case)


class Runner:
    """A case on one rank; the constructor begins the call.

    Attributes:
        work: the call's handle, if the case is asynchronous.
        outputs: the tensors that the call writes, on this rank.
        before: ``versions`` when the call began.
        promised: whether the outputs' content is defined on this rank.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup | None = None) -> None:
        self.case = case
        self.group = group or dist.group.WORLD
        self.mine, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.at = case.root % self.size
        self.root = dist.get_global_rank(self.group, self.at)
        self.is_root = self.mine == self.at
        self.given: list[tuple[Tensor, Tensor]] = []
        self.outputs: list[Tensor] = []
        self.work: dist.Work | None = None
        self.before: list[int] = []
        self.promised = True
        self._checks = globals()[case.collective](self, case, range(self.size))
        next(self._checks)

    def sent(self, source: int, target: int = 0, shape: Sequence[int] | None = None) -> Tensor:
        """Return the tensor that ``source`` sends to ``target``."""
        shape = self.case.shape if shape is None else shape
        return sample(100 * source + target, shape, self.case.dtype, self.case.seed)

    def give(self, tensor: Tensor) -> Tensor:
        given = self.lay(tensor, self.case.given_layout)
        self.given.append((given, tensor))
        return given

    def out(self, shape: Sequence[int] | None = None, content: Tensor | None = None) -> Tensor:
        """Return an output tensor, filled with zeros or with ``content``."""
        if content is None:
            shape = self.case.shape if shape is None else shape
            content = torch.zeros(shape, dtype=self.case.dtype)
        self.outputs.append(self.lay(content, self.case.output_layout))
        return self.outputs[-1]

    def lay(self, tensor: Tensor, layout: str) -> Tensor:
        if layout != "shared":
            return laid_out(tensor.to(self.case.device), layout)
        backend = self.group._get_backend(tensor.device)
        place = backend.allocate_tensor(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return place.view(tensor.shape).copy_(tensor)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors of all ranks joined into one."""
        raw = torch.uint8 if self.case.dtype in FLOAT8 else self.case.dtype
        join = torch.stack if self.case.stacked else torch.cat
        return join([t.view(raw) for t in tensors]).view(self.case.dtype)

    def call(self, collective: Callable, *tensors: Any, **options: Any) -> None:
        self.before = self.versions()
        if self.case.door == "operator":
            return call_operator(self, collective, *tensors, **options)
        if self.case.door != "dist":
            return call_direct(self, collective, *tensors, **options)
        options |= {"group": self.group, "async_op": self.case.async_op}
        self.work = collective(*tensors, **options)
        assert (self.work is not None) == self.case.async_op

    def assert_reduced(self, actual: Tensor, tensors: Sequence[Tensor]) -> None:
        complex_product = self.case.op == "PRODUCT" and self.case.dtype in COMPLEX
        if self.case.exact and self.case.device == "cpu" and not complex_product:
            assert_same(actual, reduced(tensors, self.case.op))
        else:
            assert_reduced(actual, tensors, self.case.op)

    def versions(self) -> list[int]:
        """Return the version counter of each output, then of each input."""
        return [tensor._version for tensor in (*self.outputs, *(given for given, _ in self.given))]

    def check(self) -> bytes:
        """Wait for the call, check its result, and return the bits of the outputs."""
        if self.work is not None:
            assert self.work.wait()
        next(self._checks, None)
        for given, before in self.given:
            assert_same(given, before)
        if self.case.dtype not in FLOAT8 and self.case.output_layout in LAYOUTS[1:]:
            assert all(gaps_untouched(output) for output in self.outputs)
        return b"".join(bits(output.cpu()) for output in self.outputs if self.promised)


# Each of these functions makes a call before its yield, and checks the result after it.


def all_reduce(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    tensor = r.out(content=r.sent(r.mine))
    r.call(dist.all_reduce, tensor, op=reduce_op(case.op))
    yield
    r.assert_reduced(tensor, [r.sent(s) for s in ranks])


def reduce(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    tensor = r.out(content=r.sent(r.mine))
    r.call(dist.reduce, tensor, r.root, op=reduce_op(case.op))
    yield
    if r.is_root:
        r.assert_reduced(tensor, [r.sent(s) for s in ranks])
    r.promised = r.is_root


def reduce_scatter(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    output, given = r.out(), [r.give(r.sent(r.mine, t)) for t in ranks]
    r.call(dist.reduce_scatter, output, given, op=reduce_op(case.op))
    yield
    r.assert_reduced(output, [r.sent(s, r.mine) for s in ranks])


def reduce_scatter_single(
    r: Runner, case: Case, ranks: range, call=reduce_scatter_single
) -> Iterator[None]:
    output, given = r.out(), r.give(r.joined([r.sent(r.mine, t) for t in ranks]))
    r.call(call, output, given, op=reduce_op(case.op))
    yield
    r.assert_reduced(output, [r.sent(s, r.mine) for s in ranks])


def broadcast(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    tensor = r.out(content=r.sent(r.mine))
    r.call(dist.broadcast, tensor, r.root)
    yield
    assert_same(tensor, r.sent(r.at))


def all_gather(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    outputs = [r.out() for _ in ranks]
    r.call(dist.all_gather, outputs, r.give(r.sent(r.mine)))
    yield
    for source in ranks:
        assert_same(outputs[source], r.sent(source))


def all_gather_single(
    r: Runner, case: Case, ranks: range, call=all_gather_single
) -> Iterator[None]:
    expected = r.joined([r.sent(s) for s in ranks])
    output = r.out(expected.shape)
    r.call(call, output, r.give(r.sent(r.mine)))
    yield
    assert_same(output, expected)


def gather(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    outputs = [r.out() for _ in ranks] if r.is_root else None
    r.call(dist.gather, r.give(r.sent(r.mine)), outputs, r.root)
    yield
    for source, output in enumerate(outputs or []):
        assert_same(output, r.sent(source))


def gather_single(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    output = r.out((r.size, *case.shape)) if r.is_root else None
    r.call(dist.gather_single, r.give(r.sent(r.mine)), output, r.root)
    yield
    if r.is_root:
        assert_same(output, torch.stack([r.sent(s) for s in ranks]))


def scatter(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    output, given = r.out(), [r.give(r.sent(r.at, t)) for t in ranks]
    r.call(dist.scatter, output, given if r.is_root else None, r.root)
    yield
    assert_same(output, r.sent(r.at, r.mine))


def all_to_all(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    even = IS_GLOO or not case.splits
    shapes = [[case.shape if even else (case.splits[s][t], *case.shape) for t in ranks] for s in ranks]  # fmt: skip
    outputs = [r.out(shapes[s][r.mine]) for s in ranks]
    r.call(dist.all_to_all, outputs, [r.give(r.sent(r.mine, t, shapes[r.mine][t])) for t in ranks])
    yield
    for source in ranks:
        assert_same(outputs[source], r.sent(source, r.mine, shapes[source][r.mine]))


def all_to_all_single(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    length, *rest = case.shape
    splits = case.splits or [[length] * r.size] * r.size
    incoming, outgoing = [splits[s][r.mine] for s in ranks], [splits[r.mine][t] for t in ranks]
    output = r.out((sum(incoming), *rest))
    given = r.give(r.joined([r.sent(r.mine, t, (outgoing[t], *rest)) for t in ranks]))
    told = (incoming, outgoing) if case.splits else ()
    r.call(dist.all_to_all_single, output, given, *told)
    yield
    assert_same(output, r.joined([r.sent(s, r.mine, (incoming[s], *rest)) for s in ranks]))


def ring(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    before, after = (r.mine - 1) % r.size, (r.mine + 1) % r.size
    output = r.out()
    given = r.give(r.sent(r.mine))
    r.before = r.versions()
    if case.door != "dist":
        comm = fastcoll.communicator(r.group)
        apart = [(comm.send, given, after, r.at), (comm.recv, output, before, r.at)]
        calls = apart if case.seed % 3 else [(comm.sendrecv, given, after, output, before)]
        for call, *rest in calls if r.mine else calls[::-1]:  # a long send waits for its receiver
            plan = getattr(comm, f"{call.__name__}_plan") if case.door == "plan" else None
            plan(*rest)() if plan else call(*rest)
        yield
        assert_same(output, r.sent(before))
        return
    sending = dist.isend(given, group=r.group, group_dst=after, tag=r.at)
    if case.async_op:
        r.work = dist.irecv(output, group=r.group, group_src=before, tag=r.at)
    else:
        dist.recv(output, group=r.group, group_src=before, tag=r.at)
    yield
    sending.wait()
    assert_same(output, r.sent(before))


def barrier(r: Runner, case: Case, ranks: range) -> Iterator[None]:
    r.call(dist.barrier)
    yield
