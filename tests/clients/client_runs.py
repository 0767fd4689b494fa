"""``client_runs.py``: trains each framework with gloo and with fastcoll in turns, and compares.

    PYTHONPATH=tools python tests/clients/client_runs.py                      all of them, 2 and 4 ranks
    PYTHONPATH=tools python tests/clients/client_runs.py ddp ray --rounds 5   some; the record keeps the others

The exit status is 1 if a training failed, ran on another backend than the one asked for, or ended with
other losses than gloo's.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import client_environments
from client_record import compared, has_result, parsed
from clients import CLIENTS, ENVIRONMENTS, PREPARED, Client

_RECORD = Path(__file__).resolve().parents[2] / "bench" / "results" / "clients_cpu.jsonl"
_TRAININGS = Path(__file__).parent / "trainings"
_DEADLINE = 600.0
_ENDING = 20.0  # seconds that a launcher gets to end its ranks


def _train(client: Client, ranks: int, backend: str) -> dict[str, Any]:
    """Run one training and return its result; RuntimeError if it has none."""
    command = [str(client_environments.python(client.environment))]
    if client.torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    extensions = client_environments.extensions(client.environment)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FASTCOLL_", "BACKEND"))}
    job = subprocess.Popen(
        [*command, str(_TRAININGS / client.script)],
        env={
            **inherited,
            "OMP_NUM_THREADS": "1",
            "RANKS": str(ranks),
            "HF_HUB_OFFLINE": "1",
            "TORCH_EXTENSIONS_DIR": str(extensions),
            **client.variables(backend),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = job.communicate(timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        for ending in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(job.pid, ending)
            try:
                printed, _ = job.communicate(timeout=_ENDING)
                break
            except subprocess.TimeoutExpired:
                continue
        raise RuntimeError(f"no end after {_DEADLINE:g} s") from None
    ended = f"{backend} ended with status {job.returncode}"
    if job.returncode and (backend == "fastcoll" or not has_result(printed)):
        raise RuntimeError(f"{ended}:\n{printed[-4000:]}")
    # Gloo's threads abort some processes at their exit, after all steps.
    return {**parsed(printed, backend, ranks), "ended": ended if job.returncode else "well"}


def _measure(client: Client, ranks: int, rounds: int) -> dict[str, Any]:
    """Train with both backends in turns, the first of a round being the second of the next."""
    runs: dict[str, list[dict[str, Any]]] = {"gloo": [], "fastcoll": []}
    for turn in range(rounds):
        for backend in sorted(runs, reverse=turn % 2 == 0):
            runs[backend].append(_train(client, ranks, backend))
    return compared(runs, ranks)


def _client(name: str, ranks: list[int], rounds: int) -> dict[str, Any]:
    client = CLIENTS[name]
    entry: dict[str, Any] = {
        "title": client.title,
        "setting": client.setting,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rounds": rounds,
        "ranks": {},
    }
    for count in ranks:
        try:
            environment = client.environment
            packages, prepare = ENVIRONMENTS[environment], PREPARED.get(environment, "")
            client_environments.install(environment, packages, prepare)
            case = _measure(client, count, rounds)
        except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            output = getattr(error, "output", None) or ""
            print(f"{name}, {count} ranks: {error}\n{output}", flush=True)
            case = {"problem": str(error).splitlines()[0]}
        else:
            from client_tables import client_result

            print(f"{name}, {count} ranks: {client_result(case)}", flush=True)
        entry["ranks"][str(count)] = {**case, "load_average": os.getloadavg()[0]}
    return entry


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the record and the page's table."""
    parser = argparse.ArgumentParser(prog="client_runs.py", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(CLIENTS)}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"expected some of {', '.join(CLIENTS)}, got {', '.join(sorted(unknown))}")
    # Here, as it takes seconds and imports torch.

    import page

    from fastcoll.bench.conditions import describe_run
    from fastcoll.bench.record import read_record, write_record

    path = _RECORD
    before = read_record(path)["cases"] if path.exists() else []
    known = {case["client"]: case for case in before}
    record = describe_run("PYTHONPATH=tools python tests/clients/client_runs.py")
    failed = False
    for name in options.names or CLIENTS:
        entry = _client(name, options.ranks, options.rounds)
        failed = failed or any(not case.get("agrees") for case in entry["ranks"].values())
        earlier = known.get(name, {}).get("ranks", {})
        entry["ranks"] = dict(sorted({**earlier, **entry["ranks"]}.items()))
        known[name] = {"client": name, **entry}
        record["cases"] = [known[one] for one in CLIENTS if one in known]
        write_record(path, record)
    if failed:
        print(
            "docs/guides/frameworks.md is as it was: a training failed, or its losses are not gloo's"
        )
        return 1
    page.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
