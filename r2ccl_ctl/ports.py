"""TCP ports for a job's rendezvous, that no other job started here is given while it runs.

    with Ports(2) as ports:
        start(ports.numbers)

A port cannot be handed to a process that is yet to bind it. So it is taken from those that the
kernel gives nobody by itself (neither to bind(0) nor to connect). It must be free on every address,
and it is held by name. That is an abstract UNIX socket of the network namespace, which has the
ports too, and ends with its process. What is left: a program that is told this number otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterable, Sequence
from types import TracebackType

from r2ccl_ctl.errors import R2Error

FIRST, LAST = 10240, 65535
LEAST = 512  # with fewer to choose from, the kernel's own are as good
TRIES = 400
SYSCTL = "/proc/sys/net/ipv4"


class PortsError(R2Error):
    """There is no port; the text says what to do."""


class Ports:
    """Ports that are ours until `close`. Belongs to the network namespace of the thread that makes
    it. Any thread may close it, also twice."""

    def __init__(self, count: int, candidates: Sequence[int] | None = None) -> None:
        self.numbers: list[int] = []
        self._held: list[socket.socket] = []
        try:
            for port in _order(candidates):
                if len(self.numbers) == count:
                    break
                self._take(port)
        except BaseException:
            self.close()
            raise
        if len(self.numbers) < count:
            self.close()
            raise PortsError(
                f"no {count} free TCP ports for the job's rendezvous: end jobs that are left "
                "(r2ccl-ctl ps), or widen what net.ipv4.ip_local_port_range leaves of "
                f"{FIRST} to {LAST}"
            )

    def _take(self, port: int) -> None:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0r2ccl-port-{port}")
        except OSError as err:
            name.close()
            if err.errno == errno.EADDRINUSE:
                return
            raise PortsError(f"cannot hold TCP port {port}: {err.strerror}") from err
        if not _free(port):
            name.close()
            return
        self._held.append(name)
        self.numbers.append(port)

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    def __enter__(self) -> Ports:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _order(candidates: Sequence[int] | None) -> Iterable[int]:
    """Which ports to try, in an order that differs from one job to the next."""
    known = quiet_ports() if candidates is None else candidates
    if candidates is not None or len(known) >= LEAST:
        return random.sample(known, min(len(known), TRIES))
    return _from_kernel()


def _from_kernel() -> Iterable[int]:
    for _ in range(TRIES):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        yield port


def quiet_ports() -> Sequence[int]:
    """Those that the kernel gives nobody who does not ask for them, and nobody has reserved."""
    low, high = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, _read("ip_local_port_range").split())
    reserved: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in _read("ip_local_reserved_ports").split(","):
            first, _, last = part.strip().partition("-")
            if first:
                reserved.update(range(int(first), int(last or first) + 1))
    return [
        port for port in range(FIRST, LAST + 1) if not low <= port <= high and port not in reserved
    ]


def _read(name: str) -> str:
    with open(f"{SYSCTL}/{name}", encoding="ascii") as file:
        return file.read()


def _free(port: int) -> bool:
    """Whether nobody has it, on any address of either family."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as err:
            if family == socket.AF_INET6 and err.errno != errno.EADDRINUSE:
                continue  # no IPv6 here
            return False
    return True
