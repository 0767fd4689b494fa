"""The benchmark of a compiled model: a run in which one way makes no collectives, which it must notice."""

from functools import partial
from unittest import mock

import pytest
import torch
from backend import beyond_gloo
from bench_ranks import FEW, run_on

pytestmark = [beyond_gloo("it measures both backends by itself"), pytest.mark.full]


def compile_without_inductor(whole, model, fullgraph, options=None):
    """Captures the model's graph as torch.compile does; Inductor's C++ would take a minute."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def run_as_it_is(module, inputs):
        (options or {}).get("post_grad_custom_post_pass", lambda graph: None)(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return whole(model, fullgraph=fullgraph, backend=aot_autograd(fw_compiler=run_as_it_is))


def run_rank(arguments):
    """Be one rank. The model has one layer, and fastcoll.compile drops its collectives."""
    from fastcoll.bench import __main__ as bench
    from fastcoll.bench import compiled

    capture = partial(compile_without_inductor, torch.compile)
    options = {"post_grad_custom_post_pass": compiled._without_collectives}
    fake = {
        "compile": partial(capture, options=options),
        "Transformer": partial(compiled.Transformer, 1),
    }
    with mock.patch.multiple(compiled, **fake), mock.patch.object(torch, "compile", capture):
        return bench.run_rank(arguments)


def test_a_way_that_makes_no_collectives_is_not_measured(world):
    chosen = ("--backend", "fastcoll,fastcoll-compile")
    (case,) = run_on(world, 2, "compiled", *FEW, *chosen, module=__name__).cases
    assert "0 collectives of fastcoll-compile in a step, not 2" in str(case["unsupported"])
    assert set(case["backends"]) == {"fastcoll"}
    assert case["backends"]["fastcoll"]["wrong"] == 0
    assert min(one["time"]["median"] for one in (case["alone"], *case["backends"].values())) > 0
