"""Rows 48 to 55: what lies in the tensors, and how."""

import math

import device_ranks
import torch
import torch.distributed as dist
from backend import BACKEND, all_gather_single, reduce_scatter_single
from fault_rank import Fault, Rank, catch, footprint
from matrix_ranks import finish
from matrix_row import Outcome, Stage, row, worst

__all__: list[str] = []

BAD_ARGUMENT = {"ValueError", "TypeError"}


def refused(fault) -> bool:
    """Whether the call raised as bad arguments must."""
    return fault is not None and bool(BAD_ARGUMENT & set(fault.bases))


def done(rank: Rank, **checks: bool):
    """The group must be in step after all this."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    checks["the group is in step"] = tensor.tolist() == [float(rank.size)] * 3
    return finish(rank, **checks)


@row(
    48,
    "one rank; no elements; unaligned; more than 2^31 elements",
    "right results",
    "test_all_reduce.py::test_large",
    "test_huge.py::test_more_than_two_to_the_31",
    quick=True,
)
def sizes(stage: Stage) -> Outcome:
    most = (1 << 31) + 7 if stage.deep else 1 << 20
    jobs = (stage.jobs(size, of_all_sizes, count) for size, count in ((1, 1 << 20), (2, most)))
    return worst(stage.checks(job) for job in jobs)


def of_all_sizes(rank: Rank, largest: int):
    rank.used()
    empty = torch.empty(0)
    dist.all_reduce(empty)
    unaligned = [
        torch.frombuffer(bytearray(4 * count + 1), dtype=torch.float32, count=count, offset=1)
        for count in (7, 1000, 300_000)
    ]
    for tensor in unaligned:
        assert tensor.data_ptr() % 4, "the fault was not injected"
        dist.all_reduce(tensor.fill_(rank.rank + 1.0))
    total = rank.size * (rank.size + 1) / 2
    huge = torch.zeros(largest, dtype=torch.uint8)
    huge[[0, largest // 2, largest - 1]] = 1
    dist.all_reduce(huge)
    right = huge[[0, largest // 2, largest - 1]].tolist() == [rank.size] * 3
    right = right and huge.count_nonzero().item() == 3
    del huge
    summed = all(bool(torch.all(tensor == total)) for tensor in unaligned)
    return done(rank, unaligned=summed, huge=right)


@row(
    49,
    "NaN and infinity",
    "NaN from any rank, the same bits everywhere",
    "test_all_reduce.py::test_nan_wins",
    quick=True,
)
def not_a_number(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(3, with_nan))


def with_nan(rank: Rank):
    rank.used()
    right = {}
    for op in ("MIN", "MAX", "SUM", "PRODUCT"):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for bad in range(rank.size):
                tensor = torch.full((40,), 2.0, dtype=dtype)
                if rank.rank == bad:
                    tensor[bad] = math.nan
                    tensor[10 + bad] = math.inf
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
                infinite = 2.0 if op == "MIN" else math.inf
                ok = tensor[bad].isnan().item() and tensor[10 + bad].item() == infinite
                gathered = [torch.empty_like(tensor) for _ in range(rank.size)]
                dist.all_gather(gathered, tensor)
                bits = {bytes(t.view(torch.uint8).numpy().tobytes()) for t in gathered}
                name = f"{op} of {str(dtype)[6:]}"
                right[name] = right.get(name, True) and ok and len(bits) == 1
    return done(rank, **right)


@row(
    50,
    "denormal numbers",
    "kept, on all threads",
    "test_all_reduce.py::test_denormals_are_kept",
    quick=True,
)
def denormals(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(2, with_denormals))


def with_denormals(rank: Rank):
    rank.used()
    right = {}
    for dtype, tiny in (
        (torch.float32, 2.0**-149),
        (torch.float64, 5e-324),
        (torch.float16, 2.0**-24),
    ):
        for count in (5, 70_000):
            tensor = torch.full((count,), tiny, dtype=dtype)
            dist.all_reduce(tensor)
            right[f"{str(dtype)[6:]}[{count}]"] = bool(torch.all(tensor == 2 * tiny))
            tensor = torch.full((count,), tiny, dtype=dtype)
            dist.all_reduce(tensor, async_op=True).wait()
            right[f"async {str(dtype)[6:]}[{count}]"] = bool(torch.all(tensor == 2 * tiny))
    return done(rank, **right)


@row(
    51,
    "integers that overflow; int16, uint16, bool; AVG of integers",
    "wraps like torch.add; AVG is the sum, divided, and cut towards zero",
    "test_all_reduce.py::test_integers_wrap_around",
    quick=True,
)
def integers(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(2, with_integers))


def with_integers(rank: Rank):
    rank.used()
    right = {}
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        most = torch.full((9,), torch.iinfo(dtype).max, dtype=dtype)
        wanted = most + most
        fault = catch(dist.all_reduce, most)
        right[str(dtype)[6:]] = fault is None and torch.equal(most, wanted)
    small = torch.full((9,), 65535, dtype=torch.uint16)
    fault = catch(dist.all_reduce, small)
    right["uint16"] = fault is None and small.view(torch.int16).tolist() == [-2] * 9
    flags = torch.tensor([rank.rank == 0, False])
    fault = catch(dist.all_reduce, flags)
    right["bool"] = fault is None and flags.tolist() == [True, False]
    average = torch.full((3,), -3 * rank.rank, dtype=torch.int32)
    fault = catch(dist.all_reduce, average, op=dist.ReduceOp.AVG)
    right["AVG of int32"] = fault is None and average.tolist() == [-1] * 3
    return done(rank, **right)


@row(
    52,
    "tensors with gaps, and transposed",
    "right results",
    "test_layouts.py::test_every_collective",
    quick=True,
)
def with_gaps(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(2, strided))


def strided(rank: Rank):
    rank.used()
    right = {}
    whole = torch.zeros(20, 30)
    for name, view in {
        "column": whole[:, 3],
        "steps": whole[::3, ::7],
        "transposed": whole.t(),
        "permuted": torch.zeros(3, 4, 5).permute(2, 0, 1),
    }.items():
        whole.zero_()
        view.copy_(torch.arange(view.numel()).view(view.shape) + rank.rank)
        wanted = 2.0 * torch.arange(view.numel()).view(view.shape) + 1
        before = whole.clone()
        fault = catch(dist.all_reduce, view)
        untouched = int((whole != before).sum()) <= view.numel()
        right[name] = refused(fault) or (torch.equal(view, wanted) and untouched)
    return done(rank, **right)


@row(
    53,
    "a tensor that overlaps itself",
    "ValueError before anything is sent",
    "test_mismatch.py::test_bad_arguments_are_local",
)
def overlapping(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(2, overlaps))


def overlaps(rank: Rank):
    rank.used()
    expanded = catch(dist.all_reduce, torch.ones(1).expand(1000))
    windows = catch(dist.all_reduce, torch.ones(100).unfold(0, 10, 1))
    return done(rank, expanded=refused(expanded), windows=refused(windows))


@row(
    54,
    "a leaf that requires grad; the version counter",
    "in place, and counted where stock backends count",
    "test_layouts.py::test_requires_grad",
    "test_version_counters.py::test_the_same_tensors_as_with_gloo",
)
def autograd(stage: Stage) -> Outcome:
    return stage.checks(stage.jobs(2, counts_versions))


def counts_versions(rank: Rank):
    rank.used()
    leaf = torch.ones(5, requires_grad=True)
    works = catch(dist.all_reduce, leaf) is None and leaf.tolist() == [2.0] * 5
    gathered = [torch.ones(5), torch.ones(5)]
    before = [tensor._version for tensor in gathered]
    dist.all_gather(gathered, torch.ones(5))
    return done(rank, **{
        "the leaf has the sum": works,
        "all_reduce is not counted": leaf._version == 0,
        "all_gather is counted": all(t._version > old for t, old in zip(gathered, before, strict=True)),
    })  # fmt: skip


@row(
    55,
    "sparse, float8, conjugated, meta and pinned tensors; several dtypes or devices in a call",
    "a result, or an error that names what was expected; the group in step",
)
def odd_tensors(stage: Stage) -> Outcome:
    found = [stage.checks(stage.jobs(2, with_odd_tensors))]
    found.append(stage.checks(stage.jobs(2, without_data)))
    if stage.native:
        device_ranks.build()
        found.append(stage.checks(stage.jobs(2, on_two_devices), timeout=60.0))
    if torch.cuda.is_available():
        found.append(stage.checks(stage.jobs(2, pinned)))
    return worst(found)


def with_odd_tensors(rank: Rank):
    rank.used()
    right = {}
    sparse = torch.sparse_coo_tensor([[rank.rank]], [1.0], (2,))
    fault = catch(dist.all_reduce, sparse)
    right["sparse"] = fault is not None or sparse.to_dense().tolist() == [1.0, 1.0]

    right["float8 cannot be summed"] = refused(
        catch(dist.all_reduce, torch.ones(3).to(torch.float8_e4m3fn))
    )
    moved = torch.full((4,), rank.rank, dtype=torch.uint8).view(torch.float8_e4m3fn)
    fault = catch(dist.broadcast, moved, 1)
    right["float8 can be moved"] = fault is None and moved.view(torch.uint8).tolist() == [1] * 4
    conjugated = torch.full((3,), 1 + 1j, dtype=torch.complex64).conj()
    gathered = [torch.empty(3, dtype=torch.complex64) for _ in range(2)]
    fault = catch(dist.all_gather, gathered, conjugated)
    right["conjugated"] = fault is not None or gathered[1].tolist() == [1 - 1j] * 3
    lists = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    fault = catch(dist.all_gather, lists, torch.ones(3))
    right["mixed dtypes in a list"] = refused(fault)
    return done(rank, **right)


def named(fault: Fault | None, *words: str) -> bool:
    """Whether the call was refused as bad arguments are, in these words."""
    return fault is not None and refused(fault) and all(word in fault.text for word in words)


def without_data(rank: Rank):
    """Tensors of device meta. Most calls with them torch answers itself, on all ranks alike."""
    rank.used()
    there, here = torch.empty(4, device="meta"), torch.ones(4)
    right = {}
    fault = catch(dist.all_reduce, there)
    right["all_reduce of meta is none"] = fault is None or refused(fault)
    calls = {
        "all_gather": (dist.all_gather, [there, torch.ones(4)], here),
        "reduce_scatter": (dist.reduce_scatter, torch.ones(4), [here, there]),
        "scatter": (dist.scatter, here, [here, there] if rank.rank == 0 else None),
    }
    for name, (call, *arguments) in calls.items():
        if name == "scatter" and rank.rank != 0:
            continue  # the root alone has what is wrong, and knows before anything is sent
        right[f"meta in the list of {name}"] = named(
            catch(call, *arguments), "device meta", "expected a CPU or CUDA tensor"
        ) or (BACKEND == "gloo" and catch(call, *arguments) is not None)
    if BACKEND == "fastcoll":
        right |= asked_of_the_backend(rank, there)
    return done(rank, **right)


def asked_of_the_backend(rank: Rank, there: torch.Tensor) -> dict[str, bool]:
    """Past torch, which would answer such calls itself."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    other = 1 - rank.rank
    calls = {
        "allreduce": lambda: backend.allreduce([there]),
        "broadcast": lambda: backend.broadcast(there, 0),
        "send": lambda: backend.send([there], other, 0),
        "recv": lambda: backend.recv([there], other, 0),
    }
    return {
        f"{name} asked of the backend": named(catch(call), "device meta")
        for name, call in calls.items()
    }


