"""The tables of status and nics: paths with their weights, what a node's processes share about
NICs, and texts that were cut. Rung 3, and pure functions. It cannot prove that the engine writes
what is read here: test_engine_journal, test_engine_mixed and the tests of the lab do."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from segment_bed import StartWriter, start_writer
from test_cli import call, call_json

from r2ccl_ctl import nodeseg
from r2ccl_ctl.cli import node_view, path_view, view
from r2ccl_ctl.control import Snapshot
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.nodeseg import NodeRow, NodeSegment
from r2ccl_ctl.rows import PathRow
from r2ccl_ctl.segment import layout, sentence

__all__ = ["start_writer"]


def rows_of(table: Table) -> list[dict[str, str]]:
    heads = [str(column.header) for column in table.columns]
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in zip(*cells, strict=True)]


def path(**more: Any) -> PathRow:
    words: dict[str, Any] = {
        "index": 0, "peer": 0, "peer_host": "node-b", "peer_pid": 4711, "nic": "eth0",
        "remote_nic": "eth1", "state": "up", "generation": 7, "weight": 100, "streams": 1,
        "cause": "", "since_real_ns": 0, "since_mono_ns": 0, "tx_bytes": 0, "rx_bytes": 0,
        "inflight_bytes": 0, "rate": 0, "rtt_us": 0, "failures": 0, "replayed_bytes": 0,
        "heard_mono_ns": 0, "direction": "tx", **more,
    }  # fmt: skip
    return PathRow(**words)


# Paths


def test_paths_have_a_direction_and_a_weight() -> None:
    paths = [path(weight=11), path(direction="rx"), path(direction=""), path(direction="both")]
    shown = rows_of(path_view.path_table(paths))
    assert [(row["DIR"], row["WEIGHT"]) for row in shown] == [
        ("tx", "11"), ("rx", "-"), ("-", "100"), ("both", "100")]  # fmt: skip


def test_direction_of_a_path_in_json(start_writer: StartWriter) -> None:
    writer = start_writer()
    (process,) = call_json("status", "--job", writer.job)["processes"]
    assert {one["direction"] for one in process["paths"]} == {"both"}, "that of the peer"
    assert {one["spare"] for one in process["paths"]} == {False}


def test_paths_fit_into_120_columns() -> None:
    """But for the cause; what would be the same in all rows is left out, and shown where not."""
    long = {"peer_host": "node-17", "peer_pid": 123456, "rate": 12345678, "rtt_us": 1234,
            "inflight_bytes": 12345678, "since_mono_ns": 1, "nic": "eth10", "remote_nic": "eth11",
            "state": "ramping"}  # fmt: skip
    console = Console(width=300, color_system=None)

    def lines(*paths: PathRow) -> list[str]:
        with console.capture() as got:
            console.print(path_view.path_table(paths, 10**11))
        return [line.rstrip() for line in got.get().splitlines()]

    text = lines(path(**long), path(**long))
    assert max(map(len, text)) <= 118, "\n".join(text)  # beside a margin of 2
    assert not {"VIA", "REPLAYED", "PENALTY"} & set(text[0].split())
    head = lines(path(), path(via="verbs", replayed_bytes=4096, penalty=950))[0]
    assert {"VIA", "REPLAYED", "PENALTY"} <= set(head.split())


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, False), ({"weight": 10}, True), ({"weight": 10, "direction": "rx"}, False),
        ({"weight": 0}, False), ({"state": "down"}, True), ({"state": "never-reached"}, True),
        ({"state": "closed"}, False), ({"state": "down", "spare": True}, False),
    ],
)  # fmt: skip
def test_paths_that_status_lists_without_details(
    start_writer: StartWriter, more: dict[str, Any], shown: bool
) -> None:
    """A slow one is up: it would not be seen. One that a better one has replaced stays as it was
    left, which is nobody's trouble; with --details it is marked."""
    snapshot = replace(start_writer().process.snapshot(), paths=[path(nic="127.0.1.1", **more)])

    def text(details: bool) -> str:
        console = Console(width=300, color_system=None)
        with console.capture() as got:
            console.print(view.status_view([(snapshot, {})], Seen([snapshot]), details=details))
        return got.get()

    assert ("REMOTE NIC" in text(False)) == shown
    assert "REMOTE NIC" in text(True)
    assert ("(spare)" in text(True)) == bool(more.get("spare"))


