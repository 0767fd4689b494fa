"""The work of the kernels, as fastcoll, stock DDP and PyTorch's own batched calls do it.

Each case has several candidates. A candidate makes a call for each bucket. The buffers are verified after one
run of each candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from fastcoll._measure import Call
from fastcoll.bench.derived import BAR
from fastcoll.buckets import BucketLayout
from fastcoll.kernels.flatten import Flatten, Unflatten
from fastcoll.kernels.reduce import prepare_reduce

__all__ = [
    *("SCALE", "Case", "bucketed", "copy_case", "flatten_case", "hook_case", "reduce_case"),
    *("total", "verified"),
]

Shape = tuple[int, ...]

SCALE = 1 / 8
"""One over the emulated world size."""

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes, DDP's defaults


@dataclass
class Case:
    """The same work done in several ways.

    Attributes:
        name: Row of the table.
        bytes: Least bytes that must be read and written.
        launches: Number of kernels that fastcoll launches.
        works: The work, by candidate.
        verify: Whether the work of a candidate is right.
        check: Raises if an earlier call failed without raising.
    """

    name: str
    bytes: int
    launches: int
    works: dict[str, Call]
    verify: Callable[[str], bool]
    check: Callable[[], None] = lambda: None


def bucketed(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Returns the shapes of each of DDP's buckets as they are from the second step on.

    They are in reverse order. The first is filled up to 1 MiB, the others up to 25 MiB. In the first step gpt2-medium
    has one more.
    """
    tensors = [torch.empty(shape, device="meta") for shape in reversed(shapes)]
    buckets, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(
        tensors, [_FIRST_BUCKET, _BUCKET], [False] * len(tensors)
    )
    return [[tuple(tensors[index].shape) for index in bucket] for bucket in buckets]


def _all(works: Sequence[Call]) -> Call:
    def call() -> None:
        for work in works:
            work()

    return call


def verified(
    work: Call,
    inputs: Iterable[Tensor],
    outputs: Sequence[Tensor],
    expected: Callable[[], Iterable[Tensor]],
) -> bool:
    """Does the work on small integers, whose sums and scaled values are exact in every dtype; compares the outputs."""
    for tensor in outputs:
        tensor.fill_(float("nan"))
    for tensor in inputs:
        tensor.random_(-9, 10)
    wanted = [tensor.clone() for tensor in expected()]
    work()
    return all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True))


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum in the dtype of the tensors, added in float32."""
    whole = torch.zeros_like(tensors[0], dtype=torch.float32)
    for tensor in tensors:
        whole += tensor
    return whole.to(tensors[0].dtype)


def copy_case(size: int, device: torch.device) -> Case:
    """Returns the reference: a copy of `size` bytes on the device; reads and writes count."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    works: dict[str, Call] = {"copy": partial(target.copy_, source)}

    def verify(candidate: str) -> bool:
        return verified(works[candidate], [source], [target], lambda: [source])

    return Case(f"copy {size >> 20} MiB", 2 * size, 1, works, verify)


class _Buffers:
    """Layout, gradients, float32 bucket, wire bucket, and views of the float32 bucket, of each of DDP's buckets."""

    def __init__(
        self, shapes: Sequence[Sequence[Shape]], wire: torch.dtype, device: torch.device
    ) -> None:
        packed = [[math.prod(shape) for shape in bucket] for bucket in shapes]
        self.layouts = [BucketLayout(sizes) for sizes in packed]
        self.gradients = [[torch.randn(shape, device=device) for shape in each] for each in shapes]
        self.buckets = [layout.new_bucket(torch.float32, device) for layout in self.layouts]
        self.wires = [layout.new_bucket(wire, device) for layout in self.layouts]
        self.views = [
            [view.view(shape) for view, shape in zip(layout.views(bucket), each, strict=True)]
            for layout, bucket, each in zip(self.layouts, self.buckets, shapes, strict=True)
        ]
        self.elements = sum(sum(layout.sizes) for layout in self.layouts)
        self.rows = list(zip(self.gradients, self.views, self.buckets, strict=True))


