"""The memory that a step touches around its collectives: what stock DDP reads and writes, and what fastcoll does.

A dispatch mode sees every operator of a step and adds up the bytes that it reads and writes. Each operator is a
launch on a GPU. The same step without data parallelism is taken away. The collectives return at once and are not
counted. Where an operator runs does not change what it touches: "on a device" is a backend without fastcoll's
collective for gradients, which casts, divides and measures on the CPU.
"""

import contextlib
import functools
import inspect
import math

import pytest
import torch
import torch.distributed as dist
from backend import TORCH
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from ways import hooked

from fastcoll.bench.gradients import EmulatedModel
from fastcoll.ddp import GradientSynchronizer

pytestmark = pytest.mark.full

# Two megabytes, so that there are two buckets: DDP's first one is of 1 MiB.
SHAPES = [(400, 500), (500,), (600, 400), (100,), (300, 200)]
SIZE = 4 * sum(map(math.prod, SHAPES))
P, B, RANKS = len(SHAPES), 2, 4
NEVER = 1e30  # a norm to clip to: the factor is 1
BF16 = torch.bfloat16


class Traffic(TorchDispatchMode):
    """Counts the operators that touch memory, and their bytes."""

    def __init__(self):
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if size := touched(func._schema, args, kwargs or {}, result):
            self.launches += 1
            self.bytes += size
        return result


def touched(schema, args, kwargs, result):
    """Bytes: an argument is read unless it is only written, and a result is written unless it is a view or empty."""
    name = schema.name.partition("::")[2]
    written = [each.alias_info is not None and each.alias_info.is_write for each in schema.returns]
    if any(
        each.alias_info and not write for each, write in zip(schema.returns, written, strict=True)
    ):
        return 0  # a view
    size = 0
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        target = argument.alias_info is not None and argument.alias_info.is_write
        only_written = argument.is_out or name in ("copy_", "_foreach_copy_", "fill_", "zero_")
        reads = not name.endswith("_like") and not (target and only_written)
        size += (reads + target) * extent(value)
    return size + (0 if any(written) or "empty" in name else extent(result))


def extent(value):
    """Bytes that a pass over tensors touches, once each; tensors without dimensions count as none."""
    if isinstance(value, list | tuple):
        return sum(map(extent, value))
    if not isinstance(value, torch.Tensor) or not value.dim():
        return 0
    sizes = zip(value.shape, value.stride(), strict=True)
    return value.itemsize * math.prod(length for length, stride in sizes if stride)


class Immediate(dist.ProcessGroup):
    """Rank 0 of ranks that all do as it does. Nothing is reduced."""

    def _get_backend(self, device):
        return self

    def done(self, tensors, *options, **more):
        future = Future()
        future.set_result(tensors)
        return _distributed_c10d._create_work_from_future(future)

    allreduce = broadcast = done

    def allgather(self, outputs, inputs, opts=None):
        with _disable_current_modes():  # DDP compares
            for of_ranks, own in zip(outputs, inputs, strict=True):
                for output in of_ranks:
                    output.copy_(own)
        return self.done(outputs)

    def all_gather_single(self, output, own, opts=None):  # torch 2.15 gathers objects by it
        return self.allgather([output.chunk(self.size())], [own])

    def getBackendName(self):
        return "immediate"


class Fusing(Immediate):
    """One that has fastcoll's collective for gradients, as fastcoll has on the CPU."""

    all_reduce_fused = Immediate.done

    def name(self):
        return "fastcoll"

    def transport(self):
        return "gloo"  # of ranks that take no core of this host

    def is_shared(self, tensor):
        return False

    def getBackendName(self):
        return "fusing"


@contextlib.contextmanager
def group_of(kind):
    name = kind.__name__.lower()
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(
            name, lambda store, rank, size, timeout: kind(rank, size), devices=["cpu"]
        )
    store = _distributed_c10d.HashStore()
    dist.init_process_group(name, store=store, rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Each way takes a model, and returns what is called for the loss and what follows the backward pass.
def nothing():
    pass


def ddp(model, hook=None, after=lambda model: None, **options):
    wrapped = DistributedDataParallel(model, **options)
    if hook is not None:
        # By another name: DDP refuses bf16_compress_hook on CPU tensors, and looks at annotations.
        wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return wrapped, lambda: after(model)


def fused(model, wire=None, **options):
    return hooked(model, wire_dtype=wire, **options)[0], nothing


def synchronized(model, **options):
    GradientSynchronizer(model, **options)
    return model, nothing


class FusedOptimizer(torch.optim.SGD):
    """Takes the scale as a fused one does; its step is not counted, and never called."""

    _step_supports_amp_scaling = True


def clipped_in_step(model):
    synchronizer = GradientSynchronizer(model, gradient_norm=True)
    optimizer = FusedOptimizer(model.parameters(), lr=0.0)
    return model, lambda: synchronizer.clip_in_step(optimizer, NEVER)


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), NEVER)


