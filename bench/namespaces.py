"""Emulated hosts on one machine: each has its own network, name and process namespaces, and a shaped link to a switch.

One process holds the namespaces of each host: when it ends, the kernel removes them. Nothing is made in the caller's
namespaces. Needs root, util-linux and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["BURST", "INTERFACE", "Cluster", "missing"]

INTERFACE = "eth0"
"""The network interface of each host."""

BURST = 40 << 10
"""Bytes that an idle link sends at once, before its rate applies."""

_NETWORK = "10.91.0"
_FRAME = 9000
# The kernel joins packets up to this length, because tbf drops a packet that is longer than its bucket.
_JOINED = 18000
_SPACES = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def missing() -> str:
    """Returns the reason if namespaces are impossible here, or ""."""
    if os.geteuid() != 0:
        return "namespaces need root"
    lacking = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (util-linux, iproute2)"
    script = (
        "ip link add one type veth peer name other && ip link add three type bridge && "
        f"ip link set one gso_max_size {_JOINED} && "
        f"tc qdisc replace dev one root tbf rate 1mbit burst {BURST} limit 1mb"
    )
    tried = subprocess.run(
        ["unshare", *_SPACES, "sh", "-c", script], capture_output=True, text=True
    )
    return "" if tried.returncode == 0 else f"the kernel refuses namespaces: {tried.stderr.strip()}"


class Cluster:
    """Hosts on a switch.

    Args:
        hosts: Number of hosts.
        megabits: Rate of each host's link, each way, in Mbit/s; 0: unshaped.
    """

    def __init__(self, hosts: int, megabits: float) -> None:
        self.hosts = hosts
        self._megabits = megabits
        self._keepers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        try:
            for name in [*(f"host{i}" for i in range(self.hosts)), "switch"]:
                self._keepers.append(self._keeper(name))
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the hosts and all processes on them."""
        for keeper in self._keepers:
            keeper.kill()
            keeper.wait()

    def address(self, host: int) -> str:
        """Returns the host's IPv4 address."""
        return f"{_NETWORK}.{host + 1}"

    def cut(self, host: int) -> None:
        """Makes the switch drop all packets from and to the host, whose link stays up."""
        self._ip(self.hosts, "ip", "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Undoes cut()."""
        self._ip(self.hosts, "ip", "link", "set", f"port{host}", "master", "bridge")

    def spawn(
        self, host: int, command: list[str], env: dict[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a process on a host; it ends with the host. ``options`` are Popen's."""
        enter = ["nsenter", "-t", self._inner(host), *["-n", "-u", "-i", "-p", "-m"]]
        whole = [*enter, f"--wd={os.getcwd()}", "--", *command]
        return subprocess.Popen(whole, env={**os.environ, **env}, **options)

    def _keeper(self, name: str) -> subprocess.Popen[str]:
        # The first process of a pid namespace must not collect its children's zombies.
        script = f"trap '' CHLD; hostname {name}; ip link set lo up; echo up; exec sleep infinity"
        command = ["unshare", *_SPACES, "sh", "-c", script]
        keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "up\n":
            raise RuntimeError(f"{name}: no namespaces")
        return keeper

    def _inner(self, host: int) -> str:
        """Returns the process id of the host's first process, in the caller's namespace."""
        pid = self._keepers[host].pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]

    def _ip(self, host: int, *words: object) -> None:
        command = ["nsenter", "-t", self._inner(host), "-n", *map(str, words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def _connect(self) -> None:
        switch = self.hosts
        self._ip(switch, "ip", "link", "add", "bridge", "type", "bridge")
        self._ip(switch, "ip", "link", "set", "bridge", "up")
        for host in range(self.hosts):
            port = f"port{host}"
            peer = ["type", "veth", "peer", "name", INTERFACE, "netns", self._inner(host)]
            self._ip(switch, "ip", "link", "add", port, *peer)
            joined = ["gso_max_size", _JOINED] if self._megabits else []
            up = ["mtu", _FRAME, *joined, "up"]
            self._ip(switch, "ip", "link", "set", port, "master", "bridge", *up)
            self._ip(host, "ip", "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self._ip(host, "ip", "link", "set", INTERFACE, *up)
            # Linux's default, even if this machine has another one.
            route = [f"{_NETWORK}.0/24", "dev", INTERFACE, "congctl", "cubic"]
            self._ip(host, "ip", "route", "replace", *route)
            if self._megabits:
                self._shape(switch, port)
                self._shape(host, INTERFACE)

    def _shape(self, host: int, device: str) -> None:
        bucket = ["rate", f"{self._megabits:g}mbit", "burst", f"{BURST}", "limit", "16mb"]
        self._ip(host, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
