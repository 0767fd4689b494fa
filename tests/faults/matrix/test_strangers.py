"""Processes of the same user that say hello to a rank: only who knows its nonce, from the store, gets memory."""

import array
import fcntl
import mmap
import os
import re
import socket
import struct
import time

import pytest
import torch.distributed as dist
from fault_rank import Rank
from matrix_ranks import works
from rows_elastic import listening, published

MAGIC = 0x314C4C4F43545346
SIZE = 1 << 20
RECORD_OF_PROCESS = 32  # where a record has the nonce of the rank's process


def is_visited(rank: Rank):
    rank.used()
    works(rank)
    rank.tell("ready")
    rank.hear()
    works(rank)
    dist.destroy_process_group()
    return rank.left()


def says_hello(address: object, layout: int, receiver: bytes) -> tuple[bytes, list[int]]:
    """Say a well-formed hello, with memory that is sealed; return the answer and its descriptors."""
    sender = os.urandom(16)
    memory = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, SIZE)
        header = struct.pack("<QII16sQ", MAGIC, layout, os.getpid(), sender, SIZE)
        os.pwrite(memory, header, 0)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        hello = struct.pack("<QII16s16sQ", MAGIC, layout, 56, sender, receiver, SIZE)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(6.0)
            connection.connect(address)
            socket.send_fds(connection, [hello], [memory])
            answer, found, _, _ = connection.recvmsg(64, socket.CMSG_SPACE(8 * 4))
    finally:
        os.close(memory)
    descriptors = array.array("i")
    for _, _, data in found:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return answer, descriptors.tolist()


@pytest.mark.parametrize("knows", [False, True], ids=["has not read the store", "has read it"])
def test_only_who_has_read_the_store_gets_memory(jobs, knows):
    prefix = f"strangers {time.monotonic()}/"
    job = jobs(2, is_visited, prefix=prefix)
    job.hear_all()
    store = dist.TCPStore("127.0.0.1", jobs.port, is_master=False)
    for rank, pid in job.pids.items():
        record = store.get(published(store, prefix, rf"/r/{rank}$"))
        (layout,) = struct.unpack_from("<I", record, 8)
        known = record[RECORD_OF_PROCESS : RECORD_OF_PROCESS + 16]
        (address,) = [place for family, _, place in listening(pid) if family == socket.AF_UNIX]
        assert re.fullmatch(rb"\0fastcoll-[0-9a-f]{32}", address), address
        answer, descriptors = says_hello(address, layout, known if knows else os.urandom(16))
        try:
            # Who has is of the same user and knows the job: that is no boundary, as docs/security.md says.
            assert len(descriptors) == knows and bool(answer) == knows
            for descriptor in descriptors:
                with mmap.mmap(descriptor, 4096) as memory:
                    assert memory[16:32] == known
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    job.tell_all()
    assert set(map(tuple, job.hear_all().values())) == {()}
    job.ended_well()
