"""The launcher itself, without torch, which it loads for others."""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import connection
from pathlib import Path

import psutil
import pytest
from launcher import Launcher, LauncherFailed, default

TESTS = Path(__file__).parents[1]


@pytest.fixture
def bare():
    """A launcher that has nothing loaded."""
    launcher = Launcher({"OF_THE_LAUNCHER": "1"}, preload=[])
    yield launcher
    launcher.close()


def gone(pid: int) -> bool:
    """Wait for the end of a process of another parent."""
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def tell_surroundings(channel: connection.Connection, word: str) -> None:
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    variables = {name: os.environ.get(name) for name in ("OF_THE_LAUNCHER", "GIVEN", "HOME")}
    leads = os.getsid(0) == os.getpid()
    atexit.register(print, "at exit")
    channel.send_bytes(pickle.dumps((word, interrupts, leads, variables, os.getcwd())))


def surroundings(launcher, scratch, **named):
    ours, theirs = connection.Pipe()
    with theirs:
        process = launcher.start(
            tell_surroundings, "a", log=scratch / "log", channel=theirs, **named
        )
    found = pickle.loads(ours.recv_bytes())
    assert process.wait(60) == 0
    return found, (scratch / "log").read_text()


def test_a_function_runs_in_its_surroundings(bare, tmp_path):
    environment = {"GIVEN": "2", "HOME": None}
    found, log = surroundings(bare, tmp_path, environment=environment, folder=tmp_path)
    variables = {"OF_THE_LAUNCHER": "1", "GIVEN": "2", "HOME": None}
    assert found == ("a", True, True, variables, str(tmp_path))
    assert log == ""
    assert surroundings(bare, tmp_path, real_exit=True)[1] == "at exit\n"  # as Python's


def test_a_program_that_does_not_end_shows_its_stack(bare, tmp_path):
    text = "import time\ndef waits():\n    time.sleep(1000)\nwaits()"
    ended = bare.program(text, tmp_path, limit=0.5)
    assert ended.status == -signal.SIGABRT
    assert "in waits" in ended.stderr


def test_ranks_die_with_a_test_process_that_is_killed(tmp_path):
    text = f"""
        import sys, time
        from pathlib import Path
        from launcher import Launcher
        launcher = Launcher(preload=[])
        process = launcher.start("import time; time.sleep(1000)", log=Path({str(tmp_path)!r}, "log"))
        print(process.pid, flush=True)
        time.sleep(1000)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        server = psutil.Process(pid).ppid()
        worker.kill()
    assert gone(pid) and gone(server)


def test_a_launcher_that_cannot_load_says_why():
    launcher = Launcher(preload=["no_such_module"])
    with pytest.raises(LauncherFailed, match="No module named 'no_such_module'"):
        launcher.wait()
    launcher.close()


def test_the_default_launcher_has_one_thread(launcher):
    """Else a fork may find a lock taken for ever."""
    assert default() is launcher
    assert psutil.Process(launcher.pid).num_threads() == 1
