"""More elements than 32 bits count."""

import psutil
import pytest
import torch
import torch.distributed as dist
from fault_list import plays
from on_ranks import on_ranks

ELEMENTS = 2**31 + 70_003
MARKS = [0, 1, 2**31 - 1, 2**31, ELEMENTS - 1]


@plays(48)
@pytest.mark.full
@pytest.mark.skipif(
    psutil.virtual_memory().available < 12 * 2**30, reason="needs 12 GB of free memory"
)
@on_ranks(2, deadline=110.0, fresh=True)
def test_more_than_two_to_the_31():
    rank = dist.get_rank()
    tensor = torch.zeros(ELEMENTS, dtype=torch.uint8)
    if rank == 0:
        tensor[MARKS] = torch.arange(1, 6, dtype=torch.uint8)
    dist.broadcast(tensor, 0)
    assert tensor[MARKS].tolist() == [1, 2, 3, 4, 5]
    assert tensor.count_nonzero() == 5
    tensor[MARKS[rank]] = 100
    dist.all_reduce(tensor)
    assert tensor[MARKS].tolist() == [101, 102, 6, 8, 10]
    assert tensor.count_nonzero() == 5
