"""Jobs under torchrun, the stock launcher, in processes of their own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from backend import BACKEND

__all__ = ["torchrun"]

SCRIPTS = Path(__file__).parent / "features" / "scripts"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _rendezvous(hosts: int) -> list[str]:
    if hosts == 1:
        return ["--standalone"]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{_free_port()}"
    return [f"--nnodes={hosts}", "--rdzv-backend=c10d", endpoint, "--local-addr=127.0.0.1"]


def torchrun(
    script: str,
    *arguments: object,
    ranks: int = 2,
    hosts: int = 1,
    max_restarts: int = 0,
    environment: dict[str, str] | None = None,
    deadline: float = 100.0,
) -> str:
    """Run a script of ``features/scripts``, or a module, and return what it printed; raise if it fails.

    ``hosts``: as many agents, each on a pretended host of its own, with ``ranks`` each.
    """
    program = [str(SCRIPTS / script)] if script.endswith(".py") else ["-m", script]
    command = [
        *[sys.executable, "-m", "torch.distributed.run", *_rendezvous(hosts)],
        *[f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"],
        *["--monitor-interval=0.1", *program, *map(str, arguments)],
    ]
    paths = [str(SCRIPTS.parent.parent), os.environ.get("PYTHONPATH", "")]
    shared = {
        **os.environ,
        "FASTCOLL_TEST_BACKEND": BACKEND,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    with tempfile.TemporaryFile("w+") as output:
        agents = [
            subprocess.Popen(
                command,
                env={**shared, **({"FASTCOLL_HOST_ID": f"host {host}"} if hosts > 1 else {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for host in range(hosts)
        ]
        late = False
        end = time.monotonic() + deadline
        for agent in agents:
            try:
                agent.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
                _end(agent)
        output.seek(0)
        printed = output.read()
    assert not late, f"{script} took more than {deadline:g} s:\n{printed}"
    codes = [agent.returncode for agent in agents]
    assert not any(codes), f"{script} ended with {codes}:\n{printed}"
    return printed


def _end(agent: subprocess.Popen[bytes]) -> None:
    """End an agent and its workers."""
    os.killpg(agent.pid, signal.SIGTERM)  # it ends its workers
    try:
        agent.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
