"""The compiled module, csrc/bindings/module.cpp."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch._C._distributed_c10d import Backend, ErrorType, ReduceOp, Store, Work

__all__ = [
    "Communicator",
    "CommunicatorPlan",
    "Options",
    "ProcessGroupFastcoll",
    "Tuning",
    "build_info",
    "groups",
    "reduce_isa",
    "reduces_in_one_step",
    "select_host_broadcast",
    "set_device_loader",
    "set_gloo_factory",
    "trace_dump",
    "trace_write",
]

class Tuning:
    """Message sizes, in bytes, at which collectives change their algorithm.

    They change times, never results. All ranks of a group must have the same sizes.

    Attributes:
        one_shot_bytes: all_reduce reads all messages at once up to twice this size, divided by the number of ranks.
        segment_bytes: Largest pipeline segment of messages up to ``long_bytes``. A segment never exceeds a quarter of
            the ring.
        long_segment_bytes: The same for longer messages.
        long_bytes: Largest message with ``segment_bytes``, and largest that two ranks exchange in place.
        streaming_bytes: From this size on, results and received messages are written past the caches.
        direct_bytes: From this size on, peers read a message in shared memory in place.
        direct_all_reduce_bytes: The same for all_reduce, which also writes its result in place.
        link_bytes: Latency times bandwidth of the link between hosts: bytes that it carries in the time of an empty
            step. It decides the number of steps between hosts.
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

