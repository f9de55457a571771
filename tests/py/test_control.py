"""The control segment from outside: reading, commands, journal, against a C program that writes
one. Rung 3. It cannot prove that the engine fills the segment rightly."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from segment_bed import StartWriter, Writer, start_writer, until

from r2ccl_ctl import control, gc, paths
from r2ccl_ctl.control import Command, Selection, list_processes, select, send_command
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.journal import Cursor, read_all
from r2ccl_ctl.segment import layout

__all__ = ["start_writer"]

FAIL = Command("fail-nic", nic="127.0.1.1", fault="blackhole", direction="both")


def slot_states(writer: Writer) -> list[int]:
    with control.open_segment(writer.path) as segment:
        table = segment.tables["commands"]
        return [
            struct.unpack("=I", segment.read(table.offset + i * table.stride, 4))[0]
            for i in range(table.rows)
        ]


# The layout


def test_python_and_c_agree_on_sizes(start_writer: StartWriter) -> None:
    structs = {
        "process": "r2_seg_process", "counters": "r2_seg_counters", "gauges": "r2_seg_gauges",
        "nics": "r2_seg_nic", "peers": "r2_seg_peer", "paths": "r2_seg_path",
        "commands": "r2_seg_command", "events": "r2_seg_journal_entry",
        "comms": "r2_seg_comm", "timings": "r2_seg_timing",
    }  # fmt: skip
    with control.open_segment(start_writer().path) as segment:
        strides = {word: table.stride for word, table in segment.tables.items()}
        assert strides == {word: layout().size(name) for word, name in structs.items()}
        assert segment.header()["total_size"] == layout().size("r2_segment") == segment.size
        assert segment.size < 1 << 20


def test_an_older_segment_has_no_table_of_times(start_writer: StartWriter, tmp_path: Path) -> None:
    writer = start_writer()
    assert writer.process.snapshot().timings
    data = bytearray(writer.path.read_bytes())
    at = layout().offset("r2_seg_header", "table_count")
    (count,) = struct.unpack_from("=I", data, at)
    struct.pack_into("=I", data, at, count - 1)
    copy = tmp_path / writer.path.name
    copy.write_bytes(data)
    older = control.describe(copy)
    assert older is not None and older.snapshot().timings == []
    assert len(older.snapshot().nics) == 2


def test_header_of_sources_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert paths.segment_header().is_file()
    monkeypatch.setattr(paths, "checkout", lambda: None)
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(tmp_path))
    with pytest.raises(paths.NotBuiltError, match="R2CCL_BUILD_DIR"):
        paths.segment_header()


# Processes


def test_end_in_order_and_death(start_writer: StartWriter) -> None:
    ends, dies = start_writer(), start_writer()
    held = ends.process, dies.process
    ends.end()
    dies.kill()
    assert (ends.process.state, dies.process.state) == ("ended", "died")
    assert not [p for p in list_processes() if p.job == ends.job]
    assert len([p for p in list_processes(dead=True) if p.job == ends.job]) == 2
    assert dies.process.snapshot().nics[0].name == "127.0.1.1"
    assert [one.snapshot().process.state for one in held] == ["ended", "died"], "as it is now"
    assert [event.event for event in read_all(ends.process)][-1] == "ended"


def test_stopped_process_is_silent_but_running(start_writer: StartWriter) -> None:
    writer = start_writer()
    assert writer.process.silent_s == 0
    writer.popen.send_signal(signal.SIGSTOP)
    until(lambda: writer.process.silent_s > 0, "its silence shows")
    assert writer.process.running
    writer.popen.send_signal(signal.SIGCONT)
    until(lambda: writer.process.silent_s == 0, "it is heard again")


def test_reading_the_own_segment_keeps_its_lock(start_writer: StartWriter) -> None:
    """A program that has the plugin and this package in one process must not lose its lock."""
    writer = start_writer()
    code = (
        "import fcntl, os, struct, sys\n"
        "from pathlib import Path\n"
        "from r2ccl_ctl import control, pids\n"
        "source, target = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "start = pids.start_ticks(os.getpid())\n"
        "path = target / f'r2ccl.0.{pids.own_pidns()}.{os.getpid()}.{start}'\n"
        "path.write_bytes(source.read_bytes())\n"
        "fd = os.open(path, os.O_RDWR)\n"
        "fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)\n"
        "assert control.describe(path).running\n"
        "control.describe(path).snapshot()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 1)\n"
        "    except OSError:\n"
        "        os._exit(0)\n"
        "    os._exit(1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    target = writer.path.parent / f"{writer.job}.d"
    target.mkdir()
    try:
        subprocess.run([sys.executable, "-c", code, writer.path, target], timeout=30, check=True)
    finally:
        for file in target.iterdir():
            file.unlink()
        target.rmdir()


def test_selection(start_writer: StartWriter, tmp_path: Path) -> None:
    one, two = start_writer(), start_writer(job="test-other-job")
    assert [p.pid for p in select(Selection(pid=one.pid))] == [one.pid]
    assert [p.pid for p in select(Selection(job=two.job, node="node-a"))] == [two.pid]
    with pytest.raises(R2Error, match="no running process of R2CCL with pid 1, .*There are"):
        select(Selection(pid=1, job=one.job))
    with pytest.raises(R2Error, match=r"r2ccl-ctl run -- CMD"):
        select(Selection(), directory=tmp_path)
    with pytest.raises(R2Error, match=r"r2ccl-ctl run -- CMD"):
        select(Selection(), directory=tmp_path / "not-there")
    with pytest.raises(R2UsageError, match="test-other-job"):
        control.select_targets(Selection())
    assert len(control.select_targets(Selection(job=one.job))) == 1


def test_foreign_files_are_no_processes(tmp_path: Path) -> None:
    (tmp_path / "r2ccl.txt").write_text("x")
    (tmp_path / "sem.other").write_text("x")
    os.mkfifo(tmp_path / "r2ccl.0.1.2.3")
    (tmp_path / "r2ccl.0.1.2.4").symlink_to("/etc/passwd")
    (tmp_path / "r2ccl.0.1.2.5").mkdir()
    found = list_processes(dead=True, directory=tmp_path)
    assert all(process.state == "damaged" and process.problem for process in found)


# Commands


def test_every_argument_arrives(start_writer: StartWriter) -> None:
    writer = start_writer()
    command = Command(
        "fail-nic", nic="127.0.2.1", fault="slow", direction="tx", rate=7 << 40,
        after_bytes=9 << 40, after_ops=7, for_ms=600000,
    )  # fmt: skip
    assert send_command(writer.process, command).ok
    fault = writer.process.snapshot().nics[1].fault
    assert fault == f"slow tx {7 << 40} B/s after {9 << 40} B at operation 7 for 600000 ms"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (Command("fail-nic", nic="eth7", fault="error", direction="both"), "no NIC 'eth7'; NICs: "),
        (Command("fail-nic", nic="127.0.1.1", fault="slow", direction="both"), "bad rate: 0"),
        (Command("fail-nic", nic="127.0.1.1"), "bad kind of fault: 0"),
        (Command("set-weight", nic="127.0.1.1", weight=2_000_000), "bad weight: 2000000"),
        (Command("drain-nic", nic="127.0.1.1"), "not supported"),
    ],
)
def test_process_refuses(start_writer: StartWriter, command: Command, text: str) -> None:
    answer = send_command(start_writer().process, command)
    assert not answer.ok
    assert text in answer.text
    assert answer.code < 0


@pytest.mark.parametrize(
    "command",
    [
        Command("fly"),
        Command("fail-nic", nic="n", fault="fire"),
        Command("ping", nic="x" * 40),
        Command("ping", rate=-1),
        Command("ping", rate=1 << 64),
    ],  # fmt: skip
)
def test_client_refuses(start_writer: StartWriter, command: Command) -> None:
    with pytest.raises(R2UsageError):
        send_command(start_writer().process, command)


def test_process_that_ends_before_it_answers(start_writer: StartWriter) -> None:
    writer = start_writer("--deaf")
    process = writer.process

    def kill_once_asked() -> None:
        until(lambda: any(slot_states(writer)), "a command")
        writer.kill()

    killer = threading.Thread(target=kill_once_asked)
    killer.start()
    began = time.monotonic()
    answer = send_command(process, Command("ping"), timeout=100.0)
    killer.join()
    assert not answer.ok and answer.text == "it died before it could answer"
    assert time.monotonic() - began < 60, "it was waited for to the end"


def test_full_mailbox(start_writer: StartWriter) -> None:
    writer = start_writer("--deaf")
    with control.open_segment(writer.path, write=True) as segment:
        table = segment.tables["commands"]
        for i in range(table.rows):
            segment.write(table.offset + i * table.stride, struct.pack("=I", 2))
    answer = send_command(writer.process, FAIL, timeout=0.1)
    assert not answer.ok and "mailbox is full" in answer.text


def test_many_clients_at_once(start_writer: StartWriter) -> None:
    """More clients than slots, of several processes: each gets its own answer."""
    writer = start_writer()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from r2ccl_ctl import control, pids\n"
        "process = control.describe(Path(sys.argv[1]))\n"
        "for i in range(10):\n"
        "    command = control.Command('fail-nic', nic=f'no-{sys.argv[2]}-{i}', fault='error',\n"
        "                              direction='rx')\n"
        "    answer = control.send_command(process, command, timeout=20)\n"
        "    assert f'no-{sys.argv[2]}-{i}' in answer.text, answer\n"
    )
    clients = [
        subprocess.Popen([sys.executable, "-c", code, writer.path, str(i)]) for i in range(4)
    ]

    def ask(number: int) -> None:
        for i in range(10):
            name = f"no-{number}-{i}"
            command = Command("fail-nic", nic=name, fault="error", direction="rx")
            texts.append(name in send_command(writer.process, command, timeout=20).text)

    texts: list[bool] = []
    threads = [threading.Thread(target=ask, args=(100 + i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    assert [client.wait(timeout=40) for client in clients] == [0] * 4
    assert texts == [True] * 100


def test_nic_by_interface_or_address(start_writer: StartWriter) -> None:
    writer = start_writer()
    assert list(control.with_nic([writer.process], "lo0"))[0][1] == "127.0.1.1"
    with writer.rows() as segment:
        table, offset = segment.tables["nics"], layout().offset("r2_seg_nic", "ifname")
        segment.write(table.offset + table.stride + offset, b"lo0\0")
    with pytest.raises(R2UsageError, match="'lo0' is .* several NICs: give one of 127.0.1.1, 127"):
        list(control.with_nic([writer.process], "lo0"))
    with pytest.raises(R2Error, match=r"no NIC 'eth9'. NICs: 127.0.1.1, 127.0.2.1"):
        list(control.with_nic([writer.process], "eth9"))


# Journal


def test_journal_tells_what_was_lost(start_writer: StartWriter) -> None:
    writer = start_writer()
    with Cursor(writer.process) as cursor:
        list(cursor.events())
        for _ in range(180):  # 6 events each, in a ring of 1024
            assert send_command(writer.process, FAIL).ok
            assert send_command(writer.process, Command("recover-nic", nic="127.0.1.1")).ok
        events = list(cursor.events())
        assert len(events) == 1024
        assert events[0].lost == 180 * 6 - 1024
        assert [event.number for event in events] == list(range(3 + 56, 3 + 1080))
        assert sum(event.lost for event in events[1:]) == 0


def test_journal_passes_over_what_is_never_finished(start_writer: StartWriter) -> None:
    writer = start_writer("--deaf")
    with control.open_segment(writer.path, write=True) as segment:
        table = segment.tables["events"]
        segment.write(table.offset + 1 * table.stride, struct.pack("=Q", 3))
    with Cursor(writer.process) as cursor:
        assert [event.number for event in cursor.events()] == [0]
        until(lambda: cursor.next > 1 or list(cursor.events()), "it gives up on event 1", 5)


# Sweeping


def test_gc_spares_what_is_locked(start_writer: StartWriter) -> None:
    writer = start_writer()
    assert writer.path.name not in [item.process.name for item in gc.sweep(0, dry_run=True).removed]
    assert re.fullmatch(r"r2ccl\.\d+\.\d+\.\d+\.\d+", writer.path.name)
