"""Messages of more than 2^31 elements between ranks, of which only what the last program touches is real memory.

This process is one rank of several. Messages, results and the ranks' buffers are mapped and never reserved, so they may
be as large as they like. The layout has a channel for every piece, more than are allowed, so that the last piece is the
work of one program. Its flags are set beforehand, its peers' parts written, and only this program is interpreted. All
else is as in any call: what the launcher computes, and every index, product and address of the kernel.
"""

import mmap
from typing import Any

import kernel_oracle
import numpy
import pytest
import torch
from kernel_cases import numbers, same_numbers
from triton.runtime import interpreter

from fastcoll.kernels import _launch, peers, ring
from fastcoll.kernels.staged import one_shot, two_shot

NO_RESERVE = 0x4000  # of mmap(2); the module has no name for it before Python 3.13
STAGE, SLOT, SLOTS = 24576, 16384, 2
BLOCK = 4096
COUNT = 2**31 + 7 * BLOCK + 1000


def sparse(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)


class LastProgram:
    """The last program of a rank's launch.

    Attributes:
        buffers: The rank's, over memory of all ranks.
        start: Where the program's piece begins in the message or chunk, in elements as the kernel counts them.
        length: Elements of the piece.
        piece: Elements of a whole piece.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, count: int) -> None:
        channels = -(-count // BLOCK)
        monkeypatch.setattr(peers, "MAX_CHANNELS", channels)
        self._layout = peers.PeerLayout(channels, STAGE, SLOTS, SLOT)
        self._regions = [sparse(self._layout.bytes, torch.uint8) for _ in range(ranks)]
        addresses = [region.data_ptr() for region in self._regions]
        self.buffers = peers.PeerBuffers(rank, self._regions[rank], addresses, self._layout, 1)
        self._monkeypatch = monkeypatch
        self._interpret = _launch._interpret
        monkeypatch.setattr(_launch, "_interpret", self._keep)

    def _keep(self, configuration: Any, programs: int, arguments: tuple[int, ...]) -> None:
        given = dict(zip(configuration.kernel.arg_names, arguments, strict=False))
        self.piece = given.get("piece") or given["segment"]
        unit = given.get("chunk", given["count"])
        self._channel = -(-unit // self.piece) - 1
        assert self._channel < programs
        self.start = self._channel * self.piece
        self.length = unit - self.start
        assert self.start > 2**31
        self._launch = (configuration, 1, arguments)

    def run(self) -> None:
        """Runs it, as if every peer had done all before."""
        layout = self._layout
        each = (layout.staging_at - layout.flags_at) // layout.channels
        begin = layout.flags_at + self._channel * each
        self.buffers.memory[begin : begin + each].view(torch.int64).fill_(1 << 40)
        number = numpy.array([self._channel], dtype=numpy.int32)
        program = interpreter.TensorHandle(number, interpreter.tl.int32)
        with self._monkeypatch.context() as patch:
            builder = interpreter.InterpreterBuilder
            patch.setattr(builder, "create_get_program_id", lambda *_: program)
            self._interpret(*self._launch)
        self.buffers.check()

    def staged(self, rank: int, dtype: torch.dtype, at: int, length: int) -> torch.Tensor:
        """Returns elements of what a rank has staged in the first round."""
        begin = self._layout.staging_at + (2 * self._channel + 1) * STAGE
        return self._regions[rank][begin : begin + STAGE].view(dtype)[at : at + length]

    def slot(self, rank: int, number: int, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Returns elements of a slot."""
        begin = self._layout.slots_at + (self._channel * SLOTS + number) * SLOT
        return self._regions[rank][begin : begin + SLOT].view(dtype)[:length]


def ordinary(ranks: int, length: int) -> list[torch.Tensor]:
    """Returns what each rank has in a piece."""
    return [numbers(length, torch.bfloat16, seed, ordinary=True) for seed in range(ranks)]


