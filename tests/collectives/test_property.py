"""Any collective, operation, type, shape, layout and world size against the oracle."""

import torch
from backend import IS_GLOO, beyond_gloo
from collective_cases import (
    MOVED,
    MOVING,
    REDUCED,
    REDUCING,
    STACKING,
    Case,
    nccl_pairs,
    operations,
    run,
)
from device_ranks import in_order
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from layouts import FLAT, LAYOUTS
from oracle import COMPLEX, GLOO_MOVES


def pairs(collective, device):
    """Operation and type that go together in a reducing collective."""
    if device != "cpu":
        return nccl_pairs()
    return [(op, dtype) for dtype in REDUCED for op in operations(collective, dtype)]


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
        op, dtype = "SUM", draw(st.sampled_from(known if IS_GLOO else MOVED))
    dims = st.one_of(st.integers(1, 9), st.just(0), st.sampled_from([64, 255, 1025]))
    least = 1 if collective.endswith("_single") else 0
    shape = tuple(draw(st.lists(dims, min_size=least, max_size=3)))
    while torch.Size(shape).numel() > 100_000:
        shape = shape[1:]
    layouts = st.sampled_from(FLAT if IS_GLOO else LAYOUTS)
    row = st.tuples(*[st.integers(0, 5)] * size)
    case = Case(
        collective, op, dtype, shape, draw(layouts), draw(layouts),
        root=draw(st.integers(0, size - 1)),
        async_op=draw(st.booleans()),
        splits=draw(st.tuples(*[row] * size)),
        stacked=draw(st.booleans()) and collective in STACKING and not IS_GLOO,
        seed=draw(st.integers(0, 10**6)),
        device=device,
    )  # fmt: skip
    return size, case


# No shrinking: a case says all about itself, and every failing run costs new ranks.
# What is drawn anew each time may find more than a fixed list, beside the tables of test_collectives.
def examples(fixed):
    return settings(
        max_examples=fixed if settings.default.derandomize else 4 * fixed,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@examples(100)
@given(drawn=cases())
def test_any_collective(world, drawn):
    size, case = drawn
    world(size).run(run, case)


@beyond_gloo("has no devices")
@examples(30)
@given(drawn=cases(device="recording:0"))
def test_any_collective_on_a_device(nccl_world, drawn):
    """Also that all accesses to memory are ordered."""
    size, case = drawn
    nccl_world(size).run(in_order, run, case)
