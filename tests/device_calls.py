"""All-reduces of device tensors with options that torch has no arguments for."""

import torch
import torch.distributed as dist

__all__ = ["all_reduce", "together"]


def all_reduce(tensors, op=dist.ReduceOp.SUM, group=None, async_op=False, **options):
    """One call of the group's backend, of a tensor or a list; what options there are, ``C`` says."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    backend = (group or dist.group.WORLD)._get_backend(tensors[0].device)
    return backend.all_reduce_list(tensors, op, async_op, **options)


def together(tensors, op, async_op=False, **options):
    """A call for each tensor, in a batch."""
    device = tensors[0].device
    dist.group.WORLD._start_coalescing(device)
    for tensor in tensors:
        all_reduce(tensor, op, async_op=async_op, **options)
    dist.group.WORLD._end_coalescing(device).wait()
