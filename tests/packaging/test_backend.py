"""What torch hands over reaches the compiled backend."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from backend import backend_of, beyond_gloo
from on_ranks import on_ranks

import fastcoll

SECONDS = {None: dist.distributed_c10d.default_pg_timeout}


def made_with(timeout, options):
    """Returns the timeout of a group's backend."""
    group = dist.new_group([1, 2], timeout=timeout, pg_options=options)
    if dist.get_rank() == 0:
        return None
    made = backend_of(group).options
    assert (made.group_name, made.global_ranks_in_group) == (group.group_name, [1, 2])
    assert made.tuning is not None
    assert (group.rank(), group.size()) == (dist.get_rank() - 1, 2)
    return made._timeout


@beyond_gloo("has other options")
@pytest.mark.parametrize(
    ("torchs", "options", "expected"), [(7, None, 7), (7, 5, 7), (None, 5, 5), (None, None, None)]
)
@on_ranks(3, fresh=True)
def test_name_ranks_and_timeout(torchs, options, expected):
    """The timeout of the options counts if torch was given none; the options are not modified."""
    seconds = {n: timedelta(seconds=n) for n in (5, 7)} | SECONDS
    given = None if options is None else fastcoll.Options(timeout=seconds[options])
    found = made_with(seconds[torchs] if torchs else None, given)
    assert found in (None, seconds[expected])
    if given is not None:
        assert (given._timeout, given.group_name, given.tuning) == (seconds[options], "", None)


def test_a_torch_without_gloo_is_named(monkeypatch):
    from fastcoll import _backend

    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(RuntimeError, match="cannot share memory and this torch has no Gloo"):
        _backend.create_gloo()
