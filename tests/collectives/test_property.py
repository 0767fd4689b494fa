"""Any collective, operation, type, shape, layout and world size against the oracle."""

import dataclasses

import torch
import torch.distributed as dist
from backend import IS_GLOO, all_gather_single, reduce_scatter_single
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from layouts import FLAT, LAYOUTS, gaps_untouched, laid_out
from oracle import (
    BITWISE,
    COMPLEX,
    FLOAT8,
    FLOATS,
    GLOO_MOVES,
    GLOO_REDUCES,
    INTEGERS,
    OPS,
    allows,
    assert_reduced,
    assert_same,
    reduce_op,
    sample,
)

REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"]
MOVING = ["broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all",
          "all_to_all_single", "ring"]  # fmt: skip
EVERY_TYPE = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool, *FLOAT8]


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective on one group; what each rank sends follows from ``seed``."""

    collective: str
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    given_layout: str
    output_layout: str
    size: int
    root: int
    async_op: bool
    splits: tuple[tuple[int, ...], ...]
    seed: int
    device: str


def pairs(collective, device):
    """Operation and type that go together in a reducing collective."""
    if device != "cpu":
        return nccl_pairs()
    types = GLOO_REDUCES if IS_GLOO else [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]
    ops = [op for op in OPS if not (IS_GLOO and op == "PREMUL_SUM")]
    torch_refuses = {("PRODUCT", dtype) for dtype in COMPLEX} if collective == "all_reduce" else ()
    found = [(op, dtype) for op in ops for dtype in types if allows(op, dtype)]
    return [pair for pair in found if pair not in torch_refuses]


def nccl_pairs():
    """The same for NCCL, which has no 16-bit integers and fewer operations."""
    types = [t for t in [*FLOATS, *INTEGERS, torch.bool] if t not in (torch.int16, torch.uint16)]
    found = [
        (op, t)
        for op in OPS
        for t in types
        if allows(op, t) and (op not in BITWISE or (t == torch.bool and op != "BXOR"))
    ]
    return found + [(op, t) for op in ("SUM", "AVG", "PREMUL_SUM") for t in COMPLEX]


@st.composite
def cases(draw, device="cpu"):
    size = draw(st.integers(1, 5 if device == "cpu" else 4))
    # A stream does one message after the other: a ring of them on devices goes as a batch.
    collective = draw(
        st.sampled_from(REDUCING + [m for m in MOVING if device == "cpu" or m != "ring"])
    )
    if collective == "ring" and size == 1:
        collective = "broadcast"  # torch refuses messages to oneself
    if collective in REDUCING:
        op, dtype = draw(st.sampled_from(pairs(collective, device)))
    else:
        known = [t for t in GLOO_MOVES if not (collective == "gather" and t in COMPLEX)]
        op, dtype = "SUM", draw(st.sampled_from(known if IS_GLOO else EVERY_TYPE))
    dims = st.one_of(st.integers(1, 9), st.just(0), st.sampled_from([64, 255, 1025]))
    least = 1 if collective.endswith("_single") else 0
    shape = tuple(draw(st.lists(dims, min_size=least, max_size=3)))
    while torch.Size(shape).numel() > 100_000:
        shape = shape[1:]
    layouts = st.sampled_from(FLAT if IS_GLOO else LAYOUTS)
    row = st.tuples(*[st.integers(0, 5)] * size)
    return Case(
        collective, op, dtype, shape, draw(layouts), draw(layouts), size,
        root=draw(st.integers(0, size - 1)),
        async_op=draw(st.booleans()),
        splits=draw(st.tuples(*[row] * size)),
        seed=draw(st.integers(0, 10**6)),
        device=device,
    )  # fmt: skip


class Runner:
    """The view of one rank on a case."""

    def __init__(self, case):
        self.case = case
        self.mine = dist.get_rank()
        self.is_root = self.mine == case.root
        self.outputs = []

    def sent(self, source, target=0, shape=None):
        """What ``source`` sends to ``target``."""
        shape = self.case.shape if shape is None else shape
        return sample(100 * source + target, shape, self.case.dtype, self.case.seed)

    def give(self, tensor):
        return laid_out(tensor.to(self.case.device), self.case.given_layout)

    def out(self, shape=None, content=None):
        """Return an output tensor of zeros, or of what it holds before."""
        if content is None:
            shape = self.case.shape if shape is None else shape
            content = torch.zeros(shape, dtype=self.case.dtype)
        self.outputs.append(laid_out(content.to(self.case.device), self.case.output_layout))
        return self.outputs[-1]

    def cat(self, tensors):
        raw = torch.uint8 if self.case.dtype in FLOAT8 else self.case.dtype
        return torch.cat([t.view(raw) for t in tensors]).view(self.case.dtype)

    def finish(self, work):
        if self.case.async_op:
            assert work.wait()

    def check_gaps(self):
        if self.case.dtype not in FLOAT8 and self.case.output_layout != "contiguous":
            assert all(gaps_untouched(output) for output in self.outputs)


def run(case):
    runner = Runner(case)
    globals()[case.collective](runner, case, range(case.size))
    runner.check_gaps()


def run_in_order(case):
    import recording_device

    recording_device.clear()
    with recording_device.no_violations():
        run(case)


def all_reduce(r, case, ranks):
    tensor = r.out(content=r.sent(r.mine))
    r.finish(dist.all_reduce(tensor, reduce_op(case.op), async_op=case.async_op))
    assert_reduced(tensor, [r.sent(s) for s in ranks], case.op)


def reduce(r, case, ranks):
    tensor = r.out(content=r.sent(r.mine))
    r.finish(dist.reduce(tensor, case.root, reduce_op(case.op), async_op=case.async_op))
    if r.is_root:
        assert_reduced(tensor, [r.sent(s) for s in ranks], case.op)


def reduce_scatter(r, case, ranks):
    output, given = r.out(), [r.give(r.sent(r.mine, t)) for t in ranks]
    r.finish(dist.reduce_scatter(output, given, reduce_op(case.op), async_op=case.async_op))
    assert_reduced(output, [r.sent(s, r.mine) for s in ranks], case.op)


def reduce_scatter_single(r, case, ranks, call=reduce_scatter_single):
    output, given = r.out(), r.give(r.cat([r.sent(r.mine, t) for t in ranks]))
    r.finish(call(output, given, reduce_op(case.op), async_op=case.async_op))
    assert_reduced(output, [r.sent(s, r.mine) for s in ranks], case.op)


def broadcast(r, case, ranks):
    tensor = r.out(content=r.sent(r.mine))
    r.finish(dist.broadcast(tensor, case.root, async_op=case.async_op))
    assert_same(tensor, r.sent(case.root))


def all_gather(r, case, ranks):
    outputs = [r.out() for _ in ranks]
    r.finish(dist.all_gather(outputs, r.give(r.sent(r.mine)), async_op=case.async_op))
    for source in ranks:
        assert_same(outputs[source], r.sent(source))


def all_gather_single(r, case, ranks, call=all_gather_single):
    output = r.out((case.size * case.shape[0], *case.shape[1:]))
    r.finish(call(output, r.give(r.sent(r.mine)), async_op=case.async_op))
    assert_same(output, r.cat([r.sent(s) for s in ranks]))


def gather(r, case, ranks):
    outputs = [r.out() for _ in ranks] if r.is_root else None
    given = r.give(r.sent(r.mine))
    r.finish(dist.gather(given, outputs, case.root, async_op=case.async_op))
    for source, output in enumerate(outputs or []):
        assert_same(output, r.sent(source))


def scatter(r, case, ranks):
    output, given = r.out(), [r.give(r.sent(case.root, t)) for t in ranks]
    r.finish(dist.scatter(output, given if r.is_root else None, case.root, async_op=case.async_op))
    assert_same(output, r.sent(case.root, r.mine))


def all_to_all(r, case, ranks):
    shapes = [[case.shape if IS_GLOO else (n, *case.shape) for n in row] for row in case.splits]
    outputs = [r.out(shapes[s][r.mine]) for s in ranks]
    given = [r.give(r.sent(r.mine, t, shapes[r.mine][t])) for t in ranks]
    r.finish(dist.all_to_all(outputs, given, async_op=case.async_op))
    for source in ranks:
        assert_same(outputs[source], r.sent(source, r.mine, shapes[source][r.mine]))


def all_to_all_single(r, case, ranks):
    rest = case.shape[1:]
    incoming, outgoing = [case.splits[s][r.mine] for s in ranks], list(case.splits[r.mine])
    output = r.out((sum(incoming), *rest))
    given = r.give(r.cat([r.sent(r.mine, t, (outgoing[t], *rest)) for t in ranks]))
    r.finish(dist.all_to_all_single(output, given, incoming, outgoing, async_op=case.async_op))
    assert_same(output, r.cat([r.sent(s, r.mine, (incoming[s], *rest)) for s in ranks]))


def ring(r, case, ranks):
    before, after = (r.mine - 1) % case.size, (r.mine + 1) % case.size
    output = r.out()
    sending = dist.isend(r.give(r.sent(r.mine)), after, tag=case.root)
    if case.async_op:
        dist.irecv(output, before, tag=case.root).wait()
    else:
        dist.recv(output, before, tag=case.root)
    sending.wait()
    assert_same(output, r.sent(before))


# No shrinking: a case says all about itself, and every failing run costs new ranks.
ANY = settings(
    max_examples=4 * settings.default.max_examples,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@ANY
@given(case=cases())
def test_any_collective(world, case):
    world(case.size).run(run, case)


@ANY
@given(case=cases(device="recording:0"))
def test_any_collective_on_a_device(nccl_world, case):
    """Also that all accesses to memory are ordered."""
    nccl_world(case.size).run(run_in_order, case)
