"""A job that runs with a build of R2CCL whose segment has another layout: no command may look as if
it were not there. Rung 3."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from segment_bed import StartWriter, Writer, start_writer
from test_cli import call

from r2ccl_ctl import control, exporter, gc
from r2ccl_ctl.control import OTHER, Selection

__all__ = ["start_writer"]

SHM = Path("/dev/shm")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the tool looks for segments: nobody else's are there, and nobody else sees ours."""
    with tempfile.TemporaryDirectory(prefix="layouts.", dir=SHM) as name:
        monkeypatch.setattr(control, "SHM", Path(name))
        yield Path(name)


def move(writer: Writer, folder: Path) -> Writer:
    """The writer's own object, with its lock, in the folder alone."""
    here = folder / writer.path.name
    os.link(SHM / writer.path.name, here)
    (SHM / writer.path.name).unlink()
    writer.path = here
    return writer


def other(writer: Writer, folder: Path, layout: int = 7) -> Writer:
    move(writer, folder)
    writer.write(8, struct.pack("=I", layout))
    return writer


def test_ps_lists_it(start_writer: StartWriter, folder: Path) -> None:
    writer = other(start_writer(), folder)
    result = call("ps")
    (row,) = [line for line in result.stdout.splitlines() if str(writer.pid) in line]
    assert OTHER in row and "layout version 7, this r2ccl-ctl speaks 3" in row
    assert "use the r2ccl-ctl that came with" in row
    assert result.stderr == ""
    for words in ([], ["--all"], ["--pid", str(writer.pid)]):
        (found,) = json.loads(call("ps", "--json", *words).stdout)["processes"]
        assert (found["state"], found["layout"], found["layouts_read"]) == (OTHER, 7, [3])
        assert (found["pid"], found["local_pid"], found["job"]) == (writer.pid, writer.pid, "")


def test_a_process_of_our_layout_says_so(start_writer: StartWriter, folder: Path) -> None:
    move(start_writer(), folder)
    result = call("ps", "--json")
    (found,) = json.loads(result.stdout)["processes"]
    assert (found["state"], found["layout"], found["layouts_read"]) == ("running", 3, [3])
    assert result.stderr == ""


def test_one_that_is_gone_is_not_listed(start_writer: StartWriter, folder: Path) -> None:
    writer = other(start_writer(), folder)
    writer.kill()
    result = call("ps")
    assert result.stdout == "" and "left out" not in result.stderr
    (found,) = json.loads(call("ps", "--all", "--json").stdout)["processes"]
    assert (found["state"], found["layout"]) == ("damaged", 7)
    assert "left out" not in call("status", "--job", "x", code=1).stderr


def test_of_another_pid_namespace_the_lock_tells(start_writer: StartWriter, folder: Path) -> None:
    """Its pid means nothing here; the holder of its lock is known."""
    writer = other(start_writer(), folder)
    uid, start = writer.path.name.split(".")[1], writer.path.name.split(".")[4]
    writer.path = writer.path.rename(folder / f"r2ccl.{uid}.1.1.{start}")
    (found,) = json.loads(call("ps", "--json").stdout)["processes"]
    assert (found["state"], found["pid"], found["local_pid"]) == (OTHER, 1, writer.pid)
    writer.kill()
    assert json.loads(call("ps", "--json").stdout)["processes"] == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("ps --job x", 0), ("ps --comms", 0), ("plan show", 0), ("ps --job x --json", 0),
        ("status", 1), ("status --job x", 1), ("nics --job x", 1), ("journal --job x", 1),
        ("fail-nic eth0", 1), ("fail-nic eth0 --job x", 1), ("fail-nic eth0 --all", 1),
        ("drain-nic eth0 --job x", 1), ("plan off --job x", 1),
    ],
)  # fmt: skip
def test_nobody_else_is_there(
    start_writer: StartWriter, folder: Path, words: str, code: int
) -> None:
    writer = other(start_writer(), folder)
    said = call(*words.split(), code=code).stderr
    assert "1 running process with another layout is left out" in said, said
    assert f"pid {writer.pid}: layout 7; this r2ccl-ctl reads 3" in said
    assert said.count("left out") == 1


def test_beside_others(start_writer: StartWriter, folder: Path) -> None:
    """What can be read is shown or told, and the rest is counted."""
    ours = move(start_writer(), folder)
    lost = [other(start_writer(), folder), other(start_writer(), folder, 8)]
    for words in (
        ["status", "--job", ours.job],
        ["journal", "--job", ours.job],
        ["fail-nic", "127.0.1.1", "--job", ours.job],
        ["recover-nic", "127.0.1.1", "--all"],
    ):
        result = call(*words)
        assert result.stdout
        assert "warning: 2 running processes with another layout are left out" in result.stderr
        assert f"pid {lost[1].pid}: layout 8" in result.stderr
    assert call("status", "--pid", str(ours.pid)).stderr == ""
    rows = json.loads(call("ps", "--json").stdout)["processes"]
    assert sorted(row["state"] for row in rows) == [OTHER, OTHER, "running"]


def test_by_its_pid(start_writer: StartWriter, folder: Path) -> None:
    writer = other(start_writer(), folder)
    pid = str(writer.pid)
    for words in (["status"], ["journal"], ["fail-nic", "eth0"]):
        assert "layout" in call(*words, "--pid", pid, code=1).stderr


def test_its_segment_is_not_swept(start_writer: StartWriter, folder: Path) -> None:
    """However long ago it was made."""
    writer = other(start_writer(), folder)
    later = time.time_ns() + 86400 * 10**9
    assert gc.sweep(0, dry_run=True, now_ns=later).removed == []
    writer.kill()
    assert [item.process.name for item in gc.sweep(0, dry_run=True, now_ns=later).removed] == [
        writer.path.name
    ]


def test_metrics_count_it(start_writer: StartWriter, folder: Path) -> None:
    other(start_writer(), folder)
    page = exporter.page(Selection(), directory=folder).decode()
    assert "r2ccl_segments_unreadable 1.0" in page and "r2ccl_processes 0.0" in page