def way(name, attach, passes, launches, kind=Immediate, kept=False, **options):
    """A way to average gradients, with what is expected: S are the bytes of all gradients, P tensors, B buckets.

    Args:
        passes: over the gradients, in S.
        kept: whether gradients are zeroed before the step, and not set to None.
    """
    attach = functools.partial(attach, **options)
    return pytest.param(attach, passes, launches, kind, kept, id=name)


VIEWS = {"gradient_as_bucket_view": True}
COMPRESS = {"hook": default_hooks.bf16_compress_hook}
# Into buckets, each tensor by itself, is 2 S in P launches, and out of them the same. A cast of a bucket to bfloat16
# moves 1.5 S, and so does the cast back.
STOCK = [
    way("stock DDP", ddp, 2 + 2, P + P),
    way("stock DDP, bucket views", ddp, 2, P, **VIEWS),
    way("bf16_compress_hook", ddp, 2 + 2 + 1.5 + 1.5 + 1, P + P + 3 * B, **COMPRESS),
    way("bf16_compress_hook, views", ddp, 2 + 1.5 + 1.5 + 1, P + 3 * B, **COMPRESS, **VIEWS),
    way("clip_grad_norm_", ddp, 2 + 1 + 2, None, after=clipped, **VIEWS),
]
if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
    BATCHED = {"batched_grad_copy": True}
    OUT = B if TORCH >= (2, 15) else P
    STOCK += [
        way("batched_grad_copy", ddp, 2 + 2 + 2, B + B + OUT, **BATCHED),
        way("batched_grad_copy, views", ddp, 2 + 2, B + B, **BATCHED, **VIEWS),
    ]
OURS = [
    way("hook", fused, 2 + 2, P + P),
    way("hook, views", fused, 2, P, **VIEWS),
    way("hook, views, gradients kept", fused, 0, 0, kept=True, **VIEWS),
    way("hook, bf16 wire, CPU", fused, 2, P, Fusing, wire=BF16, **VIEWS),
    way("hook, bf16 wire, device", fused, 2 + 1.5 + 1.5, P + 2 * B, wire=BF16, **VIEWS),
    way("synchronizer, CPU", synchronized, 0, 0, Fusing),
    way("synchronizer, bf16 wire, CPU", synchronized, 0, 0, Fusing, wire_dtype=BF16),
    way("synchronizer, device", synchronized, 2 + 2, B + B),
    way("synchronizer, bf16 wire, device", synchronized, 4 + 3, 4 * B, wire_dtype=BF16),
    way("clip_in_step, CPU", clipped_in_step, 0, None, Fusing),
    way("clip_in_step, device", clipped_in_step, 4 + 1 / RANKS, None),  # a rank measures its share
]


def step(model, module, after, kept):
    """Takes three steps, because DDP makes its buckets anew after the first, and counts the last."""
    for _ in range(3):
        model.zero_grad(set_to_none=not kept)
        loss = module()
        with Traffic() as traffic:
            loss.backward()
            after()
    return traffic


@pytest.mark.parametrize(("attach", "passes", "launches", "kind", "kept"), [*STOCK, *OURS])
def test_passes_over_the_gradients(attach, passes, launches, kind, kept):
    memory = torch.zeros(SIZE // 4)
    with group_of(kind):
        alone, model = (EmulatedModel(SHAPES, memory, 1.0, 0.0) for _ in range(2))
        base = step(alone, alone, nothing, kept)
        found = step(model, *attach(model), kept)
    # Norms and flags are a few bytes; shares are rounded up.
    assert (found.bytes - base.bytes) / SIZE == pytest.approx(passes, abs=1e-3)
    if launches is not None:
        assert found.launches - base.launches == launches
