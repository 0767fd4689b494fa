"""Buckets of more than 2^31 elements, of which only a few lie in real memory.

The kernels are given the tables of a huge layout but launched for a few of its blocks; tables say that the
bucket begins so far before the real memory that these blocks fall into it. So every index, product
and address is that of the huge bucket.
"""

import numpy
import pytest
import torch
from kernel_cases import numbers, same_numbers
from triton.runtime import interpreter

from fastcoll.buckets import BLOCK, BucketLayout
from fastcoll.kernels import reduce
from fastcoll.kernels._configuration import double_bits
from fastcoll.kernels._launch import prepared
from fastcoll.kernels.flatten import Flatten, Unflatten

FIRST_PIECE = 2**31 // BLOCK + 7
HERE = BLOCK + 100  # elements that lie in memory: a whole block and a tail
SIZE = FIRST_PIECE * BLOCK + HERE


def tables(device: torch.device, *rows: int) -> list[torch.Tensor]:
    """Returns the block map of the last two blocks of tensor 1 of 2, the sizes, and rows of addresses."""
    content = [[1, FIRST_PIECE], [1, FIRST_PIECE + 1]]
    block_map = torch.tensor(content, dtype=torch.int32, device=device)
    sizes = torch.tensor([5, SIZE], device=device)
    return [block_map, sizes, *(torch.tensor([0, row], device=device) for row in rows)]


def before(memory: torch.Tensor) -> int:
    """Returns where the huge tensor begins, so that its end lies in `memory`."""
    return memory.data_ptr() - FIRST_PIECE * BLOCK * memory.element_size()


def test_the_layout_has_such_blocks():
    layout = BucketLayout([5, SIZE])
    block_map = layout.block_map(BLOCK, torch.device("cpu"))
    assert block_map[-2:].tolist() == [[1, FIRST_PIECE], [1, FIRST_PIECE + 1]]
    assert layout.byte_offsets(torch.float64, torch.device("cpu")).tolist() == [0, 40]
    assert layout.elements > 2**31


@pytest.mark.parametrize("name", ["flatten", "unflatten"])
def test_addresses_beyond_32_bits(device, name):
    pair = torch.float32, torch.bfloat16
    table, (first, second) = {
        "flatten": (Flatten.table, pair),
        "unflatten": (Unflatten.table, pair[::-1]),
    }[name]
    source = numbers(HERE, first, 1, ordinary=True).to(device)
    target = torch.zeros(HERE, dtype=second, device=device)
    block_map, sizes, inputs, outputs = tables(device, before(source), before(target))
    bits = double_bits(1.0)
    common = (block_map.data_ptr(), sizes.data_ptr())
    if name == "flatten":
        arguments = (*common, inputs.data_ptr(), 0, outputs.data_ptr(), bits)
    else:
        arguments = (*common, 0, inputs.data_ptr(), outputs.data_ptr(), bits, 0)
    prepared(table[first, second], device, 2, arguments)()
    assert same_numbers(target, source.to(second))


def test_reduce_addresses_beyond_32_bits(monkeypatch):
    """Interpreted only: its programs count from the start of the buffers."""
    sources = [numbers(HERE, torch.float32, seed, ordinary=True) for seed in (1, 2)]
    target = torch.zeros(HERE)
    configuration = reduce._TABLE[torch.float32, 8]
    assert configuration.constexprs["BLOCK"] == BLOCK
    inputs = torch.tensor([before(source) for source in sources])
    programs = iter((FIRST_PIECE, FIRST_PIECE + 1))

    def program_id(*_: object) -> interpreter.TensorHandle:
        return interpreter.TensorHandle(
            numpy.array([next(programs)], dtype=numpy.int32), interpreter.tl.int32
        )

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", program_id)
    arguments = (inputs.data_ptr(), 2, before(target), SIZE, double_bits(1.0), 1, 0)
    prepared(configuration, torch.device("cpu"), 2, arguments)()
    assert same_numbers(target, sources[0] + sources[1])


@pytest.mark.gpu
@pytest.mark.full
def test_a_bucket_of_more_than_2_31_elements_on_a_gpu(gpu):
    """In 14 GB."""
    size = 2**31 + 5000
    source = torch.ones(size, dtype=torch.bfloat16, device=gpu)
    source[-1] = 3.0
    layout = BucketLayout([7, size])
    small = torch.full((7,), 2.0, dtype=torch.bfloat16, device=gpu)
    bucket = layout.new_bucket(torch.bfloat16, gpu)
    Flatten(layout, torch.bfloat16, torch.bfloat16, gpu).prepare([small, source], bucket)()
    assert bucket[:8].tolist() == [2.0] * 7 + [1.0]
    assert torch.equal(bucket[7:], source)
