"""The peer that gathers and folds: it runs in the benchmark, and its sums have fastcoll's bits."""

from dataclasses import replace
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from bench_ranks import FEW, run_on
from on_ranks import on_ranks
from oracle import folded, sample

from fastcoll.bench.collectives import build_case
from fastcoll.bench.fold import FoldPeer, fold
from fastcoll.bench.peer import bind

SERVED = ("all_reduce", "reduce_scatter", "reduce")


def test_it_runs_beside_the_others_and_names_what_it_lacks(world):
    kinds = ("-b", "4K", "-e", "4K", "-d", "float,int32", "-o", "sum,avg,max")
    given = (*SERVED, "broadcast", *FEW, *kinds, "--backend", "fastcoll,gloo-fold,nccl-fold")
    record = run_on(world, 2, *given).record
    assert set(record["left_out"]) == {"nccl-fold"}
    assert record["libraries"]["gloo-fold"].startswith("all_gather of gloo of torch")
    for case in record["cases"]:
        kind = (case["collective"], case["dtype"], case["op"])
        found = case["backends"]
        assert found["fastcoll"]["wrong"] == 0
        if kind in product(SERVED, ["float"], ["sum", "avg"]):
            assert found["gloo-fold"]["wrong"] == 0
        else:
            assert set(found) == {"fastcoll"}
            assert f"gloo-fold has no {kind[0]} {kind[2]}" in case["unsupported"]["gloo-fold"]


@beyond_gloo("gloo sums in another order")
@on_ranks(2, 3, 4)
def test_its_bits_are_those_of_fastcoll(size):
    rank, device = dist.get_rank(), torch.device("cpu")
    peer = FoldPeer("gloo-fold", timedelta(seconds=30))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for name, dtype, op in product(SERVED, dtypes, ("sum", "avg")):
        case = build_case(name, 1 << 15, dtype, op, rank, size, size - 1, device)
        inputs = [sample(each, case.send.shape, dtype) for each in range(size)]
        receive = torch.empty_like(case.receive)
        other = replace(case, send=inputs[rank].clone(), receive=receive)
        if case.receive is case.send:
            other = replace(other, receive=other.send)
        case.send.copy_(inputs[rank])
        peer.bind(case)()
        bind(other, None)()
        if name != "reduce" or rank == case.root:
            assert torch.equal(case.receive, other.receive), (name, dtype, op)
    peer.close()


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_tree(ranks):
    terms = [sample(rank, (999,), torch.float32) for rank in range(ranks)]
    assert torch.equal(fold([term.clone() for term in terms]), folded(terms, torch.add))
