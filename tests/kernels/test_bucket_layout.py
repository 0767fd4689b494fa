"""BucketLayout: the arithmetic on the host."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.buckets import BucketLayout, address_table, require_apart

CPU = torch.device("cpu")


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 500), max_size=20), alignment=st.integers(1, 16))
def test_tensors_lie_in_order_and_apart(sizes, alignment):
    layout = BucketLayout(sizes, alignment)
    end = 0
    for size, offset in zip(layout.sizes, layout.offsets, strict=True):
        assert offset % alignment == 0
        assert end <= offset < end + alignment
        end = offset + size
    assert layout.elements == end


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 500), max_size=20), block=st.sampled_from([1, 7, 64]))
def test_the_block_map_has_every_element_once(sizes, block):
    layout = BucketLayout(sizes)
    seen = []
    for tensor, piece in layout.block_map(block, CPU).tolist():
        first = piece * block
        assert first < sizes[tensor]
        seen += [(tensor, index) for index in range(first, min(first + block, sizes[tensor]))]
    assert seen == [(tensor, index) for tensor, size in enumerate(sizes) for index in range(size)]
    assert layout.blocks(block) == len(layout.block_map(block, CPU))


def test_tables_are_made_once():
    layout = BucketLayout([3, 5])
    assert layout.block_map(4, CPU) is layout.block_map(4, CPU)
    assert layout.byte_offsets(torch.float32, CPU).tolist() == [0, 12]
    assert layout.byte_offsets(torch.bfloat16, CPU).tolist() == [0, 6]


def test_tables_do_not_follow_the_default_device():
    layout = BucketLayout([3, 5])
    with torch.device("meta"):
        tables = [layout.block_map(4, CPU), layout.device_sizes(CPU), address_table([1], CPU)]
        tables.append(layout.byte_offsets(torch.float32, CPU))
    assert [table.device for table in tables] == [CPU] * 4


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match=r"sizes\[1\]"):
        BucketLayout([1, -1])
    with pytest.raises(ValueError, match="alignment"):
        BucketLayout([1], 0)
    with pytest.raises(ValueError, match=r"less than 2\^31 blocks"):
        BucketLayout([2**31]).block_map(1, CPU)


def test_tensors_that_overlap_are_refused():
    require_apart([4, 0, 4], [100, 104, 116], 4, "t")
    with pytest.raises(ValueError, match=r"overlapping memory in t\[2\] and t\[0\]"):
        require_apart([4, 0, 4], [112, 104, 100], 4, "t")
