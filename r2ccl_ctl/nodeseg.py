"""The node segment: what the processes of a node have found out about NICs.

net_plugin/control/nodeseg.h has the layout. Read with pread into bytes of our own, and nothing in
it is believed before it is checked: the object may be cut short or rewritten at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import stat
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2ccl_ctl import control
from r2ccl_ctl.segment import sentence

MAGIC = b"R2CCNODE"
VERSION = 1
HEADER_SIZE = 512
ROW_SIZE = 512
ROWS = 64
OTHERS = 8
STATES = ("unknown", "works", "failed")
VERDICTS = (
    "undecided",
    "transient",
    "local NIC",
    "remote NIC",
    "local and remote NIC",
    "link or switch",
)

_NAME = re.compile(r"r2ccl-node\.(\d{1,10})\.(\d{1,20})\.([0-9a-f]{8})")
_HEADER = struct.Struct("<8sIIIIQQIIQ64s40s")
_ADDR = struct.Struct("<BBH16s")
_ROW = struct.Struct(f"<IIQQQII16s20s{20 * OTHERS}sI40s80s")
_FLOCK = struct.Struct("@hhqqi4x")


@dataclass(frozen=True)
class NodeRow:
    """What one process found out about one NIC."""

    name: str
    addr: str
    state: str
    verdict: str
    others: list[str]
    why: str
    pid: int
    process_id: str
    epoch: int
    mono_ns: int
    real_ns: int


@dataclass(frozen=True)
class NodeSegment:
    """One object. `used`: a process holds it."""

    name: str
    path: Path
    uid: int
    host: str
    netns: int
    used: bool
    changed_real_ns: int
    rows: list[NodeRow]
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["path"] = str(self.path)
        return found


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _text(raw: bytes) -> str:
    """Up to the first NUL, printable."""
    words = raw.split(b"\0", 1)[0].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in words)


def _addr(raw: bytes) -> str:
    family, _, _, ip = _ADDR.unpack(raw)
    if family == 4:
        return str(ipaddress.IPv4Address(ip[:4]))
    return str(ipaddress.IPv6Address(ip)) if family == 6 else ""


def parse_row(raw: bytes) -> NodeRow | None:
    """A row of the table, None when it is empty, torn or damaged."""
    if len(raw) != ROW_SIZE:
        return None
    (crc, state, epoch, mono, real, kind, pid, process, nic, others, n_others, name, why) = (
        _ROW.unpack(raw[: _ROW.size])
    )
    if crc == 0 or crc != (crc32c(raw[4:]) or 1):
        return None
    if state >= len(STATES) or kind >= len(VERDICTS) or n_others > OTHERS or not _addr(nic):
        return None
    return NodeRow(
        name=_text(name),
        addr=_addr(nic),
        state=STATES[state],
        verdict=VERDICTS[kind],
        others=[_addr(others[i * 20 : i * 20 + 20]) for i in range(n_others)],
        why=sentence(why),
        pid=pid,
        process_id=process.hex(),
        epoch=epoch,
        mono_ns=mono,
        real_ns=real,
    )


def _held(fd: int) -> bool:
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 2, 0)
    with contextlib.suppress(OSError):
        return bool(_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, query))[0] != fcntl.F_UNLCK)
    return True


def read(path: Path) -> NodeSegment | None:
    """One object; None when it is not for our eyes, or gone."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return None
        head = os.pread(fd, HEADER_SIZE, 0)
        data = os.pread(fd, ROWS * ROW_SIZE, HEADER_SIZE)
        held = _held(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    host, netns, problem = "", int(match[2]), ""
    rows: list[NodeRow] = []
    if len(head) < _HEADER.size or head[:8] != MAGIC:
        problem = "not a node segment, or a damaged one"
    else:
        fields = _HEADER.unpack(head[: _HEADER.size])
        host = _text(fields[10])
        if fields[1:5] != (VERSION, HEADER_SIZE, ROW_SIZE, ROWS):
            problem = f"layout version {fields[1]} (this tool speaks {VERSION})"
        else:
            parsed = (
                parse_row(data[i : i + ROW_SIZE]) for i in range(0, ROWS * ROW_SIZE, ROW_SIZE)
            )
            rows = sorted((r for r in parsed if r is not None), key=lambda r: -r.epoch)
    return NodeSegment(
        path.name, path, info.st_uid, host, netns, held, info.st_mtime_ns, rows, problem
    )


def list_segments(*, unused: bool = False) -> list[NodeSegment]:
    """The node segments that may be read; with `unused` those that no process holds, too."""
    try:
        names = sorted(os.listdir(control.SHM))
    except OSError:
        names = []
    found = [read(control.SHM / name) for name in names if _NAME.fullmatch(name)]
    return [segment for segment in found if segment is not None and (segment.used or unused)]


def sweep(older_than_s: float, *, dry_run: bool = False) -> list[tuple[NodeSegment, float, str]]:
    """Remove those that no process holds and nobody has written for so long, of this user, or as
    root of all. Each with its age and what kept it from being removed."""
    removed = []
    for segment in list_segments(unused=True):
        age = max(0.0, (time.time_ns() - segment.changed_real_ns) / 1e9)
        if segment.used or os.geteuid() not in (0, segment.uid) or age < older_than_s:
            continue
        error = ""
        if not dry_run:
            try:
                segment.path.unlink()
            except FileNotFoundError:
                continue
            except OSError as err:
                error = err.strerror or str(err)
        removed.append((segment, age, error))
    return removed