def test_a_spare_path_is_read(start_writer: StartWriter) -> None:
    writer = start_writer()
    with writer.rows() as segment:
        table = segment.tables["paths"]
        row = table.offset + table.stride
        segment.write(row + layout().offset("r2_seg_path", "spare"), struct.pack("=I", 1))
        segment.write(row + layout().offset("r2_seg_path", "state"), struct.pack("=I", 10))
    paths = writer.process.snapshot().paths
    assert [(one.state, one.spare) for one in paths] == [("up", False), ("closed", True)]


# What the processes of a node share


def node_row(name: str, addr: str, state: str = "failed", **more: Any) -> NodeRow:
    words: dict[str, Any] = {
        "verdict": "local NIC", "others": [], "why": "said so", "pid": 9, "process_id": "aa",
        "epoch": 1, "mono_ns": 1, "real_ns": time.time_ns(), **more,
    }  # fmt: skip
    return NodeRow(name=name, addr=addr, state=state, **words)


def node_segment(*rows: NodeRow) -> NodeSegment:
    return NodeSegment("r2ccl-node.x", Path("x"), 0, "node-a", 1, True, 0, list(rows))


def verdicts(look: Snapshot, *rows: NodeRow) -> list[node_view.Verdict]:
    return node_view.node_verdicts([node_segment(*rows)], [look])


@pytest.mark.parametrize(
    ("name", "ago_s", "state", "says"),
    [
        ("127.0.1.1", -60, "healthy", "recovered"),
        ("127.0.1.1", -60, "ramping", "recovered"),
        ("127.0.1.1", -60, "probing", "failed"),
        ("127.0.1.1", 60, "healthy", "failed"),  # of this process alone: it never lost the NIC
        ("127.0.9.1@node-b", -60, "up", "recovered"),
        ("127.0.9.1@node-b", -60, "down", "failed"),
        ("127.0.9.1@node-b", 60, "up", "failed"),  # another path to it that never was down
        ("127.0.9.1@node-c", -60, "up", "failed"),
    ],
)
def test_verdicts_that_are_over(
    start_writer: StartWriter, name: str, ago_s: int, state: str, says: str
) -> None:
    """`ago_s`: how long before the verdict the NIC, or the path to it, came into that state."""
    look = start_writer().process.snapshot()
    row = node_row(name, "127.0.1.1")
    when = row.real_ns - ago_s * 10**9
    if "@" in name:
        paths = [replace(look.paths[0], state=state, since_real_ns=when)]
        look = replace(look, paths=paths)
    else:
        look = replace(look, nics=[replace(look.nics[0], state=state, since_real_ns=when)])
    (found,) = verdicts(look, row)
    (shown,) = rows_of(node_view.node_table([found]))
    assert shown["STATE"] == says
    as_dict = found.as_dict()
    assert (as_dict["state"], as_dict["recovered"]) == ("failed", says == "recovered")


def test_who_started_since_proves_nothing(start_writer: StartWriter) -> None:
    look = start_writer().process.snapshot()
    row = node_row("127.0.1.1", "127.0.1.1")
    late = replace(look.process, created_real_ns=row.real_ns + 1)
    nic = replace(look.nics[0], since_real_ns=row.real_ns + 2)
    looks = [replace(look, nics=[nic]), replace(look, process=late, nics=[nic])]
    assert node_view.recovered(row, looks[:1]) and not node_view.recovered(row, looks[1:])


def test_long_names_of_hosts_are_cut_in_verdicts(start_writer: StartWriter) -> None:
    look = start_writer().process.snapshot()
    host = "ip-172-31-12-34.us-west-2.compute.internal"
    row = node_row(f"eth1@{host}"[:31], "10.0.0.7")
    up = replace(look.paths[0], remote_nic="eth1", peer_host=host, since_real_ns=row.real_ns + 1)
    assert node_view.recovered(row, [replace(look, paths=[up])])


