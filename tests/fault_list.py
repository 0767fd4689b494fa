"""The faults that fastcoll must survive. ``.ci/run faults`` runs the tests of each with fastcoll and with gloo.

Mark a test, or one of its parameters, with the number of its fault: ``@plays(7)``.
"""

import pytest

FAULTS = {
    # number: (what happens, what must be true then)
    1: ("SIGKILL in the middle of an all_reduce", "an error that names the rank, 0.25 s"),
    2: ("SIGKILL of a rank that has not arrived", "the same"),
    3: ("SIGKILL of a rank that holds 1 GiB", "the same: the memory does not count"),
    4: ("SIGKILL at a random moment of mixed collectives", "the same each time, and no leak"),
    5: ("SIGSTOP", "timeout + 0.5 s; the error shows state T"),
    6: ("a rank never calls", "timeout + 0.5 s; names the rank and its last call"),
    7: ("exit without destroy; a Python exception", "left the group (close notice sent), 1 s"),
    8: ("rank 0 and its store die together", "like 1: no call needs the store"),
    9: ("the store dies", "groups go on; a new group is a DistNetworkError within 5 s"),
    10: ("the link between two hosts is cut", "timeout + 0.5 s"),
    11: ("segmentation fault that dumps 512 MB of core", "an error that names the rank, 5 s"),
    12: ("an exception in the communication thread", "the error on all ranks, no abort"),
    13: ("destroy with work pending", "1 s; wait raises that the group was destroyed"),
    14: ("abort from another thread", "0.1 s on all ranks"),
    15: ("Ctrl-C in a wait", "KeyboardInterrupt within 0.1 s"),
    16: ("wait(timeout) shorter than the group's", "raises in time; the work goes on"),
    17: ("after a timeout: a second call, and the late rank's", "the same error at once"),
    18: ("exit with work pending", "the process ends within 2 s"),
    19: ("use after destroy, double destroy", "everything raises"),
    20: ("fork after init; DataLoader workers", "an error in the child; the parent goes on"),
    21: ("SIGALRM every millisecond (EINTR)", "right results"),
    22: ("the wall clock steps by an hour during a wait", "deadline exact, right results"),
    23: ("shapes differ, small and large", "an error with both calls on all ranks, 1 s"),
    24: ("dtypes differ, of the same and of another size", "the same"),
    25: ("reduce operations differ", "the same"),
    26: ("roots differ", "the same"),
    27: ("different collectives", "the same"),
    28: ("splits of all_to_all disagree", "the same, with the pair's bytes"),
    29: ("two threads on one group, in no order", "a mismatch error or right results"),
    30: ("two threads on two groups, crossed", "right results"),
    31: ("at init: a rank missing, one twice, other world sizes", "in time; names the rank"),
    32: ("/dev/shm of 64 KB, full, or read-only", "works: nothing lies there"),
    33: (
        "memory cannot be reserved: at once, and later",
        "Gloo, slower messages, or an error on all ranks",
    ),
    34: ("SIGKILL of all ranks, then the same job again", "nothing left, no stale state"),
    35: ("squatted names and links in /dev/shm", "works, and touches none"),
    36: ("two jobs with the same group name at once", "both right"),
    37: ("another user opens the memory, takes descriptors, connects", "refused"),
    38: ("ranks under two users", "Gloo; right results"),
    39: ("other mount and IPC namespaces", "works, over shared memory still"),
    40: ("other PID namespaces, equal pids, and a death in one", "works; noticed in 0.25 s"),
    41: ("other network namespaces: two hosts", "Gloo; right results"),
    42: ("8 ranks on one core; the processor time of a wait", "right; below 5 % of a core"),
    43: ("300 groups, each used", "no thread each; all is given back"),
    44: ("2000 outstanding works", "right results, nothing left"),
    45: ("a mixed load for some time", "memory, descriptors, threads stay"),
    46: ("descriptors run out", "all ranks name the rank and the limit; works once there are some"),
    47: ("the first to finish leaves while others read", "right results"),
    48: ("no elements; unaligned; more than 2^31 elements", "right results"),
    49: ("NaN and infinity", "NaN from any rank, the same bits everywhere"),
    50: ("denormal numbers", "kept, on all threads"),
    51: ("integers that overflow", "wrap like torch.add"),
    52: ("tensors with gaps, and transposed", "right results"),
    53: ("a tensor that overlaps itself", "ValueError before anything is sent"),
    54: ("a leaf that requires grad; the version counter", "in place; counted as with gloo"),
    55: ("sparse, float8, conjugated, meta tensors; several dtypes", "a result, or a named error"),
    56: ("torchrun --max-restarts after a SIGKILL", "generation 1 works the first time"),
    57: (
        "a group rebuilt without the dead rank, which joins again",
        "0.1 s after the last rank's error",
    ),
    58: ("garbage in the store where a record or vote should be", "DistStoreError within 5 s"),
    59: ("garbage to every socket that listens", "ignored; no descriptor lost"),
    60: ("another version, or other settings, on one rank", "an error that names both"),
    64: ("placement of memory is refused (NUMA, huge pages)", "works"),
    65: ("NCCL reports an asynchronous error (stand-in)", "names communicator and device"),
    66: ("a call hangs in NCCL; a stream hangs (stand-in)", "timeout that names the call"),
    67: ("NCCL's init fails or hangs on a rank (stand-in)", "both ranks name rank and status"),
    68: ("an abort while a graph is captured (stand-in)", "later calls name it"),
}
"""``make sanitize`` finds data races and memory errors (61, 63); ``make model`` finds lost wake-ups (62)."""

OF_FASTCOLL_ALONE = {12, 33, 38, 41, 58, 60, 65, 66, 67, 68}
"""Faults of its transports, its records and its CUDA half, without counterpart in other backends."""


def plays(number: int) -> pytest.MarkDecorator:
    """Mark a test, or a parameter, with its fault in the list."""
    assert number in FAULTS, number
    return pytest.mark.fault(number)
