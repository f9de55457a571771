"""Reading a control segment: net_plugin/control/segment.h through cffi, over untrusted bytes.

Every look goes through pread into bytes of our own: another process may rewrite or truncate the
object at any time, which would kill a reader that had mapped it (SIGBUS); here it is a short read.
Rows are taken only when their sequence number is even and unchanged by the time that a second
look has been had. Nothing that stands in the segment is believed: offsets and counts are
checked against the object's size, unknown enum values stay numbers, text is made printable.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2Error, plain

MAGIC = b"R2CCLSEG"
VERSIONS = (3,)
TRIES = 20
MAX_TABLES = 64
MAX_ROWS = 65536
MAX_STRIDE = 65536
MAX_SIZE = 64 << 20
LATER = ("timings",)  # tables that came after the first segment of these versions
# Sentences, and what stands for one; other texts are names, which are compared.
SENTENCES = ("cause", "fault", "warning", "command", "result")

_FLOCK = struct.Struct("@hhqqi4x")
_OWN_FILES: dict[str, int] = {}


class SegmentError(R2Error):
    """An object that is no control segment, a damaged one, or one of another version."""


class OtherLayout(SegmentError):
    """A segment of another build: `version` is its layout's, `holder` who holds its
    sign of life (Segment.lock_holder), which lies at the same place in all layouts."""

    def __init__(self, text: str, version: int, holder: int | None) -> None:
        super().__init__(text)
        self.version = version
        self.holder = holder


def cdef_text(header: str) -> str:
    """The part of segment.h that cffi parses."""
    parts = header.split("/* cdef begin */")
    if len(parts) != 2 or "/* cdef end */" not in parts[1]:
        raise SegmentError("segment.h lacks its cdef marks: reinstall r2ccl-ctl")
    return parts[1].split("/* cdef end */")[0]


class Layout:
    """The header's types: sizes, enums, and rows as dictionaries."""

    def __init__(self, header: str) -> None:
        text = cdef_text(header)
        self.ffi = cffi.FFI()
        self.ffi.cdef(text)
        self.constants = {
            name: int(value)
            for name, value in re.findall(r"^#define (\w+) (\d+)$", text, re.MULTILINE)
        }
        kinds = self.enum("r2_seg_kind", "R2_SEG_KIND_")
        self.kinds = {word: number for number, word in kinds.items()}

    def size(self, name: str) -> int:
        return int(self.ffi.sizeof(f"struct {name}"))

    def offset(self, name: str, field: str) -> int:
        return int(self.ffi.offsetof(f"struct {name}", field))

    def enum(self, name: str, prefix: str) -> dict[int, str]:
        """Number -> word of an enum: R2_EV_NIC_DOWN is nic-down."""
        elements: dict[int, str] = self.ffi.typeof(f"enum {name}").elements
        return {
            number: word.removeprefix(prefix).lower().replace("_", "-")
            for number, word in elements.items()
        }

    def parse(self, name: str, data: bytes) -> dict[str, Any]:
        """A struct's fields by name. Shorter data (an older writer) is filled up with zeros."""
        size = self.size(name)
        cdata = self.ffi.from_buffer(f"struct {name} *", data[:size].ljust(size, b"\0"))
        return self._fields(cdata[0])

    def _fields(self, cdata: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, field in self.ffi.typeof(cdata).fields:
            if name.startswith("reserved"):
                continue
            value = getattr(cdata, name)
            if field.type.kind == "primitive":
                found[name] = int(value)
            elif field.type.kind == "struct":
                found[name] = self._fields(value)
            elif field.type.item.kind == "struct":
                found[name] = [self._fields(item) for item in value]
            elif field.type.item.cname == "char":
                raw = bytes(self.ffi.buffer(value))
                found[name] = sentence(raw) if name in SENTENCES else printable(raw)
            elif field.type.item.cname == "uint64_t":
                found[name] = list(value)
            else:
                found[name] = bytes(self.ffi.buffer(value)).hex()
        return found


@functools.lru_cache(maxsize=1)
def layout() -> Layout:
    """The layout that this tool speaks."""
    return Layout(paths.segment_header().read_text(encoding="utf-8"))


def printable(raw: bytes) -> str:
    """Text up to the first NUL, with nothing in it that could steer a terminal."""
    return plain(raw.split(b"\0", 1)[0].decode("utf-8", errors="replace"))


def sentence(raw: bytes) -> str:
    """The same, with "…" where it fills its field: its writer had more to say. Some writers mark
    that themselves."""
    text = printable(raw)
    full = len(raw.split(b"\0", 1)[0]) >= len(raw) - 1
    return f"{text}…" if full and not text.endswith("...") else text


@dataclass(frozen=True)
class Table:
    """Where a table lies, checked against the object's size."""

    offset: int
    stride: int
    rows: int


class Segment:
    """An open control segment. Raises SegmentError at once if it is none; later, when it shrinks.

    Not for use by several threads at once.
    """

    def __init__(self, path: Path, *, write: bool = False, own: bool = False) -> None:
        self.path = path
        self.layout = layout()
        # Closing any descriptor of an object drops the POSIX lock that says that this process
        # lives, if it is our own: so that descriptor is opened once and kept.
        self._keep = own
        self.fd = _open_own(path) if own else _open(path, write)
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise SegmentError(f"{path} is no control segment: not a regular file")
            self.uid = status.st_uid
            self.size = min(status.st_size, MAX_SIZE)
            self.tables = self._read_tables()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0 and not self._keep:
            os.close(self.fd)
        self.fd = -1

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes."""
        try:
            data = os.pread(self.fd, size, offset)
        except (OSError, OverflowError) as err:
            raise SegmentError(f"{self.path} cannot be read: {err}") from err
        if len(data) != size:
            raise SegmentError(f"{self.path} is damaged: it ends within what its header announces")
        return data

    def header(self) -> dict[str, Any]:
        return self.layout.parse("r2_seg_header", self.read(0, self.layout.size("r2_seg_header")))

    def _read_tables(self) -> dict[str, Table]:
        name = self.path.name
        raw = os.pread(self.fd, self.layout.size("r2_seg_header"), 0)
        if raw[:8] != MAGIC:
            if not raw[:8].strip(b"\0"):
                raise SegmentError(f"{name} is being set up, or its process died while it was")
            raise SegmentError(f"{name} is no control segment: its first bytes are not R2CCLSEG")
        header = self.layout.parse("r2_seg_header", raw)
        if header["version"] not in VERSIONS:
            speaks = ", ".join(str(version) for version in VERSIONS)
            raise OtherLayout(
                f"{name} has layout version {header['version']}, this r2ccl-ctl speaks {speaks}: "
                "use the r2ccl-ctl that came with the job's plugin",
                header["version"],
                self.lock_holder(),
            )
        words = {number: word for word, number in self.layout.kinds.items()}
        tables: dict[str, Table] = {}
        for row in _table_rows(header):
            word = words.get(row["kind"], "none")
            table = Table(row["offset"], row["stride"], row["rows"])
            if word == "none" or word in tables:
                continue
            if not self._fits(table):
                raise SegmentError(f"{name} is damaged: its table of {word} lies outside of it")
            tables[word] = table
        needed = [word for word in self.layout.kinds if word not in ("none", *LATER)]
        absent = [word for word in needed if word not in tables]
        if absent:
            raise SegmentError(f"{name} is damaged: it has no table of {', '.join(absent)}")
        return tables

    def _fits(self, table: Table) -> bool:
        return (
            0 < table.rows <= MAX_ROWS
            and 8 <= table.stride <= MAX_STRIDE
            and table.offset >= self.layout.size("r2_seg_header")
            and table.offset + table.rows * table.stride <= self.size
        )

    def high(self, kind: str) -> int:
        """Rows of this table that may have been used: at most all of them."""
        for row in _table_rows(self.header()):
            if row["kind"] == self.layout.kinds[kind]:
                return min(int(row["high"]), self.tables[kind].rows)
        return 0

    def single(self, kind: str, struct_name: str) -> dict[str, Any]:
        """A table of one row without a sequence number: counters."""
        return self.layout.parse(
            struct_name, self.read(self.tables[kind].offset, self.tables[kind].stride)
        )

    def row(self, kind: str, struct_name: str, index: int) -> dict[str, Any]:
        """A row that begins with its sequence number, whole if the writer lets us have it."""
        table = self.tables[kind]
        offset = table.offset + index * table.stride
        data = b""
        for _ in range(TRIES):
            before = self.read(offset, 4)
            data = self.read(offset, table.stride)
            if _stable(before, data[:4], self.read(offset, 4)):
                break
        return self.layout.parse(struct_name, data)

    def used_rows(self, kind: str, struct_name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, row) of all rows in use. Three looks at the whole table serve for most rows: the
        number is read before the row and after it, not with it, as the kernel copies in no order.
        """
        if kind not in self.tables:
            return
        table = self.tables[kind]
        count = self.high(kind)
        before, first, second = (self.read(table.offset, count * table.stride) for _ in range(3))
        for index in range(count):
            at = index * table.stride
            if first[at + 4 : at + 8] == b"\0\0\0\0" == second[at + 4 : at + 8]:
                continue
            if _stable(before[at : at + 4], first[at : at + 4], second[at : at + 4]):
                row = self.layout.parse(struct_name, first[at : at + table.stride])
            else:
                row = self.row(kind, struct_name, index)
            if row["used"]:
                yield index, row

    def lock_holder(self) -> int | None:
        """Pid of the process that holds the sign of life (0: one of another PID namespace), or
        None. Never sees a lock of this process itself."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            answer = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_GETLK, query))
        except OSError:
            return None
        return None if answer[0] == fcntl.F_UNLCK else max(int(answer[4]), 0)

    def try_lock(self, offset: int, size: int) -> bool:
        """Exclude other clients from these bytes until close or unlock; False: one is there."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, size, 0)
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, request)
        except OSError:
            return False
        return True

    def unlock(self, offset: int, size: int) -> None:
        request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, offset, size, 0)
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, request)

    def write(self, offset: int, data: bytes) -> None:
        """For the mailbox only."""
        try:
            os.pwrite(self.fd, data, offset)
        except OSError as err:
            raise SegmentError(f"{self.path} cannot be written: {err.strerror}") from err


def _table_rows(header: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = header["tables"] + header["more"]
    return rows[: min(header["table_count"], MAX_TABLES)]


def _stable(*sequence: bytes) -> bool:
    return len(set(sequence)) == 1 and sequence[0][0] % 2 == 0


def _stable_order() -> None:
    """The sequence number's lowest byte comes first: the tool runs where the job runs, on
    little-endian machines only."""
    if struct.pack("=H", 1) != b"\1\0":
        raise SegmentError("control segments can be read on little-endian machines only")


def _open(path: Path, write: bool) -> int:
    _stable_order()
    flags = os.O_RDWR if write else os.O_RDONLY
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SegmentError(f"{path.name} is gone") from None
    except PermissionError:
        verb = "be given commands" if write else "be read"
        raise SegmentError(
            f"{path.name} may not {verb} by you: it belongs to another user (use sudo, or the "
            "group of R2CCL_SHM_GROUP for reading)"
        ) from None
    except OSError as err:
        raise SegmentError(f"{path.name} cannot be opened: {err.strerror}") from err


def _open_own(path: Path) -> int:
    key = str(path)
    if key not in _OWN_FILES:
        _OWN_FILES[key] = _open(path, write=True)
    return _OWN_FILES[key]