def test_a_nic_that_one_process_has_not_back(start_writer: StartWriter) -> None:
    look = start_writer().process.snapshot()
    row = node_row("127.0.1.1", "127.0.1.1")
    back = replace(look.nics[0], since_real_ns=row.real_ns + 1)
    out = replace(back, state="failed")
    looks = [replace(look, nics=[one]) for one in (back, out)]
    assert not node_view.recovered(row, looks) and node_view.recovered(row, looks[:1])


@pytest.mark.parametrize(("host", "back"), [("node-b", True), ("node-a", False)])
def test_the_last_nic_is_never_taken_out(start_writer: StartWriter, host: str, back: bool) -> None:
    """Its state did not change: its paths say that it works, but for those within the node."""
    look = start_writer().process.snapshot()
    row = node_row("127.0.1.1", "127.0.1.1")
    up = replace(look.paths[0], since_real_ns=row.real_ns + 1, peer_host=host)
    assert node_view.recovered(row, [replace(look, paths=[up])]) == back


def test_verdicts_name_the_nic_at_the_other_end(start_writer: StartWriter) -> None:
    """By name if the node knows one, else by address."""
    look = start_writer().process.snapshot()
    others = ["10.0.0.7", "10.0.0.7", "10.0.0.8", "10.0.0.9"]
    rows = [
        node_row("eth0", "10.0.0.1", "unknown", others=others),
        node_row("eth1@node-b", "10.0.0.7"),
    ]
    found = verdicts(look, *rows)
    first, second = rows_of(node_view.node_table(found))
    assert first["TOWARDS"] == "eth1@node-b, 10.0.0.8 and 1 more"
    assert (second["NIC"], second["TOWARDS"]) == ("eth1@node-b", "-")
    assert found[0].as_dict()["towards"] == ["eth1@node-b", "10.0.0.8", "10.0.0.9"]


def test_verdicts_of_former_processes_are_left_out(start_writer: StartWriter) -> None:
    look = start_writer().process.snapshot()
    old = node_row("eth0", "10.0.0.1", real_ns=look.process.created_real_ns - 1)
    elsewhere = replace(node_segment(node_row("eth0", "10.0.0.1")), host="node-z")
    assert verdicts(look, old) == []
    assert node_view.node_verdicts([elsewhere], [look]) == []


# Texts that were cut


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"short\0\0\0\0\0", "short"),
        (b"12345678\0\0", "12345678"),
        (b"123456789\0", "123456789…"),
        (b"1234567890", "1234567890…"),  # of a writer that leaves out the end
        (b"12345 ...\0", "12345 ..."),
    ],
)
def test_texts_that_fill_their_field(raw: bytes, text: str) -> None:
    assert sentence(raw) == text


def test_a_cause_that_was_cut_is_shown_so(start_writer: StartWriter) -> None:
    writer = start_writer()
    with writer.rows() as segment:
        for kind, struct_name, field in (
            ("nics", "r2_seg_nic", "cause"), ("nics", "r2_seg_nic", "name"),
            ("paths", "r2_seg_path", "cause"), ("events", "r2_seg_journal_entry", "cause"),
        ):  # fmt: skip
            at = segment.tables[kind].offset + layout().offset(struct_name, field)
            ctype = layout().ffi.typeof(f"struct {struct_name}")
            size = layout().ffi.sizeof(dict(ctype.fields)[field].type)
            segment.write(at, b"x" * (size - 1))
    snapshot = writer.process.snapshot()
    assert snapshot.nics[0].cause == "x" * 79 + "…"
    assert snapshot.paths[0].cause == "x" * 63 + "…"
    assert snapshot.nics[0].name == "x" * 39, "names are compared: they stay as they are"
    assert "x" * 79 + "…\n" in call("journal", "--job", writer.job).stdout


def test_a_verdict_that_was_cut_is_shown_so() -> None:
    body = bytearray(nodeseg.ROW_SIZE)
    fields = (0, 2, 1, 1, 1, 2, 9, bytes(16), bytes([4, 0, 0, 0, 10, 0, 0, 1]), b"", 0)
    body[: nodeseg._ROW.size] = nodeseg._ROW.pack(*fields, b"eth0", b"y" * 79)
    body[:4] = struct.pack("<I", nodeseg.crc32c(bytes(body[4:])))
    row = nodeseg.parse_row(bytes(body))
    assert row is not None and row.why == "y" * 79 + "…"
