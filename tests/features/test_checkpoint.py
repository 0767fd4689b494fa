"""torch.distributed.checkpoint: what one set of ranks saves, another loads."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, network, sharded, train, train_alone

STEPS = 3


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def model_and_optimizer():
    model = sharded(network(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adam(model.parameters())


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save_sharded(folder, in_background):
    model, optimizer = model_and_optimizer()
    train(model, STEPS, optimizer)
    state = state_of(model, optimizer)
    if in_background:
        # a group of its own: its collectives run in a thread, beside those of the training
        group = dist.new_group(list(range(dist.get_world_size())))
        future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
        train(model, 1, optimizer)  # changes the parameters while they are written
        future.result()
    else:
        dcp.save(state, checkpoint_id=folder)


def load_sharded(folder, saved_by):
    model, optimizer = model_and_optimizer()
    train(model, 1, optimizer)
    optimizer.zero_grad()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_like(model, train_alone(STEPS, saved_by, adam))
    steps = {int(s["step"].item()) for s in optimizer.state.values()}
    assert steps == {STEPS}


def save_replicated(folder):
    model = DistributedDataParallel(network())
    train(model, STEPS)
    dcp.save({"model": model.module.state_dict(), "step": STEPS}, checkpoint_id=folder)


def load_alone(folder, saved_by):
    model = network()
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_like(model, train_alone(STEPS, saved_by))
    assert state["step"] == STEPS


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "async_save"])
def test_sharded_state_is_loaded_by_another_number_of_ranks(world, tmp_path, in_background):
    world(2).run(save_sharded, tmp_path, in_background, fresh=True)
    assert list(tmp_path.glob("*.distcp"))
    for size in (2, 3):
        world(size).run(load_sharded, tmp_path, 2, fresh=True)


@pytest.mark.full
def test_replicated_state_is_loaded_by_one_process(world, tmp_path):
    world(3).run(save_replicated, tmp_path)
    world(1).run(load_alone, tmp_path, 3)
