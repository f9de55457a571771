"""Segments that lie: random bytes, truncations, other versions, text that would steer a terminal.
Reading them may end in an R2Error, never in anything else. Rung 1."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from segment_bed import StartWriter, start_writer

from r2ccl_ctl import control
from r2ccl_ctl.cli import view
from r2ccl_ctl.control import list_processes
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.journal import Cursor, read_all
from r2ccl_ctl.segment import SegmentError, layout

__all__ = ["start_writer"]

NAME = "r2ccl.0.1.2.3"


@pytest.fixture
def good(start_writer: StartWriter) -> bytes:
    """A segment's bytes."""
    writer = start_writer()
    control.send_command(writer.process, control.Command("fail-nic", "127.0.1.1", "error", "both"))
    return writer.path.read_bytes()


def place(folder: Path, data: bytes) -> Path:
    path = folder / NAME
    path.write_bytes(data)
    return path


def read_everything(folder: Path) -> int:
    """All that the tools read, rendered as they render it. The number of refusals."""
    refusals = 0
    for process in list_processes(dead=True, directory=folder):
        view.process_dict(process)
        try:
            snapshot = process.snapshot()
            seen = Seen([snapshot])
            view.snapshot_dict(snapshot, view.Rates().update(snapshot), seen)
            view.status_view([(snapshot, {})], seen, details=True)
        except R2Error:
            refusals += 1
        try:
            for event in read_all(process):
                view.event_dict(event)
                view.event_line(event, titled=True)
        except R2Error:
            refusals += 1
    return refusals


def test_random_bytes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        data = rng.randbytes(rng.choice([0, 1, 7, 8, 100, 311, 312, 2000, 100_000]))
        if rng.random() < 0.7:
            data = b"R2CCLSEG" + struct.pack("=II", 1, 0) + data[16:]
        place(tmp_path, data)
        read_everything(tmp_path)


def test_damaged_bytes(tmp_path: Path, good: bytes, seed: int) -> None:
    """Of a real segment a few words are changed: most often where offsets and counts are."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(80):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 8)):
            limit = rng.choice([312, 312, 1000, 20_000, len(data)])
            at = rng.randrange(8, limit - 8) & ~3
            word = rng.choice([0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 1 << 20, rng.getrandbits(32)])
            data[at : at + 4] = struct.pack("=I", word)
        place(tmp_path, bytes(data))
        refused += read_everything(tmp_path) > 0
    assert 0 < refused < 80, "either nothing was checked, or nothing was read"


def test_truncated(tmp_path: Path, good: bytes, seed: int) -> None:
    rng = random.Random(seed)
    for size in [0, 1, 8, 311, 312, len(good) - 1, *(rng.randrange(len(good)) for _ in range(30))]:
        place(tmp_path, good[:size])
        (process,) = list_processes(dead=True, directory=tmp_path)
        assert process.state == "damaged", size
        assert process.problem
        read_everything(tmp_path)


def test_truncated_while_it_is_read(tmp_path: Path, good: bytes) -> None:
    path = place(tmp_path, good)
    (process,) = list_processes(dead=True, directory=tmp_path)
    with control.open_segment(path) as segment, Cursor(process) as cursor:
        next(cursor.events())
        path.write_bytes(good[:1000])
        with pytest.raises(SegmentError, match="ends within"):
            control.read_snapshot(segment)
        with pytest.raises(SegmentError, match="ends within"):
            list(cursor.events())


def test_vanished(tmp_path: Path, good: bytes) -> None:
    path = place(tmp_path, good)
    (process,) = list_processes(dead=True, directory=tmp_path)
    path.unlink()
    with pytest.raises(SegmentError, match="is gone"):
        process.snapshot()


def test_other_version(tmp_path: Path, good: bytes) -> None:
    place(tmp_path, good[:8] + struct.pack("=I", 7) + good[12:])
    (process,) = list_processes(dead=True, directory=tmp_path)
    assert process.state == "damaged"
    assert "layout version 7, this r2ccl-ctl speaks 3" in process.problem


def test_wider_rows_of_a_newer_minor_version(tmp_path: Path, good: bytes) -> None:
    """Rows that grew at their ends, more tables: what is known is read."""
    size = layout().size("r2_seg_nic")
    header = layout().parse("r2_seg_header", good)
    row = next(i for i, t in enumerate(header["tables"]) if t["kind"] == layout().kinds["nics"])
    table = header["tables"][row]
    old = good[table["offset"] : table["offset"] + table["rows"] * size]
    wide = b"".join(old[i : i + size] + b"\xee" * 64 for i in range(0, len(old), size))
    data = bytearray(good + wide)
    at = layout().offset("r2_seg_header", "tables") + row * layout().size("r2_seg_table")
    struct.pack_into("=II", data, at + 4, len(good), size + 64)
    place(tmp_path, bytes(data))
    (process,) = list_processes(dead=True, directory=tmp_path)
    nics = process.snapshot().nics
    assert [nic.name for nic in nics] == ["127.0.1.1", "127.0.2.1"]
    assert nics[0].failures == 1


def test_row_that_is_always_being_written(tmp_path: Path, good: bytes) -> None:
    """A writer that died in the middle of a row: the reader takes what is there and goes on."""
    header = layout().parse("r2_seg_header", good)
    table = next(t for t in header["tables"] if t["kind"] == layout().kinds["nics"])
    data = bytearray(good)
    struct.pack_into("=I", data, table["offset"], 7)
    place(tmp_path, bytes(data))
    (process,) = list_processes(dead=True, directory=tmp_path)
    assert process.snapshot().nics[0].name == "127.0.1.1"


def test_text_cannot_steer_a_terminal(tmp_path: Path, good: bytes) -> None:
    evil = b"\x1b]0;owned\x07\x1b[2J\n\xff[red]x"
    data = bytearray(good)
    header = layout().parse("r2_seg_header", good)
    for kind, name, field in (
        ("process", "r2_seg_process", "host"),
        ("nics", "r2_seg_nic", "name"),
        ("nics", "r2_seg_nic", "cause"),
    ):
        table = next(t for t in header["tables"] if t["kind"] == layout().kinds[kind])
        at = table["offset"] + layout().offset(name, field)
        data[at : at + len(evil)] = evil
    place(tmp_path, bytes(data))
    (process,) = list_processes(dead=True, directory=tmp_path)
    texts = [process.host, process.snapshot().nics[0].name, process.snapshot().nics[0].cause]
    for text in texts:
        assert text.startswith("\N{REPLACEMENT CHARACTER}]0;owned")
        assert text.isprintable()
    read_everything(tmp_path)


def test_head_that_lies(tmp_path: Path, good: bytes) -> None:
    data = bytearray(good)
    struct.pack_into("=Q", data, layout().offset("r2_seg_header", "event_head"), 2**64 - 1)
    place(tmp_path, bytes(data))
    (process,) = list_processes(dead=True, directory=tmp_path)
    assert read_all(process) == []
