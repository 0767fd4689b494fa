"""The backward passes over a rank's shards: what is kept of each, and the sum of all (see logical.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastcoll._group_backend import all_gather_flat
from fastcoll.buckets import used_here
from fastcoll.ddp.logical import Block, LogicalRanks
from fastcoll.ddp.reduction import BucketReduction, Settings, reduce_bucket
from fastcoll.ddp.squares import Squares

__all__ = [
    "Blocks",
    "Shards",
    "divide",
    "gradients_of",
    "reduce_shards",
    "require_no_gradients",
    "shards_of",
    "taken",
]


class Blocks:
    """Sums of this rank's shards so far, in the accumulate dtype: one for each subtree that is complete, in order."""

    def __init__(self, ranks: LogicalRanks) -> None:
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        """Forgets all sums: a batch begins."""
        self._all: list[tuple[Block, dict[object, Tensor]]] = []
        self._next = self.ranks.mine.start
        self._served: set[object] = set()  # keys whose sums were taken

    @torch.no_grad()
    def add(self, gradients: Mapping[Any, Tensor]) -> None:
        """Adds the gradients of this pass's shard, by any keys; takes over those in the accumulate dtype.

        Raises:
            RuntimeError: The pass is not that of the next shard, or has other keys than the one before.
        """
        shard = self.ranks.shard
        known = self._all[-1][1].keys() if self._all else gradients.keys()
        if shard != self._next or known != gradients.keys():
            raise self._unlike()
        self._next += 1
        block, sums = (shard, shard + 1), {key: wide(one) for key, one in gradients.items()}
        while self._all and self.ranks.is_subtree(self._all[-1][0], block):
            left, before = self._all.pop()
            torch._foreach_add_([before[key] for key in sums], list(sums.values()))
            block, sums = (left[0], block[1]), before
        self._all.append((block, sums))

    @torch.no_grad()
    def joined(self, gradients: Mapping[Any, Tensor]) -> dict[Block, list[Tensor]]:
        """Returns the sums of these keys, with the gradients of the run's last shard, which stay as they are.

        The caller gets the memory of the sums; those of a shard alone may be its gradients.

        Raises:
            RuntimeError: A shard before was left out, or had no such keys, or its sums were taken already.
        """
        shard = self.ranks.shard
        known = self._all[-1][1].keys() if self._all else gradients.keys()
        if shard != self._next or self._served & gradients.keys() or gradients.keys() - known:
            raise self._unlike()
        self._served |= gradients.keys()
        block, sums = (shard, shard + 1), [wide(one) for one in gradients.values()]
        found: dict[Block, list[Tensor]] = {}
        for left, before in reversed(self._all):
            held = [before[key] for key in gradients]
            if self.ranks.is_subtree(left, block):
                torch._foreach_add_(held, sums)
                block, sums = (left[0], block[1]), held
            else:
                found[block] = sums
                block, sums = left, held
        found[block] = sums
        return found

    def _unlike(self) -> RuntimeError:
        return RuntimeError(
            f"{self.ranks.who}: expected one backward pass for each shard, with gradients of the same parameters, got "
            f"another one for shard {self.ranks.shard}. Make one pass for each shard, and freeze parameters between "
            "batches only."
        )


