"""The benchmark of objects: a short run of it, and a wrong result that it must notice."""

import json
import os
import subprocess
import sys

import pytest
from backend import beyond_gloo

pytestmark = [beyond_gloo("it measures both backends by itself"), pytest.mark.full]

SHORT = ["-n", "1", "--rounds", "1", "-w", "0"]


def test_a_short_run(tmp_path):
    path = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "fastcoll.bench.objects", *SHORT, "--json", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    head, *cases = map(json.loads, path.read_text().splitlines())
    assert head["command"].startswith("python -m fastcoll.bench.objects -n 1")
    assert len(cases) == 10
    for case in cases:
        assert set(case["backends"]) == {"fastcoll", "fastcoll-direct", "gloo"}
        assert all(one["wrong"] == 0 for one in case["backends"].values())
    assert "wrong elements: 0 OK" in ended.stdout


def test_a_wrong_object_is_counted(tmp_path):
    wrong = (
        "import sys; from fastcoll.bench import objects; objects._equal = lambda one, other: False\n"
        "sys.exit(objects.main())"
    )
    script = tmp_path / "wrong.py"
    script.write_text(wrong)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *(str(script), *SHORT, "--backend", "fastcoll-direct"),
    ]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode != 0
    assert "wrong elements: 20" in ended.stdout or "wrong elements: 40" in ended.stdout, (
        ended.stdout
    )
