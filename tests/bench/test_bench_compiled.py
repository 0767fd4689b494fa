"""The benchmark of a compiled model: a run in which one way makes no collectives, which it must notice."""

import json
import os
import subprocess
import sys

import pytest
from backend import beyond_gloo

pytestmark = [beyond_gloo("it measures both backends by itself"), pytest.mark.full]


def test_a_way_that_makes_no_collectives_is_not_measured(tmp_path):
    script, path = tmp_path / "none.py", tmp_path / "record.jsonl"
    script.write_text(
        "import functools, sys, torch\n"
        "from fastcoll.bench import compiled\n"
        "options = {'post_grad_custom_post_pass': compiled._without_collectives}\n"
        "compiled.compile = lambda model, fullgraph: torch.compile(model, options=options)\n"
        "compiled.Transformer = functools.partial(compiled.Transformer, 1)\n"
        "sys.exit(compiled.main())"
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)),
        *("-n", "1", "--rounds", "1", "-w", "0", "--json", str(path)),
        *("--backend", "fastcoll,fastcoll-compile"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    _, case = map(json.loads, path.read_text().splitlines())
    assert "0 collectives of fastcoll-compile in a step, not 2" in str(case["unsupported"])
    assert set(case["backends"]) == {"fastcoll"}
    assert case["backends"]["fastcoll"]["wrong"] == 0
    assert min(one["time"]["median"] for one in (case["alone"], *case["backends"].values())) > 0
