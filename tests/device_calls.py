"""All-reduces of device tensors with options for which torch has no arguments."""

import torch
import torch.distributed as dist


def all_reduce(tensors, op=dist.ReduceOp.SUM, group=None, async_op=False, **options):
    """Makes one call of the group's backend, with a tensor or a list; for the options see ``all_reduce_list`` in C."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    backend = (group or dist.group.WORLD)._get_backend(tensors[0].device)
    return backend.all_reduce_list(tensors, op, async_op, **options)


def together(tensors, op, async_op=False, **options):
    """Makes a call for each tensor, coalesced."""
    device = tensors[0].device
    dist.group.WORLD._start_coalescing(device)
    for tensor in tensors:
        all_reduce(tensor, op, async_op=async_op, **options)
    dist.group.WORLD._end_coalescing(device).wait()


def inputs_of(count, dtype, seed=0):
    """Returns each rank's input of a call."""
    made = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        made.append(torch.randn(count, generator=generator, dtype=torch.float64).to(dtype))
    return made


def reduces_of(group=None):
    """Returns the ``AllReduces`` of a group on the device."""
    from fastcoll.cuda.engine import engine_of

    return engine_of((group or dist.group.WORLD).group_name).all_reduces[0]
