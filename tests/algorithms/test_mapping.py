"""torch's symmetric memory as the mapper asks for it, and what ends the wait for a peer that does not come."""

import ctypes
import os
from unittest import mock

import pytest
import recording_device
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from suite_rules import until
from torch._C import _distributed_c10d as c10d

from fastcoll import env
from fastcoll._load_cuda import CUDA
from fastcoll.cuda import deadline, mapping
from fastcoll.cuda.errors import Member
from fastcoll.cuda.mapping import TorchSymmetricMemory, rendezvous


def begin(name, seconds=30.0):
    recording_device.add_symmetric_memory()
    memory = CUDA.symmetric_empty(1000, torch.device("recording", 0))
    assert memory.numel() == 1000 and memory.dtype == torch.uint8
    member, store = Member("g", 0, 1), dist.HashStore()
    return deadline.start(lambda: rendezvous(memory, f"fastcoll/g/{name}", member, store, seconds))


def end(call):
    assert call.wait(30)
    call.result()


@on_ranks(1, world="device_world")
def test_a_peer_that_does_not_come_freezes_nobody():
    with recording_device.held_rendezvous():
        call = begin("held")
        # With the GIL held, nobody would ever come to the end of this block.
        assert not call.wait(0.3)
    end(call)


@pytest.mark.parametrize("before", [None, "0"])
@on_ranks(1, world="device_world")
def test_ranks_that_see_one_gpu_each_map_and_the_users_environment_comes_back(before):
    """ "0" is the default; a variable that is removed would move others, which threads may be reading."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    for name in env.SYMMETRIC_SWITCHES:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    call = begin("switches")
    end(call)
    assert recording_device.switches_seen() == ["1", "1"]
    assert [getenv(name.encode()) for name in env.SYMMETRIC_SWITCHES] == [b"0", b"0"]


def environment():
    """The array of the C library's variables: where it lies, and whose entry is where."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    names = []
    while (entry := entries[len(names)]) is not None:
        names.append(entry.split(b"=")[0])
    return ctypes.addressof(entries.contents), names


@on_ranks(1, world="device_world")
def test_no_variable_of_the_environment_moves_while_memory_is_mapped():
    """A group is made where there are GPUs, and later maps memory, while other threads read the environment."""
    for name in env.SYMMETRIC_SWITCHES:
        os.environ.pop(name, None)
    with (
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch.cuda, "device_count", return_value=8),
    ):
        dist.new_group(backend="fastcoll")
    seen = [environment()]
    with recording_device.held_rendezvous():
        call = begin("entries")
        until(recording_device.most_at_once)
        seen.append(environment())
        assert [os.environ[name] for name in env.SYMMETRIC_SWITCHES] == ["0", "0"]
    end(call)
    seen.append(environment())
    assert seen[0] == seen[1] == seen[2]
    assert recording_device.switches_seen() == ["1", "1"]


@on_ranks(1, world="device_world")
def test_memory_is_given_back_without_the_gil():
    """torch waits for the device then, and so for kernels of other groups."""
    recording_device.add_symmetric_memory()
    recording_device.clear()
    memory = CUDA.symmetric_empty(1000, torch.device("recording", 0))
    address = memory.data_ptr()
    with recording_device.held_rendezvous():
        call = deadline.start(lambda: TorchSymmetricMemory().free(memory))
        # With the GIL held, nobody would ever come to the end of this block.
        assert not call.wait(0.3)
    end(call)
    freed = [entry.touches[0].address for entry in recording_device.log("free")]
    assert freed.count(address) == 1


@on_ranks(1, world="device_world")
def test_groups_of_a_process_map_one_after_the_other():
    with recording_device.held_rendezvous():
        first = begin("first")
        until(recording_device.most_at_once)
        second = begin("second", seconds=0.1)
        assert second.wait(30)
        with pytest.raises(dist.DistBackendError, match="another group of this process has been"):
            second.result()
        third = begin("third")
    for call in (first, third):
        end(call)
    assert recording_device.most_at_once() == 1


# --- atomic operations between devices ------------------------------------------------------------


