"""Operators and models on the recording device."""

import copy

import pytest
import recording_device as recording
import torch
import torch.distributed as dist
from torch import nn


def factories_and_copies():
    for device in ("privateuseone:0", "recording:1"):
        assert torch.empty(4, device=device).device == torch.device(device)
        assert torch.zeros(3, device=device).tolist() == [0, 0, 0]
        assert torch.full((2,), 7, device=device).tolist() == [7, 7]
        assert torch.arange(5, device=device).tolist() == [0, 1, 2, 3, 4]
        assert torch.tensor([[1.5], [2.5]], device=device).tolist() == [[1.5], [2.5]]
        assert torch.linspace(0, 1, 3, device=device).tolist() == [0, 0.5, 1]
    there = torch.arange(6, device="recording:0").to("recording:1")
    assert there.device.index == 1
    assert there.cpu().tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.ones(3).recording(1).device == torch.device("recording:1")
    assert torch.empty(0, device="recording:0").sum().item() == 0


def random_numbers_are_those_of_cpu():
    torch.manual_seed(3)
    expected = [torch.randn(5), torch.randperm(7), torch.rand(2, 2)]
    torch.manual_seed(3)
    drawn = [
        torch.randn(5, device="recording"),
        torch.randperm(7, device="recording"),
        torch.rand(2, 2, device="recording"),
    ]
    for ours, theirs in zip(drawn, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def views_share_memory():
    base = torch.zeros(4, 6, device="recording:0")
    views = [
        base[1:3, ::2],
        base.t(),
        base.view(-1),
        base.view(2, 12).unfold(1, 3, 3),
        base.reshape(6, 4),
        base.unsqueeze(0).expand(2, 4, 6),
        base.view(torch.int32),
        torch.view_as_complex(base.view(4, 3, 2)),
        base.detach(),
        base.split(2)[1],
    ]
    for view in views:
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    views[0].fill_(5)
    expected = torch.zeros(4, 6)
    expected[1:3, ::2] = 5
    assert torch.equal(base.cpu(), expected)
    alias = torch.empty(0, device="recording:0").set_(base.untyped_storage(), 6, (6,), (1,))
    assert alias.tolist() == expected[1].tolist()


def strides_and_types():
    transposed = torch.arange(12.0).view(3, 4).t()
    moved = transposed.to("recording:0")
    assert moved.stride() == transposed.stride()
    assert torch.equal(moved.cpu(), transposed)
    assert torch.equal((moved @ moved.t()).cpu(), transposed @ transposed.t())
    for dtype in (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.complex64):
        ones = torch.ones(3, device="recording:0").to(dtype)
        assert ones.dtype == dtype
        assert torch.equal(ones.cpu(), torch.ones(3, dtype=dtype))
    number = torch.tensor([1 + 2j], device="recording:0")
    assert number.conj().cpu().item() == 1 - 2j
    assert number.conj().resolve_conj().item() == 1 - 2j


def memory_grows():
    tensor = torch.arange(4.0, device="recording:0")
    tensor.resize_(8)
    assert tensor[:4].tolist() == [0, 1, 2, 3]
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(32)
    tensor.fill_(2)
    assert tensor.sum().item() == 16
    out = torch.empty(0, device="recording:0")
    torch.add(tensor, tensor, out=out)
    assert out.tolist() == [4.0] * 8


def results_of_writing_operators():
    tensor = torch.ones(3, device="recording:0")
    assert tensor.add_(1) is tensor
    assert tensor.tolist() == [2, 2, 2]
    tensors = [torch.ones(2, device="recording:0"), torch.ones(3, device="recording:0")]
    torch._foreach_mul_(tensors, 3.0)
    assert [t.tolist() for t in tensors] == [[3, 3], [3, 3, 3]]
    values, indices = torch.tensor([3.0, 1.0, 2.0], device="recording:0").sort()
    assert (values.tolist(), indices.tolist()) == ([1, 2, 3], [1, 2, 0])
    assert values.device == indices.device == torch.device("recording:0")
    assert torch.equal(tensor, tensor.clone())


def reported_accesses():
    """The log says of each operator what it read and what it wrote."""
    a, b = torch.ones(4, device="recording:0"), torch.ones(4, device="recording:0")
    out = torch.empty(4, device="recording:0")
    recording.clear()
    torch.mul(a, b, out=out)
    a.copy_(b)
    out[1:3].zero_()
    touches = [
        (entry.what, [(touch.address, touch.bytes, touch.write) for touch in entry.touches])
        for entry in recording.log("launch")
    ]
    assert touches == [
        (
            "aten::mul",
            [(a.data_ptr(), 16, False), (b.data_ptr(), 16, False), (out.data_ptr(), 16, True)],
        ),
        ("aten::copy_", [(b.data_ptr(), 16, False), (a.data_ptr(), 16, True)]),
        ("aten::zero_", [(out.data_ptr() + 4, 8, True)]),
    ]


def new_memory_holds_no_zeros():
    assert torch.empty(4, device="recording:0").abs().min().item() > 1e28


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 16, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 10),
    )


def train(model, device, make_optimizer):
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        images = torch.randn(6, 3, 8, 8, generator=generator).to(device)
        labels = torch.randint(10, (6,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def training_matches_cpu(make_optimizer):
    torch.manual_seed(0)
    on_cpu = network()
    on_device = copy.deepcopy(on_cpu).to("recording:0")
    recording.clear()
    with recording.no_violations():
        losses = train(on_device, "recording:0", make_optimizer)
    assert losses == train(on_cpu, "cpu", make_optimizer)
    for name, value in on_cpu.state_dict().items():
        assert torch.equal(on_device.state_dict()[name].cpu(), value), name


def training_on_a_side_stream():
    torch.manual_seed(0)
    model = network().to("recording:1")
    side = torch.Stream(device="recording:1")
    torch.recording.synchronize(1)
    recording.clear()
    with side:
        train(model, "recording:1", sgd)
    assert {entry.stream for entry in recording.log("launch")} == {recording.name_of(side)}
    side.synchronize()
    assert recording.violations() == []


def objects_travel_as_tensors():
    device = torch.device("recording:0")
    value = {"rank": 3, "words": ["a", "b"]}
    tensor, size = dist.distributed_c10d._object_to_tensor(value, device, None)
    assert tensor.device == size.device == device
    back = dist.distributed_c10d._tensor_to_object(tensor, size, None)
    assert back == value


@pytest.mark.parametrize(
    "case",
    [
        factories_and_copies,
        random_numbers_are_those_of_cpu,
        views_share_memory,
        strides_and_types,
        memory_grows,
        results_of_writing_operators,
        reported_accesses,
        new_memory_holds_no_zeros,
        training_on_a_side_stream,
        objects_travel_as_tensors,
    ],
)
def test_operators(device_world, case):
    device_world(1).run(case, init=False)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_training_matches_cpu(device_world, make_optimizer):
    device_world(1).run(training_matches_cpu, make_optimizer, init=False)
