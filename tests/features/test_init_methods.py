"""Ways to say init_process_group."""

import contextlib
import os
import random
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend import BACKEND, beyond_gloo
from on_ranks import on_ranks
from oracle import assert_same
from world import here, init_group


@contextlib.contextmanager
def kept_ports(count):
    """Ports that only a store of rank 0 can listen at.

    They lie below those that the kernel gives to a connecting socket: one of these could be taken meanwhile, or a rank
    that comes first could connect to itself. A bound socket keeps each from other tests; with SO_REUSEADDR it lets
    a store listen, which sets that too.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        ports = []
        while len(ports) < count:
            keeper = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                keeper.bind(("127.0.0.1", random.randrange(10_000, first)))
                keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                ports.append(keeper.getsockname()[1])
        yield ports


def use_group():
    everyone = list(range(here().size))
    for group in (None, dist.new_group(everyone)):
        tensor = torch.full((5,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, torch.full((5,), float(sum(r + 1 for r in everyone))))


def by_url(url, name):
    dist.init_process_group(
        name,
        init_method=url,
        rank=here().rank,
        world_size=here().size,
        timeout=timedelta(seconds=30),
    )
    assert dist.get_backend() == name
    use_group()
    dist.destroy_process_group()


def by_environment(*ports):
    """The variables that Kubeflow's PyTorchJob sets."""
    os.environ.update(MASTER_ADDR="localhost", RANK=str(here().rank), WORLD_SIZE=str(here().size))
    # Rank 0's store of the first group may listen still when another rank comes for the second.
    for port, arguments in zip(ports, [{}, {"init_method": "env://"}], strict=True):
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group(BACKEND, **arguments)
        use_group()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "name",
    [
        *(BACKEND, f"cpu:{BACKEND}", f"cpu:{BACKEND},cuda:{BACKEND}"),
        pytest.param(
            f"cpu:{BACKEND},cuda:nccl",
            marks=pytest.mark.skipif(
                not (dist.is_nccl_available() and torch.cuda.is_available()),
                reason="torch finds no CUDA device, or has no NCCL, which this names",
            ),
        ),
    ],
)
@on_ranks(2, init=False)
def test_file(name):
    by_url(f"file://{here().scratch}/store", name)


@pytest.mark.parametrize("size", [1, 3])
def test_tcp(world, size):
    with kept_ports(1) as (port,):
        world(size).run(by_url, f"tcp://127.0.0.1:{port}", BACKEND, init=False)


def test_environment(world):
    with kept_ports(2) as ports:
        world(3).run(by_environment, *ports, init=False)


def by_store(kind, port):
    if kind == "file":
        store = dist.FileStore(str(here().scratch / "store"), here().size)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store = dist.PrefixStore("mine", store)
    dist.init_process_group(BACKEND, store=store, rank=here().rank, world_size=here().size)
    use_group()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_store(world, kind):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world(2).run(by_store, kind, server.port, init=False)


@beyond_gloo("takes no fastcoll.Options")
@on_ranks(2, init=False)
def test_options():
    import fastcoll

    init_group(pg_options=fastcoll.Options())
    use_group()
    group = dist.new_group(list(range(here().size)), pg_options=fastcoll.Options())
    dist.barrier(group=group)
