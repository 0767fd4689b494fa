"""What csrc/bindings.cpp exports."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ErrorType, ReduceOp, Store, Work

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "REDUCE_OPS",
    "Communicators",
    "NcclCalls",
    "NcclFunctions",
    "Options",
    "ProcessGroupFastcoll",
    "Roster",
    "Tuning",
    "build_info",
    "groups",
    "reduce_isa",
    "reduces_in_one_step",
    "select_host_broadcast",
    "set_device_factory",
    "set_gloo_factory",
    "set_nccl_allocator",
    "trace_dump",
    "trace_write",
]

COLLECTIVES: tuple[str, ...]
"""torch.distributed's names of what an engine does, by the numbers that the device engine passes."""

DTYPES: tuple[str, ...]
"""torch's names of dtypes, by number; the last, "opaque", stands for bytes of any other."""

REDUCE_OPS: tuple[str, ...]
"""The names of ReduceOp's members, by number."""

class NcclFunctions:
    """The functions of a NCCL that is loaded, for callers in C++."""

    def __init__(self, addresses: dict[str, int], version: int) -> None:
        """Takes their addresses by name, and the library's version, such as 22907."""

    def describe(self, status: int) -> str:
        """Returns a status in words: NCCL's for it, NCCL's for the last error, and what to do."""

class NcclCalls:
    """The calls of one communicator; see csrc/device/nccl.hpp. The GIL is free during each.

    Args:
        functions: Of the library.
        communicator: NCCL's handle.
        ranks: That it has.
        patience: How long a call is waited for in which NCCL does not block.
    """

    def __init__(
        self, functions: NcclFunctions, communicator: int, ranks: int, patience: timedelta
    ) -> None: ...
    @property
    def communicator(self) -> int: ...
    def issue(
        self,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        factor: float,
        factor_on_device: int,
        given: int,
        given_count: int,
        result: int,
        result_count: int,
        stream: int,
        /,
    ) -> None:
        """Puts one operation on a stream: numbers as in COLLECTIVES, DTYPES, REDUCE_OPS; addresses and elements."""

    def begin_group(self) -> None:
        """Begins a group: what this thread calls until end_group goes together."""

    def end_group(self) -> None:
        """Ends it."""

    def end(self) -> None:
        """Makes every later call an error, without a call of NCCL."""

class Communicators:
    """A group's communicators, for the engine and for the watchdog, which never take the GIL."""

    def add(self, calls: NcclCalls, device: int, name: str, instance: str, peer: int) -> bool:
        """Takes a communicator; False if the group was aborted already.

        Args:
            calls: Of it.
            device: Index of its device.
            name: For messages.
            instance: Equal on all its ranks, and of no other; "" if there is none.
            peer: The one other rank that has it; -1: all ranks of the group.
        """

    def remove(self, calls: NcclCalls) -> bool:
        """Takes a communicator back, to be ended by the caller; False if it was aborted."""

    def find(self, device: int, peer: int) -> NcclCalls | None:
        """Returns the calls of the communicator of a device, or of a pair of ranks; None if there is none."""

    def add_kernels(self, words: torch.Tensor, prefix: str, size: int) -> None:
        """Takes the words by which kernels between ranks are ended with the communicators, and tell of faults.

        Args:
            words: int64 [2] on the host, as ``fastcoll.kernels.PeerBuffers`` takes them; kept from now on.
            prefix: Of messages.
            size: Number of ranks.
        """

    def abort_all(self) -> None:
        """Aborts all, and returns when NCCL does, which may be never."""

    def begin_calls(self) -> None:
        """Has other threads' calls on the communicators wait until ``end_calls``, by the same thread."""

    def end_calls(self) -> None:
        """Takes ``begin_calls`` back."""

    @property
    def aborted(self) -> bool: ...

