"""Digests of collectives, and fastcoll.check_same. The C++ side is attacked in tests/cpp/stress_digests.cpp."""

import gc
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcoll
import fastcoll.trace

LOG = Path("/proc/self/fd/2")  # a rank's stderr is a file


def digesting(of="all"):
    return dist.new_group(backend="fastcoll", pg_options=fastcoll.Options(digest=of))


def digests(group):
    """Return input and output digest of the group's last call."""
    ours = [one["fastcoll"] for one in fastcoll.trace.records()]
    last = [one for one in ours if one["group"] == group.group_name][-1]
    return last.get("input_digest"), last.get("output_digest")


@on_ranks(1, 3)
def test_the_digest_is_of_the_bytes():
    """Whatever their dtype, layout and form of call."""
    group, size = digesting(), dist.get_world_size()
    rows = torch.arange(6.0 * size).view(size, 6) + dist.get_rank()
    alone = fastcoll._load.C.digest(rows[0].contiguous())
    dist.all_reduce(rows[0].clone(), group=group)
    assert digests(group)[0] != alone  # a message of a list has its own key
    of_row = digests(group)[0]
    for row in (
        rows[0].view(torch.int32).clone().view(torch.float32),
        rows[0:1].view(2, 3).t().t(),
    ):
        dist.all_reduce(row.clone(), group=group)
        assert digests(group)[0] == of_row
    strided = torch.stack([rows[0], rows[0]], dim=1)[:, 0]
    assert not strided.is_contiguous()
    dist.all_reduce(strided, group=group)
    assert digests(group)[0] == of_row
    into, parts = torch.empty(6 * size), [torch.empty(6) for _ in range(size)]
    dist.all_gather_into_tensor(into, rows[0].clone(), group=group)
    of_all = digests(group)
    dist.all_gather(parts, rows[0].clone(), group=group)
    assert digests(group) == of_all
    assert of_all[0] == of_row
    rows[0, 3] = torch.nextafter(rows[0, 3], torch.tensor(1e9))
    dist.all_reduce(rows[0].clone(), group=group)
    assert digests(group)[0] != of_row


@on_ranks(2)
def test_which_calls_have_digests():
    for of, summed, moved in (("off", False, False), ("sum", True, False), ("all", True, True)):
        group = digesting(of)
        dist.all_reduce(torch.ones(3), group=group)
        assert (digests(group) == (None, None)) != summed
        dist.broadcast(torch.ones(3), 0, group=group)
        assert (digests(group) == (None, None)) != moved
        dist.barrier(group)
        assert digests(group) == (None, None)


@on_ranks(3, fresh=True)
def test_the_rank_with_another_result_is_named():
    """Rank 2 gathers two parts into one tensor, so it ends with other bits than the others."""
    group, rank = digesting(), dist.get_rank()
    parts = [torch.zeros(5) for _ in range(3)]
    if rank == 2:
        parts[1] = parts[2]
    dist.all_gather(parts, torch.full((5,), float(rank)), group=group)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(3), group=group)
    text = r"the result of all_gather\(seq 1, .* has other bits on rank 2 \(pid .*\) than on rank 0 .*, rank 1 "
    assert re.search(text, str(caught.value)), caught.value


@on_ranks(3, fresh=True)
def test_an_input_that_changes_during_its_call_is_named():
    """All ranks get the same wrong sum. Whether one does depends on the moment, so some calls may pass."""
    group, rank = digesting("sum"), dist.get_rank()
    out, x = torch.zeros(1 << 18), torch.ones(3 << 18)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(1000):
            work = dist.reduce_scatter_tensor(out, x, group=group, async_op=True)
            while rank == 1 and not work.is_completed():
                x[-1] += 1
            work.wait()
    text = r"the input of rank 1 \(.*\) to reduce_scatter\(seq \d+, float32\[\d+\], SUM\) changed during the call"
    assert re.search(text, str(caught.value)), caught.value


@on_ranks(3, fresh=True)
def test_ranks_that_send_equal_gradients_are_told():
    group, text = (
        digesting("sum"),
        "the ranks of this host gave equal gradients to 20 all_reduces in a row",
    )
    for other in (True, False):
        for step in range(25):
            own = float(other and dist.get_rank() == 2)
            dist.all_reduce(torch.full((2000,), 1.0 + step + own), group=group)
            dist.all_reduce(torch.zeros(2000), group=group)  # of frozen parameters
        assert other is (text not in LOG.read_text()) or dist.get_rank() != 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean.fill_(dist.get_rank())  # buffers may differ


@on_ranks(1, 2, 4)
def test_the_same_parameters_pass():
    net = Net()
    fastcoll.check_same(net)
    fastcoll.check_same(DistributedDataParallel(net), dist.new_group(backend="gloo"))
    fastcoll.check_same(nn.Module())


@on_ranks(2, 4)
def test_a_parameter_that_drifted_is_named():
    net, rank, size = Net(), dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        net.two.weight[1, 2] += 1e-7 * (rank == 1)
    where = r"rank 1 from that on ranks 0, 2, 3" if size == 4 else r"rank 0 and rank 1"
    with pytest.raises(RuntimeError, match=rf"1 of 6 differ: 'two.weight' (on|between) {where}\."):
        fastcoll.check_same(net)
    if rank == 1:
        net.one = nn.Linear(4, 3, bias=False)
    with pytest.raises(
        RuntimeError, match=r"3 of 6 differ: 'one.weight' .*; 'one.bias' .*; 'two.weight' "
    ):
        fastcoll.check_same(net)


@on_ranks(2)
def test_sharded_parameters_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"got 'weight' with placements \(Shard\(dim=0\),\)"):
        fastcoll.check_same(net)
    del net
    gc.collect()  # the module has cycles, and so would keep its group
