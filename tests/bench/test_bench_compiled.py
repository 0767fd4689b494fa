"""The benchmark of a compiled model: a run in which one way makes no collectives, which it must notice."""

import json
from functools import partial
from unittest import mock

import pytest
import torch
from backend import beyond_gloo
from bench_ranks import FEW, run_on

pytestmark = [beyond_gloo("it measures both backends by itself"), pytest.mark.full]


def run_rank(arguments):
    """Be one rank. The model has one layer, and fastcoll.compile drops its collectives."""
    from fastcoll.bench import __main__ as bench
    from fastcoll.bench import compiled

    options = {"post_grad_custom_post_pass": compiled._without_collectives}
    fake = {
        "compile": lambda model, fullgraph: torch.compile(model, options=options),
        "Transformer": partial(compiled.Transformer, 1),
    }
    with mock.patch.multiple(compiled, **fake):
        return bench.run_rank(arguments)


def test_a_way_that_makes_no_collectives_is_not_measured(world, tmp_path):
    path = tmp_path / "record.jsonl"
    chosen = ("--backend", "fastcoll,fastcoll-compile", "--json", path)
    # Three models are compiled on each rank, which takes a minute of CPU time.
    ended = run_on(world, 2, "compiled", *FEW, *chosen, module=__name__, deadline=240.0)
    assert ended.status == 0, ended
    _, case = map(json.loads, path.read_text().splitlines())
    assert "0 collectives of fastcoll-compile in a step, not 2" in str(case["unsupported"])
    assert set(case["backends"]) == {"fastcoll"}
    assert case["backends"]["fastcoll"]["wrong"] == 0
    assert min(one["time"]["median"] for one in (case["alone"], *case["backends"].values())) > 0