class Roster:
    """How the ranks of a device group come together through a store; see csrc/group/roster.hpp.

    Between two looks into the store a wait calls ``on_look``, which ends it by an exception. The GIL is free else.

    Args:
        store: The group's.
        folder: Of the keys.
        rank: This process in the group.
        size: Number of ranks.
        record: Of this rank, with a nonce drawn now; as long on all ranks.
        magic: Bytes at the head of a record that are equal on all ranks.

    Attributes:
        id: Equal on all ranks, and of no other life of the group; "" before the ranks' records were gathered.
    """

    def __init__(
        self, store: Store, folder: str, rank: int, size: int, record: bytes = b"", magic: int = 0
    ) -> None: ...
    @property
    def id(self) -> str: ...
    def publish(self) -> None:
        """Announces this rank; waits for nobody."""
    def read(self, rank: int) -> bytes | None:
        """Returns a rank's record as the store has it now."""
    def gather(self, on_look: Callable[[], None]) -> list[bytes]:
        """Waits for the records of all ranks, and returns them in rank order.

        Raises:
            DistStoreError: What the store holds is no record.
        """
    def exchange(
        self, round: str, text: bytes, on_look: Callable[[], None], watch: bool = False
    ) -> list[bytes] | None:
        """Says something in a round, waits for what all say, and returns it in rank order.

        With ``watch`` None, when the records are others meanwhile: gather them again.
        """
    def say(self, round: str, text: bytes) -> None:
        """Says something in a round; waits for nobody."""
    def silent(self, round: str) -> list[int]:
        """Returns the other ranks that have said nothing in a round."""
    def tell(self, text: str) -> None:
        """Tells the other ranks of a fault, unless one was told before."""
    def told(self) -> str | None:
        """Returns the fault that was told first."""
    def erase(self) -> None:
        """Deletes what this rank has set, as far as the store can."""

class Tuning:
    """Message sizes at which one way of doing a collective gives way to another, in bytes.

    They change times, never results. All ranks of a group must have the same.

    Attributes:
        one_shot_bytes: all_reduce reads all messages at once up to twice this, divided by the ranks.
        segment_bytes: Most bytes of a pipeline segment of messages up to long_bytes.
        long_segment_bytes: The same for longer messages.
        long_bytes: See there; and two ranks exchange messages up to this size in place.
        streaming_bytes: From here on results are written past the caches.
        direct_bytes: From here on a message in shared memory is read by the peers where it is.
        direct_all_reduce_bytes: The same for all_reduce.
        link_bytes: Latency times bandwidth of the link between hosts, which decides how many steps are taken there.
    """

    one_shot_bytes: int
    segment_bytes: int
    long_segment_bytes: int
    long_bytes: int
    streaming_bytes: int
    direct_bytes: int
    direct_all_reduce_bytes: int
    link_bytes: int

    def __init__(self) -> None: ...

class NcclConfig:
    """The fields of NCCL's ncclConfig_t, by the names of torch's ``ProcessGroupNCCL.NCCLConfig``; None: not set.

    NCCL's documentation says what they mean; its environment variables win over them. ``blocking`` is missing: no
    call of fastcoll's waits for NCCL longer than the group's timeout.
    """

    cga_cluster_size: int | None
    min_ctas: int | None
    max_ctas: int | None
    net_name: str | None
    split_share: int | None
    traffic_class: int | None
    comm_name: str | None
    collnet_enable: int | None
    cta_policy: int | None
    shrink_share: int | None
    nvls_ctas: int | None
    n_channels_per_net_peer: int | None
    nvlink_centric_sched: int | None

    def __init__(self) -> None: ...

