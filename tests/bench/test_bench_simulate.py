"""``--simulate`` and ``--list-algorithms``: what is asked, what is printed, what is recorded."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastcoll.bench.__main__ import main
from fastcoll.bench.simulate import asked, parse_counts, parse_sizes
from fastcoll.costs import ALGORITHMS, HGX_H200, IMPLEMENTED, nccl
from fastcoll.cuda.algorithms import ALGORITHMS as DEVICE_ALGORITHMS

pytestmark = pytest.mark.full  # a study


def test_ranges_and_lists():
    assert parse_counts("8..16384") == [8 << power for power in range(12)]
    assert parse_counts("8..100") == [8, 16, 32, 64]
    assert parse_counts("24,8,24") == [24, 8]
    assert parse_sizes("1K..4K") == [1024, 2048, 4096]
    assert parse_sizes("0,1M") == [0, 1 << 20]


@pytest.mark.parametrize(
    "text", ["", "8..", "16..8", "0..8", "1", "8,x", "-8", "8..16..32", "1..8"]
)
def test_what_is_no_number_of_gpus_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a"):
        parse_counts(text)


@pytest.mark.parametrize("text", ["", "1M..1K", "0..8", "4X", "-4"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_sizes(text)


def test_only_these_flags_are_for_the_simulation():
    assert asked(["--simulate"]) and asked(["--list-algorithms"])
    assert not asked(["all_reduce", "-b", "4"])


@pytest.mark.parametrize("collective", nccl.COLLECTIVES)
def test_predictions(collective, capsys, tmp_path):
    path = tmp_path / "model.json"
    flags = f"--simulate --gpus 8,64 --sizes 1K,1G --collective {collective} --json {path}"
    assert main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A MODEL, NOT A MEASUREMENT")
    for source in HGX_H200.sources.values():
        assert source in printed
    assert nccl.SOURCE in printed
    assert "8 GPUs (model)" in printed and "64 GPUs (model)" in printed
    record = json.loads(path.read_text())
    assert record["kind"] == "model, not a measurement"
    assert [(case["ranks"], case["size"]) for case in record["cases"]] == [
        (ranks, size) for ranks in (8, 64) for size in (1 << 10, 1 << 30)
    ]
    for case in record["cases"]:
        times = {name: found["seconds"] for name, found in case["algorithms"].items()}
        assert times[case["best"]] == min(times.values())
        models = {"ring", "tree", "nvls"} if collective == "all_reduce" else {"ring", "nvls"}
        assert set(case["nccl"]) == (
            models if case["ranks"] == 8 or collective == "all_reduce" else {"ring"}
        )
    # One mark in each row, and as many rows as cases.
    rows = [line for line in printed.splitlines() if line.strip().startswith(("1 KiB", "1 GiB"))]
    assert len(rows) == 4 and all(row.count("*") == 1 for row in rows)
    in_one_node = [case for case in record["cases"] if case["ranks"] == 8]
    assert all("hierarchical_ring" not in case["algorithms"] for case in in_one_node)


def test_constants_can_be_given(capsys, tmp_path):
    path = tmp_path / "model.json"
    flags = f"--simulate --gpus 72 --per-node 72 --nvlink 900 --nic 100 --sizes 1G --json {path}"
    assert main(flags.split()) == 0
    platform = json.loads(path.read_text())["platform"]
    assert (platform["per_node"], platform["intra_bandwidth"]) == (72, 900e9)
    assert platform["sources"]["intra_bandwidth"] == "given on the command line"
    assert "NVLink 900.0 GB/s: given on the command line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ("--simulate --gpus 12", "expected one node or full ones of 8"),
        ("--simulate --nic 900", "--nic"),
        ("--simulate --per-node 0", "above 0"),
        ("--simulate --collective scan", "invalid choice"),
        ("--simulate all_reduce", "unrecognized arguments"),
    ],
)
def test_wrong_flags(flags, match, capsys):
    with pytest.raises(SystemExit) as end:
        main(flags.split())
    assert end.value.code == 2
    assert match in capsys.readouterr().err


def test_formulas_are_listed(capsys):
    assert main(["--list-algorithms"]) == 0
    printed = capsys.readouterr().out
    for algorithms in ALGORITHMS.values():
        for algorithm in algorithms.values():
            (line,) = {
                " ".join(line.split())
                for line in printed.splitlines()
                if line.split()[:1] == [algorithm.name]
                and " ".join(line.split()).endswith(f"{algorithm.time} {algorithm.source}")
            }
            assert f"{algorithm.steps} {algorithm.wire_bytes}" in line


def test_every_algorithm_of_fastcoll_is_listed_with_its_model(capsys):
    assert main(["--list-algorithms"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    root = Path(__file__).parents[2]
    for one in IMPLEMENTED:
        assert (root / one.source).is_file(), one.source
        assert set(one.models) <= set(ALGORITHMS[one.collective])
        start = f"{one.tensors} {one.collective} {one.name} {' or '.join(one.models)} {one.source}"
        assert any(line.startswith(start) and line.endswith(one.remark) for line in lines), start
    of_devices = [one.name for one in IMPLEMENTED if one.tensors == "CUDA"]
    assert sorted(of_devices) == sorted(DEVICE_ALGORITHMS)
    compiled = {file.name for file in (root / "csrc/algorithms").glob("*all_reduce.cpp")}
    on_hosts = [
        one
        for one in IMPLEMENTED
        if one.source.startswith("csrc/algorithms/") and one.collective == "all_reduce"
    ]
    assert {Path(one.source).name for one in on_hosts} == compiled


def test_a_picture(tmp_path):
    path = tmp_path / "model.png"
    assert main(["--simulate", "--gpus", "8..64", "--plot", str(path)]) == 0
    assert path.read_bytes()[1:4] == b"PNG"


def test_importing_fastcoll_imports_no_models():
    code = (
        "import fastcoll, sys; assert not any(n.startswith('fastcoll.costs') for n in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
