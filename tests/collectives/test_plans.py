"""Plans of fastcoll.communicator. test_collectives.py compares the results of all plans."""

import gc
import queue
import threading
import time

import pytest
import torch
import torch.distributed as dist
from backend import beyond_gloo
from on_ranks import on_ranks
from suite_rules import bound

import fastcoll

pytestmark = [beyond_gloo("fastcoll's communicator"), *on_ranks(2)]


@on_ranks(2, 3)
def test_a_plan_reads_and_writes_what_is_there_when_it_runs():
    comm = fastcoll.communicator()
    whole = torch.zeros(4, 2)
    part = whole[:, 0]  # staged: it is not one run of memory
    plan = comm.all_reduce_plan(part)
    for turn in range(3):
        whole.fill_(float(turn))
        plan()
        assert part.tolist() == [float(turn * comm.size)] * 4
        assert whole[:, 1].tolist() == [float(turn)] * 4


def test_a_plan_keeps_its_tensors_alive():
    comm = fastcoll.communicator()
    tensor = torch.full((100_000,), 1.0)
    address, plan = tensor.data_ptr(), comm.all_reduce_plan(tensor)
    del tensor
    gc.collect()
    others = [torch.empty(100_000) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    plan()


MOVES = {
    "resize_": lambda tensor: tensor.resize_(1 << 20),
    "shrunk": lambda tensor: tensor.resize_(2),
    "set_": lambda tensor: tensor.set_(torch.ones(8)),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
}


def message_plan(comm, tensor: torch.Tensor):
    return comm.send_plan(tensor, 1) if comm.rank == 0 else comm.recv_plan(tensor, 0)


PLANS = {"all_reduce": lambda comm, tensor: comm.all_reduce_plan(tensor), "message": message_plan}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", MOVES)
def test_a_plan_refuses_a_tensor_that_left_its_memory(how, plan):
    comm = fastcoll.communicator()
    tensor = torch.ones(8)
    plan = PLANS[plan](comm, tensor)
    plan()
    MOVES[how](tensor)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has left its memory .* Make the plan anew"):
            plan()
    comm.barrier()


def test_plans_of_messages_meet_other_messages_in_order():
    comm = fastcoll.communicator()
    peer = 1 - comm.rank
    sent, received, other = torch.zeros(3, 2)[:, 0], torch.zeros(3), torch.zeros(3)
    plan = comm.sendrecv_plan(sent, peer, received, peer, tag=3)
    for turn in range(4):
        sent.fill_(2.0 * turn + comm.rank)
        if turn % 2 == 0:
            plan()
        else:
            work = dist.irecv(other, peer, tag=3)
            dist.send(sent, peer, tag=3)
            work.wait()
            received.copy_(other)
        assert received.tolist() == [2.0 * turn + peer] * 3


@pytest.mark.parametrize("elements", [1, 5000, 300_000])
def test_a_plan_sends_ahead_of_its_receives(elements):
    comm = fastcoll.communicator()
    tensor = torch.zeros(elements)
    plan = message_plan(comm, tensor)
    for turn in range(20):
        if comm.rank == 0:
            tensor.fill_(float(turn))
        elif turn == 0:
            time.sleep(0.05)
        plan()
        assert tensor[0] == tensor[-1] == float(turn)


def test_a_plan_of_all_to_all_in_one_buffer():
    comm = fastcoll.communicator()
    whole = torch.zeros(8)
    plan = comm.all_to_all_plan(whole[4:], whole[:4])
    for turn in range(3):
        whole[:4] = 10.0 * turn + comm.rank
        plan()
        assert whole[4:].tolist() == [10.0 * turn] * 2 + [10.0 * turn + 1] * 2


def test_a_plan_is_for_one_thread_at_a_time():
    comm = fastcoll.communicator()
    tensor = torch.ones(3)
    plan = comm.all_reduce_plan(tensor)
    raised: queue.Queue[str] = queue.Queue()

    def run() -> None:
        try:
            plan()
        except ValueError as error:
            raised.put(str(error))

    if dist.get_rank() == 0:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert "runs on another thread" in raised.get(timeout=bound(5.0))
        dist.send(torch.ones(1), 1)
        for thread in threads:
            thread.join()
    else:
        dist.recv(torch.ones(1), 0)
        plan()
    assert tensor.tolist() == [2.0] * 3
