"""Options.shared_tensors, FASTCOLL_SHARED_TENSORS: torch's own tensors are in shared memory; nothing else changes.

Tests have processes of their own: what is switched on stays on.
"""

import gc
import io
import os

import pytest
import torch
import torch.distributed as dist
import training
from backend import beyond_gloo, shared_bytes
from on_ranks import on_ranks
from oracle import assert_same
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from training import network
from world import Worlds, here

import fastcoll
import fastcoll.info
from fastcoll._group_backend import cpu_backend
from fastcoll.ddp import GradientSynchronizer

pytestmark = beyond_gloo("fastcoll's own shared memory")

CPU = torch.device("cpu")
LEAST = 8192  # elements of float32: smaller tensors are not shared
MANY = 100_003


def shared(tensor: torch.Tensor) -> bool:
    return cpu_backend(dist.group.WORLD, CPU).is_shared(tensor)


def begin() -> dist.ProcessGroup:
    return dist.new_group(pg_options=fastcoll.Options(shared_tensors=True))


@on_ranks(2, world="own_worlds")
def test_tensors_are_shared_only_when_asked():
    assert not shared(torch.ones(MANY))
    begin()
    made = {
        "ones": torch.ones(MANY),
        "empty": torch.empty(300, 400),
        "result": torch.ones(MANY) + 1,
        "copy": torch.zeros(MANY, dtype=torch.int64).clone(),
        "gradient": torch.ones(MANY, requires_grad=True),
    }
    made["gradient"].sum().backward()
    made["gradient"] = made["gradient"].grad
    assert {name: shared(tensor) for name, tensor in made.items()} == dict.fromkeys(made, True)
    assert shared(torch.ones(LEAST)) and not shared(torch.ones(LEAST - 1))
    assert_same(made["result"], torch.full((MANY,), 2.0))


@pytest.mark.parametrize(("value", "option", "expected"), [("1", False, True), ("0", True, False)])
@on_ranks(2, world="own_worlds")
def test_the_variable_wins_over_the_option(value, option, expected):
    os.environ["FASTCOLL_SHARED_TENSORS"] = value
    dist.new_group(pg_options=fastcoll.Options(shared_tensors=option))
    assert shared(torch.ones(MANY)) == expected


@on_ranks(2, world="own_worlds")
def test_a_wrong_value_is_refused():
    os.environ["FASTCOLL_SHARED_TENSORS"] = "yes"
    with pytest.raises(ValueError, match="FASTCOLL_SHARED_TENSORS=yes: expected an integer from 0"):
        dist.new_group()


@on_ranks(1, world="own_worlds")
def test_nothing_is_shared_with_nobody():
    """No peer can read what one rank alone, or a group over Gloo, has."""
    dist.new_group([here().rank], pg_options=fastcoll.Options(shared_tensors=True))
    dist.new_group(pg_options=fastcoll.Options(shared_tensors=True, shared_memory="off"))
    assert not shared(torch.ones(MANY))


@on_ranks(2, world="own_worlds")
def test_freed_blocks_are_used_again_and_bounded():
    begin()
    tensor = torch.ones(1_000_000)
    at = tensor.data_ptr()
    del tensor
    assert torch.ones(999_990).data_ptr() == at  # pages that are in use already
    assert torch.ones(700_000).data_ptr() != at  # too much of them would lie idle
    most = 0
    for size in range(1, 40):  # no two alike: none serves the next
        tensor = torch.empty(200_000 + 100_000 * size)
        most = max(most, tensor.nbytes)
        assert shared(tensor)
        del tensor
    assert shared_bytes() < 1.25 * most + (64 << 20) + (8 << 20)
    kept = [torch.ones(1_000_000) for _ in range(16)]
    assert len({tensor.data_ptr() for tensor in kept}) == 16
    for number, tensor in enumerate(kept):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(kept))


@on_ranks(3, world="own_worlds", fresh=True)
def test_tensors_outlive_all_groups():
    everyone = begin()
    tensor = torch.ones(MANY)
    dist.all_reduce(tensor, group=everyone)
    dist.destroy_process_group()
    del everyone
    gc.collect()
    assert not fastcoll.info.groups()
    assert_same(tensor, torch.full((MANY,), float(here().size)))
    assert_same(torch.ones(MANY) + tensor, torch.full((MANY,), here().size + 1.0))
    return tensor  # which lives on when the call has ended


