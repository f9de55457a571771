"""The functions that a shared library exports, read from its file (64-bit, little-endian ELF)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from r2ccl_ctl.errors import R2Error

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_IDENTITY = b"\x7fELF\x02\x01"
_DYNSYM = 11
_FUNCTION = 2
_MOST = 64 << 20  # bytes of a table that are believed


class ElfError(R2Error):
    """The file is no shared library that can be read."""


def exported_functions(path: Path) -> set[str]:
    """Names of the functions in the dynamic symbol table. Raises ElfError."""
    try:
        with path.open("rb") as file:
            return _functions(file)
    except (struct.error, ValueError, IndexError):
        raise ElfError(f"{path} is no shared library, or a damaged one") from None
    except OSError as err:
        raise ElfError(f"{path} cannot be read: {err.strerror}") from err


def _part(file: BinaryIO, offset: int, size: int) -> bytes:
    if size > _MOST:
        raise ValueError
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise ValueError
    return data


def _functions(file: BinaryIO) -> set[str]:
    head = _HEADER.unpack(_part(file, 0, _HEADER.size))
    if not head[0].startswith(_IDENTITY):
        raise ValueError
    offset, each, count = head[6], head[11], head[12]
    raw = _part(file, offset, each * count)
    sections = [_SECTION.unpack_from(raw, index * each) for index in range(count)]
    for section in sections:
        if section[1] == _DYNSYM:
            names = sections[section[6]]
            return _named(
                _part(file, section[4], section[5] // _SYMBOL.size * _SYMBOL.size),
                _part(file, names[4], names[5]),
            )
    return set()


def _named(symbols: bytes, names: bytes) -> set[str]:
    found = set()
    for name, info, _, section, _, _ in _SYMBOL.iter_unpack(symbols):
        if section and info & 15 == _FUNCTION:
            found.add(names[name : names.index(b"\0", name)].decode("ascii", "replace"))
    return found
