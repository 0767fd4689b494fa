"""An element's bits depend on its sources and their number alone: 300 random messages against a tree in numpy.

A message repeats up to 4093 marks: elements whose sources on all ranks are known. So a mark is at many places, and the
expected bits of every element are known. The tree is written apart from the one in tests/oracle.py. A seed and the
number of ranks determine a message. Each algorithm reduces it with each instruction set, in another form each time.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend import backend_of, beyond_gloo, name_of, reduce_scatter_single
from suite_rules import full
from torch import Tensor

import fastcoll
from fastcoll._load import C

pytestmark = beyond_gloo("sums in another order")

MANTISSA = {torch.float32: 23, torch.float64: 52, torch.bfloat16: 7, torch.float16: 10}
OPS = ["SUM", "AVG", "PREMUL_SUM"]
FORMS = ["tensor", "list", "list by torch", "reduce_scatter", "reduce"]
MARKS = 4093  # a prime, so a mark is at other places of vectors, cache lines and segments each time
AVX2 = ["avx2"] if torch.cpu._is_avx2_supported() else []
ISAS = [*dict.fromkeys(["baseline", *AVX2, C.reduce_isa()])]  # the best is last: it stays in use
NEVER, MIB = 1 << 62, 1 << 20

# What forces an algorithm: sizes of the tuning table, and variables.
ON_ONE_HOST = {
    "default": {},
    "one shot": {"one_shot_bytes": NEVER},
    "segments": {"one_shot_bytes": 0, "long_bytes": 0, "FASTCOLL_RING_BYTES": "16384"},
    "in place": {"one_shot_bytes": 0, "direct_bytes": 0, "direct_all_reduce_bytes": 0},
    "streaming": {"one_shot_bytes": 0, "streaming_bytes": 0, "FASTCOLL_STORES": "streaming"},
    "network": {"FASTCOLL_SHARED_MEMORY": "off"},
}
ON_HOSTS = {
    "one step": {"link_bytes": NEVER},
    "two steps": {"link_bytes": 0},
    "chunks": {"link_bytes": 0, "FASTCOLL_RING_BYTES": "16384"},
}


def paired(blocks):
    """Sum by levels: each adds the neighbours in pairs, and keeps a last block that has no neighbour."""
    while len(blocks) > 1:
        pairs = [blocks[i] + blocks[i + 1] for i in range(0, len(blocks) - 1, 2)]
        blocks = pairs + blocks[2 * len(pairs) :]
    return blocks[0]


def widened(words, dtype):
    """Return the numbers that have these bits, as float32 or float64."""
    if dtype == torch.bfloat16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(f"f{dtype.itemsize}").astype(f"f{max(4, dtype.itemsize)}")


def narrowed(values, dtype):
    """Return the numbers' bits, rounded to nearest even. Any NaN is the positive quiet one."""
    if dtype == torch.bfloat16:
        words = values.view(np.uint32)
        words = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        words = values.astype(f"f{dtype.itemsize}").view(f"u{dtype.itemsize}")
    ones = 8 * dtype.itemsize - MANTISSA[dtype]  # the exponent's, and the highest of the mantissa
    quiet = ((1 << ones) - 1) << (MANTISSA[dtype] - 1)
    return np.where(np.isnan(values), words.dtype.type(quiet), words)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def summed(words, dtype, op, factor):
    """Return the bits of the reduction of the ranks' rows."""
    rows = widened(words, dtype)
    number = rows.dtype.type
    total = paired(list(rows * number(factor) if op == "PREMUL_SUM" else rows))
    return narrowed(total / number(len(rows)) if op == "AVG" else total, dtype)


def finite_words(random, ranks, count, dtype):
    """Return the bits of random sources, by rank: any finite numbers, with subnormals, huge ones and both zeros.

    The sources of an element are of similar size, or of very different sizes. Some are zeros. If the largest two
    cancel each other, the result shows which bits of the others were lost before.
    """
    bits, mantissa, every = 8 * dtype.itemsize, MANTISSA[dtype], np.arange(count)
    largest = (1 << (bits - 1 - mantissa)) - 2
    exponent = random.integers(0, largest, count, endpoint=True)
    exponent = np.where(random.random(count) < 0.1, random.choice([0, largest], count), exponent)
    less = random.integers(0, random.choice([1, 3, 12, 30], count), (ranks, count), endpoint=True)
    one = random.integers(ranks, size=count)
    other = (one + random.integers(1, ranks, count)) % ranks
    less[one, every] = 0
    fraction = random.integers(0, 1 << mantissa, (ranks, count))
    magnitude = np.maximum(exponent - less, 0) << mantissa | fraction
    zeros = random.choice([0, 0.3, 1], count, p=[0.7, 0.25, 0.05])
    magnitude[random.random((ranks, count)) < zeros] = 0
    alike = random.random(count) < 0.2
    negative = random.integers(0, 2, (ranks, count), dtype=np.uint64)
    negative = np.where(alike, negative[0], negative)
    cancel = (random.random(count) < 0.3) & ~alike
    magnitude[other[cancel], every[cancel]] = magnitude[one[cancel], every[cancel]]
    negative[other[cancel], every[cancel]] = 1 - negative[one[cancel], every[cancel]]
    words = negative << np.uint64(bits - 1) | magnitude.astype(np.uint64)
    return words.astype(f"u{dtype.itemsize}")


