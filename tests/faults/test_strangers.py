"""Processes of the same user that write to a rank: garbage, and hellos, which need the rank's nonce from the store."""

import array
import contextlib
import fcntl
import mmap
import os
import random
import re
import socket
import struct

import psutil
import pytest
import torch.distributed as dist
from fault_list import plays
from fault_rank import Rank
from rank_calls import all_reduce, works

MAGIC = 0x314C4C4F43545346
SIZE = 1 << 20
RECORD_OF_PROCESS = 32  # where a record has the nonce of the rank's process


def is_visited(rank: Rank):
    rank.used()
    works(rank)
    rank.pause()
    works(rank)
    rank.finish()


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
@pytest.mark.parametrize("silent", [0, 8])
def test_only_who_has_read_the_store_gets_memory(jobs, knows, silent):
    """Also while other connections have sent nothing yet: they do not delay the answer."""
    job = jobs.ready(2, is_visited)
    for rank, pid in job.pids.items():
        record = jobs.store.get(jobs.key(job, rf"/r/{rank}$"))
        (layout,) = struct.unpack_from("<I", record, 8)
        known = record[RECORD_OF_PROCESS : RECORD_OF_PROCESS + 16]
        (address,) = [place for family, _, place in listening(pid) if family == socket.AF_UNIX]
        assert re.fullmatch(rb"\0fastcoll-[0-9a-f]{32}", address), address
        with contextlib.ExitStack() as connections:
            for _ in range(silent):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connections.enter_context(connection).connect(address)
            answer, descriptors = says_hello(address, layout, known if knows else os.urandom(16))
        try:
            # Who has is of the same user and knows the job: that is no boundary, as docs/project/security.md says.
            assert len(descriptors) == knows and bool(answer) == knows
            for descriptor in descriptors:
                with mmap.mmap(descriptor, 4096) as memory:
                    assert memory[16:32] == known
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    job.tell_all()
    job.hear_all()


def listening(pid: int) -> list[tuple[int, int, object]]:
    """Return family, type and address of all sockets on which the process listens."""
    found: set[tuple[int, int, object]] = set()
    for one in psutil.Process(pid).net_connections("all"):
        if one.status == psutil.CONN_LISTEN:
            host = "127.0.0.1" if one.family == socket.AF_INET else "::1"
            found.add((one.family, one.type, (host, one.laddr.port)))
        elif one.family == socket.AF_UNIX and one.laddr:  # of connections too, by the same name
            found.add((one.family, one.type, one.laddr.replace("@", "\0", 1).encode()))
    return sorted(found, key=repr)


def pelt(family: int, kind: int, address: object, chance: random.Random) -> None:
    """Send what does not belong there, with and without descriptors, and leave."""
    magic = MAGIC.to_bytes(8, "little")  # of a hello
    for attempt in range(60):
        with socket.socket(family, kind) as connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            connection.connect(address)
            size = chance.choice([0, 1, 8, 55, 56, 57, 64, 1000, 65536])
            data = chance.randbytes(size)
            if attempt % 3 == 0:
                data = (magic + (3).to_bytes(4, "little") + (56).to_bytes(4, "little") + data)[:56]
            if family == socket.AF_UNIX and attempt % 2:
                socket.send_fds(connection, [data or b"x"], [0] * chance.choice([1, 2, 8, 30]))
            else:
                connection.send(data)


def is_pelted(rank: Rank):
    rank.used()
    works(rank)
    before = len(os.listdir("/proc/self/fd"))
    rank.pause()
    works(rank)
    group = dist.new_group([0, 1])
    all_reduce(rank, 5000, group)
    dist.destroy_process_group(group)
    del group
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors were lost"
    rank.finish()


@plays(59)
def test_garbage_to_every_socket_that_listens(jobs):
    """On one host: Gloo, between hosts, keeps the connection of a stranger that says nothing it knows."""
    job = jobs.ready(2, is_pelted)
    chance = random.Random(59)
    sockets = [found for pid in job.pids.values() for found in listening(pid)]
    assert sockets, "no socket listens"
    for family, kind, address in sockets:
        pelt(family, kind, address, chance)
    job.tell_all()
    job.hear_all()