@on_ranks(2, world="own_worlds")
def test_a_forked_child_and_its_parent_change_nothing_of_each_others():
    """A child and its parent write, make and free tensors side by side."""
    begin()
    tensor, given = torch.full((MANY,), 3.0), torch.full((MANY,), 5.0)
    at, gone = given.data_ptr(), torch.ones(MANY)
    del gone  # is kept, and the child must not hand it out
    (go, told), (answers, answer) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        own = torch.full((MANY,), 7.0)
        tensor.add_(1.0)
        os.read(go, 1)  # the parent has freed what it had given, and made others
        well = [bool((own == 7).all()), bool((tensor == 4).all()), bool((given == 5).all())]
        del own, tensor, given
        gc.collect()
        os.write(answer, bytes(well))
        os.read(go, 1)
        os._exit(0)
    del given
    others = [torch.full((MANY,), 9.0) for _ in range(3)]
    assert all(shared(other) and other.data_ptr() != at for other in others)
    os.write(told, b"1")
    assert list(os.read(answers, 3)) == [True, True, True]
    assert_same(tensor, torch.full((MANY,), 3.0))
    os.write(told, b"2")
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    others += [torch.full((MANY,), 9.0) for _ in range(64)]  # first those of other temporaries
    assert at in [other.data_ptr() for other in others], "held for a child that has ended"
    for other in others:
        dist.all_reduce(other)
        assert_same(other, torch.full((MANY,), 9.0 * here().size))
    for end in (go, told, answers, answer):
        os.close(end)


@pytest.mark.full
@on_ranks(2, world="own_worlds")
def test_forks_come_and_go():
    begin()
    tensors = [torch.ones(MANY) for _ in range(4)]
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(20):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        tensors[turn % 4] = torch.ones(MANY)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert shared_bytes() < 30 * tensors[0].nbytes + (4 << 20)


@pytest.mark.full
@on_ranks(2, world="own_worlds")
def test_loads_data_with_workers():
    begin()
    rows = torch.arange(40.0 * LEAST).view(40, LEAST)
    loader = DataLoader(TensorDataset(rows), batch_size=4, num_workers=2)
    found = torch.cat([batch for (batch,) in loader])
    assert_same(found, rows)


@on_ranks(2, world="own_worlds")
def test_storages_are_resized_saved_and_moved():
    begin()
    tensor = torch.arange(float(MANY))
    storage = tensor.untyped_storage()
    storage.resize_(2 * tensor.nbytes)  # as FSDP does
    assert_same(tensor, torch.arange(float(MANY)))
    storage.resize_(0)
    storage.resize_(tensor.nbytes)
    assert shared(tensor.fill_(1.0))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert_same(torch.load(file), tensor)
    assert_same(torch.from_numpy(tensor.numpy().copy()), tensor)
    tensor.share_memory_()  # torch's own shared memory
    assert_same(tensor, torch.ones(MANY))


def without_memory():
    begin()
    tensors = [torch.ones(5_000_000) for _ in range(4)]  # 20 MB each
    assert [shared(tensor) for tensor in tensors] == [True, True, True, False]
    for tensor in tensors:
        dist.all_reduce(tensor)
        assert_same(tensor, torch.full((5_000_000,), float(here().size)))
    del tensors, tensor
    assert shared(torch.ones(7_500_000)), "what was kept is room"
    small = [torch.ones(250_000) for _ in range(100)]
    assert not shared(small[-1])
    # The group opens its ring now, which tensors left room for, and another group has its memory.
    dist.all_reduce(small[-1])
    assert_same(small[-1], torch.full((250_000,), float(here().size)))
    dist.all_reduce(torch.ones(3), group=dist.new_group())
    assert [group["transport"] for group in fastcoll.info.groups()].count("shm") >= 2


@pytest.mark.full  # its ranks are new interpreters
def test_without_shared_memory_a_tensor_is_an_ordinary_one(tmp_path):
    worlds = Worlds(tmp_path, environ={"FASTCOLL_ARENA_BYTES": str(80 << 20)})
    world = worlds(2)
    world.run(without_memory)
    worlds.close()
    for text in map(world.log, range(2)):
        assert text.count("has ordinary memory") == 1, "said once"
        assert "has no room for" in text and "Raise FASTCOLL_ARENA_BYTES" in text


def trains(share: bool):
    if share:
        begin()
    model = DistributedDataParallel(network(torch.float, width=512))
    training.train(model, 10, torch.optim.AdamW(model.parameters()))
    return [parameter.detach().clone() for parameter in model.parameters()]


def synchronizes(share: bool, wire: torch.dtype | None):
    """Large gradients are messages of their own then, small ones one message."""
    if share:
        begin()
    model = network(torch.float, width=512)
    synchronizer = GradientSynchronizer(model, gradient_norm=True, wire_dtype=wire)
    assert synchronizer.settings.alone is share
    for step in range(3):
        model.zero_grad()
        training.loss_of(model, here().rank, step, torch.float).backward()
        norm = synchronizer.grad_norm()
        gradients = [parameter.grad for parameter in model.parameters()]
        exact = torch.linalg.vector_norm(torch.cat([g.double().reshape(-1) for g in gradients]))
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0.0)
    return [gradient.clone() for gradient in gradients]


@pytest.mark.parametrize(
    "job, arguments", [(trains, []), (synchronizes, [None]), (synchronizes, [torch.bfloat16])]
)
def test_training_has_the_same_bits(own_worlds, job, arguments):
    world = own_worlds(2)
    private = world.run(job, False, *arguments)
    for rank, tensors in enumerate(world.run(job, True, *arguments)):
        for one, other in zip(tensors, private[rank], strict=True):
            assert_same(one, other)