class Driver:
    """The driver of a machine of 4 GPUs, of which 0 and 1, and 2 and 3, have a link that carries atomics."""

    def cuDeviceGet(self, handle, index):
        if index.value > 3:
            return 101  # CUDA_ERROR_INVALID_DEVICE
        handle._obj.value = index.value + 10
        return 0

    def cuDeviceGetP2PAttribute(self, value, attribute, source, target):
        assert attribute == 3
        value._obj.value = int((source.value - 10) // 2 == (target.value - 10) // 2)
        return 0


class Properties:
    def __init__(self, device):
        self.uuid = f"GPU-{device.index}"


def test_gpus_that_cannot_set_each_others_flags_are_named(monkeypatch):
    monkeypatch.setattr(mapping, "_driver", Driver)
    assert mapping._without_atomics(0, [0, 1, 2, 3, 4]) == [2, 3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    mapper = TorchSymmetricMemory()
    mapper.require_atomics(
        torch.device("cuda", 1), ["GPU-1", "GPU-0", "GPU-of-which-nothing-is-seen"]
    )
    with pytest.raises(
        RuntimeError, match="the GPU of rank 2 takes no atomic operations from cuda:1"
    ):
        mapper.require_atomics(torch.device("cuda", 1), ["GPU-1", "GPU-0", "GPU-3"])


def test_without_a_driver_nothing_is_known_of_atomics(monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(mapping, "_driver", missing)
    assert mapping._without_atomics(0, [1, 2]) == []


# --- releases of torch ---------------------------------------------------------------------------


class OfRelease:
    """torch's symmetric memory, as one release or another looks up the ranks: by a process group, or in a table."""

    def __init__(self, by_table):
        self.by_table = by_table
        self.table = {}
        self.found = []

    def set_group_info(self, name, rank, size, store):
        assert name not in self.table
        self.table[name] = (rank, size)

    def rendezvous(self, memory, name, seconds):
        if self.by_table:
            if name not in self.table:
                raise RuntimeError(
                    f"get_group_info: no group info associated with the group name {name}"
                )
            self.found.append(self.table[name])
        else:
            group = c10d._resolve_process_group(name)
            self.found.append((group.rank(), group.size()))
        return "handle"


@pytest.mark.parametrize("by_table", [False, True])
def test_the_ranks_are_found_by_every_release_of_torch(by_table, monkeypatch):
    """No release for CUDA is at hand; what is asked of it is."""
    release = OfRelease(by_table)
    monkeypatch.setattr(c10d, "_SymmetricMemory", release)
    monkeypatch.setattr(CUDA, "symmetric_rendezvous", release.rendezvous)
    for instance in ("first", "second"):
        member = Member("g", 1, 3)
        assert (
            rendezvous(torch.zeros(1), f"fastcoll/g/{instance}", member, dist.HashStore(), 1)
            == "handle"
        )
        with pytest.raises(RuntimeError, match="Could not resolve"):
            c10d._resolve_process_group(f"fastcoll/g/{instance}")
    assert release.found == [(1, 3)] * 2
    assert len(release.table) == 2 * by_table


def test_another_error_of_torch_is_passed_on(monkeypatch):
    class Fails(OfRelease):
        def rendezvous(self, memory, name, seconds):
            raise RuntimeError("overlapping devices")

    monkeypatch.setattr(CUDA, "symmetric_rendezvous", Fails(False).rendezvous)
    with pytest.raises(RuntimeError, match="overlapping devices"):
        rendezvous(torch.zeros(1), "fastcoll/g/third", Member("g", 0, 1), dist.HashStore(), 1)
    with pytest.raises(RuntimeError, match="Could not resolve"):
        c10d._resolve_process_group("fastcoll/g/third")


@pytest.mark.parametrize(
    ("backend", "missing"), [(None, False), ("CUDA", False), ("NVSHMEM", True), ("NCCL", True)]
)
def test_memory_of_another_backend_of_torchs_is_left_alone(monkeypatch, backend, missing):
    monkeypatch.setattr(c10d._SymmetricMemory, "get_backend", staticmethod(lambda device: backend))
    said = TorchSymmetricMemory().missing()
    assert bool(said) == missing and (not missing or f"is that of {backend} here" in said)


def test_what_ranks_have_in_common_that_can_pass_memory_on(monkeypatch, tmp_path):
    mapper = TorchSymmetricMemory()
    common = mapper.host()
    assert common == mapper.host() and len(common.split()) == 3
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # another container's
    assert mapper.host() != common
    assert mapper.missing() == ""


def test_the_name_of_a_device_where_ranks_may_share_it(monkeypatch):
    mapper, device = TorchSymmetricMemory(), torch.device("cuda", 0)
    monkeypatch.setattr(TorchSymmetricMemory, "_uuid", staticmethod(lambda device: "GPU-1"))
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    assert mapper.device_identity(device) == "GPU-1"
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert mapper.device_identity(device) == ""
