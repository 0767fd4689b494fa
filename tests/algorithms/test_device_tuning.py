"""The section on devices of the tuning table: found from times, measured with stand-ins, written, read, refused."""

import json
from dataclasses import asdict

import peer_memory
import pytest
import torch
import torch.distributed as dist

from fastcoll import tune, tuning
from fastcoll._measure import Control, Plan
from fastcoll.cuda.thresholds import DEFAULT, Thresholds
from fastcoll.tune import limits, measure_device


def test_limits_are_those_of_the_least_times():
    times = {
        1: {"one_shot": 1, "two_shot": 2, "ring": 9, "nccl": 5},
        2: {"one_shot": 2, "two_shot": 2.5, "ring": 9, "nccl": 5},
        4: {"one_shot": 6, "two_shot": 3, "ring": 9, "nccl": 5},
        8: {"one_shot": 9, "two_shot": 9, "ring": 6, "nccl": 7},
        16: {"one_shot": 20, "two_shot": 20, "ring": 20, "nccl": 12},
    }
    ways = ("one_shot", "two_shot", "ring", "nccl")
    assert limits(times, ways) == [2, 4, 8]
    assert limits({size: {"nccl": 1.0} for size in times}, ways) == [0, 0, 0]
    assert limits({size: {"nccl": 2, "two_shot": 1} for size in times}, ways) == [0, 16, 0]
    slow = {1: {"one_shot": 1, "nccl": 2}, 2: {"one_shot": 3, "nccl": 2}}
    assert limits(slow, ways) == [1, 0, 0]


def measured():
    store = dist.PrefixStore("tune", dist.distributed_c10d._get_default_store())
    control = Control(store, dist.get_rank(), dist.get_world_size())
    device = torch.device(peer_memory.DEVICE)
    return measure_device(control, Plan(1, 1, 0), device, (64, 512), (2,), (64,))


def test_measuring_with_stand_ins(peer_world, tmp_path, monkeypatch):
    first, second = peer_world(2).run(measured, fresh=True)
    assert first["table"] == second["table"]  # all ranks come to the same
    assert set(first["measured"]["sizes"][64]) == {"one_shot", "two_shot", "ring", "nccl"}
    assert set(first["measured"]["list_tensors"][2]) == {"fused", "apart"}
    assert (first["name"], first["ranks"], first["without peers"]) == ("recording", 2, "")
    path = tmp_path / "table.json"
    basis = {**tuning.SHIPPED, "machine": tuning.machine_name()}
    tune._write(path, {**basis, "device": first})
    monkeypatch.setenv("FASTCOLL_TUNING", str(path))
    tuning._load.cache_clear()
    loaded = tuning.load()
    assert loaded.device == Thresholds(**first["table"])
    assert loaded.thresholds_on("recording") == loaded.device
    assert loaded.thresholds_on("another device") == DEFAULT
    assert tune._kept(path)["device"]["table"] == first["table"]
    tuning._load.cache_clear()


def test_a_table_of_another_machine_is_not_kept(tmp_path):
    path = tmp_path / "table.json"
    assert tune._kept(path) == {}
    path.write_text(json.dumps(tuning.SHIPPED))
    assert tune._kept(path) == {}


def test_the_shipped_table_has_no_limits_for_devices(monkeypatch):
    monkeypatch.setenv("FASTCOLL_TUNING", "default")
    shipped = tuning.load()
    assert shipped.device == DEFAULT and shipped.device_name == ""


RIGHT = dict.fromkeys(asdict(Thresholds()), 1)


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        (7, "expected the section on devices to have a name, of the devices, and a table, got 7"),
        ({"name": "GPU", "table": 7}, "missing or unknown: list_bytes"),
        ({"table": RIGHT}, "a name, of the devices, and a table, got {'table'"),
        ({"device": "GPU", "table": RIGHT}, "a name, of the devices, and a table, got {'device'"),
        ({"name": "", "table": RIGHT}, "a name, of the devices, and a table, got {'name': ''"),
        ({"name": 7, "table": RIGHT}, "a name, of the devices, and a table, got {'name': 7"),
        ({"name": "GPU"}, "missing or unknown: list_bytes"),
        ({"name": "GPU", "table": {"one_shot_bytes": 1}}, "missing or unknown: list_bytes, list_t"),
        ({"name": "GPU", "table": {**RIGHT, "x": 1}}, "missing or unknown: x"),
        ({"name": "GPU", "table": dict.fromkeys(RIGHT, -1)}, "is a number from 0 to 2^62, got -1"),
        (
            {"name": "GPU", "table": dict.fromkeys(RIGHT, "1")},
            "is a number from 0 to 2^62, got '1'",
        ),
    ],
)
def test_a_wrong_section_is_refused_by_name(section, complaint, tmp_path):
    record = {**tuning.SHIPPED, "device": section}
    with pytest.raises(ValueError, match=r"some\.json") as caught:
        tuning.parse(json.dumps(record), tmp_path / "some.json")
    assert complaint in str(caught.value)


def test_tuning_on_a_device_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tune.main(["--device", "cuda"])
    assert "--device cuda: torch finds no CUDA device" in capsys.readouterr().err
