"""Plans are kept for what they were made for, captured when they repeat, and dropped oldest first."""

from typing import ClassVar

import pytest
import torch
from test_peer_training import Graphs

from fastcoll.cuda.algorithms.algorithm import Prepared
from fastcoll.cuda.plans import CAPTURE_AFTER, CudaGraphs, Plan, PlanCache


def counting(log, *names, **kind):
    return Prepared(tuple((lambda name=name: log.append(name)) for name in names), **kind)


def test_a_plan_is_built_once_for_a_key() -> None:
    log: list[str] = []
    cache = PlanCache()
    for _ in range(3):
        for key in ("a", "b"):
            plan = cache.find(key) or cache.add(key, lambda key=key: counting(log, key))
            plan.run(None)
    assert cache.built == 2 and log == ["a", "b"] * 3


def test_the_one_that_was_not_used_longest_goes_first() -> None:
    cache = PlanCache(2)
    for key in "ab":
        cache.add(key, lambda: counting([]))
    assert cache.find("a") is not None
    cache.add("c", lambda: counting([]))
    assert [key for key in "abc" if cache.find(key)] == ["a", "c"] and len(cache) == 2


def test_a_build_that_fails_leaves_nothing() -> None:
    cache = PlanCache()

    def fail() -> Prepared:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        cache.add("a", fail)
    assert cache.find("a") is None and cache.built == 0


def test_a_plan_is_captured_when_it_repeats() -> None:
    log: list[str] = []
    graphs = Graphs()
    plan = Plan(counting(log, "flatten", "reduce"))
    for use in range(1, 6):
        plan.run(graphs)
        assert plan.is_captured == (use >= CAPTURE_AFTER)
        assert (
            log == ["flatten", "reduce"] * use
        )  # the capture itself runs nothing twice, and loses nothing
    assert graphs.recorded == [2] and graphs.replays == 6 - CAPTURE_AFTER


def test_a_captured_plan_is_launched_anew_into_a_graph_of_the_users() -> None:
    log: list[str] = []
    graphs = Graphs()
    plan = Plan(counting(log, "flatten", "reduce"))
    for _ in range(CAPTURE_AFTER):
        plan.run(graphs)
    assert plan.is_captured and graphs.replays == 1
    plan.run(None)
    assert log == ["flatten", "reduce"] * (CAPTURE_AFTER + 1) and graphs.replays == 1
    plan.run(graphs)
    assert graphs.replays == 2


@pytest.mark.parametrize(
    "prepared",
    [counting([], "one"), counting([], "flatten", "nccl", uses_nccl=True)],
    ids=["one launch", "NCCL"],
)
def test_what_gains_nothing_or_needs_all_ranks_is_not_captured(prepared):
    graphs = Graphs()
    plan = Plan(prepared)
    for _ in range(6):
        plan.run(graphs)
    assert graphs.recorded == [] and not plan.is_captured


def test_a_stream_that_cannot_be_captured_is_asked_once() -> None:
    asked = []

    class Never(Graphs):
        def record(self, launches):
            asked.append(len(launches))

    log: list[str] = []
    plan = Plan(counting(log, "flatten", "reduce"))
    for _ in range(6):
        plan.run(Never())
    assert asked == [2] and log == ["flatten", "reduce"] * 6 and not plan.is_captured


def test_a_pinned_plan_lives_with_the_cache() -> None:
    cache = PlanCache(1)
    first = cache.add("a", lambda: counting([]))
    cache.pin(first)
    cache.pin(first)
    cache.add("b", lambda: counting([]))
    assert cache.find("a") is None and cache._pinned == [first]
    cache.clear()
    assert cache._pinned == [] and len(cache) == 0


class Graph:
    """torch.cuda.CUDAGraph, as far as plans use it."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self):
        self.log = []
        self.made.append(self)

    def capture_begin(self, capture_error_mode):
        self.log.append(f"begin {capture_error_mode}")

    def capture_end(self):
        self.log.append("end")
        if "failed" in self.log:
            raise RuntimeError("the capture was invalidated")

    def replay(self):
        self.log.append("replay")


@pytest.fixture
def graphs(monkeypatch):
    Graph.made.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    return CudaGraphs(torch.device("cuda", 0))


def test_a_graph_holds_the_launches(graphs):
    def launch(name):
        return lambda: Graph.made[0].log.append(name)

    plan = Plan(Prepared((launch("flatten"), launch("reduce"))))
    plan.uses = CAPTURE_AFTER - 1
    plan.run(graphs)
    plan.run(graphs)
    (graph,) = Graph.made
    assert graph.log == ["begin thread_local", "flatten", "reduce", "end", "replay", "replay"]


def test_the_default_stream_is_not_captured(graphs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "default")
    assert graphs.record([lambda: None] * 2) is None and Graph.made == []


def test_a_capture_that_fails_leaves_the_launches(graphs, caplog):
    log = []

    def launch():
        if Graph.made and "end" not in Graph.made[0].log:
            Graph.made[0].log.append("failed")
            raise RuntimeError("an operation is not permitted in a capture")
        log.append("launched")

    plan = Plan(Prepared((launch, launch)))
    for _ in range(5):
        plan.run(graphs)
    assert log == ["launched"] * 10 and not plan.is_captured and len(Graph.made) == 1
    (entry,) = caplog.records
    assert (
        "a plan of 2 launches is not captured: an operation is not permitted" in entry.getMessage()
    )
