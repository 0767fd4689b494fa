"""The comparison with copies by the kernel."""

import json
import os

import pytest
import torch

from fastcoll.bench import single_copy

pytestmark = pytest.mark.full  # a study


def test_both_ways_are_timed(tmp_path, capfd):
    path = tmp_path / "result.json"
    status = single_copy.main(
        ["--sizes", "4K,64K", "--iterations", "6", "--rounds", "3", "--json", str(path)]
    )
    assert status == 0, capfd.readouterr()
    record = json.loads(path.read_text())
    assert [case["size"] for case in record["cases"]] == [4096, 65536]
    for case in record["cases"]:
        for name in ("fastcoll", "process_vm_readv", "floor"):
            assert case[name]["median"] > 0
    assert "python -m fastcoll.bench.single_copy" in record["command"]


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="process_vm_readv"):
        single_copy.read_from(os.getpid(), 8, torch.zeros(100, dtype=torch.uint8))