def on_two_devices(rank: Rank):
    """A call with tensors of the CPU and of another device that the backend serves."""
    device_ranks.prepare()
    rank.used()

    def there() -> torch.Tensor:
        return torch.ones(4, device=f"{device_ranks.DEVICE}:0")

    def here() -> torch.Tensor:
        return torch.ones(4)

    rank.before = footprint()
    right = {}
    for name, (call, *arguments) in {
        "all_gather into another device": (dist.all_gather, [here(), there()], here()),
        "all_gather from another device": (dist.all_gather, [here(), here()], there()),
        "reduce_scatter": (dist.reduce_scatter, here(), [here(), there()]),
        "all_to_all": (dist.all_to_all, [here(), here()], [here(), there()]),
        "all_gather_single": (all_gather_single, torch.ones(8), there()),
        "reduce_scatter_single": (reduce_scatter_single, there(), torch.ones(8)),
    }.items():
        fault = catch(call, *arguments)
        right[name] = named(fault, "all tensors on one device", "cpu", f"{device_ranks.DEVICE}:0")
    return done(rank, **right)


def pinned(rank: Rank):
    """Host memory that a device maps is host memory."""
    rank.used()
    tensor = torch.full((100_000,), 2.0, pin_memory=True)
    dist.all_reduce(tensor)
    right = bool(torch.all(tensor == 2.0 * rank.size)) and tensor.is_pinned()
    return done(rank, **{"the sum of pinned tensors": right})