@pytest.mark.parametrize("way", [one_shot, two_shot])
def test_all_reduce(way, monkeypatch):
    rank, ranks = 2, 3
    last = LastProgram(monkeypatch, rank, ranks, COUNT)
    source, out = sparse(COUNT, torch.bfloat16), sparse(COUNT, torch.bfloat16)
    way.prepare_all_reduce(source, out, last.buffers)()
    values = ordinary(ranks, last.length)
    expected = kernel_oracle.all_reduce(values)
    share = -(-last.length // (16 * ranks)) * 16
    source[last.start :] = values[rank]
    for peer in range(rank):
        content = values[peer].clone()
        if way is two_shot:  # has reduced its share already
            mine = slice(peer * share, (peer + 1) * share)
            content[mine] = expected[mine]
        last.staged(peer, torch.bfloat16, 0, last.length).copy_(content)
    last.run()
    assert same_numbers(out[last.start :], expected)


def test_ring_all_reduce(monkeypatch):
    rank, chunk = 1, COUNT // 16 * 16
    count = 2 * chunk - 8  # the second chunk is shorter
    last = LastProgram(monkeypatch, rank, 2, chunk)
    message, space = sparse(count, torch.bfloat16), sparse(count + 16, torch.bfloat16)
    out, guard = space[:count], space[count:].fill_(7)
    ring.prepare_all_reduce(message, out, last.buffers)()
    lengths = [last.length, last.length - 8]
    values = [
        [numbers(n, torch.bfloat16, 2 * q + r, True) for r in (0, 1)] for q, n in enumerate(lengths)
    ]
    for q, own in enumerate(values):
        message[q * chunk + last.start :][: lengths[q]] = own[rank]
    expected = [kernel_oracle.all_reduce(own) for own in values]
    last.slot(rank, 0, torch.float32, lengths[1]).copy_(values[1][0])
    last.slot(rank, 1, torch.bfloat16, lengths[0]).copy_(expected[0])
    last.run()
    for q, length in enumerate(lengths):
        assert same_numbers(out[q * chunk + last.start :][:length], expected[q])
    assert torch.all(guard == 7)
    assert same_numbers(last.slot(0, 0, torch.float32, lengths[0]), values[0][rank].float())
    assert same_numbers(last.slot(0, 1, torch.bfloat16, lengths[1]), expected[1])


def test_ring_reduce_scatter(monkeypatch):
    rank = 1
    last = LastProgram(monkeypatch, rank, 2, COUNT)
    message, out = sparse(2 * COUNT, torch.bfloat16), sparse(COUNT, torch.bfloat16)
    ring.prepare_reduce_scatter(message, out, last.buffers)()
    first, own, theirs = ordinary(3, last.length)
    message[last.start :][: last.length] = first
    message[COUNT + last.start :] = own
    last.slot(rank, 0, torch.float32, last.length).copy_(theirs)
    last.run()
    assert same_numbers(out[last.start :], kernel_oracle.all_reduce([theirs, own]))
    assert same_numbers(last.slot(0, 0, torch.float32, last.length), first.float())


@pytest.mark.parametrize("count, dtype", [(COUNT, torch.int32), (COUNT + 1, torch.uint8)], ids=str)
def test_ring_all_gather(count, dtype, monkeypatch):
    rank = 1
    last = LastProgram(monkeypatch, rank, 2, count)
    message, out = sparse(count, dtype), sparse(2 * count, dtype)
    ring.prepare_all_gather(message, out, last.buffers)()
    own, theirs = (numbers(last.length, dtype, seed) for seed in (1, 2))
    message[last.start :] = own
    last.slot(rank, 0, dtype, last.length).copy_(theirs)
    last.run()
    assert torch.equal(out[count + last.start :], own)
    assert torch.equal(out[last.start :][: last.length], theirs)
    assert torch.equal(last.slot(0, 0, dtype, last.length), own)