class Message:
    """A message of ``least`` to ``most`` bytes. Each doubling of the size is as likely as another."""

    def __init__(self, seed: int, ranks: int, least: int, most: int) -> None:
        random = np.random.default_rng([seed, ranks])
        self.dtype = [*MANTISSA][random.integers(len(MANTISSA))]
        self.op, self.factor = OPS[random.integers(len(OPS))], random.normal()
        self.count = max(1, int(least * (most / least) ** random.random()) // self.dtype.itemsize)
        self.start = int(random.integers(1, 70))  # of each tensor in its buffer, in elements
        self.root, self.alone = int(random.integers(ranks)), int(random.integers(self.count))
        self.cuts = sorted(random.integers(0, self.count, random.integers(1, 6)).tolist())
        self.later = bool(random.integers(2))
        words = finite_words(random, ranks, min(self.count, MARKS), self.dtype)
        self.own = words[dist.get_rank()]
        self.sums = summed(words, self.dtype, self.op, self.factor)
        self.seed, self.ranks = seed, ranks
        what = f"{self.op} of {self.count} {name_of(self.dtype)}, async_op={self.later}"
        self.name = f"seed {seed} of {ranks} ranks, {what}, from element {self.start} of a buffer"

    def given(self, count: int, first: int = 0) -> Tensor:
        """Return elements of this rank's message."""
        words = np.resize(np.roll(self.own, -first), count)
        return torch.from_numpy(words.view(f"i{self.dtype.itemsize}")).view(self.dtype)

    def check(self, where: str, found: Tensor, first: int = 0) -> None:
        """Compare the bits of elements of the result."""
        words = found.view(getattr(torch, f"int{8 * self.dtype.itemsize}")).numpy()
        words = words.view(self.sums.dtype)
        expected = np.resize(np.roll(self.sums, -first), len(words))
        if len(wrong := np.flatnonzero(words != expected)):
            at = wrong[0]
            bits = f"element {first + at} has {words[at]:#x}, not {expected[at]:#x}"
            raise AssertionError(f"{self.name}, {where}: {len(wrong)} differ, {bits}")


def reduce_in(form: str, message: Message, where: str, group: Any) -> None:
    """Make a call in this form, and one of an element alone."""

    def placed(content: Tensor) -> Tensor:
        make = backend_of(group).allocate_tensor if "in place" in where else torch.empty
        buffer = make(message.start + len(content) + 9, dtype=content.dtype, device=content.device)
        return buffer[message.start :][: len(content)].copy_(content)

    premul = dist._make_nccl_premul_sum(message.factor)
    op = premul if message.op == "PREMUL_SUM" else getattr(dist.ReduceOp, message.op)
    count, first, call = message.count, 0, dist.all_reduce
    if form == "reduce_scatter":
        each = -(-count // message.ranks)
        first, call = dist.get_rank() * each, reduce_scatter_single
        results = [placed(message.given(each))]
        given = [*results, placed(message.given(each * message.ranks))]
    elif "list" in form:
        call = fastcoll.all_reduce_coalesced if form == "list" else dist.all_reduce_coalesced
        results = [placed(part) for part in message.given(count).tensor_split(message.cuts)]
        given = [results]
    else:
        given = results = [placed(message.given(count))]
        if form == "reduce":
            call, given = dist.reduce, [*results, message.root]
    work = call(*given, op=op, group=group, async_op=message.later)
    if message.later:
        work.wait()
    if form != "reduce" or dist.get_rank() == message.root:
        message.check(where, torch.cat(results), first)
    alone = placed(message.given(1, message.alone))
    dist.all_reduce(alone, op, group)
    message.check(f"{where}, alone", alone, message.alone)


def go_every_way(hosts: str, seeds: range, least: int, most: int) -> None:
    messages = [Message(seed, len(hosts), least, most) for seed in seeds]
    number = len(set(hosts))
    ways = ON_ONE_HOST if number == 1 else ON_HOSTS
    for turn, (way, isa) in enumerate(itertools.product(ways, ISAS)):
        table = C.Tuning()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FASTCOLL_HOST_ID", f"host {hosts[dist.get_rank()]}")
            patch.setenv("FASTCOLL_ISA", isa)
            for name, value in ways[way].items():
                patch.setenv(name, value) if name.isupper() else setattr(table, name, value)
            group = dist.new_group(pg_options=fastcoll.Options(tuning=table))
        for message in messages:
            form = FORMS[(message.seed + turn) % len(FORMS)]
            reduce_in(form, message, f"as {form}, {way}, {isa}, hosts {hosts}", group)
        transport = {1: "shm", len(hosts): "gloo"}.get(number, "shm+gloo")
        assert backend_of(group).transport() == ("gloo" if way == "network" else transport)
        assert C.reduce_isa() == isa
        dist.destroy_process_group(group)


SHORT = ["00", "01", "000", "012", "0000", "0101", "0000000", "0120011", "00000000", "00001111"]
FULL = ["001", "0012", "00000", "00112", "000000", "012012", "0001122", "01201201"]
LONG = ["00", "01", "000", "001", "0000", "0012"]
UP_TO_A_MIB = {2: 70, 3: 64, 4: 60, 5: 15, 6: 15, 7: 25, 8: 25}
"""Messages of that size, by the number of ranks."""


@pytest.mark.parametrize(
    ("hosts", "seeds", "least", "most"),
    [
        *((hosts, range(UP_TO_A_MIB[len(hosts)]), 4, MIB) for hosts in SHORT),
        *(full(hosts, range(UP_TO_A_MIB[len(hosts)]), 4, MIB) for hosts in FULL),
        *(full(hosts, range(100, 108), MIB, 12 * MIB) for hosts in LONG),
        *(full(hosts, range(200, 201), 64 * MIB, 64 * MIB) for hosts in LONG[:3]),
    ],
)
def test_messages(world, hosts, seeds, least, most):
    world(len(hosts)).run(go_every_way, hosts, seeds, least, most)