def _mul_out(gradients: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    for gradient, view in zip(gradients, views, strict=True):
        torch.mul(gradient, SCALE, out=view)


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _foreach_flatten(gradients: Sequence[Tensor], views: Sequence[Tensor], bucket: Tensor) -> None:
    torch._foreach_copy_(list(views), list(gradients))
    bucket.mul_(SCALE)


def _cat_flatten(gradients: Sequence[Tensor], bucket: Tensor) -> None:
    torch.cat([gradient.view(-1) for gradient in gradients], out=bucket)
    bucket.mul_(SCALE)


def flatten_case(
    name: str,
    shapes: Sequence[Sequence[Shape]],
    device: torch.device,
    back: bool = False,
) -> Case:
    """Returns the flattening of float32 gradients into DDP's buckets, or with `back` the unflattening.

    Candidates besides fastcoll: "ddp", one kernel a tensor, as DDP launches; "foreach", the batched copy
    and one scaling, as DDP with batched_grad_copy=True; "cat". The bar is a copy of the same buckets.
    """
    data = _Buffers(shapes, torch.float32, device)
    copies = [torch.empty_like(bucket) for bucket in data.buckets]
    given = (torch.float32, torch.float32, device)
    rows = data.rows
    prepared = zip(data.layouts, data.gradients, data.buckets, strict=True)
    candidates: dict[str, Sequence[Call]]
    if back:
        candidates = {
            "fastcoll": [
                Unflatten(layout, *given).prepare(bucket, each) for layout, each, bucket in prepared
            ],
            "ddp": [partial(_copy_each, each, there) for each, there, _ in rows],
            "foreach": [partial(torch._foreach_copy_, each, there) for each, there, _ in rows],
        }
    else:
        candidates = {
            "fastcoll": [
                Flatten(layout, *given).prepare(each, bucket, SCALE)
                for layout, each, bucket in prepared
            ],
            "ddp": [partial(_mul_out, each, there) for each, there, _ in rows],
            "foreach": [partial(_foreach_flatten, *row) for row in rows],
            "cat": [partial(_cat_flatten, each, bucket) for each, _, bucket in rows],
        }
    bar = [partial(one.copy_, bucket) for one, bucket in zip(copies, data.buckets, strict=True)]
    works = {candidate: _all(each) for candidate, each in (candidates | {BAR: bar}).items()}

    gradients, views = (list(chain.from_iterable(each)) for each in (data.gradients, data.views))

    def verify(candidate: str) -> bool:
        if candidate == BAR:
            return verified(works[candidate], data.buckets, copies, lambda: data.buckets)
        if back:
            return verified(works[candidate], data.buckets, gradients, lambda: views)
        scaled = (gradient * SCALE for gradient in gradients)
        return verified(works[candidate], gradients, views, lambda: scaled)

    label = f"{'unflatten' if back else 'flatten'} {name}"
    return Case(label, 8 * data.elements, len(data.layouts), works, verify)


def _stock_hook(
    gradients: Sequence[Tensor], views: Sequence[Tensor], bucket: Tensor, sent: bool
) -> None:
    """Does the work of DDP and bf16_compress_hook around the all-reduce of a bucket."""
    if sent:  # gradients are not views of the bucket: DDP copies them in and out
        _copy_each(views, gradients)
    compressed = bucket.to(torch.bfloat16).div_(1 / SCALE)
    bucket.copy_(compressed)
    if sent:
        _copy_each(gradients, views)


def hook_case(name: str, shapes: Sequence[Sequence[Shape]], device: torch.device) -> Case:
    """Returns all work around the all-reduce of gradients in bfloat16, for S bytes of float32 gradients.

    fastcoll moves 3 S bytes. Other candidates: "stock", DDP with bf16_compress_hook (8 S), and "stock view",
    the same with gradient_as_bucket_view=True (4 S).
    """
    data = _Buffers(shapes, torch.bfloat16, device)
    ours: list[Call] = []
    for layout, tensors, wire in zip(data.layouts, data.gradients, data.wires, strict=True):
        there = Flatten(layout, torch.float32, torch.bfloat16, device)
        back = Unflatten(layout, torch.bfloat16, torch.float32, device)
        ours += [there.prepare(tensors, wire, SCALE), back.prepare(wire, tensors)]
    works = {
        "fastcoll": _all(ours),
        "stock": _all([partial(_stock_hook, *row, True) for row in data.rows]),
        "stock view": _all([partial(_stock_hook, *row, False) for row in data.rows]),
    }

    def verify(candidate: str) -> bool:
        each = data.views if candidate == "stock view" else data.gradients
        both = list(chain.from_iterable(each))
        scaled = (tensor * SCALE for tensor in both)
        return verified(works[candidate], both, both, lambda: scaled)

    return Case(f"bf16 hook {name}", 12 * data.elements, 2 * len(data.layouts), works, verify)


def _add_each(inputs: Sequence[Tensor], output: Tensor) -> None:
    torch.add(inputs[0], inputs[1], out=output)
    for tensor in inputs[2:]:
        output.add_(tensor)


def reduce_case(
    inputs: int,
    elements: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """Returns the sum of flat buffers. Candidate besides fastcoll: "adds", one kernel for each further input."""
    given = [torch.randn(elements, device=device).to(dtype) for _ in range(inputs)]
    output = torch.empty(elements, dtype=dtype, device=device)
    addresses = [tensor.data_ptr() for tensor in given]
    works: dict[str, Call] = {
        "fastcoll": prepare_reduce(addresses, output.data_ptr(), elements, dtype, device),
        "adds": partial(_add_each, given, output),
    }

    def verify(candidate: str) -> bool:
        return verified(works[candidate], given, [output], lambda: [total(given)])

    name = f"reduce {inputs} x {str(dtype).removeprefix('torch.')}"
    return Case(name, (inputs + 1) * elements * dtype.itemsize, 1, works, verify)
