"""``python -m fastcoll.bench compiled``: one token through a compiled transformer with tensor parallelism.

The model is that of examples/tensor_parallel_generate.py, with its layers split over the ranks. ``gloo`` and
``fastcoll`` are ``torch.compile`` on groups of these backends, and ``fastcoll-compile`` is ``fastcoll.compile``.
``(alone)`` is the same graph without its collectives. The difference to it is what communication costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fastcoll._compile import compile
from fastcoll._measure import Call, take_turn
from fastcoll.bench.peer import Peer
from fastcoll.bench.run import Candidate, Run
from fastcoll.bench.table import Column, Table
from fastcoll.examples.tensor_parallel_generate import Transformer, shard

__all__ = ["ALONE", "compare_compiled"]

ALONE = "(alone)"


def _bind(model: nn.Module, compiler: Callable[..., Any]) -> Callable[[], Tensor]:
    """Returns a call that compiles the model at its first run, and returns the logits of one token."""
    step = compiler(model, fullgraph=True)
    token, position = torch.tensor([[65]]), torch.tensor([7])

    def call() -> Tensor:
        with torch.no_grad():
            logits: Tensor = step(token, position)
            return logits

    return call


def _without_collectives(graph: Graph) -> None:
    """Replaces each all-reduce, the model's only collective, by its input. A pass of Inductor."""
    functional = torch.ops._c10d_functional
    for node in list(graph.nodes):
        if node.target in (functional.all_reduce.default, functional.wait_tensor.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _candidate(run: Run, model: Transformer, expected: Tensor, peer: Peer) -> Candidate:
    assert peer.group is not None
    compiler = compile if peer.way == "compile" else torch.compile
    call = _bind(shard(model, peer.group), compiler)
    call()
    backend: Any = peer.group._get_backend(run.device)
    before = backend._get_sequence_number_for_group()
    call()
    calls, must = backend._get_sequence_number_for_group() - before, 2 * len(model.layers)
    if calls != must:
        raise RuntimeError(f"{calls} collectives of {peer.name} in a step, not {must}")

    def verify() -> int:
        return int((call() - expected).abs().gt(1e-4).sum())

    return Candidate(partial(take_turn, call, run.device), verify if run.options.check else None)


def _measure(run: Run, advance: Call) -> dict[str, Any]:
    torch.manual_seed(run.options.seed)
    model = Transformer().eval().requires_grad_(False)
    expected = _bind(model, lambda model, fullgraph: model)()
    assert run.peers[0].group is not None
    options = {"post_grad_custom_post_pass": _without_collectives}
    compiler = partial(torch.compile, options=options)
    alone = _bind(shard(model, run.peers[0].group), compiler)
    alone()
    makers = {peer.name: partial(_candidate, run, model, expected, peer) for peer in run.peers}
    beside = {ALONE: partial(take_turn, alone, run.device)}
    found, unsupported, disturbed = run.compare(makers, beside, False, advance)
    case = {
        "model": f"a token through {len(model.layers)} layers",
        "across_ranks": "median",
        **disturbed,
    }
    return {**case, "alone": found.pop(ALONE), "backends": found, "unsupported": unsupported}


def compare_compiled(run: Run) -> int:
    """Measures all ways to compile the model, and prints a line for each; returns the exit status."""
    table = Table(Column("by", -16), Column("step, us", 10, 1), Column("over (alone), us", 16, 1))
    run.say(*table.head())
    turns = run.plan.turns * (len(run.peers) + 1)
    with run.progress(turns) as advance:
        row = _measure(run, advance)
    base = row["alone"]["time"]["median"]
    medians = {name: one["time"]["median"] for name, one in row["backends"].items()}
    lines = [table.row([name, time, time - base]) for name, time in medians.items()]
    run.add(row, row["backends"].values(), [table.row([ALONE, base, 0.0]), *lines])
    return run.finish()
