"""Jobs under torchrun, torch's launcher, in separate processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from backend import BACKEND
from launcher import import_path

from fastcoll.bench.namespaces import INTERFACE, Cluster

SCRIPTS = Path(__file__).parent / "features" / "scripts"


def torchrun(
    script: str,
    *arguments: object,
    ranks: int = 2,
    hosts: int = 1,
    max_restarts: int = 0,
    environment: dict[str, str] | None = None,
    deadline: float = 240.0,
    cluster: Cluster | None = None,
    monitor: float = 0.1,
) -> str:
    """Run a script of ``features/scripts``, or a module, and return its output; raise if it fails.

    ``monitor`` is the seconds between two looks of an agent at its ranks. After a look that finds a dead one, it ends
    the others. ``hosts`` is the number of agents, each on its own simulated host with ``ranks`` ranks, or on a host of
    ``cluster``.
    """
    hosts = cluster.hosts if cluster else hosts
    # The store runs in this process, so no other process can take its port before the agents start.
    meeting = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    endpoint = f"{cluster.address(0)}:29500" if cluster else f"127.0.0.1:{meeting.port}"
    program = [str(SCRIPTS / script)] if script.endswith(".py") else ["-m", script]
    shared = {
        **os.environ,
        "FASTCOLL_TEST_BACKEND": BACKEND,
        "PYTHONPATH": import_path(),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    with tempfile.TemporaryFile("w+") as output:

        def agent_of(host: int) -> "subprocess.Popen[bytes]":
            command = [
                *[sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}"],
                *["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"],
                # torchrun finds the endpoint's owner through a name server, which does not have these hosts.
                f"--rdzv-conf=is_host={int(cluster is not None and host == 0)}",
                f"--local-addr={cluster.address(host) if cluster else '127.0.0.1'}",
                *[f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"],
                *[f"--monitor-interval={monitor}", *program, *map(str, arguments)],
            ]
            streams = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            if cluster:
                return cluster.spawn(
                    host, command, {**shared, "GLOO_SOCKET_IFNAME": INTERFACE}, **streams
                )
            pretended = {"FASTCOLL_HOST_ID": f"host {host}"} if hosts > 1 else {}
            return subprocess.Popen(command, env={**shared, **pretended}, **streams)

        agents = [agent_of(host) for host in range(hosts)]
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
