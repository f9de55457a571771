"""Packets that vanish while the carrier stays up: nf_tables rules on the fabric's bridges.

The whole rule set of a lab is replaced in one atomic batch. With no rule left the table goes
away, so that a healthy lab pays nothing for it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass

from r2ccl_ctl.lab.spec import LabError

TABLE = "r2lab"
LOSS_SCALE = 1_000_000
TIMEOUT_S = 10.0

NETLINK_NETFILTER = 12
SUBSYS = 10 << 8
BATCH_BEGIN, BATCH_END = 0x10, 0x11
NEWTABLE, DELTABLE, NEWCHAIN, NEWRULE = 0, 2, 3, 6
NLMSG_ERROR = 2
F_REQUEST, F_ACK, F_CREATE, F_APPEND = 0x1, 0x4, 0x400, 0x800
NESTED = 0x8000
FAMILY_BRIDGE = 7
# In the order that a packet meets them: hook name, hook number, chain priority.
HOOKS = {"prerouting": 0, "forward": 2, "postrouting": 4}
META_IIF, META_OIF = 4, 5
CMP_EQ, CMP_LT = 0, 2
REG_VERDICT, REG_1 = 0, 1
NF_DROP = 0


@dataclass(frozen=True)
class Drop:
    """Drop a share of what comes from a port, goes to a port, or both.

    iif, oif: interface index of the fabric's port, None for any. percent: 100 drops everything.
    """

    iif: int | None
    oif: int | None
    percent: float = 100.0

    @property
    def hook(self) -> str:
        if self.oif is None:
            return "prerouting"
        return "postrouting" if self.iif is None else "forward"


def _attr(kind: int, payload: bytes) -> bytes:
    size = 4 + len(payload)
    return struct.pack("=HH", size, kind) + payload + bytes(-size % 4)


def _nest(kind: int, *parts: bytes) -> bytes:
    return _attr(kind | NESTED, b"".join(parts))


def _name(kind: int, text: str) -> bytes:
    return _attr(kind, text.encode() + b"\0")


def _be32(kind: int, value: int) -> bytes:
    return _attr(kind, struct.pack(">I", value))


def _expr(name: str, *attrs: bytes) -> bytes:
    return _nest(1, _name(1, name), _nest(2, *attrs))


def _match_port(key: int, index: int) -> list[bytes]:
    value = _nest(3, _attr(1, struct.pack("=I", index)))
    return [
        _expr("meta", _be32(1, REG_1), _be32(2, key)),
        _expr("cmp", _be32(1, REG_1), _be32(2, CMP_EQ), value),
    ]


def _match_share(percent: float) -> list[bytes]:
    """A random number below the share; compared as bytes, hence in network order."""
    below = struct.pack(">I", round(percent / 100 * LOSS_SCALE))
    return [
        _expr("numgen", _be32(1, REG_1), _be32(2, LOSS_SCALE), _be32(3, 1), _be32(4, 0)),
        _expr("byteorder", _be32(1, REG_1), _be32(2, REG_1), _be32(3, 1), _be32(4, 4), _be32(5, 4)),
        _expr("cmp", _be32(1, REG_1), _be32(2, CMP_LT), _nest(3, _attr(1, below))),
    ]


def _rule(drop: Drop) -> bytes:
    parts: list[bytes] = []
    if drop.iif is not None:
        parts += _match_port(META_IIF, drop.iif)
    if drop.oif is not None:
        parts += _match_port(META_OIF, drop.oif)
    if drop.percent < 100:
        parts += _match_share(drop.percent)
    verdict = _nest(2, _nest(2, _be32(1, NF_DROP)))
    parts.append(_expr("immediate", _be32(1, REG_VERDICT), verdict))
    return _name(1, TABLE) + _name(2, drop.hook) + _nest(4, *parts)


def _chain(hook: str) -> bytes:
    where = _nest(4, _be32(1, HOOKS[hook]), _be32(2, 0))
    return _name(1, TABLE) + _name(3, hook) + where + _name(7, "filter")


def batch(drops: list[Drop]) -> tuple[bytes, int]:
    """The messages that make `drops` the whole rule set; and the number of the last one."""
    table = _name(1, TABLE)
    create = F_CREATE | F_APPEND
    # Adding first makes the deletion succeed whether or not the table was there.
    body = [(NEWTABLE, F_CREATE, table), (DELTABLE, 0, table)]
    if drops:
        body.append((NEWTABLE, F_CREATE, table))
        body += [(NEWCHAIN, create, _chain(h)) for h in HOOKS if any(d.hook == h for d in drops)]
        body += [(NEWRULE, create, _rule(d)) for d in drops]
    out = [_message(BATCH_BEGIN, F_REQUEST, 0, 0, SUBSYS >> 8, b"")]
    for seq, (kind, flags, attrs) in enumerate(body, start=1):
        ack = F_ACK if seq == len(body) else 0
        out.append(_message(SUBSYS | kind, F_REQUEST | ack | flags, seq, FAMILY_BRIDGE, 0, attrs))
    out.append(_message(BATCH_END, F_REQUEST, len(body) + 1, 0, SUBSYS >> 8, b""))
    return b"".join(out), len(body)


def _message(kind: int, flags: int, seq: int, family: int, res_id: int, attrs: bytes) -> bytes:
    body = struct.pack(">BBH", family, 0, res_id) + attrs
    return struct.pack("=IHHII", 16 + len(body), kind, flags, seq, 0) + body


class DropRules:
    """The rule set of one fabric. Open it in a thread that is inside the fabric's namespace."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._sock = socket.socket(socket.AF_NETLINK, kind, NETLINK_NETFILTER)
        self._sock.settimeout(TIMEOUT_S)
        self._sock.bind((0, 0))

    def close(self) -> None:
        self._sock.close()

    def replace(self, drops: list[Drop]) -> None:
        """Make `drops` the rule set, atomically; returns when the kernel has applied it."""
        data, last = batch(drops)
        self._sock.sendto(data, (0, 0))
        while True:
            for seq, code in _errors(self._sock.recv(65536)):
                if code != 0:
                    raise _explain(code)
                if seq == last:
                    return


def _errors(data: bytes) -> list[tuple[int, int]]:
    """(sequence number, errno) of every acknowledgement in a datagram."""
    found, at = [], 0
    while at + 20 <= len(data):
        size, kind, _, seq, _ = struct.unpack_from("=IHHII", data, at)
        if kind == NLMSG_ERROR:
            found.append((seq, -struct.unpack_from("=i", data, at + 16)[0]))
        at += max(16, (size + 3) & ~3)
    return found


def _explain(code: int) -> LabError:
    if code in (errno.EOPNOTSUPP, errno.ENOENT, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT):
        return LabError(
            "this kernel cannot drop packets on a bridge (nf_tables with its bridge family "
            "and numgen is missing): use fail-link without --silent, --loss and cut-pair"
        )
    return LabError(f"the kernel refused the drop rules: {os.strerror(code)}")
