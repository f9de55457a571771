"""What programs and libraries have in them, read from the file (64-bit, little-endian ELF)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from r2ccl_ctl.errors import R2Error

T = TypeVar("T")

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_IDENTITY = b"\x7fELF\x02\x01"
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMTAB, _DYNSYM = 2, 11
_INTERPRETER = 3
_FUNCTION = 2
_MOST = 64 << 20  # bytes of a table that are believed


class ElfError(R2Error):
    """The file is no shared library that can be read."""


def exported_functions(path: Path) -> set[str]:
    """Names of the functions in the dynamic symbol table. Raises ElfError."""
    return _read(path, lambda file: _functions(file, {_DYNSYM}))


def defined_functions(path: Path) -> set[str]:
    """Names of all its functions, as far as it was not stripped. Raises ElfError."""
    return _read(path, lambda file: _functions(file, {_DYNSYM, _SYMTAB}))


def has_loader(path: Path) -> bool:
    """A program that the dynamic loader starts, and so takes LD_PRELOAD. Raises ElfError."""
    return _read(path, lambda file: _INTERPRETER in _segments(file))


def _read(path: Path, read: Callable[[BinaryIO], T]) -> T:
    try:
        with path.open("rb") as file:
            return read(file)
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


def _header(file: BinaryIO) -> tuple[Any, ...]:
    head = _HEADER.unpack(_part(file, 0, _HEADER.size))
    if not head[0].startswith(_IDENTITY):
        raise ValueError
    return head


def _segments(file: BinaryIO) -> set[int]:
    """The types of its segments."""
    head = _header(file)
    offset, each, count = head[5], head[9], head[10]
    raw = _part(file, offset, each * count)
    return {_SEGMENT.unpack_from(raw, index * each)[0] for index in range(count)}


def _functions(file: BinaryIO, tables: set[int]) -> set[str]:
    head = _header(file)
    offset, each, count = head[6], head[11], head[12]
    raw = _part(file, offset, each * count)
    sections = [_SECTION.unpack_from(raw, index * each) for index in range(count)]
    found: set[str] = set()
    for section in sections:
        if section[1] in tables:
            names = sections[section[6]]
            found |= _named(
                _part(file, section[4], section[5] // _SYMBOL.size * _SYMBOL.size),
                _part(file, names[4], names[5]),
            )
    return found


def _named(symbols: bytes, names: bytes) -> set[str]:
    found = set()
    for name, info, _, section, _, _ in _SYMBOL.iter_unpack(symbols):
        if section and info & 15 == _FUNCTION:
            found.add(names[name : names.index(b"\0", name)].decode("ascii", "replace"))
    return found