class Options(Backend.Options):
    """Options of one group, for ``init_process_group(pg_options=...)`` and ``new_group(pg_options=...)``.

    An environment variable wins over the field with the same meaning. Only ``tuning`` wins over its variable.
    The group copies the options, so later changes have no effect on it.

    Attributes:
        timeout: Limit of each operation, after which it fails on all ranks. The argument ``timeout`` of
            ``init_process_group`` wins, unless it is torch's default.
        transport: Transport of CPU tensors. "auto": shared memory between ranks of a host, Gloo between hosts. "shm"
            or "gloo": this one only.
        ring_bytes: Size of a rank's ring in shared memory, in bytes: 16384 to 1073741824.
        spin_us: Time that a wait spins before it sleeps, in microseconds. -1: 50 if each rank has its own core,
            else 0.
        link_seconds: Seconds without any TCP response after which another host is treated as lost: 0 to 86400.
            0: the TCP defaults.
        shared_tensors: Whether CPU tensors of 32 KiB and more are in shared memory, if this process makes them after
            the group. They are then like tensors of ``fastcoll.empty_shared``.
        shared_buckets: Whether DDP's buckets of CPU tensors are in shared memory. ``DDP_DISABLE_COMM_MEM=1`` wins.
        tuning: Message sizes at which the algorithms change. None: the table that FASTCOLL_TUNING names.
        is_high_priority_stream: Whether asynchronous calls on CUDA tensors use streams of high priority.
        blocking_wait: Whether ``wait()`` of a call on CUDA tensors blocks the host. False: it blocks the stream.
        config: Configuration of NCCL's communicators, equal on all ranks. The fields have the names of torch's
            ``ProcessGroupNCCL.NCCLConfig``; None: not set.

    torch's ``group_name`` and ``global_ranks_in_group`` are set when the group is made.

    Raises:
        ValueError: A transport is unknown, or a number is out of its range.
    """

    timeout: timedelta
    transport: str
    ring_bytes: int
    spin_us: int
    link_seconds: int
    shared_tensors: bool
    shared_buckets: bool
    tuning: Tuning | None
    is_high_priority_stream: bool
    blocking_wait: bool
    config: NcclConfig
    group_name: str  # type: ignore[assignment]

    def __init__(
        self,
        timeout: timedelta = ...,
        *,
        transport: str = "auto",
        ring_bytes: int = 2097152,
        spin_us: int = -1,
        link_seconds: int = 10,
        shared_tensors: bool = False,
        shared_buckets: bool = True,
        tuning: Tuning | None = None,
        is_high_priority_stream: bool = True,
        blocking_wait: bool = False,
        config: NcclConfig = ...,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class ProcessGroupFastcoll(Backend):
    """The backend of one group on one rank; made by fastcoll._backend.create."""

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    @property
    def options(self) -> Options: ...
    def transport(self) -> str:
        """Returns what moves the group's bytes: "shm", "gloo", or "none" before the first use."""

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies in memory of allocate_tensor, dense, so that peers can read it where it is."""

    def all_reduce_list(
        self,
        tensors: list[torch.Tensor],
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
        *,
        wire_dtype: torch.dtype | None = None,
        scale: float = 1.0,
        algorithm: str = "",
        fuse: bool | None = None,
    ) -> Work | None:
        """Reduces tensors of one or several dtypes in place, as torch's allreduce_coalesced does those of one.

        Args:
            tensors: At least one.
            op: The operation.
            async_op: Whether to return a work at once.
            wire_dtype: Device tensors: what messages of a wider floating-point dtype travel as.
            scale: Device tensors: factor of the results, applied before they are rounded.
            algorithm: Device tensors: in place of FASTCOLL_ALGO.
            fuse: Device tensors: whether they are reduced as one bucket; None: if they are many and small.
        """

    def all_reduce_fused(
        self,
        tensors: list[torch.Tensor],
        op: ReduceOp | ReduceOp.RedOpType,
        wire_dtype: torch.dtype | None = None,
        squares: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduces CPU tensors of one dtype in place, as one message.

        Args:
            tensors: At least one; any shapes.
            op: The reduction.
            wire_dtype: bfloat16 or float16, for float32 tensors: each element is rounded to it before it travels,
                summed in float32, and rounded to it once more; so is each host's sum, where there are several.
            squares: One float64 element: becomes the sum of the squares of this rank's share of the result. The
                shares of all ranks make up the result.
            async_op: Whether to return a work at once; squares is then set when it has ended.

        Raises:
            ValueError: A tensor or squares is not as said.
            TypeError: The wire dtype does not fit.
        """

    def reduce_scatter_fused(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp | ReduceOp.RedOpType,
        wire_dtype: torch.dtype | None = None,
        squares: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduces CPU tensors, and leaves on each rank its part, in rank order of the input.

        Args:
            output: Any number of elements; float32, or the dtype that travels.
            input: As many for each rank.
            op: The reduction.
            wire_dtype: bfloat16 or float16, for a float32 input: what it is rounded to before it travels. The sum is
                taken in float32, and is not rounded if the output is float32.
            squares: One float64 element: becomes the sum of the squares of the output.
            async_op: Whether to return a work at once.

        Raises:
            ValueError: A size, or squares, is not as said.
            TypeError: The dtypes do not fit.
        """

    def get_error(self) -> ErrorType: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def comm_split_count(self) -> int: ...
    @property
    def mem_allocator(self) -> Any:
        """The allocator of memory that NCCL registers best, for torch.cuda.MemPool."""

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Registers what a torch.cuda.MemPool holds with NCCL: see fastcoll.cuda.memory_pools.register."""

    def deregister_mem_pool(self, pool: Any) -> None:
        """Takes register_mem_pool back."""
    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a 1-D tensor of `size` elements in memory that the other ranks can map.

        Raises:
            DistBackendError: The memory is lacking; says how to get more.
        """

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

def build_info() -> dict[str, str]:
    """Returns "fastcoll" and "torch", the versions of the build, and facts about the compiler."""

def groups() -> list[dict[str, Any]]:
    """Returns what fastcoll.info.groups tells of each live group of this process, but for its devices."""

def reduce_isa() -> str:
    """Returns the instruction set that reductions use: "avx512", "avx2" or "baseline"."""

def reduces_in_one_step(hosts: int, partial: int, result: int, link_bytes: int) -> bool:
    """Tells whether a sum is made in one step between hosts, and not in two: csrc/hosts/selector.hpp."""

def select_host_broadcast(hosts: int, bytes: int, link_bytes: int) -> str:
    """Returns the algorithm of a broadcast between hosts: "flat", "scatter_all_gather" or "chain"."""

SYMMETRIC_SWITCHES: tuple[str, ...]
"""Variables of the environment that are "1" during symmetric_rendezvous."""

def symmetric_empty(bytes: int, device: torch.device) -> torch.Tensor:
    """Returns uint8 [bytes] of torch's symmetric memory, of which torch's groups and allocation ids know nothing."""

def symmetric_free(memory: torch.Tensor) -> None:
    """Gives the memory of a tensor of ``symmetric_empty`` back.

    torch waits for the device, and other threads run meanwhile.
    """

def symmetric_rendezvous(memory: torch.Tensor, group: str, seconds: float) -> Any:
    """Returns torch's ``_SymmetricMemory`` of a tensor of ``symmetric_empty``, when all ranks have called it.

    Other threads run meanwhile. One call at a time in a process; `seconds` is how long one waits for another's end.
    Ranks may be on devices of one index, and no multicast object is made, whatever the environment says.

    Raises:
        DistBackendError: Another call has not ended in time.
        RuntimeError: What torch says.
    """

def set_nccl_allocator(allocate: int, free: int) -> None: ...
def set_device_factory(
    factory: Callable[[Store, str, int, int, Options, str], object],
) -> None: ...
def set_gloo_factory(
    factory: Callable[[], Callable[[Store, int, int, timedelta], Backend]],
) -> None:
    """Sets what makes, for a group on several hosts, what makes its Gloo backends."""

def trace_dump(reason: str) -> bytes:
    """Returns the trace as a pickle; nothing while nothing is recorded."""

def trace_write(reason: str, path: str = "") -> str:
    """Writes the trace to a file, by default FASTCOLL_TRACE_DUMP and the rank, and returns its name."""

def _shutdown_all() -> None:
    """Ends all groups of this process, with little grace for what is under way."""
