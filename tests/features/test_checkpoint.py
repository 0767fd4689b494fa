"""torch.distributed.checkpoint: what one set of ranks saves, another loads."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, network, parameters_of, train, train_alone

STEPS = 3


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sharded():
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, adam(model.parameters())


def full_parameters(model):
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def save_sharded(folder, in_background):
    model, optimizer = sharded()
    train(model, STEPS, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if in_background:
        # a group of its own: its collectives run in a thread, beside those of the training
        group = dist.new_group(list(range(dist.get_world_size())))
        future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
        train(model, 1, optimizer)  # changes the parameters while they are written
        future.result()
    else:
        dcp.save(state, checkpoint_id=folder)
    return parameters_of(train_alone(STEPS, dist.get_world_size(), adam))


def load_sharded(folder, expected):
    model, optimizer = sharded()
    loss_of(model, dist.get_rank(), 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    torch.testing.assert_close(full_parameters(model), expected, rtol=1e-10, atol=1e-10)
    steps = {int(s["step"].item()) for s in optimizer.state.values()}
    assert steps == {STEPS}


def save_replicated(folder):
    model = DistributedDataParallel(network())
    train(model, STEPS)
    dcp.save({"model": model.module.state_dict(), "step": STEPS}, checkpoint_id=folder)


def load_alone(folder, size):
    model = network()
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    expected = parameters_of(train_alone(STEPS, size))
    torch.testing.assert_close(parameters_of(model), expected, rtol=1e-10, atol=1e-10)
    assert state["step"] == STEPS


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "async_save"])
def test_sharded_state_is_loaded_by_another_number_of_ranks(world, tmp_path, in_background):
    expected = world(2).run(save_sharded, tmp_path, in_background, fresh=True)[0]
    assert list(Path(tmp_path).glob("*.distcp"))
    world(2).run(load_sharded, tmp_path, expected, fresh=True)
    world(3).run(load_sharded, tmp_path, expected, fresh=True)


def test_replicated_state_is_loaded_by_one_process(world, tmp_path):
    world(3).run(save_replicated, tmp_path)
    world(1).run(load_alone, tmp_path, 3)
