"""Sends settings and weights to rollout workers. One worker is lost, and a new one takes its place.

    python examples/rollout.py

Rank 0 is the trainer. In each round it sends an object and a tensor, and all ranks exchange scores. Rank 2 ends in
round 2. The other ranks get an error that names it, leave the group, and repeat the round with a new rank 2.

Expected output, of which the lines of ranks 0 and 1 may be in another order:

    round 0: temperature 1.00, scores [0, 1, 2]
    round 1: temperature 0.50, scores [0, 2, 4]
    rank 0: rank 2 was lost
    rank 1: rank 2 was lost
    round 2: temperature 0.33, scores [0, 3, 6]
    round 3: temperature 0.25, scores [0, 4, 8]
"""

import os

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context

import fastcoll

RANKS, ROUNDS = 3, 4


def play(rank: int, number: int, weights: torch.Tensor, doomed: bool) -> int:
    """Plays a round, and returns the number of the next one; the trainer's number counts."""
    comm = fastcoll.communicator()
    number, temperature = comm.broadcast_object((number, 1 / (number + 1)), src=0)
    if doomed and number == 2:
        os._exit(1)
    comm.broadcast(weights.fill_(number if rank == 0 else -1), src=0)
    scores = comm.all_gather_object(rank * (int(weights[0]) + 1))
    if rank == 0:
        print(f"round {number}: temperature {temperature:.2f}, scores {scores}")
    return int(number) + 1


def serve(rank: int, port: int, generation: int) -> None:
    """Runs one rank: makes a group again whenever a rank of the last one was lost."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    number, weights, doomed = 0, torch.zeros(1000), rank == 2 and generation == 0
    while number < ROUNDS:
        names = dist.PrefixStore(str(generation), store)
        dist.init_process_group("fastcoll", store=names, rank=rank, world_size=RANKS)
        try:
            while number < ROUNDS:
                number = play(rank, number, weights, doomed)
        except dist.DistBackendError as error:
            print(f"rank {rank}: {'rank 2 was lost' if 'rank 2 (pid' in str(error) else error}")
        generation += 1
        dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = get_context("spawn").Process
    workers = [start(target=serve, args=(rank, store.port, 0)) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    workers[2].join()  # it ends, and a scheduler would start another one
    workers[2] = start(target=serve, args=(2, store.port, 1))
    workers[2].start()
    for worker in workers:
        worker.join()
