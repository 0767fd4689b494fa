"""Tensors that are seldom seen: a result, or an error that names what was expected; the group stays in step."""

import torch
import torch.distributed as dist
from backend import IS_GLOO, all_gather_single, beyond_gloo, reduce_scatter_single
from device_ranks import DEVICE, prepare
from fault_list import plays
from fault_rank import Fault, Rank, catch, footprint
from on_ranks import on_ranks
from over_hosts import over_hosts
from rank_calls import WRONG

pytestmark = on_ranks(2, world="jobs")


def refused(fault: Fault | None, *words: str) -> bool:
    """Whether the call raised as bad arguments must, in these words."""
    if fault is None or not {"ValueError", "TypeError"} & set(fault.bases):
        return False
    return all(word in fault.text for word in words)


def finish(rank: Rank) -> None:
    """The group must be in step after all this."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(rank.size)] * 3, "the group is out of step"
    rank.finish()


@plays(48)
@over_hosts
def test_unaligned_tensors(rank):
    rank.used()
    for count in (0, 7, 1000, 300_000):
        memory = bytearray(4 * count + 5)
        tensor = (
            torch.frombuffer(memory, dtype=torch.float32, count=count, offset=1)
            if count
            else torch.empty(0)
        )
        assert not count or tensor.data_ptr() % 4, "the fault was not injected"
        dist.all_reduce(tensor.fill_(rank.rank + 1.0))
        assert torch.all(tensor == 3.0), WRONG
    finish(rank)


@plays(55)
@over_hosts
def test_tensors_without_data(rank):
    """Tensors of device meta. Most calls with them torch answers itself, on all ranks alike."""
    rank.used()
    there, here = torch.empty(4, device="meta"), torch.ones(4)
    mixed = [here, torch.ones(4, dtype=torch.float64)]
    assert refused(catch(dist.all_gather, mixed, here)), "dtypes were mixed in a list"
    fault = catch(dist.all_reduce, there)
    assert fault is None or refused(fault), fault
    calls = {
        "all_gather": (dist.all_gather, [there, torch.ones(4)], here),
        "reduce_scatter": (dist.reduce_scatter, torch.ones(4), [here, there]),
        "scatter": (dist.scatter, here, [here, there] if rank.rank == 0 else None),
    }
    for name, (call, *arguments) in calls.items():
        if name == "scatter" and rank.rank != 0:
            continue  # the root alone has what is wrong, and knows before anything is sent
        fault = catch(call, *arguments)
        said = "device meta", "expected a CPU or CUDA tensor"
        assert refused(fault, *said) or (IS_GLOO and fault is not None), (name, fault)
    if not IS_GLOO:  # past torch, which would answer such calls itself
        backend, other = dist.group.WORLD._get_backend(torch.device("cpu")), 1 - rank.rank
        for name, call in {
            "allreduce": lambda: backend.allreduce([there]),
            "broadcast": lambda: backend.broadcast(there, 0),
            "send": lambda: backend.send([there], other, 0),
            "recv": lambda: backend.recv([there], other, 0),
        }.items():
            fault = catch(call)
            assert refused(fault, "device meta"), (name, fault)
        del backend, call  # they keep the group
    finish(rank)


@plays(55)
@over_hosts
@beyond_gloo("serves no other device")
def test_tensors_of_two_devices_in_a_call(rank, device_libraries):
    """A call with tensors of the CPU and of another device that the backend serves."""
    prepare()
    rank.used()

    def there() -> torch.Tensor:
        return torch.ones(4, device=f"{DEVICE}:0")

    def here() -> torch.Tensor:
        return torch.ones(4)

    rank.before = footprint()
    for name, (call, *arguments) in {
        "all_gather into another device": (dist.all_gather, [here(), there()], here()),
        "all_gather from another device": (dist.all_gather, [here(), here()], there()),
        "reduce_scatter": (dist.reduce_scatter, here(), [here(), there()]),
        "all_to_all": (dist.all_to_all, [here(), here()], [here(), there()]),
        "all_gather_single": (all_gather_single, torch.ones(8), there()),
        "reduce_scatter_single": (reduce_scatter_single, there(), torch.ones(8)),
    }.items():
        fault = catch(call, *arguments)
        said = "all tensors on one device", "cpu", f"{DEVICE}:0"
        assert refused(fault, *said), (name, fault)
    finish(rank)


@plays(12)
@beyond_gloo("sums no sparse tensors here")
def test_a_long_text_is_cut_between_characters(rank):
    """A call fails on rank 0 with a text of umlauts, which other ranks read from 1,016 bytes of shared memory."""
    rank.used()
    groups = [
        dist.new_group() for _ in range(2)
    ]  # the texts' lengths differ by one: one cut is inside a character
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    library = torch.library.Library("aten", "IMPL")
    for i, group in enumerate(groups):
        text = "x" * i + "\N{LATIN SMALL LETTER A WITH DIAERESIS}" * 700

        def fails(*_, text=text):
            raise RuntimeError(text)

        tensor = torch.eye(3).to_sparse()
        if rank.rank == 0:
            library.impl("_coalesce", fails, "SparseCPU", allow_override=True)
            fault = catch(dist.all_reduce, tensor, group=group)
            assert fault is not None and text in fault.text, fault
            continue
        catch(dist.all_reduce, tensor, group=group)  # it may have ended before
        fault = catch(dist.all_reduce, torch.ones(1), group=group)
        assert fault is not None and fault.kind == "DistBackendError", fault
        assert "rank 0 failed in all_reduce" in fault.text, fault.text
    del groups, group
    rank.finish()
