"""Remote procedure calls beside a group: torch's RPC has a transport of its own."""

import torch
import torch.distributed as dist
from on_ranks import on_ranks
from oracle import assert_same
from torch.distributed import rpc
from world import here


def doubled(tensor):
    return tensor * 2


@on_ranks(3, fresh=True)
def test_calls_and_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{here().scratch}/rpc", num_worker_threads=4
        ),
    )
    after = f"worker{(rank + 1) % size}"
    calls = [rpc.rpc_async(after, doubled, (torch.full((50,), float(n)),)) for n in range(10)]
    sums = [torch.full((1000,), float(n)) for n in range(10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in sums]
    for number, (call, work) in enumerate(zip(calls, works, strict=True)):
        assert_same(call.wait(), torch.full((50,), 2.0 * number))
        work.wait()
        assert_same(sums[number], torch.full((1000,), float(number * size)))
    remote = rpc.remote(after, torch.add, (torch.ones(2), 3))
    assert_same(remote.to_here(), torch.full((2,), 4.0))
    del remote
    rpc.shutdown()
    dist.barrier()
