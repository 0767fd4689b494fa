"""The rank's side of a companion: a backend that lives in processes of its own."""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any

import torch

from fastcoll.bench.candidate import Candidate
from fastcoll.bench.channel import Channel, Refused, accept, connect, listen
from fastcoll.bench.collectives import Case
from fastcoll.bench.control import Control
from fastcoll.bench.environments import ENVIRONMENTS, Environment
from fastcoll.bench.options import DTYPES
from fastcoll.bench.peer import Peer
from fastcoll.bench.turn import Call, Lost

__all__ = ["CompanionPeer"]

_START_SECONDS = 60.0  # at least: to import torch on a busy machine takes long
_GRACE = 10.0  # seconds that processes get to end by themselves


class _Processes:
    """What a rank has started: its companion, or all ranks' through a launcher, or nothing."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(self, command: list[str], variables: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def ended(self, wait: float = 0.0) -> str:
        """Returns how they ended, with their last line that names an error, or the very last; "" while they run."""
        if self._process is None or self._log is None:
            return ""
        try:
            status = self._process.wait(wait)
        except subprocess.TimeoutExpired:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        words = [line.strip(" =") for line in lines if any(map(str.isalpha, line))]
        said = next((line for line in reversed(words) if "Error" in line), (words or [""])[-1])
        return f"it ended with status {status}" + (f": {said}" if said else "")

    def stop(self) -> None:
        """Waits for their end, and then brings it about."""
        if self._process is None or self._log is None:
            return
        for bring_about in (None, self._process.terminate, self._process.kill):
            if bring_about is not None:
                bring_about()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
                break
        self._log.close()
        self._process = self._log = None


class CompanionPeer(Peer):
    """A backend in a companion of each rank. See companion.py for what a companion does.

    Attributes:
        environments: By name of the backend.
    """

    environments: Mapping[str, Environment] = ENVIRONMENTS

    def __init__(self, name: str, control: Control, timeout: timedelta) -> None:
        super().__init__(name, control, timeout)
        environment = self.environments[name]
        self.settings = environment.variables
        self._why = ""
        self._used = 0.0
        self._processes = _Processes()
        address = f"fastcoll.bench.{control.all_gather(secrets.token_hex(16))[0]}"
        listener = listen(f"{address}.{control.rank}")
        control.barrier()  # all listen, before any companion can connect
        self._seconds = timeout.total_seconds()
        start = max(_START_SECONDS, self._seconds)
        self._channel: Channel | None = None
        try:
            if control.rank == 0 or not environment.launcher:
                arguments = [name, environment.peer, address]
                arguments += [",".join(environment.rank_variables), str(start)]
                self._processes.start(
                    environment.command(control.world_size, arguments),
                    environment.process_variables(),
                )
            self._channel = accept(listener, start, self._processes.ended)
            self.library = self._received(start)
        except Exception as error:
            if environment.launcher and control.rank == 0:
                _tell(address, control.world_size, str(error))
            self._end()
            raise

    @classmethod
    def missing(cls, name: str, device: torch.device) -> str:
        """Looks for what `make peers` installs."""
        if device.type != "cpu":
            return "its companions move CPU tensors only"
        return cls.environments[name].missing()

    def prepare(self, case: Case) -> Candidate:
        """Has the companion allocate the same case."""
        dtype = next(name for name, dtype in DTYPES.items() if dtype == case.dtype)
        self.ask("prepare", case.collective.name, case.size, dtype, case.op, case.root)
        return _CompanionCandidate(self)

    def cpu_seconds(self) -> float:
        """Asks the companion."""
        with suppress(Lost):
            self._used = float(self.ask("cpu_seconds"))
        return self._used

    def ask(self, request: str, *arguments: object) -> Any:
        """Makes a request of the companion.

        Raises:
            Lost: It has ended, or did not answer in time; it is asked no more.
            Refused: It says what went wrong.
        """
        if self._channel is None:
            raise Lost(self._why)
        try:
            self._channel.send([request, *arguments])
            return self._received(self._seconds)
        except Lost as error:
            self._why = f"{self._processes.ended(wait=1.0) or error}, asked for {request!r}"
            self._end()
            raise Lost(self._why) from error

    def close(self) -> None:
        """Ends the companion."""
        if self._channel is not None:
            with suppress(Lost, Refused):
                self.ask("close")
        self._end()

    def _received(self, timeout: float) -> Any:
        assert self._channel is not None
        answer = self._channel.receive(timeout)
        if "problem" in answer:
            raise Refused(answer["problem"])
        return answer["result"]

    def _end(self) -> None:
        """Closes the channel: with it the companion ends, whatever it is doing, and then its launcher."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._processes.stop()


class _CompanionCandidate(Candidate):
    """The case that was prepared last."""

    def __init__(self, peer: CompanionPeer) -> None:
        self._peer = peer

    def verify(self, first_seed: int, times: int) -> int:
        return int(self._peer.ask("verify", first_seed, times))

    def clear(self) -> None:
        self._peer.ask("clear")

    def turn(self, meet: Call, warmup: int, calls: int) -> list[float]:
        meet()
        try:
            return [float(time) for time in self._peer.ask("turn", warmup, calls)]
        except Refused as error:  # after which nobody knows where the other ranks are
            raise Lost(str(error)) from error


def _tell(address: str, ranks: int, why: str) -> None:
    """Answers in place of companions that will not come."""
    for rank in range(1, ranks):
        with suppress(OSError, Lost):
            connect(f"{address}.{rank}").send({"problem": why})
