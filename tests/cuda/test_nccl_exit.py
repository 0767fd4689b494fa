"""The interpreter ends within seconds and with its own status, whatever the communicators are doing."""

import textwrap

import pytest

START = """
import gc, os, sys, threading, time
import torch, torch.distributed as dist
from nccl_ranks import CPU, Tensors, stand_in
from fastcoll.cuda import deadline, nccl_life
from fastcoll.cuda.errors import Member
from fastcoll.cuda.nccl_init import create_communicator
tensor = torch.ones(4)

def create(timeout=30, size=1):
    return create_communicator(
        dist.HashStore(), Member("g", 0, size), CPU, timeout, 0, str
    )

def all_reduce(made):
    Tensors(made).all_reduce(tensor, torch.empty(4))  # NCCL gets no call of one rank in place

def hangs_aside(call, function, *arguments):
    stand_in.inject("hang", call)
    threading.Thread(target=function, args=arguments, daemon=True).start()
    stand_in.wait_for(call)
"""

# What a process does before it ends, and the calls that NCCL hears after it.
ENDINGS = {
    "live": ("made = create(); all_reduce(made)", ["abort"]),
    "forgotten": (
        "all_reduce(create()); gc.collect(); assert 'destroy' not in stand_in.names()",
        ["abort"],
    ),
    "destroyed": ("made = create(); made.destroy()", []),
    "aborted": ("made = create(); made.abort()", []),
    "three": ("all = [create() for _ in range(3)]", ["abort"] * 3),
    "in a hanging call": ("made = create(); hangs_aside('allReduce', all_reduce, made)", ["abort"]),
    "with an abort that hangs": ("made = create(); stand_in.inject('hang', 'abort')", ["abort"]),
    "after an abort that hangs": ("made = create(); hangs_aside('abort', made.abort)", []),
    "after a destruction that hangs": ("made = create(); hangs_aside('destroy', made.destroy)", []),
    "without a thread to abort": (
        """
        made = create()
        stand_in.inject('hang', 'destroy')
        def start(function):
            raise RuntimeError("can't start new thread at interpreter shutdown")
        deadline.start = start
        """,
        [],
    ),
    "in an init that hangs": ("hangs_aside('initRank', create)", []),
    "after Ctrl-C in an init that hangs": (
        """
        import signal
        stand_in.inject('hang', 'initRank')
        interrupt = lambda: (stand_in.wait_for('initRank'), os.kill(os.getpid(), signal.SIGINT))
        threading.Thread(target=interrupt, daemon=True).start()
        try:
            create(timeout=30)
        except KeyboardInterrupt:
            assert stand_in.names()[-1] == 'initRank'  # an abort might free what the init still uses
        else:
            raise AssertionError
        """,
        [],
    ),
    "after an init that hangs": (
        """
        stand_in.inject('hang', 'initRank')
        try:
            create(timeout=0.3)
        except dist.DistBackendError as error:
            assert 'has not ended here' in str(error)
        """,
        [],
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_interpreter_ends(script, tmp_path, name):
    code, after = ENDINGS[name]
    log = tmp_path / "calls"
    mark = 'open(os.environ["FAKE_NCCL_LOG"], "a").write("end\\n"); sys.stdout.flush(); sys.exit(3)'
    seconds = 0.5 if "abort that hangs" in name else 30
    limit = f"nccl_life.ABORT_SECONDS = {seconds}"
    program = "\n".join([START, limit, textwrap.dedent(code), mark])
    process = script(program, FAKE_NCCL_LOG=str(log), limit=40)
    assert process.status == 3, process.stderr
    calls = [line.split()[0] for line in log.read_text().splitlines()]
    assert calls[calls.index("end") + 1 :] == after
    if "hang" not in name:
        assert process.stderr == ""


@pytest.mark.parametrize("others", [0, 1])
def test_a_thread_that_makes_a_communicator_gives_up_before_the_interpreter_ends(script, others):
    """CPython ends a thread that comes back from C++ then, in a way that ends the process by SIGABRT."""
    process = script(
        START
        + textwrap.dedent(f"""
        stand_in.inject('hang', 'initRank')
        threading.excepthook = lambda thread: os.write(1, str(thread.exc_value).encode())
        threading.Thread(target=create, args=(30, 1 + {others}), daemon=True).start()
        while not nccl_life._making: time.sleep(0.001)
        sys.exit(3)
        """)
    )
    assert process.status == 3, process.stderr
    assert (
        process.stdout
        == f"fastcoll.nccl_init [group 'g', rank 0/{1 + others}]: the interpreter ends"
    )


def test_a_forked_child_uses_nothing_and_ends(script):
    process = script(
        START
        + textwrap.dedent("""
        made = create()
        child = os.fork()
        if child == 0:
            stand_in.clear()
            forked = f"this process was forked from {os.getppid()}"
            uses = {
                "the group was aborted": lambda: all_reduce(made),
                forked: lambda: made.split(0, 0, "part"),
            }
            for text, use in uses.items():
                try:
                    use()
                except dist.DistBackendError as error:
                    assert text in str(error), error
                    assert text != forked or "spawn" in str(error)
                else:
                    os._exit(1)
            assert "forked" in made.closed
            made.abort(), made.destroy()
            use = uses = None
            del made
            gc.collect()
            assert stand_in.calls() == []
            create().destroy()  # its own it may have
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        all_reduce(made)
        made.destroy()
        """)
    )
    assert process.status == 0, process.stderr
