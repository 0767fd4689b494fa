"""Groups whose communicators share NCCL's resources (``split_share``), and the bytes of communicators."""

import os
import threading
import unittest.mock
from types import SimpleNamespace

import pytest
import torch
from nccl_ranks import Tensors, engine_of, on_stand_in, stand_in
from suite_rules import until
from world import here

from fastcoll.cuda.engine import CudaEngine
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_config import NcclConfig, shares

MIB = 2**20


def sharing(name: str, share: int | None = 1, **fields: int | str) -> CudaEngine:
    """A group whose communicators share, with one for device 0."""
    engine = engine_of(name, config=NcclConfig(SimpleNamespace(split_share=share, **fields)))
    engine.prepare(0, -1, False)
    return engine


def whole(engine: CudaEngine) -> NcclCommunicator:
    return engine._known[0, -1]


def summed(engine: CudaEngine) -> float:
    tensor = torch.ones(3)
    Tensors(whole(engine)).all_reduce(tensor, tensor)
    return tensor[0].item()


def made() -> list[str]:
    """How this process's communicators were made, in order."""
    return [name for name in stand_in.names() if name in ("initRank", "splitInit")]


@on_stand_in(2)
def test_by_default_each_group_has_its_own():
    engines = [engine_of(name) for name in "abc"]
    for engine in engines:
        engine.prepare(0, -1, False)
        assert summed(engine) == here().size
    assert made() == ["initRank"] * 3
    assert [engine.communicators.memory() for engine in engines] == [[("of cpu:0", 512 * MIB)]] * 3
    engines[0].communicators.abort_all("a test")
    assert [engine.communicators.aborted for engine in engines] == [True, False, False]


@on_stand_in(3)
def test_groups_of_the_same_ranks_split_the_first():
    engines = [sharing(name) for name in "abcdefgh"]
    assert made() == ["initRank"] + ["splitInit"] * 7
    told = [call["count"] for name, call in stand_in.calls() if name == "config.splitShare"]
    assert told == [1] * 8
    assert {one.communicators.family for one in engines} == {engines[0].communicators.family}
    # The memory of all of them, where eight of their own would take 4096.
    assert engines[5].communicators.memory() == [("of cpu:0", 519 * MIB)]
    assert [summed(engine) for engine in engines] == [here().size] * 8
    assert len({whole(engine).instance for engine in engines}) == 8
    for engine in engines:
        engine.close()
    assert stand_in.names().count("destroy") == 8 and "abort" not in stand_in.names()


@on_stand_in(2)
def test_the_config_of_a_part_is_that_of_its_group():
    sharing("first", max_ctas=8)
    stand_in.clear()
    sharing("second", min_ctas=2)
    told = [name for name, _ in stand_in.calls() if name.startswith("config.")]
    assert told == ["config.minCTAs", "config.splitShare"]


@on_stand_in(2)
def test_the_variable_of_nccl_makes_groups_without_a_config_share():
    with unittest.mock.patch.dict(os.environ, NCCL_COMM_SPLIT_SHARE_RESOURCES="1"):
        sharing("first", None, max_ctas=8)
        stand_in.clear()
        engine_of("second").prepare(0, -1, False)
    told = [name for name, _ in stand_in.calls() if name.startswith("config.")]
    assert made() == ["splitInit"] and told == ["config.splitShare"]  # not the first one's maxCTAs


@on_stand_in(2)
def test_what_does_not_share_is_made_anew():
    """A group without the option, one on another network, one with other ranks, and a second device."""
    first = sharing("first")
    sharing("without", None)
    sharing("network", net_name="IB")
    pair = engine_of("pair", config=NcclConfig(SimpleNamespace(split_share=1)))
    pair.prepare(0, 1 - here().rank, False)
    first.prepare(1, -1, False)
    assert made() == ["initRank"] * 5


@on_stand_in(2)
def test_ranks_that_differ_use_init():
    """One rank has lost the communicator of a group, which the other one would split."""
    first, second = sharing("first"), sharing("second")
    if here().rank == 1:
        first.close()
    third = sharing("third")
    assert made() == ["initRank", "splitInit", "splitInit"]
    assert third.communicators.family == second.communicators.family
    if here().rank == 1:
        second.close()
    fourth = sharing("fourth")  # split from the third
    if here().rank == 1:
        third.close()
        fourth.close()
    fifth = sharing("fifth")
    assert made()[3:] == ["splitInit", "initRank"]
    assert summed(fifth) == here().size


@on_stand_in(2)
def test_two_threads_call_them_in_turn():
    engines = [sharing("a"), sharing("b")]
    held = threading.Event()
    engines[0].communicators.begin_calls()

    def call() -> None:
        engines[1].communicators.begin_calls()
        held.set()
        engines[1].communicators.end_calls()

    thread = threading.Thread(target=call)
    thread.start()
    assert not held.wait(0.2)
    engines[0].communicators.end_calls()
    assert held.wait(10)
    thread.join()


@on_stand_in(2)
def test_a_part_of_split_group_shares_without_a_config_of_its_own():
    parent, child, stranger = sharing("parent"), engine_of("child"), engine_of("stranger")
    parent.split(0, 0, here().rank, child)
    assert child.communicators.family == parent.communicators.family
    grandchild = engine_of("grandchild")
    child.split(0, 0, here().rank, grandchild)
    assert grandchild.communicators.memory() == [("of cpu:0", 514 * MIB)]
    assert stranger.communicators.family != parent.communicators.family
    child.communicators.abort_all("a test")
    until(lambda: parent.communicators.aborted and grandchild.communicators.aborted)


@pytest.mark.parametrize(
    ("given", "field", "result"),
    [(None, None, False), (None, 0, False), (None, 1, True), ("1", None, True), ("0", 1, False)],
)
def test_the_variable_of_nccl_wins(given, field, result):
    environ = {} if given is None else {"NCCL_COMM_SPLIT_SHARE_RESOURCES": given}
    assert shares(NcclConfig(SimpleNamespace(split_share=field)), environ) is result
    assert shares(None, environ) is (given == "1")


def test_an_older_nccl_counts_no_bytes(script):
    process = script(
        """
from datetime import timedelta
import torch.distributed as dist
from fastcoll.cuda.engine import CudaEngine
engine = CudaEngine(dist.HashStore(), "one", 0, 1, timedelta(seconds=30), "cpu")
engine.prepare(0, -1, False)
print(engine.communicators.memory())
engine.close()
""",
        FAKE_NCCL_VERSION="22809",
    )
    assert "[('of cpu:0', None)]" in process.stdout, process.stderr
