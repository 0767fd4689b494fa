"""Jobs under torchrun, torch's launcher, in separate processes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from backend import BACKEND

from fastcoll.bench.namespaces import INTERFACE, Cluster

SCRIPTS = Path(__file__).parent / "features" / "scripts"


def _rendezvous(
    hosts: int, cluster: Cluster | None, meeting: dist.TCPStore | None
) -> list[list[str]]:
    """Returns the options of each host's agent; agents meet in the store or on the cluster's first host."""
    if hosts == 1:
        return [["--standalone"]]
    common = [f"--nnodes={hosts}", "--rdzv-backend=c10d"]
    if cluster is None:
        assert meeting is not None
        common.append(f"--rdzv-endpoint=127.0.0.1:{meeting.port}")
        return [[*common, "--rdzv-conf=is_host=0", "--local-addr=127.0.0.1"]] * hosts
    common.append(f"--rdzv-endpoint={cluster.address(0)}:29500")
    # torchrun finds the endpoint's owner through a name server, which does not have these hosts.
    return [
        [*common, f"--local-addr={cluster.address(host)}", f"--rdzv-conf=is_host={int(host == 0)}"]
        for host in range(hosts)
    ]


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
    if cluster is not None:
        hosts = cluster.hosts
    several = hosts > 1 and cluster is None
    # The store runs in this process, so no other process can take its port before the agents start.
    meeting = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if several else None
    program = [str(SCRIPTS / script)] if script.endswith(".py") else ["-m", script]
    commands = [
        [
            *[sys.executable, "-m", "torch.distributed.run", *rendezvous],
            *[f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"],
            *[f"--monitor-interval={monitor}", *program, *map(str, arguments)],
        ]
        for rendezvous in _rendezvous(hosts, cluster, meeting)
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

        def agent_of(host: int) -> "subprocess.Popen[bytes]":
            streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
            if cluster is not None:
                network = {"GLOO_SOCKET_IFNAME": INTERFACE}
                return cluster.spawn(
                    host, commands[host], {**shared, **network}, start_new_session=True, **streams
                )
            pretended = {"FASTCOLL_HOST_ID": f"host {host}"} if hosts > 1 else {}
            return subprocess.Popen(
                commands[host], env={**shared, **pretended}, start_new_session=True, **streams
            )

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