class Options(Backend.Options):
    """Options of one group, for ``init_process_group(pg_options=...)`` and ``new_group(pg_options=...)``.

    An environment variable wins over the field with the same meaning. Only ``tuning`` wins over its variable.
    The group copies the options, so later changes have no effect on it.

    Attributes:
        timeout: Limit of each operation, after which it fails on all ranks. The argument ``timeout`` of
            ``init_process_group`` wins, unless it is torch's default.
        shared_memory: Whether CPU tensors go through shared memory between ranks of a host. auto uses it where the
            ranks can share memory, and the network between the others. With require, a group fails if a rank cannot
            share memory. One of auto, off, require.
        order: Order of sums, equal on all ranks. With fixed, the bits of an element depend only on the ranks' values
            and their order, and on no size, algorithm or placement. A call that cannot keep this raises an error. With
            any, NCCL sums CUDA tensors by default, and each host rounds its sum to a 16-bit wire. One of any, fixed.
        network: Network of CPU tensors between hosts, equal on all ranks. ``gloo`` is the only one so far.
        ring_bytes: Bytes of a rank's ring in shared memory, one for each group. A group of several hosts uses four
            times as much. 16384 to 1073741824.
        spin_us: Time that a wait spins before it sleeps, in microseconds. -1 means 50 if each rank has its own core,
            else 0. -1 to 1000000.
        link_seconds: Seconds without any TCP response after which a host is treated as lost. 0 keeps the TCP defaults.
            0 to 86400.
        digest: Whether the trace has digests of the inputs and results of CPU tensors: of collectives that reduce, or
            of all. Ranks compare their results at the next collective. With FASTCOLL_TRACE_DUMP, each rank also dumps
            its trace when the program ends. One of off, sum, all.
        threads: Threads of a rank that copy and sum in one collective of CPU tensors, one for each 256 KiB at most. 0
            uses the rank's part of the cores, where measurements show that it is faster. A collective beside the
            program then leaves it as many cores as torch computes with. 0 to 64.
        shared_buckets: False keeps DDP's buckets of CPU tensors in private memory, as DDP_DISABLE_COMM_MEM=1 does.
            With a GPU, buckets are private unless DDP_DISABLE_COMM_MEM is 0.
        tuning: Message sizes at which the algorithms change. None: the table that FASTCOLL_TUNING names.
        is_high_priority_stream: Whether asynchronous calls on CUDA tensors use streams of high priority.
        blocking_wait: Whether ``wait()`` of a call on CUDA tensors blocks the host. False: it blocks the stream.
        config: Configuration of NCCL's communicators, equal on all ranks. The fields have the names of torch's
            ``ProcessGroupNCCL.NCCLConfig``; None: not set. It can be set to any object with such attributes, whose
            fields are copied.

    torch's ``group_name`` and ``global_ranks_in_group`` are set when the group is made.

    Raises:
        ValueError: A word is unknown, or a number is out of its range.
    """

    timeout: timedelta
    shared_memory: str
    order: str
    network: str
    ring_bytes: int
    spin_us: int
    link_seconds: int
    digest: str
    threads: int
    shared_buckets: bool
    tuning: Tuning | None
    is_high_priority_stream: bool
    blocking_wait: bool
    config: Any
    group_name: str  # type: ignore[assignment]

    def __init__(
        self,
        timeout: timedelta = ...,
        *,
        shared_memory: str = "auto",
        order: str = "any",
        network: str = "gloo",
        ring_bytes: int = 2097152,
        spin_us: int = -1,
        link_seconds: int = 10,
        digest: str = "off",
        threads: int = 0,
        shared_buckets: bool = True,
        tuning: Tuning | None = None,
        is_high_priority_stream: bool = True,
        blocking_wait: bool = False,
        config: Any = ...,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

# torch.Tensor, a numpy array or an array with __dlpack__; and such a one, or a list of them
_Array: TypeAlias = Any
_Parts: TypeAlias = Any

class CommunicatorPlan:
    """A call prepared for repetition; made by the ``*_plan`` methods of ``Communicator``.

    ``plan()`` makes the call on the tensors that the plan was made with, which are checked once. On CPU tensors it
    blocks. A plan of a message of CUDA tensors makes the whole call each time. The models are the persistent
    collectives of MPI 4.0 (chapter 6.13) and its persistent messages (chapter 3.9). Only one thread at a time may run
    a plan.

    Raises:
        ValueError: Another thread runs the plan; or a tensor has left its memory.
        torch.distributed.DistBackendError: As in the call without a plan.
    """

    def __call__(self) -> None: ...

class Communicator:
    """The calls of a group, each as one C call that works in place; made by ``fastcoll.communicator``.

    Calls on CPU tensors block. Calls on CUDA tensors are enqueued on the current stream. An argument is a tensor, a
    numpy array, or a CPU array with ``__dlpack__``. An argument with a part for each rank is one of these, with the
    parts in rank order, or a list with one for each rank. Ranks and timeout are those of the group. Each call has a
    ``*_plan`` with the same arguments.

    Args:
        backend: fastcoll's backend of the group.

    Raises:
        TypeError: An argument is missing, unknown, or of another type; dtypes differ.
        ValueError: A length, a rank, a layout or an operation is wrong, as for ``torch.distributed``.
        torch.distributed.DistBackendError: The group has failed, was destroyed, or a timeout has passed.
    """

    def __init__(self, backend: Backend) -> None: ...
    @property
    def rank(self) -> int:
        """This rank in the group."""
    @property
    def size(self) -> int:
        """Number of ranks in the group."""
    def all_reduce(self, tensor: _Array, op: ReduceOp | ReduceOp.RedOpType = ...) -> None:
        """Reduces a tensor over all ranks, in place."""
    def all_reduce_plan(
        self, tensor: _Array, op: ReduceOp | ReduceOp.RedOpType = ...
    ) -> CommunicatorPlan:
        """Returns a plan of ``all_reduce``."""
    def reduce(self, tensor: _Array, dst: int, op: ReduceOp | ReduceOp.RedOpType = ...) -> None:
        """Reduces a tensor over all ranks into that of rank ``dst``."""
    def reduce_plan(
        self, tensor: _Array, dst: int, op: ReduceOp | ReduceOp.RedOpType = ...
    ) -> CommunicatorPlan:
        """Returns a plan of ``reduce``."""
    def broadcast(self, tensor: _Array, src: int) -> None:
        """Copies the tensor of rank ``src`` into those of all ranks."""
    def broadcast_plan(self, tensor: _Array, src: int) -> CommunicatorPlan:
        """Returns a plan of ``broadcast``."""
    def all_gather(self, output: _Parts, input: _Array) -> None:
        """Gathers the inputs of all ranks on each rank."""
    def all_gather_plan(self, output: _Parts, input: _Array) -> CommunicatorPlan:
        """Returns a plan of ``all_gather``."""
    def reduce_scatter(
        self, output: _Array, input: _Parts, op: ReduceOp | ReduceOp.RedOpType = ...
    ) -> None:
        """Reduces the inputs over all ranks. Each rank gets its part."""
    def reduce_scatter_plan(
        self, output: _Array, input: _Parts, op: ReduceOp | ReduceOp.RedOpType = ...
    ) -> CommunicatorPlan:
        """Returns a plan of ``reduce_scatter``."""
    def all_to_all(
        self,
        output: _Parts,
        input: _Parts,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> None:
        """Sends a part of the input to each rank. The splits count rows of the first dimension; None: even parts."""
    def all_to_all_plan(
        self,
        output: _Parts,
        input: _Parts,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> CommunicatorPlan:
        """Returns a plan of ``all_to_all``."""
    def gather(self, output: _Parts | None, input: _Array, dst: int) -> None:
        """Gathers the inputs of all ranks on rank ``dst``; the output of other ranks is None."""
    def gather_plan(self, output: _Parts | None, input: _Array, dst: int) -> CommunicatorPlan:
        """Returns a plan of ``gather``."""
    def scatter(self, output: _Array, input: _Parts | None, src: int) -> None:
        """Sends a part of the input of rank ``src`` to each rank; the input of other ranks is None."""
    def scatter_plan(self, output: _Array, input: _Parts | None, src: int) -> CommunicatorPlan:
        """Returns a plan of ``scatter``."""
    def barrier(self) -> None:
        """Waits for all ranks."""
    def barrier_plan(self) -> CommunicatorPlan:
        """Returns a plan of ``barrier``."""
    def send(self, tensor: _Array, dst: int, tag: int = 0) -> None:
        """Sends a tensor to a rank; returns when its memory can be used again."""
    def send_plan(self, tensor: _Array, dst: int, tag: int = 0) -> CommunicatorPlan:
        """Returns a plan of ``send``."""
    def recv(self, tensor: _Array, src: int, tag: int = 0) -> None:
        """Receives a tensor from a rank."""
    def recv_plan(self, tensor: _Array, src: int, tag: int = 0) -> CommunicatorPlan:
        """Returns a plan of ``recv``."""
    def sendrecv(self, send: _Array, dst: int, recv: _Array, src: int, tag: int = 0) -> None:
        """Sends a tensor to rank ``dst`` while it receives one from rank ``src``."""
    def sendrecv_plan(
        self, send: _Array, dst: int, recv: _Array, src: int, tag: int = 0
    ) -> CommunicatorPlan:
        """Returns a plan of ``sendrecv``."""

class ProcessGroupFastcoll(Backend):
    """The backend of one group on one rank; made by fastcoll._backend.create."""

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None: ...
    @property
    def options(self) -> Options: ...
    def transport(self) -> str:
        """Returns the transport: "shm", "shm+gloo", "gloo", "local" (one rank), or "undecided" before the first use."""

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is dense and in memory of allocate_tensor, so peers can read it in place."""

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
        squares: torch.Tensor | None = None,
    ) -> Work | None:
        """Reduces tensors in place, like torch's allreduce_coalesced, but of one or several dtypes.

        Args:
            tensors: At least one.
            op: The operation.
            async_op: Whether to return a work at once.
            wire_dtype: Device tensors only: the dtype in which messages of a wider floating-point dtype travel.
            scale: Device tensors only: factor of the results, applied before they are rounded.
            algorithm: Device tensors only: the algorithm, in place of FASTCOLL_ALGO.
            fuse: Device tensors only: whether to reduce them as one bucket. None: if they are many and small.
            squares: Device tensors only: float64, dense, on their device, of ``AllReduces.measured`` elements. Their
                sum becomes that of the results' squares, with equal bits on all ranks.
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
            wire_dtype: bfloat16 or float16, for float32 tensors. Each element is rounded to it before it travels. The
                sum is made in float32 and rounded to it. With several hosts, each host's sum is rounded too.
            squares: One float64 element, set to the sum of the squares of this rank's share of the result. The
                shares of all ranks make up the result.
            async_op: Whether to return a work at once. Then squares is set when the work has ended.

        Raises:
            ValueError: A tensor or squares is not as described.
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
        """Reduces CPU tensors, and leaves each rank its part; the parts are in rank order in the input.

        Args:
            output: n elements, any n; float32, or the dtype that travels.
            input: ranks * n elements.
            op: The reduction.
            wire_dtype: bfloat16 or float16, for a float32 input, which is rounded to it before it travels. The sum is
                made in float32, and not rounded if the output is float32.
            squares: One float64 element, set to the sum of the squares of the output.
            async_op: Whether to return a work at once.

        Raises:
            ValueError: A size, or squares, is not as described.
            TypeError: The dtypes do not fit.
        """

    def get_error(self) -> ErrorType: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def comm_split_count(self) -> int: ...
    @property
    def mem_allocator(self) -> Any:
        """The allocator of the memory that NCCL registers best, for torch.cuda.MemPool."""

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        """Registers the memory of a torch.cuda.MemPool with NCCL: see fastcoll.cuda.memory_pools.register."""

    def deregister_mem_pool(self, pool: Any) -> None:
        """Undoes register_mem_pool."""
    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a 1-D tensor of `size` elements in memory that the other ranks can map.

        Raises:
            DistBackendError: The memory does not suffice; the message names the remedy.
        """

    def _set_default_timeout(self, timeout: timedelta) -> None: ...

def build_info() -> dict[str, str]:
    """Returns "fastcoll" and "torch", the versions of the build, and facts about the compiler."""

def groups() -> list[dict[str, Any]]:
    """Returns fastcoll's part of ``fastcoll.info.groups``, of each live group of this process, without devices."""

def digest(tensor: torch.Tensor) -> int:
    """Returns the digest of a contiguous CPU tensor's bytes: csrc/reduce/digest.hpp."""

def reduce_isa() -> str:
    """Returns the instruction set that reductions use: "avx512", "avx2" or "baseline"."""

def reduces_in_one_step(hosts: int, partial: int, result: int, link_bytes: int) -> bool:
    """Returns whether a sum between hosts takes one step, not two: csrc/cpu/hosts/selector.hpp."""

def select_host_broadcast(hosts: int, bytes: int, link_bytes: int) -> str:
    """Returns the algorithm of a broadcast between hosts: "flat", "scatter_all_gather" or "chain"."""

def set_gloo_factory(
    factory: Callable[[], Callable[[Store, int, int, timedelta], Backend]],
) -> None:
    """Sets the function that returns, for a group on several hosts, the factory of its Gloo backends."""

def set_device_loader(load: Callable[[], None]) -> None:
    """Sets what imports ``fastcoll._cuda``, at the first device tensor."""

def trace_dump(reason: str) -> bytes:
    """Returns a copy of the trace's memory; empty if nothing is recorded."""

def trace_write(reason: str, path: str = "") -> str:
    """Writes the trace to a file, by default FASTCOLL_TRACE_DUMP and the rank, and returns its name."""

def _shutdown_all() -> None:
    """Ends all groups of this process, and waits only shortly for operations in progress."""
