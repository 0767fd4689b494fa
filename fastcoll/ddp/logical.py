"""Logical ranks: which shards and which parts of their sum belong to a rank.

A batch is cut into shards, one for each logical rank. Each rank takes a run of them, with a backward pass for each:

    synchronizer = GradientSynchronizer(model, logical_ranks=8)
    for shard in synchronizer.shards():
        loss_of(model(inputs_of(step, shard))).backward()
    optimizer.step()

The gradients of all shards are added by the tree of ``logical_ranks`` ranks (docs/concepts/same-bits.md), whoever adds
them, in float32 or wider, and rounded once. A rank adds those blocks of its run that are subtrees. If each rank has one
block, and the group's own tree joins them, an all-reduce does the rest. If not, each rank sends its shares of its
blocks, at most 2 log2 L, to the ranks that add them. Those add the rest of the tree with torch, and an all-gather
follows. shards.py has the passes and the sums of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastcoll._group_backend import serving_backend

__all__ = ["Block", "LogicalRanks"]

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


class LogicalRanks:
    """How the shards of a batch are divided among the ranks of a group, and the pass that is under way.

    Args:
        who: For errors, such as "fastcoll.GradientSynchronizer".
        process_group: None: the default group.
        count: Logical ranks, so shards of a batch.
        wire_dtype: Must be None.

    Raises:
        ValueError: There are fewer of them than ranks, this rank is not in the group, or there is a wire dtype.

    Attributes:
        who: As given.
        count: As given.
        mine: Shards of this rank.
        whole: Whether each rank has one block, and the group's own tree joins them.
        is_last: Whether this rank's last pass is under way.
        counts: Whether this pass's gradients are used.
    """

    def __init__(
        self,
        who: str,
        process_group: ProcessGroup | None,
        count: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        if wire_dtype is not None:
            raise ValueError(
                f"{who}: expected no wire_dtype with logical_ranks, got {wire_dtype}, to which each rank's sum would "
                "be rounded. Leave one of them out."
            )
        self.who = who
        self._group = process_group
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

    @property
    def shard(self) -> int:
        """The shard of this pass.

        Raises:
            RuntimeError: There is no pass.
        """
        if self._shard is None:
            raise RuntimeError(
                f"{self.who}: expected every backward pass inside `for shard in ...shards():`, because it has "
                "logical_ranks. Make one pass for each shard there."
            )
        return self._shard

    def is_subtree(self, left: Block, right: Block) -> bool:
        """Returns whether a block and the one behind it are the two parts of a subtree."""
        whole = (left[0], right[1])
        return blocks_of(range(*whole), 0, self.count) == [whole] and middle_of(*whole) == left[1]

    def require_order(self, device: torch.device) -> None:
        """Checks that the group sums by the tree.

        Raises:
            ValueError: It does not, or it is another backend's.
        """
        if dist.get_world_size(self._group) == 1 or not self.whole:
            return
        backend = serving_backend(self._group or dist.group.WORLD, device)
        if backend is None or not (device.type == "cpu" or backend.options.order == "fixed"):
            raise ValueError(
                f"{self.who}: expected a group that sums by the tree for logical_ranks, got one of "
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
