"""Jobs that torchrun starts, and starts again after a death; and one with torchrun's variables."""

import pytest
import torch
from backend import BACKEND, beyond_gloo
from fault_list import plays
from torchrun import SCRIPTS, torchrun
from training import assert_like, train_alone, trained

from fastcoll.bench import namespaces

pytestmark = pytest.mark.timeout(600)

STEPS = 4


exits_cleanly = beyond_gloo("its threads want the interpreter's lock at exit, and at times abort")


@exits_cleanly
def test_training_with_the_variables_of_torchrun(launcher, tmp_path):
    arguments = [str(tmp_path / "model"), str(STEPS), "destroy"]
    text = f"import sys\nsys.argv[1:] = {arguments}\n{(SCRIPTS / 'train.py').read_text()}"
    for ended in launcher.ranks(text, 2, tmp_path, FASTCOLL_TEST_BACKEND=BACKEND):
        assert ended.status == 0, ended.stderr
    assert_like(trained(tmp_path / "model"), train_alone(STEPS, 2))


@pytest.mark.full
@exits_cleanly
@pytest.mark.parametrize("ending", ["destroy", "leave"])
def test_training(tmp_path, ending):
    """The group is destroyed, or the interpreter ends with it alive."""
    printed = torchrun("train.py", tmp_path / "model", STEPS, ending)
    assert "rank 0 of 2" in printed and "rank 1 of 2" in printed
    assert_like(trained(tmp_path / "model"), train_alone(STEPS, 2))


@pytest.mark.full
@beyond_gloo("torch 2.13 crashes in DDP's logger, which takes the wrapper for gloo")
def test_debug_detail(tmp_path):
    """DETAIL wraps the backend and checks every collective through a gloo group of its own."""
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    printed = torchrun("train.py", tmp_path / "model", STEPS, "destroy", environment=detail)
    assert printed.count("at level DETAIL") == 2
    assert_like(trained(tmp_path / "model"), train_alone(STEPS, 2))


@plays(56)
@pytest.mark.full
@beyond_gloo("its second life reads the addresses of the first (pytorch#135712)")
def test_restart_after_a_killed_worker(tmp_path):
    printed = torchrun("die_once.py", tmp_path / "checkpoint", max_restarts=1)
    for rank in (0, 1):
        assert f"rank {rank} ends in life 1, having started at step 3" in printed
    expected = train_alone(6, 2, lambda p: torch.optim.SGD(p, lr=0.1))
    assert_like(trained(tmp_path / "checkpoint"), expected)


NAMESPACES = pytest.param(
    "namespaces",
    marks=[
        beyond_gloo("fastcoll's own hosts"),
        pytest.mark.skipif(namespaces.missing() != "", reason=namespaces.missing() or "-"),
    ],
)


@pytest.fixture(params=["pretended", NAMESPACES])
def hosts(request):
    """What torchrun is to know of two hosts, which may have namespaces of their own, on a switch."""
    if request.param == "pretended":
        yield {"hosts": 2}
    else:
        with namespaces.Cluster(2, 0) as cluster:
            yield {"cluster": cluster}


@pytest.mark.full
@exits_cleanly
def test_two_hosts(tmp_path, hosts):
    loud = {"FASTCOLL_DEBUG": "INFO"}
    path = tmp_path / "model"
    printed = torchrun("train.py", path, STEPS, "destroy", environment=loud, **hosts)
    assert all(f"rank {rank} of 4" in printed for rank in range(4))
    assert "on 2 hosts" in printed
    assert_like(trained(path), train_alone(STEPS, 4))


@pytest.mark.full
@beyond_gloo("its second life reads the addresses of the first (pytorch#135712)")
def test_both_hosts_restart_after_a_killed_worker(tmp_path, hosts):
    printed = torchrun("die_once.py", tmp_path / "checkpoint", max_restarts=2, **hosts)
    assert printed.count("having started at step 3") == 4
    assert "cluster" in hosts or "rank 1 (pid" in printed, "the survivors do not name it"
    expected = train_alone(6, 4, lambda p: torch.optim.SGD(p, lr=0.1))
    assert_like(trained(tmp_path / "checkpoint"), expected)


@pytest.mark.full
@pytest.mark.parametrize("hosts", [NAMESPACES], indirect=True)
def test_shards_inside_and_replicas_between_hosts(hosts):
    printed = torchrun("hybrid_shards.py", **hosts)
    for rank in range(4):
        assert f"rank {rank} shards over ['shm', 'gloo']" in printed
