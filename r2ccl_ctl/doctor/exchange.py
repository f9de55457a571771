"""What a helper on a host does for `doctor`: it looks, listens on every NIC, and sends bytes."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from r2ccl_ctl import __version__, settings_view
from r2ccl_ctl.doctor import local
from r2ccl_ctl.hostnics import HostNic, HostNics

CONNECT_S = 3.0
SILENT_S = 3.0
TOKEN = 16
CHUNK = bytes(1 << 18)
# In struct tcp_info: the segment size, and all retransmissions.
_TCP_INFO = struct.Struct("8B24I")
_SND_MSS, _RETRANS = 8 + 2, 8 + 23


class Exchanger:
    """What one host does for the exchange."""

    def __init__(self) -> None:
        self.nics = HostNics((), {}, "")
        self.token = b""

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        self.nics, found = local.check_all(request["command"])
        return {
            "host": socket.gethostname(),
            "version": __version__,
            "nics": [vars(nic) for nic in self.nics.nics],
            "findings": [one.as_dict() for one in found],
        }

    def listen(self, request: dict[str, Any]) -> dict[str, Any]:
        """A listening socket for each NIC; who connects has to show the token."""
        self.token = secrets.token_bytes(TOKEN)
        span = port_range()
        places: list[dict[str, Any]] = []
        for nic in self.nics.nics:
            try:
                servers = listeners(nic, span)
            except OSError as err:
                places.append({"port": 0, "last": 0, "error": err.strerror or str(err)})
                continue
            for server in servers:
                threading.Thread(target=self._serve, args=(server,), daemon=True).start()
            ports = [server.getsockname()[1] for server in servers]
            places.append({"port": ports[0], "last": (ports[1:] or [0])[0], "error": ""})
        return {"token": self.token.hex(), "places": places}

    def _serve(self, server: socket.socket) -> None:
        while True:
            conn, _ = server.accept()
            threading.Thread(target=self._take, args=(conn,), daemon=True).start()

    def _take(self, conn: socket.socket) -> None:
        """Counts what comes, and says at its end how much that was."""
        with conn, contextlib.suppress(OSError):
            conn.settimeout(SILENT_S)
            if not secrets.compare_digest(conn.recv(TOKEN, socket.MSG_WAITALL), self.token):
                return
            count = 0
            while data := conn.recv(len(CHUNK)):
                count += len(data)
            conn.sendall(struct.pack("!Q", count))

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        """Bytes to a NIC of another host, for a while."""
        nic = self.nics.nics[int(request["nic"])]
        token = bytes.fromhex(request["token"])
        try:
            return exchange(nic, (request["addr"], request["port"]), token, request["seconds"])
        except OSError as err:
            stage = "connect" if not isinstance(err, Stalled) else "transfer"
            return {"error": err.strerror or str(err) or "no answer", "stage": stage}


class Stalled(OSError):
    """A connection was there, and its bytes did not arrive."""


def exchange(nic: HostNic, to: tuple[str, int], token: bytes, seconds: float) -> dict[str, Any]:
    """Bytes per second that arrived, and how many segments had to be sent again."""
    with bound(nic) as conn:
        conn.settimeout(CONNECT_S)
        begun = time.monotonic()
        conn.connect(socket.getaddrinfo(*to, type=socket.SOCK_STREAM)[0][4])
        rtt = time.monotonic() - begun
        conn.settimeout(SILENT_S)
        sent, start = 0, time.monotonic()
        try:
            conn.sendall(token)
            while time.monotonic() - start < seconds:
                sent += conn.send(CHUNK)
            conn.shutdown(socket.SHUT_WR)
            raw = conn.recv(8, socket.MSG_WAITALL)
        except OSError as err:
            text = f"{sent >> 10} KiB were queued, and no answer came in {SILENT_S:g} s"
            raise Stalled(None, text) from err
        took = time.monotonic() - start
        if len(raw) != 8:
            raise Stalled(None, "the other end closed the connection")
        info = _TCP_INFO.unpack(
            conn.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        )
        count = struct.unpack("!Q", raw)[0]
        segments = max(sent // max(info[_SND_MSS], 1), 1)
        return {
            "error": "" if count == sent else f"{count} of {sent} bytes arrived",
            "stage": "done",
            "bytes": count,
            "rate": count / took,
            "connect_ms": round(rtt * 1e3, 3),
            "mss": info[_SND_MSS],
            "retransmitted": info[_RETRANS],
            "loss": round(info[_RETRANS] / segments, 6),
        }


def bound(nic: HostNic, port: int = 0) -> socket.socket:
    """A socket that uses this NIC and no other, as the engine's do."""
    conn = socket.socket(socket.AF_INET6 if ":" in nic.addr else socket.AF_INET)
    try:
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not nic.loopback:
            with contextlib.suppress(PermissionError):
                conn.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, nic.ifname.encode())
        conn.bind(socket.getaddrinfo(nic.addr, port, type=socket.SOCK_STREAM)[0][4])
    except OSError:
        conn.close()
        raise
    return conn


def listeners(nic: HostNic, span: tuple[int, int]) -> list[socket.socket]:
    """One on any port. With R2CCL_PORT_RANGE on its first free port, and on its last one: a
    firewall may pass a part of the range."""
    if span == (0, 0):
        server = bound(nic)
        server.listen()
        return [server]
    ports = range(span[0], span[1] + 1)
    first = _listen_on(nic, ports)
    if first is None:
        raise OSError(None, f"no port of R2CCL_PORT_RANGE={span[0]}-{span[1]} is free")
    last = _listen_on(nic, reversed(ports))
    return [first, last] if last else [first]


def _listen_on(nic: HostNic, ports: Iterable[int]) -> socket.socket | None:
    """A listening socket on the first free one of these ports."""
    for port in ports:
        server = None
        try:
            server = bound(nic, port)
            server.listen()
            return server
        except OSError:
            if server is not None:
                server.close()
    return None


def port_range() -> tuple[int, int]:
    text = next((s.value for s in settings_view.load() if s.name == "R2CCL_PORT_RANGE"), "")
    low, _, high = text.partition("-")
    return (int(low), int(high or low)) if low else (0, 0)
