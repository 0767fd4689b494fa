"""fastcoll.ddp over another backend: gloo."""

import copy
import functools
import gc
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_both_ways import sums as summed_over
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_gradients, assert_like, assert_same, network, train, train_alone
from ways import WAYS, synchronized

from fastcoll.ddp import WIRE_DTYPES

STEPS = 5


def on_gloo(name, *arguments):
    """Runs a function of this file with a group, which all that the function has made is gone before."""
    group = dist.new_group(backend="gloo")
    globals()[name](group, *arguments)
    # DDP's part in C++ ends a group under Python's lock, for which gloo's threads may wait.
    gc.collect()
    dist.destroy_process_group(group)


def reduced(way, model, group, **options):
    """Small buckets for the synchronizer, one for the hook, as stock DDP has here."""
    small = {"bucket_cap_mb": 0.0005} if way == "synchronizer" else {}
    return WAYS[way](model, group, **small, **options)[0]


def like_stock(group, way, options):
    """Every bit is that of stock DDP on gloo, which sums more than two ranks in an order that depends on the bucket."""
    stock = DistributedDataParallel(network(torch.float), process_group=group)
    ours = network(torch.float)
    losses, expected = train(reduced(way, ours, group, **options), STEPS), train(stock, STEPS)
    if way == "hook" or dist.get_world_size() == 2:
        assert losses == expected
        assert_same(ours, stock)
    assert_like(ours, stock, 1e-5)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.full), {"gradient_norm": True}], ids=str
)
def test_training_on_gloo_is_that_of_stock_ddp(world, way, options, size):
    world(size).run(on_gloo, "like_stock", way, options)


def learns(group, way, wire):
    model = network()
    train(reduced(way, model, group, wire_dtype=wire), STEPS)
    assert_like(model, train_alone(STEPS, dist.get_world_size()), 0.03)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    "wire",
    [pytest.param(w, marks=[] if w.itemsize == 1 else pytest.mark.full) for w in WIRE_DTYPES],
    ids=str,
)
def test_any_wire_on_gloo(world, way, wire):
    world(3).run(on_gloo, "learns", way, wire)


def reached_from(value):
    """Yields what a callback keeps: what it closes over, is bound to, and so on."""
    yield value
    if isinstance(value, types.FunctionType):
        inner = [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, types.MethodType):
        inner = [value.__self__]
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, list | tuple):
        inner = value
    else:
        inner = vars(value).values() if type(value).__module__.startswith("fastcoll") else ()
    for each in inner:
        yield from reached_from(each)


def frees_no_group(group, way, options):
    callbacks = []

    def recorded(method):
        def call(future, callback):
            callbacks.append(callback)
            return method(future, callback)

        return call

    future = torch._C.Future
    with (
        mock.patch.object(future, "then", recorded(future.then)),
        mock.patch.object(future, "add_done_callback", recorded(future.add_done_callback)),
    ):
        train(reduced(way, network(torch.float), group, **options), 2)
    assert callbacks
    kept = [each for callback in callbacks for each in reached_from(callback)]
    assert any(isinstance(each, torch.Tensor) for each in kept)
    assert not any(isinstance(each, dist.ProcessGroup) for each in kept)


@pytest.mark.parametrize(
    "way, options",
    [
        ("hook", {"gradient_norm": True}),
        ("hook", {"gradient_norm": True, "wire_dtype": torch.float8_e5m2}),
        ("synchronizer", {"gradient_norm": True, "wire_dtype": torch.float8_e5m2}),
    ],
    ids=str,
)
def test_no_callback_frees_the_group_on_gloos_thread(world, way, options):
    """Whose destructor would wait for that thread: the process aborts."""
    world(2).run(on_gloo, "frees_no_group", way, options)


class Scaled(nn.Module):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, inputs):
        return (self.weight * inputs).sum()


def near_the_largest(group, way):
    """The mean of numbers near float16's largest is finite: they are divided before they are added."""
    model = Scaled()
    trained = reduced(way, model, group, wire_dtype=torch.float16)
    trained(torch.full((5,), 60000.0)).backward()
    assert torch.equal(model.weight.grad, torch.full((5,), 60000.0))


@pytest.mark.parametrize("way", list(WAYS))
def test_a_mean_in_float16_on_gloo_does_not_overflow(world, way):
    world(2).run(on_gloo, "near_the_largest", way)


def odd_layouts(group):
    """Gradients that are not contiguous, empty, complex, and of several dtypes."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    model.empty = nn.Parameter(torch.zeros(0))
    model.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    alone = copy.deepcopy(model)

    def loss(model, rank):
        hidden = model[1](model[0](torch.full((2, 3, 9, 9), 1.0 + rank))).mean((0, 2, 3))
        return (hidden * model.turn).abs().sum() + model.empty.sum()

    synchronized(model, group, gradient_norm=True)
    loss(model, dist.get_rank()).backward()
    for rank in range(2):
        (loss(alone, rank) / 2).backward()
    assert_gradients(model, alone)


def test_odd_gradients_on_gloo(world):
    world(2).run(on_gloo, "odd_layouts")


def sums(group, way):
    summed_over(way, group)


@pytest.mark.parametrize("way", WAYS)
def test_the_sum_on_gloo(world, way):
    world(3).run(on_gloo, "sums", way)
