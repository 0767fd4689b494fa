"""Jobs that torchrun starts, and starts again after a death; and one of living ranks with torchrun's variables."""

import os

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, beyond_gloo
from fault_list import plays
from torch.nn.parallel import DistributedDataParallel
from torchrun import torchrun
from training import assert_like, network, train, train_alone, trained
from world import here

from fastcoll.bench import namespaces

pytestmark = pytest.mark.timeout(600)

STEPS = 4


def as_under_torchrun(port):
    """Train as scripts/train.py does; the store is the agent's."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(here().rank),
        "LOCAL_RANK": str(here().rank),
        "WORLD_SIZE": str(here().size),
        "LOCAL_WORLD_SIZE": str(here().size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    dist.init_process_group(BACKEND)
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    train(model, STEPS)
    dist.destroy_process_group()
    return model.module.state_dict()


def test_training_with_the_variables_of_torchrun(world):
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for state in world(2).run(as_under_torchrun, agent.port, init=False):
        model = network()
        model.load_state_dict(state)
        assert_like(model, train_alone(STEPS, 2))


exits_cleanly = beyond_gloo("its threads want the interpreter's lock at exit, and at times abort")


@pytest.mark.full
@exits_cleanly
def test_training(tmp_path):
    printed = torchrun("train.py", tmp_path / "model", STEPS, "destroy")
    assert "rank 0 of 2" in printed and "rank 1 of 2" in printed
    assert_like(trained(tmp_path / "model"), train_alone(STEPS, 2))


@pytest.mark.full
@exits_cleanly
def test_interpreter_ends_with_the_group_alive(tmp_path):
    torchrun("train.py", tmp_path / "model", STEPS, "leave")
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


@pytest.mark.full
@exits_cleanly
def test_two_hosts(tmp_path):
    loud = {"FASTCOLL_DEBUG": "INFO"}
    path = tmp_path / "model"
    printed = torchrun("train.py", path, STEPS, "destroy", hosts=2, environment=loud)
    assert all(f"rank {rank} of 4" in printed for rank in range(4))
    assert "on 2 hosts" in printed
    assert_like(trained(path), train_alone(STEPS, 4))


@pytest.mark.full
@beyond_gloo("its second life reads the addresses of the first (pytorch#135712)")
def test_both_hosts_restart_after_a_killed_worker(tmp_path):
    printed = torchrun("die_once.py", tmp_path / "checkpoint", hosts=2, max_restarts=2)
    assert printed.count("having started at step 3") == 4
    assert "rank 1 (pid" in printed, "the survivors do not name it"
    expected = train_alone(6, 4, lambda p: torch.optim.SGD(p, lr=0.1))
    assert_like(trained(tmp_path / "checkpoint"), expected)


@pytest.mark.full
@beyond_gloo("fastcoll's own hosts")
@pytest.mark.skipif(namespaces.missing() != "", reason=namespaces.missing() or "-")
class TestNamespaces:
    """Hosts with network, name and process namespaces of their own, on a switch."""

    def test_training(self, tmp_path):
        path = tmp_path / "model"
        with namespaces.Cluster(2, 0) as cluster:
            printed = torchrun(
                *("train.py", path, STEPS, "destroy"),
                cluster=cluster,
                environment={"FASTCOLL_DEBUG": "INFO"},
            )
        assert all(f"rank {rank} of 4" in printed for rank in range(4))
        assert "on 2 hosts" in printed
        assert_like(trained(path), train_alone(STEPS, 4))

    def test_both_hosts_restart_after_a_killed_worker(self, tmp_path):
        with namespaces.Cluster(2, 0) as cluster:
            printed = torchrun(
                "die_once.py", tmp_path / "checkpoint", cluster=cluster, max_restarts=2
            )
        assert printed.count("having started at step 3") == 4
        expected = train_alone(6, 4, lambda p: torch.optim.SGD(p, lr=0.1))
        assert_like(trained(tmp_path / "checkpoint"), expected)

    def test_shards_inside_and_replicas_between_hosts(self):
        with namespaces.Cluster(2, 0) as cluster:
            printed = torchrun("hybrid_shards.py", cluster=cluster)
        for rank in range(4):
            assert f"rank {rank} shards over ['shm', 'gloo']" in printed
