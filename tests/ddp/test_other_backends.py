"""fastcoll.ddp over another backend: gloo."""

import copy
import functools
import gc
import inspect
import types
from unittest import mock

import pytest
import test_both_ways
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from suite_rules import full
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import (
    Given,
    assert_gradients,
    assert_like,
    assert_same,
    backward_alone,
    network,
    train,
    train_alone,
)
from ways import WAYS, synchronized

STEPS = 5


def on_gloo(function):
    """Hands a function a group of gloo first, which all that the function has made is gone before."""

    @functools.wraps(function)
    def call(*arguments):
        group = dist.new_group(backend="gloo")
        function(group, *arguments)
        # DDP's part in C++ ends a group under Python's lock, for which gloo's threads may wait.
        gc.collect()
        dist.destroy_process_group(group)

    signature = inspect.signature(function)
    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return call


def reduced(way, model, group, **options):
    """Small buckets for the synchronizer, one for the hook, as stock DDP has here."""
    small = {"bucket_cap_mb": 0.0005} if way == "synchronizer" else {}
    return WAYS[way](model, group, **small, **options)[0]


@test_both_ways.each_way
@pytest.mark.parametrize("options", [full({}), {"gradient_norm": True}], ids=str)
@on_ranks(full(2), 3)
@on_gloo
def test_training_is_that_of_stock_ddp(group, way, options):
    """Every bit is that of stock DDP on gloo, which sums more than two ranks in an order that depends on the bucket."""
    stock = DistributedDataParallel(network(torch.float), process_group=group)
    ours = network(torch.float)
    losses, expected = train(reduced(way, ours, group, **options), STEPS), train(stock, STEPS)
    if way == "hook" or dist.get_world_size() == 2:
        assert losses == expected
        assert_same(ours, stock)
    assert_like(ours, stock, 1e-5)


@test_both_ways.each_way
@pytest.mark.parametrize("wire", [torch.bfloat16, full(torch.float16)], ids=str)
@on_ranks(3)
@on_gloo
def test_any_wire(group, way, wire):
    model = network()
    train(reduced(way, model, group, wire_dtype=wire), STEPS)
    assert_like(model, train_alone(STEPS, dist.get_world_size()), 0.03)


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


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=str)
@on_ranks(2)
@on_gloo
def test_no_callback_frees_the_group_on_gloos_thread(group, wire):
    """Whose destructor would wait for that thread: the process aborts."""
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
        train(reduced("hook", network(torch.float), group, gradient_norm=True, wire_dtype=wire), 2)
    assert callbacks
    kept = [each for callback in callbacks for each in reached_from(callback)]
    assert any(isinstance(each, torch.Tensor) for each in kept)
    assert not any(isinstance(each, dist.ProcessGroup) for each in kept)


@test_both_ways.each_way
@on_ranks(2)
@on_gloo
def test_a_mean_in_float16_does_not_overflow(group, way):
    """The mean of numbers near float16's largest is finite: they are divided before they are added."""
    model = Given(5)
    trained = reduced(way, model, group, wire_dtype=torch.float16)
    trained(torch.full((5,), 60000.0)).backward()
    assert torch.equal(model.gradient(), torch.full((5,), 60000.0))


@on_ranks(2)
@on_gloo
def test_odd_gradients(group):
    """Gradients that are not contiguous, empty, complex, and of several dtypes."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    model.empty = nn.Parameter(torch.zeros(0))
    model.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    alone = copy.deepcopy(model)

    def loss(model, rank, step):
        hidden = model[1](model[0](torch.full((2, 3, 9, 9), 1.0 + rank))).mean((0, 2, 3))
        return (hidden * model.turn).abs().sum() + model.empty.sum()

    synchronized(model, group, gradient_norm=True)
    loss(model, dist.get_rank(), 0).backward()
    assert_gradients(model, backward_alone(alone, 2, loss_of=loss))


@test_both_ways.each_way
@on_ranks(3)
@on_gloo
def test_the_sum(group, way):
    test_both_ways.test_the_sum_in_place_of_the_average(way, group)
