"""What torch hands over reaches the compiled backend, here played by a recording one."""

import copy
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import fastcoll

DEFAULT = dist.distributed_c10d.default_pg_timeout


class Tuning:
    one_shot_bytes = segment_bytes = long_segment_bytes = long_bytes = 0
    streaming_bytes = direct_bytes = direct_all_reduce_bytes = link_bytes = 0


class Options:
    def __init__(self) -> None:
        self.timeout = DEFAULT
        self.transport = "auto"
        self.tuning: Tuning | None = None
        self.group_name = ""
        self.global_ranks_in_group: list[int] = []


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    """fastcoll._backend above a compiled module that records."""
    compiled = SimpleNamespace(
        Options=Options,
        Tuning=Tuning,
        ProcessGroupFastcoll=lambda *arguments: arguments,
        set_gloo_factory=lambda factory: setattr(compiled, "factory", factory),
        set_device_factory=lambda factory: setattr(compiled, "device_factory", factory),
    )
    load = SimpleNamespace(C=compiled)
    monkeypatch.setitem(sys.modules, "fastcoll._load", load)
    monkeypatch.setattr(fastcoll, "_load", load, raising=False)
    for name in ("_backend", "tuning"):
        monkeypatch.delitem(sys.modules, f"fastcoll.{name}", raising=False)
        monkeypatch.delattr(fastcoll, name, raising=False)
    import fastcoll._backend as backend

    yield backend
    for name in ("_backend", "tuning"):
        sys.modules.pop(f"fastcoll.{name}", None)
        delattr(fastcoll, name)


def handed_over(timeout: timedelta = DEFAULT) -> SimpleNamespace:
    return SimpleNamespace(
        store="store",
        group_rank=1,
        group_size=2,
        timeout=timeout,
        group_id="g",
        global_ranks_in_group=[3, 5],
    )


def test_all_of_it_arrives(backend) -> None:
    store, rank, size, options = backend.create(handed_over(timedelta(seconds=7)), None)
    assert (store, rank, size) == ("store", 1, 2)
    assert options.timeout == timedelta(seconds=7)
    assert (options.group_name, options.global_ranks_in_group) == ("g", [3, 5])
    assert isinstance(options.tuning, Tuning)


def test_the_callers_options_are_kept_and_not_modified(backend) -> None:
    mine = Options()
    mine.transport = "gloo"
    before = copy.deepcopy(vars(mine))
    options = backend.create(handed_over(timedelta(seconds=7)), mine)[3]
    assert (options.transport, options.timeout) == ("gloo", timedelta(seconds=7))
    assert vars(mine) == before


def test_the_options_timeout_counts_where_torch_was_given_none(backend) -> None:
    mine = Options()
    mine.timeout = timedelta(seconds=5)
    assert backend.create(handed_over(), mine)[3].timeout == timedelta(seconds=5)


def test_options_of_another_backend_are_refused(backend) -> None:
    with pytest.raises(
        TypeError, match=r"expected pg_options of type fastcoll\.Options.*got .*Pass"
    ):
        backend.create(handed_over(), dist.ProcessGroupGloo._Options())


def test_the_gloo_factory_makes_a_working_group(backend) -> None:
    from fastcoll import _load

    gloo = _load.C.factory()(dist.HashStore(), 0, 1, timedelta(seconds=5))
    assert isinstance(gloo, dist.ProcessGroupGloo)
    assert (gloo.rank(), gloo.size()) == (0, 1)


def test_a_torch_without_gloo_is_named(backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(RuntimeError, match="cannot share memory and this torch has no Gloo"):
        backend.create_gloo()
