"""What the ranks of a soak do, and what they sample of themselves meanwhile."""

import dataclasses
import os
import random
import time

import torch
import torch.distributed as dist
from backend import shared_bytes
from fault_rank import Rank
from own_memory import allocated_bytes
from rank_calls import WRONG, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter


@dataclasses.dataclass(frozen=True)
class Sample:
    """The resources of a process at one moment."""

    at: float  # seconds since the load began
    rounds: int  # of the load, done so far
    # Bytes of malloc, not given back; torch itself keeps 130 to 180 of each new group.
    allocated: int
    shared: int  # bytes of shared memory that its groups have reserved
    descriptors: int
    threads: int
    mappings: int  # of shared memory


def sample(start: float, rounds: int) -> Sample:
    """Look at this process."""
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:fastcoll" in line for line in maps)
    return Sample(
        time.monotonic() - start,
        rounds,
        allocated_bytes(),
        shared_bytes(),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        mappings,
    )


class Load:
    """A mixed load, drawn from a seed that all ranks share."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.mine, self.size = rank, rank.rank, rank.size
        self.chance = random.Random(45)
        self.kinds = [self.all_reduces, self.gathers, self.scatters, self.works]
        self.kinds += [self.messages, self.group, self.objects]
        if hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "transport"):
            self.kinds.append(self.in_shared_memory)

    def round(self) -> None:
        """Do some of everything, in an order and sizes of chance, and check the results."""
        for kind in self.chance.choices(self.kinds, k=8):
            kind(self.chance.choice([0, 1, 100, 1000, 40_000, 300_000]))

    def all_reduces(self, count: int, group: dist.ProcessGroup | None = None) -> None:
        all_reduce(self.rank, count, group)
        broadcast(self.rank, count, self.size - 1, group)

    def gathers(self, count: int) -> None:
        all_gather(self.rank, count)
        root = self.chance.randrange(self.size)
        parts = [torch.empty(count) for _ in range(self.size)] if self.mine == root else None
        dist.gather(torch.ones(count), parts, root)

    def scatters(self, count: int) -> None:
        reduce_scatter(self.rank, count)
        all_to_all(self.rank, count)

    def works(self, count: int) -> None:
        tensors = [torch.ones(count) for _ in range(12)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        self.chance.shuffle(works)
        for work in works[:8]:  # nobody waits for the others
            work.wait()
        dist.barrier()
        for tensor in tensors:
            self.check(tensor, float(self.size))

    def messages(self, count: int) -> None:
        into = torch.empty(count)
        tag = self.chance.randrange(5)
        work = dist.isend(torch.full((count,), 7.0), (self.mine + 1) % self.size, tag=tag)
        dist.recv(into, (self.mine - 1) % self.size, tag=tag)
        work.wait()
        self.check(into, 7.0)

    def group(self, count: int) -> None:
        group = dist.new_group(list(range(self.size)))
        self.all_reduces(count, group)
        dist.destroy_process_group(group)

    def in_shared_memory(self, count: int) -> None:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        tensor = backend.allocate_tensor(count, dtype=torch.float32, device=torch.device("cpu"))
        dist.all_reduce(tensor.fill_(1.0))
        self.check(tensor, float(self.size))

    def objects(self, count: int) -> None:
        gathered = [None] * self.size
        dist.all_gather_object(gathered, "x" * (count % 5000))
        assert len(set(gathered)) == 1, WRONG

    def check(self, tensor: torch.Tensor, value: float) -> None:
        assert torch.all(tensor == value), WRONG


def sampled(rank: Rank, seconds: float) -> list[Sample]:
    """Run the load for some time; return samples, one a second or twenty in all."""
    every = min(1.0, seconds / 20)
    rank.used()
    load = Load(rank)
    samples: list[Sample] = []
    start = due = time.monotonic()
    rounds = 0
    goes_on = torch.ones(1)
    while True:
        load.round()
        rounds += 1
        # Rank 0 says when it is over, so that all do as many rounds.
        goes_on.fill_(float(time.monotonic() - start < seconds))
        dist.broadcast(goes_on, 0)
        if time.monotonic() >= due:
            samples.append(sample(start, rounds))
            due += every
        if not goes_on:
            break
    dist.destroy_process_group()
    assert rank.left() == [], rank.left()
    return samples
