"""Sums over logical ranks: one result for any number of ranks.

A batch is cut into shards, one for each logical rank. Each rank takes a run of them, with a backward pass for each:

    synchronizer = GradientSynchronizer(model, logical_ranks=8)
    for shard in synchronizer.shards():
        loss_of(model(inputs_of(step, shard))).backward()
    optimizer.step()

The gradients of all shards are added by the tree of ``logical_ranks`` ranks (docs/concepts/same-bits.md), whoever adds
them, in float32 or wider, and rounded once. A rank adds those blocks of its run that are subtrees. If each rank has one
block, and the group's own tree joins them, an all-reduce does the rest. If not, each rank sends its shares of its
blocks, at most 2 log2 L, to the ranks that add them. Those add the rest of the tree with torch, and an all-gather
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll._group_backend import all_gather_flat, serving_backend
from fastcoll.buckets import used_here
from fastcoll.ddp.reduction import BucketReduction, Settings, reduce_bucket

__all__ = ["Blocks", "LogicalRanks", "divide", "local", "reduce_shards"]

Block = tuple[int, int]
"""A subtree: its first shard, and the one behind its last."""


def middle_of(first: int, last: int) -> int:
    """Returns where the tree splits the operands `first` to `last` - 1: at the largest power of two below."""
    return first + (1 << (last - first - 1).bit_length() - 1)


def runs_of(shards: int, ranks: int) -> list[range]:
    """Returns each rank's shards."""
    return [range(rank * shards // ranks, (rank + 1) * shards // ranks) for rank in range(ranks)]


def blocks_of(run: range, first: int, last: int) -> list[Block]:
    """Returns the largest subtrees below (first, last) that have only shards of a run, in order."""
    if run.start <= first and last <= run.stop:
        return [(first, last)]
    if last <= run.start or run.stop <= first:
        return []
    middle = middle_of(first, last)
    return blocks_of(run, first, middle) + blocks_of(run, middle, last)


def _is_joined_by_ranks(runs: Sequence[range], first: int, last: int) -> bool:
    """Returns whether the tree over the ranks, each with one block, is the tree over the shards."""
    if last - first == 1:
        return True
    middle = middle_of(first, last)
    splits = middle_of(runs[first].start, runs[last - 1].stop) == runs[middle].start
    return splits and all(
        _is_joined_by_ranks(runs, *part) for part in ((first, middle), (middle, last))
    )


class Blocks:
    """Sums of the shards so far, in the accumulate dtype: one for each subtree that is complete, in order."""

    def __init__(self) -> None:
        self._all: list[tuple[Block, dict[object, Tensor]]] = []

    def clear(self) -> None:
        """Forgets all sums."""
        self._all = []

    @torch.no_grad()
    def add(self, shard: int, shards: int, gradients: Mapping[Any, Tensor]) -> None:
        """Adds a shard's gradients, by any keys; takes over those that are in the accumulate dtype."""
        block, sums = (shard, shard + 1), {key: wide(one) for key, one in gradients.items()}
        while self._all and _is_subtree(self._all[-1][0], block, shards):
            left, before = self._all.pop()
            if before.keys() != sums.keys():
                raise RuntimeError(
                    f"expected gradients of the same parameters for the shards {left[0]} to {block[1] - 1}, got "
                    f"{len(before)} and {len(sums)}. Freeze the parameters that no loss depends on."
                )
            torch._foreach_add_([before[key] for key in sums], list(sums.values()))
            block, sums = (left[0], block[1]), before
        self._all.append((block, sums))

    @torch.no_grad()
    def joined(
        self, shard: int, shards: int, gradients: Mapping[Any, Tensor]
    ) -> dict[Block, list[Tensor]]:
        """Returns the sums of these keys, with the gradients of the run's last shard, which stay as they are.

        The caller gets the memory of the sums; those of a shard alone may be its gradients.
        """
        block, sums = (shard, shard + 1), [wide(one) for one in gradients.values()]
        found: dict[Block, list[Tensor]] = {}
        for left, before in reversed(self._all):
            if missing := [key for key in gradients if key not in before]:
                raise RuntimeError(
                    f"expected gradients of the same parameters for all shards, got {len(missing)} new ones for "
                    f"shard {shard}. Freeze parameters between steps, not between shards."
                )
            held = [before.pop(key) for key in gradients]
            if _is_subtree(left, block, shards):
                torch._foreach_add_(held, sums)
                block, sums = (left[0], block[1]), held
            else:
                found[block] = sums
                block, sums = left, held
        found[block] = sums
        return found


def _is_subtree(left: Block, right: Block, shards: int) -> bool:
    """Returns whether a block and the one behind it are the two parts of a subtree."""
    whole = range(left[0], right[1])
    return (
        blocks_of(whole, 0, shards) == [(left[0], right[1])]
        and middle_of(left[0], right[1]) == left[1]
    )


def wide(gradient: Tensor) -> Tensor:
    """Returns a gradient in the accumulate dtype, complex numbers as pairs; itself if it has that dtype."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.to(torch.promote_types(real.dtype, torch.float32))


class LogicalRanks:
    """How the shards of a batch are divided among the ranks of a group, and the pass that is under way.

    Args:
        who: For errors, such as "fastcoll.GradientSynchronizer".
        process_group: None: the default group.
        count: Logical ranks, so shards of a batch.

    Raises:
        ValueError: There are fewer of them than ranks.

    Attributes:
        count: As given.
        mine: Shards of this rank.
        whole: Whether each rank has one block, and the group's own tree joins them.
        is_last: Whether this rank's last pass is under way.
        counts: Whether this pass's gradients are used.
    """

    def __init__(self, who: str, process_group: ProcessGroup | None, count: int) -> None:
        self._group = process_group
        self._who = who
        rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        if rank < 0 or not ranks <= count:
            got = f"{count} for {ranks}" if rank >= 0 else "a group without this rank"
            raise ValueError(
                f"{who}: expected as many logical_ranks as the group has ranks, or more, got {got}"
            )
        runs = runs_of(count, ranks)
        self.count, self.mine = count, runs[rank]
        self._blocks = [blocks_of(run, 0, count) for run in runs]
        single = all(len(blocks) == 1 for blocks in self._blocks)
        self.whole = single and _is_joined_by_ranks(runs, 0, ranks)
        self._most = max(map(len, runs))
        self._shard: int | None = None
        self.is_last = self.counts = False

    def passes(self, idle: bool = False) -> Iterator[int]:
        """Yields the shard of each backward pass of this rank.

        Args:
            idle: Whether all ranks make as many passes. Then a rank with fewer shards makes its first one several
                times, and only the last of these counts.
        """
        idles = self._most - len(self.mine) if idle else 0
        try:
            for number in range(-idles, len(self.mine)):
                self._shard = shard = self.mine[max(number, 0)]
                self.counts, self.is_last = number >= 0, number == len(self.mine) - 1
                yield shard
        finally:
            self._shard = None

    def shards(
        self,
        parameters: Callable[[], Iterable[Tensor]],
        no_sync: Callable[[], AbstractContextManager[object]],
        blocks: Blocks,
    ) -> Iterator[int]:
        """Yields the shard of each pass; keeps the gradients of all but the last one, which it leaves to a hook.

        Args:
            parameters: Returns the module's parameters.
            no_sync: The context in which no gradient is reduced.
            blocks: Where the gradients are kept.

        Raises:
            RuntimeError: A gradient is there before the first pass, or missing after one.
        """
        blocks.clear()
        self.require_no_gradients(parameters())
        for shard in self.passes():
            if self.is_last:
                yield shard
                continue
            with no_sync():
                yield shard
            blocks.add(shard, self.count, taken(self._who, parameters()))

    def require_no_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Checks that no gradient is left from a step before.

        Raises:
            RuntimeError: One is.
        """
        if any(parameter.grad is not None for parameter in parameters):
            raise RuntimeError(
                f"{self._who}: expected no gradients before the first shard, got some. Call "
                "optimizer.zero_grad(set_to_none=True) before."
            )

    @property
    def shard(self) -> int:
        """The shard of this pass.

        Raises:
            RuntimeError: There is no pass.
        """
        if self._shard is None:
            raise RuntimeError(
                f"{self._who}: expected every backward pass inside `for shard in ...shards():`, because it has "
                "logical_ranks. Make one pass for each shard there."
            )
        return self._shard

    def require_order(self, device: torch.device) -> None:
        """Checks that the group sums by the tree.

        Raises:
            ValueError: It does not, or it is another backend's.
        """
        ranks = dist.get_world_size(self._group)
        if ranks == 1 or not self.whole:
            return
        backend = serving_backend(self._group or dist.group.WORLD, device)
        if backend is None or not (device.type == "cpu" or backend.options.order == "fixed"):
            raise ValueError(
                f"{self._who}: expected a group that sums by the tree for logical_ranks, got one of "
                f"{'another backend' if backend is None else 'order any'} on {device}. Use fastcoll with "
                "Options(order='fixed') or FASTCOLL_ORDER=fixed."
            )

    def share_of_sum(self, blocks: Mapping[Block, Tensor]) -> Tensor:
        """Exchanges blocks, and returns this rank's share of the sum of all shards; all ranks call it in one order.

        Args:
            blocks: This rank's blocks: tensors of [ranks * n], of one dtype and device.
        """
        own = self._blocks[dist.get_rank(self._group)]
        ranks = dist.get_world_size(self._group)
        sent = torch.stack([blocks[block].view(ranks, -1) for block in own], 1)
        share = sent.shape[2]
        received = sent.new_empty(sum(map(len, self._blocks)), share)
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [len(part) * share for part in self._blocks],
            [len(own) * share] * ranks,
            group=self._group,
        )
        every = [block for part in self._blocks for block in part]
        return self._sum(dict(zip(every, received, strict=True)), 0, self.count)

    def _sum(self, known: Mapping[Block, Tensor], first: int, last: int) -> Tensor:
        if (first, last) in known:
            return known[first, last]
        middle = middle_of(first, last)
        return self._sum(known, first, middle).add_(self._sum(known, middle, last))


@torch.no_grad()
def divide(sums: Sequence[Tensor], count: int) -> None:
    """Divides sums by the number of logical ranks: true quotients, which CUDA has only for tensors."""
    if sums:
        torch._foreach_div_(list(sums), sums[0].new_tensor(float(count)))


def local(tensor: Any) -> Tensor:
    """Returns the part of a DTensor that is here; another tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def reduce_shards(
    gradients: Mapping[Any, Tensor],
    settings: Settings,
    ranks: LogicalRanks,
    blocks: Blocks,
    async_op: bool = True,
) -> BucketReduction:
    """Begins to sum a bucket over all shards: of earlier ones, what `blocks` holds, and `gradients` of the last one.

    Args:
        gradients: Of one dtype and device, by the keys of `blocks`; they get the result.
        settings: Settings of the reduction.
        ranks: The pass under way is the last one.
        blocks: Sums of this rank's other shards.
        async_op: As for ``reduce_bucket``. If ranks exchange blocks, the call waits for them.

    Raises:
        RuntimeError: The pass is not one of ``shards``.
        ValueError: The group does not sum by the tree.
    """
    results = list(gradients.values())
    ranks.require_order(results[0].device)
    sums = blocks.joined(ranks.shard, ranks.count, gradients)
    divisor = ranks.count if settings.average else 1
    if ranks.whole:
        (parts,) = sums.values()
        begun = reduce_bucket(parts, replace(settings, average=False), async_op)
        return BucketReduction(begun.work, _finisher(begun, parts, results, divisor), begun.square)
    group = settings.process_group
    flat = {block: _flat(parts, dist.get_world_size(group)) for block, parts in sums.items()}
    share = ranks.share_of_sum(flat)
    divide([share], divisor)
    square = torch.linalg.vector_norm(share, dtype=torch.float64).square().reshape(1)
    whole = share.new_empty(share.numel() * dist.get_world_size(group))
    all_gather_flat(whole, share, group=group)
    sizes = [_elements(one) for one in results]
    _copy(torch.split(whole[: sum(sizes)], sizes), results)
    return BucketReduction(None, None, square if settings.gradient_norm else None)


def _finisher(
    begun: BucketReduction, sums: Sequence[Tensor], results: Sequence[Tensor], divisor: int
) -> Callable[[], None]:
    def finish() -> None:
        if begun.finish is not None:
            begun.finish()
        here = [used_here(one) for one in sums]
        divide(here, divisor)
        if begun.square is not None:
            used_here(begun.square).div_(divisor**2)
        _copy(here, results)

    return finish


def _elements(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


@torch.no_grad()
def _flat(parts: Sequence[Tensor], ranks: int) -> Tensor:
    flat = torch.cat([part.reshape(-1) for part in parts])
    return torch.nn.functional.pad(flat, (0, -flat.numel() % ranks))


@torch.no_grad()
def _copy(sums: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copies sums to the gradients that they are not, rounded to their dtypes."""
    for one, result in zip(sums, results, strict=True):
        real = torch.view_as_real(result) if result.is_complex() else result
        if real.data_ptr() != one.data_ptr():
            real.copy_(one.view_as(real))


def taken(who: str, parameters: Iterable[Tensor]) -> dict[object, Tensor]:
    """Takes the gradients of all trained parameters.

    Raises:
        RuntimeError: One has none.
    """
    found: dict[object, Tensor] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            raise RuntimeError(
                f"{who}: expected a gradient of every trained parameter for each shard, got none for one of shape "
                f"{tuple(parameter.shape)}. Freeze the parameters that no loss depends on."
            )
        found[parameter] = local(parameter.grad)
        parameter.grad = None
    return found