class Shards:
    """This rank's shards of a batch. Each iteration is over a new batch.

    Gradients must be None before. Make one backward pass for each shard, in the loop. After the last one, gradients
    are the average over all shards, or their sum.

    Raises:
        RuntimeError: When iterated: a gradient is there before the first pass, or missing after a pass.
    """

    def __init__(self, start: Callable[[], Iterator[int]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[int]:
        """Yields the shard of each backward pass."""
        return self._start()


def shards_of(
    blocks: Blocks,
    parameters: Callable[[], Iterable[Tensor]],
    no_sync: Callable[[], AbstractContextManager[object]],
) -> Iterator[int]:
    """Yields the shard of each pass; keeps the gradients of all but the last one, which it leaves to a hook.

    Args:
        blocks: Where gradients are kept.
        parameters: Returns the parameters whose gradients are reduced.
        no_sync: The context in which no gradient is reduced.

    Raises:
        RuntimeError: As ``Shards``.
    """
    ranks = blocks.ranks
    blocks.clear()
    require_no_gradients(ranks.who, parameters())
    try:
        for shard in ranks.passes():
            if ranks.is_last:
                yield shard
            else:
                with no_sync():
                    yield shard
                blocks.add(taken(ranks.who, parameters()))
        gradients_of(ranks.who, parameters())
    finally:
        blocks.clear()


def require_no_gradients(who: str, parameters: Iterable[Tensor]) -> None:
    """Checks that no gradient is left from a batch before.

    Raises:
        RuntimeError: One is.
    """
    if any(parameter.grad is not None for parameter in parameters):
        raise RuntimeError(
            f"{who}: expected no gradients before the first shard, got some. Call "
            "optimizer.zero_grad(set_to_none=True) before."
        )


def gradients_of(who: str, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Returns the dense gradients of all trained parameters.

    Raises:
        RuntimeError: One has none, or a sparse one.
    """
    trained = {parameter: parameter.grad for parameter in parameters if parameter.requires_grad}
    for parameter, gradient in trained.items():
        if gradient is None or gradient.layout != torch.strided:
            got = "none" if gradient is None else f"one of layout {gradient.layout}"
            raise RuntimeError(
                f"{who}: expected a dense gradient of every trained parameter for each shard, got {got} for one of "
                f"shape {tuple(parameter.shape)}. Make one synchronized backward pass for each shard, and freeze the "
                "parameters that no loss depends on."
            )
    return {parameter: local(gradient) for parameter, gradient in trained.items()}


def taken(who: str, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Takes the gradients of all trained parameters; raises RuntimeError as ``gradients_of``."""
    found = gradients_of(who, parameters)
    for parameter in found:
        parameter.grad = None
    return found


def wide(gradient: Tensor) -> Tensor:
    """Returns a gradient in the accumulate dtype, complex numbers as pairs; itself if it has that dtype."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def local(tensor: Any) -> Tensor:
    """Returns the part of a DTensor that is here; another tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@torch.no_grad()
def divide(sums: Sequence[Tensor], count: int) -> None:
    """Divides sums by the number of logical ranks: true quotients, which CUDA has only for tensors."""
    if sums and count != 1:
        torch._foreach_div_(list(sums), sums[0].new_full((), float(count)))


def reduce_shards(
    gradients: Mapping[Any, Tensor],
    settings: Settings,
    blocks: Blocks,
    squares: Squares | None = None,
    async_op: bool = True,
) -> BucketReduction:
    """Begins to sum a bucket over all shards: of earlier ones, what `blocks` holds, and `gradients` of the last one.

    Args:
        gradients: Of one dtype and device, by the keys of `blocks`; they get the result.
        settings: Settings of the reduction.
        blocks: Sums of this rank's other shards; its last pass is under way.
        squares: As for ``reduce_bucket``.
        async_op: As for ``reduce_bucket``. If ranks exchange blocks, the call waits for them.

    Raises:
        RuntimeError: The pass is not one of ``shards``.
        ValueError: The group does not sum by the tree.
    """
    ranks, results = blocks.ranks, list(gradients.values())
    ranks.require_order(results[0].device)
    sums = blocks.joined(gradients)
    divisor = ranks.count if settings.average else 1
    if ranks.whole:
        (parts,) = sums.values()
        begun = reduce_bucket(parts, replace(settings, average=False), squares, async_op)

        def finish() -> None:
            here = [used_here(one) for one in parts]
            divide(here, divisor)
            for square in begun.squares:
                used_here(square).div_(divisor**2)
            _copy(here, results)

        return begun.followed_by(finish)
    group = settings.process_group
    flat = {block: _flat(parts, dist.get_world_size(group)) for block, parts in sums.items()}
    share = ranks.share_of_sum(flat)
    divide([share], divisor)
    if squares is not None:
        torch.sum(share.double().square(), 0, keepdim=True, out=squares.new_share(share))
    whole = share.new_empty(share.numel() * dist.get_world_size(group))
    all_gather_flat(whole, share, group=group)
    sizes = [one.numel() * (2 if one.is_complex() else 1) for one in results]
    _copy(torch.split(whole[: sum(sizes)], sizes), results)
    return BucketReduction()


@torch.no_grad()
def _flat(parts: Sequence[Tensor], ranks: int) -> Tensor:
    flat = torch.cat([part.reshape(-1) for part in parts])
    return torch.nn.functional.pad(flat, (0, -flat.numel() % ranks))


@torch.no_grad()
def _copy(sums: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copies sums to the gradients that they are not, rounded to their dtypes."""
    for one, result in zip(sums, results, strict=True):
        if result.is_complex():
            result.copy_(torch.view_as_complex(one.reshape(*result.shape, 2)))
        elif result.data_ptr() != one.data_ptr():
            result.copy_(one.view_as(result))
