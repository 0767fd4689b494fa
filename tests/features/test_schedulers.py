"""The ways of docs/guides/several-hosts.md to start under Slurm and Kubernetes: their variables, without Slurm."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from backend import BACKEND, beyond_gloo
from torchrun import SCRIPTS
from training import assert_like, train_alone, trained

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    beyond_gloo("how fastcoll's hosts are started"),
]

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "several-hosts.md"
NODES, EACH = 2, 2
STEPS = 4

SRUN = f"""#!{sys.executable}
import os, re, subprocess, sys
each = int(re.fullmatch("--ntasks-per-node=(.+)", sys.argv[1])[1])
tasks = [
    subprocess.Popen(sys.argv[2:], env={{
        **os.environ, "SLURM_NTASKS": str({NODES} * each), "SLURM_PROCID": str(node * each + local),
        "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "FASTCOLL_HOST_ID": f"node {{node}}",
    }})
    for node in range({NODES}) for local in range(each)
]
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = f"""#!{sys.executable}
import sys
assert sys.argv[1:] == ["show", "hostnames", "node[0-1]"], sys.argv
sys.stdout.write("localhost\\nanother\\n")
"""


@pytest.fixture
def environment(tmp_path):
    """Variables of a shell on the first node, which finds srun and scontrol."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    tests = str(SCRIPTS.parent.parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        "FASTCOLL_DEBUG": "INFO",
        "FASTCOLL_TEST_BACKEND": BACKEND,
        "PET_LOCAL_ADDR": "127.0.0.1",  # the node's name, by which its peers find it, is not known here
    }


@pytest.fixture
def port():
    """A port that no other process is given during the test.

    The socket does not listen, so a store, which reuses addresses, can.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def of_the_document(path: Path, port: int) -> list[str]:
    """Return the two ways of the document to start under Slurm, for nodes of EACH ranks."""
    text = DOCUMENT.read_text().partition("## Slurm")[2]
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert block is not None
    script = f"{SCRIPTS / 'train.py'} {path} {STEPS} destroy"
    lines = block[1].replace("=8", f"={EACH}").replace("29500", str(port))
    first, second = lines.replace("script.py", script).split("\n\n")
    head = first.splitlines()[0]
    assert head.startswith("head=")
    return [first, f"{head}\n{second}"]


def assert_trained(printed: str, path: Path, ranks: int) -> None:
    assert all(f"rank {rank} of {ranks}" in printed for rank in range(ranks)), printed
    assert "on 2 hosts" in printed, printed
    assert_like(trained(path), train_alone(STEPS, ranks))


@pytest.mark.parametrize("way", [0, 1], ids=["torchrun a node", "rank a task"])
def test_slurm(tmp_path, environment, port, way):
    command = of_the_document(tmp_path / "model", port)[way]
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": str(NODES), "SLURM_JOB_ID": "4711"}
    done = subprocess.run(
        ["bash", "-eu", "-c", command],
        env={**environment, **job},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout
    assert_trained(done.stdout, tmp_path / "model", NODES * EACH)


def test_kubernetes(tmp_path, environment, port):
    """Two pods of Kubeflow's TrainJob."""
    command = ["torchrun", str(SCRIPTS / "train.py"), str(tmp_path / "model"), str(STEPS)]
    jobs = [
        subprocess.Popen(
            [*command, "destroy"],
            env={
                **environment,
                "FASTCOLL_HOST_ID": f"pod {pod}",
                "PET_NNODES": str(NODES),
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": str(pod),
                "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for pod in range(NODES)
    ]
    printed = "".join(job.communicate(timeout=1000)[0] for job in jobs)
    assert [job.returncode for job in jobs] == [0] * NODES, printed
    assert_trained(printed, tmp_path / "model", NODES)
