"""Jobs under torchrun, the stock launcher, in processes of their own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from backend import BACKEND

__all__ = ["torchrun"]

SCRIPTS = Path(__file__).parent / "features" / "scripts"


def torchrun(
    script: str,
    *arguments: object,
    ranks: int = 2,
    max_restarts: int = 0,
    environment: dict[str, str] | None = None,
    deadline: float = 100.0,
) -> str:
    """Run a script of ``features/scripts`` and return what it printed; raise if it fails."""
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone"],
        *[f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"],
        *["--monitor-interval=0.1", str(SCRIPTS / script), *map(str, arguments)],
    ]
    paths = [str(SCRIPTS.parent.parent), os.environ.get("PYTHONPATH", "")]
    job = subprocess.Popen(
        command,
        env={
            **os.environ,
            "FASTCOLL_TEST_BACKEND": BACKEND,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = job.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)  # the agent ends its workers
        try:
            printed, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            printed, _ = job.communicate()
        raise AssertionError(f"{script} took more than {deadline:g} s:\n{printed}") from None
    assert job.returncode == 0, f"{script} ended with {job.returncode}:\n{printed}"
    return printed
