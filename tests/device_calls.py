"""All-reduces of device tensors with options for which torch has no arguments."""

import torch
import torch.distributed as dist
from backend import wait_all
from oracle import reduce_op


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


_SUMS = [
    (torch.float32, 1, "SUM"),
    (torch.float32, 37, "AVG"),
    (torch.float32, 2160, "SUM"),
    (torch.bfloat16, 960, "AVG"),
    (torch.float16, 130, "SUM"),
    (torch.float64, 48, "AVG"),
    (torch.float64, 5, "PREMUL_SUM"),
    (torch.bfloat16, 70, "PREMUL_SUM"),
    (torch.float32, 96, "MAX"),
    (torch.int32, 60, "SUM"),
]


def assert_bits_of_the_cpu(group, device, async_op, sums_only=False):
    """Checks all_reduce and reduce_scatter_tensor of `group` on a device against the default group's CPU tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed, (dtype, count, op) in enumerate(_SUMS[:5] if sums_only else _SUMS):
        own = inputs_of(count * size, dtype, seed)[rank]
        number = reduce_op(op)
        there, here = own.to(device), own.clone()
        works = [
            dist.all_reduce(there, number, group, async_op),
            dist.all_reduce(here, number, None, async_op),
        ]
        part, expected = there.new_empty(count), here.new_empty(count)
        source = own.to(device)
        works += [
            dist.reduce_scatter_tensor(part, source, number, group, async_op),
            dist.reduce_scatter_tensor(expected, own, number, None, async_op),
        ]
        wait_all(works if async_op else ())
        part += 0  # on the caller's stream
        assert torch.equal(there.cpu(), here), ("all_reduce", dtype, count, op)
        assert torch.equal(part.cpu(), expected), ("reduce_scatter_tensor", dtype, count, op)
