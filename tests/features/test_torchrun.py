"""Jobs that torchrun starts, and starts again after a death; and one with torchrun's variables."""

import contextlib

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
def test_training(tmp_path):
    """The interpreter ends with the group alive."""
    printed = torchrun("train.py", tmp_path / "model", STEPS, "leave")
    assert "rank 0 of 2" in printed and "rank 1 of 2" in printed
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
@beyond_gloo("its second life reads the addresses of the first (pytorch#135712)")
def test_shards_inside_of_hosts_and_a_restart_of_both(tmp_path):
    """Hosts have namespaces and a switch where the kernel allows it: they see no process of each other."""
    path, loud = tmp_path / "checkpoint", {"FASTCOLL_DEBUG": "INFO"}
    with contextlib.ExitStack() as ended:
        cluster = None if namespaces.missing() else ended.enter_context(namespaces.Cluster(2, 0))
        printed = torchrun("hybrid_shards.py", hosts=2, cluster=cluster)
        # The survivors need a moment to name the dead rank, before the agent ends them.
        again = torchrun(
            *("die_once.py", path),
            max_restarts=2,
            hosts=2,
            environment=loud,
            cluster=cluster,
            monitor=1.0,
        )
    for rank in range(4):
        assert f"rank {rank} shards over ['shm', 'gloo']" in printed
    assert again.count("having started at step 3") == 4
    assert "on 2 hosts" in again
    assert "rank 1 (pid" in again, "the survivors do not name it"
    expected = train_alone(6, 4, lambda p: torch.optim.SGD(p, lr=0.1))
    assert_like(trained(path), expected)
