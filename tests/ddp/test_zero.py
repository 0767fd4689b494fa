"""ZeroRedundancyOptimizer: every rank keeps the optimizer state of its own parameters."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training import assert_like, assert_replicated, network, train, train_alone

STEPS = 5


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@on_ranks(3)
def test_sharded_adam(view):
    """Three ranks reach the parameters of one process. Rank 1 collects its optimizer state."""
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=view
    )
    train(model, STEPS, optimizer)
    alone = network()
    reference = torch.optim.Adam(alone.parameters(), lr=0.01)
    train_alone(STEPS, dist.get_world_size(), lambda _: reference, alone)
    assert_like(model.module, alone)
    assert_replicated(model.module)
    kept = sum(len(state) > 0 for state in optimizer.optim.state.values())
    assert kept < len(list(model.parameters()))
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        states = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert set(states[0]) == set(states[1])
        for index, expected in states[1].items():
            for name, value in expected.items():
                torch.testing.assert_close(states[0][index][name], value, rtol=1e-9, atol=1e-12)
