"""How a rank talks with its companion: one JSON value a line, over a unix socket that vanishes with them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from fastcoll.bench.turn import Lost

__all__ = ["Channel", "Refused", "accept", "connect", "exit_with", "listen", "problem_of"]

_POLL_SECONDS = 0.1


class Refused(RuntimeError):
    """What a companion said of a call that it could not make."""


def problem_of(error: Exception) -> str:
    """Returns the first line of an error, with its type unless it comes from a companion, which added one."""
    text = str(error).strip()
    if not isinstance(error, (Lost, Refused)):
        text = f"{type(error).__name__}: {text}"
    return text.splitlines()[0]


class Channel:
    """One end of a connection.

    Args:
        connection: A connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, value: Any) -> None:
        """Sends a value of types that JSON has.

        Raises:
            Lost: The other end is closed.
        """
        try:
            self._connection.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise Lost(f"it cannot be reached: {error}") from error

    def receive(self, timeout: float | None = None) -> Any:
        """Waits, asleep, for the next value.

        Args:
            timeout: In seconds; None waits for ever.

        Raises:
            Lost: The other end is closed, or nothing came in time.
        """
        self._connection.settimeout(timeout)
        try:
            line = self._file.readline()
        except TimeoutError as error:
            raise Lost(f"it did not answer within {timeout:g} s") from error
        except OSError as error:
            raise Lost(f"it cannot be reached: {error}") from error
        if not line.endswith(b"\n"):
            raise Lost("it has ended")
        return json.loads(line)

    def close(self) -> None:
        """Tells the other end that nothing more will come."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._connection.close()

    def fileno(self) -> int:
        """Returns the descriptor, for poll."""
        return self._connection.fileno()


def listen(address: str) -> socket.socket:
    """Returns a socket that listens under an abstract name, one without a file.

    Args:
        address: The name; secret, as everybody on the host may connect to it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{address}")
    listener.listen()
    return listener


def accept(listener: socket.socket, timeout: float, ended: Callable[[], str]) -> Channel:
    """Waits for the one connection that is expected, and closes the listener.

    Args:
        listener: From :func:`listen`.
        timeout: In seconds.
        ended: Asked again and again; returns why nobody will connect any more, or "".

    Raises:
        Lost: Nobody connected.
    """
    with listener:
        listener.settimeout(_POLL_SECONDS)
        for _ in range(max(1, round(timeout / _POLL_SECONDS))):
            with contextlib.suppress(TimeoutError):
                return Channel(listener.accept()[0])
            if why := ended():
                raise Lost(why)
    raise Lost(f"it did not start within {timeout:g} s")


def connect(address: str) -> Channel:
    """Connects to a listener."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{address}")
    return Channel(connection)


def exit_with(channel: Channel) -> threading.Event:
    """Ends this process when the other end closes, even in the midst of a collective that cannot end.

    Returns:
        To be set before the end is a good one.
    """
    expected = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLRDHUP)
        poll.poll()
        os._exit(0 if expected.is_set() else 1)

    threading.Thread(target=watch, name="exit with the rank", daemon=True).start()
    return expected
