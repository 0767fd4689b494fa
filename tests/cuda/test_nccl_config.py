"""Communicators with a config, which CuPy cannot make."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import Tensors, create, engine_of, on_stand_in, stand_in
from world import here

import fastcoll
from fastcoll.cuda.nccl import NcclCommunicator
from fastcoll.cuda.nccl_config import NcclConfig

NUMBERS = {
    "cga_cluster_size": "cgaClusterSize",
    "min_ctas": "minCTAs",
    "max_ctas": "maxCTAs",
    "split_share": "splitShare",
    "traffic_class": "trafficClass",
    "collnet_enable": "collnetEnable",
    "cta_policy": "CTAPolicy",
    "shrink_share": "shrinkShare",
    "nvls_ctas": "nvlsCTAs",
    "n_channels_per_net_peer": "nChannelsPerNetPeer",
    "nvlink_centric_sched": "nvlinkCentricSched",
}


def config_of(**fields: int | str) -> NcclConfig:
    return NcclConfig(SimpleNamespace(**fields))


def configured(config: NcclConfig | None, name: str = "g") -> NcclCommunicator:
    return create(name=name, config=config)


def told() -> dict[str, int]:
    """What NCCL has read of configs."""
    return {
        name.removeprefix("config."): arguments["count"]
        for name, arguments in stand_in.calls()
        if name.startswith("config.")
    }


def summed(made: NcclCommunicator) -> float:
    tensor = torch.ones(3)
    Tensors(made).all_reduce(tensor, tensor)
    return tensor[0].item()


@on_stand_in(2)
def test_each_field_arrives():
    values = {name: at for at, name in enumerate(NUMBERS)}
    made = configured(config_of(**values, net_name="IB", comm_name="name"))
    expected = {NUMBERS[name]: value for name, value in values.items()}
    assert told() == expected | {"netName:IB": 0, "commName:name": 0}
    assert summed(made) == here().size
    stand_in.clear()
    assert made.destroy()
    assert stand_in.names().count("destroy") == 1
    made = configured(config_of(min_ctas=3), "again")
    assert told() == {"minCTAs": 3}
    assert made.abort()


@on_stand_in(2)
def test_without_a_field_cupy_makes_it():
    for name, config in [("first", None), ("second", NcclConfig())]:
        stand_in.clear()
        made = configured(config, name)
        assert type(made.raw).__module__.startswith("cupy")
        assert not told()
        assert made.abort()


@on_stand_in(4)
def test_parts_have_configs():
    size, rank = here().size, here().rank
    for whole in (configured(None, "first"), configured(config_of(max_ctas=8), "second")):
        for config in (None, NcclConfig(), config_of(cta_policy=1)):
            stand_in.clear()
            part = whole.split(rank % 2, -rank, "half", config)
            assert part is not None
            own = config is not None and config.cta_policy is not None
            assert told() == ({"CTAPolicy": 1} if own else {})
            members = range(rank % 2, size, 2)
            assert (part.member.rank, part.member.size) == (
                [*members][::-1].index(rank),
                len(members),
            )
            assert summed(part) == len(members)
            part.destroy()
        assert (whole.split(0 if rank else -1, 0, "some", config_of(nvls_ctas=2)) is None) == (
            rank == 0
        )
        whole.abort()


@on_stand_in(2)
def test_faults_are_named():
    with pytest.raises(dist.DistBackendError, match="config: minCTAs -5"):
        configured(config_of(min_ctas=-5), "wrong")
    made = configured(config_of(min_ctas=1))
    made.abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        summed(made)
    del made
    gc.collect()


@on_stand_in(2)
def test_a_slow_init_is_waited_for():
    """NCCL may go on with it after its call has returned."""
    stand_in.inject("in_progress", "initRank", 3)
    made = configured(config_of(min_ctas=1))
    stand_in.clear()
    assert summed(made) == here().size
    made.destroy()


@on_stand_in(2)
def test_an_engine_hands_it_on():
    engine = engine_of("e", config=config_of(max_ctas=7))
    engine.prepare(0, -1, False)
    assert told() == {"maxCTAs": 7}
    stand_in.clear()
    engine.prepare(0, 1 - here().rank, False)
    assert told() == {"maxCTAs": 7}


def test_a_field_that_this_nccl_does_not_know_is_refused(script):
    process = script(
        """
from fastcoll.cuda import nccl_config, nccl_library
config = nccl_config.NcclConfig()
config.max_ctas = 4
nccl_config.check_config(nccl_library.load(), config)
config.cta_policy = 1
nccl_config.check_config(nccl_library.load(), config)
""",
        FAKE_NCCL_VERSION="22605",
    )
    assert "expected NCCL 2.27.0 or newer for config.cta_policy, got 2.26.5" in process.stderr


def test_options_keep_it():
    options = fastcoll.Options()
    assert options.config.min_ctas is None
    options.config.min_ctas = 4
    options.config.net_name = "IB"
    others = copy.copy(options), copy.deepcopy(options)
    options.config.min_ctas = 5
    for other in others:
        assert (other.config.min_ctas, other.config.net_name) == (4, "IB")
    with pytest.raises(AttributeError):
        options.config.min_cta = 4


def test_options_take_the_fields_of_any_object():
    """Such as torch's, whose unset numbers are the least number."""
    given = SimpleNamespace(max_ctas=16, min_ctas=-(2**31), net_name=None, blocking=1, some=None)
    options = fastcoll.Options(config=given)
    given.max_ctas = 8
    config = options.config
    assert (config.max_ctas, config.min_ctas, config.net_name) == (16, None, None)
    with pytest.warns(UserWarning, match="ignores config.max_p2p_peers = 8"):
        options.config = SimpleNamespace(max_p2p_peers=8)
    assert options.config.max_ctas is None
