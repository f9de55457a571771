"""Why a job is stalled: the rank and the NIC that a hang points at. Looks are made up (rung 1), or
of real jobs (rung 3, loopback). Their NICs are gone, or a rank calls nothing or is stopped. It
cannot prove what a fabric's own failures look like."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Build
from plan_bed import comms, end_at, meets, preloaded, processes, working
from rich.console import Console
from segment_bed import StartWriter, start_writer, until
from test_cli import call, call_json

from r2ccl_ctl import hang
from r2ccl_ctl.cli import comm_view, path_view, view
from r2ccl_ctl.control import Process, Snapshot
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.rows import Comm, Nic, PathRow, Peer

__all__ = ["start_writer"]

S = 10**9
NOW = 1000 * S
ID = "0123456789abcdef"


def made(kind: Callable[..., Any], words: Sequence[str], **values: Any) -> Any:
    """A row: what is not given is nothing."""
    return kind(**{**dict.fromkeys(words, 0), **values})


def nic(name: str = "eth0", state: str = "healthy", **more: Any) -> Nic:
    words = list(Nic.__dataclass_fields__)
    text = dict.fromkeys(("addr", "ifname", "pci_path", "link", "cause", "fault"), "")
    found: Nic = made(Nic, words, **{**text, "name": name, "state": state, **more})
    return found


def peer(**more: Any) -> Peer:
    values = {
        "process_id": "aa", "host": "node1", "pid": 7, "state": "up", "direction": "tx",
        "connections": 1, "cause": "", "waits_for": "path", "rank": None,
    }  # fmt: skip
    found: Peer = made(Peer, list(Peer.__dataclass_fields__), **{**values, **more})
    return found


def waiting(**more: Any) -> Peer:
    return peer(waits_mono_ns=NOW - 18 * S, gives_up_mono_ns=NOW + 42 * S, **more)


def path(local: str = "eth0", remote: str = "eth8", state: str = "down", **more: Any) -> PathRow:
    values = {
        "peer_host": "node1", "peer_pid": 7, "nic": local, "remote_nic": remote, "state": state,
        "cause": "", "via": "tcp", "peer_rank": None,
    }  # fmt: skip
    found: PathRow = made(PathRow, list(PathRow.__dataclass_fields__), **{**values, **more})
    return found


def rank(number: int, operations: int = 7, ago: float = 10, **more: Any) -> Comm:
    values = {
        "id": ID, "parent": "", "name": "", "state": "ready", "rank": number, "ranks": 2,
        "nodes": 2, "plan": "", "cause": "", "op": "all-reduce", "op_bytes": 4 << 20,
        "operations": operations, "op_mono_ns": NOW - int(ago * S), "calling": False,
    }  # fmt: skip
    found: Comm = made(Comm, list(Comm.__dataclass_fields__), **{**values, **more})
    return found


def look(
    comm: Comm | None = None,
    *,
    silent_s: float = 0,
    state: str = "running",
    nics: Sequence[Nic] = (),
    peers: Sequence[Peer] = (),
    paths: Sequence[PathRow] = (),
    host: str = "",
) -> Snapshot:
    number = comm.rank or 0 if comm is not None else 0
    alive = time.monotonic_ns() - int(silent_s * S)
    process = Process(
        f"name{number}", Path("none"), state, 40 + number, None, 0, 0, host=host or f"node{number}",
        process_id="aa" if number else "00", rank=number, ranks=2, alive_mono_ns=alive,
    )  # fmt: skip
    return Snapshot(
        process, NOW, NOW, {}, {}, [], list(nics), list(peers), list(paths),
        [comm] if comm is not None else [],
    )  # fmt: skip


def rows(*looks: Snapshot) -> list[dict[str, Any]]:
    seen = Seen(looks)
    return [comm_view.comm_dict(comm, one, seen) for one in looks for comm in one.comms]


def causes(*looks: Snapshot) -> list[str]:
    seen = Seen(looks)
    return [comm_view.cause_text(comm, one, seen) for one in looks for comm in one.comms]


# No path


def test_own_nics_that_failed_are_named() -> None:
    nics = [nic("eth0", "failed", cause="carrier lost"), nic("eth1", "probing", cause="no answer")]
    paths = [path("eth0"), path("eth1", "eth9", "probing"), path("eth0", "eth9")]
    stands, other = look(rank(0), nics=nics, peers=[waiting()], paths=paths), look(rank(1))
    text = "no path to node1:7 (rank 1) for 18s of 60s: NIC eth0 failed, NIC eth1 probing"
    assert causes(stands, other) == [f"stalled: {text}", ""]
    row, _ = rows(stands, other)
    assert row["stands"] == text
    assert [
        (w["kind"], w["rank"], w["host"], w["nic"], w["state"], w["cause"], w["for_s"], w["of_s"])
        for w in row["waits"]
    ] == [
        ("no-path", 0, "node0", "eth0", "failed", "carrier lost", 18.0, 60.0),
        ("no-path", 0, "node0", "eth1", "probing", "no answer", 18.0, 60.0),
    ]
    assert {str(w["peer"]) for w in row["waits"]} == {str({"rank": 1, "host": "node1", "pid": 7})}
    assert hang.why([stands]) == [
        "node0: NIC eth0 is failed: carrier lost", "node0: NIC eth1 is probing: no answer"
    ]  # fmt: skip


def test_nics_of_the_peer_are_named_where_ours_are_healthy() -> None:
    nics = [nic("eth0"), nic("eth1")]
    paths = [
        path("eth0", "eth9", "never-reached"),
        path("eth0", "eth8", cause="its node says so"),
        path("eth1", "eth9", "probing"),
    ]
    stands = look(rank(0), nics=nics, peers=[waiting()], paths=paths)
    assert hang.stands(stands) == (
        "no path to node1:7 for 18s of 60s: the NICs here are healthy; "
        "paths to node1's eth8 down, eth9 probing"
    )
    row, _ = rows(stands, look(rank(1)))
    assert [(w["rank"], w["host"], w["nic"]) for w in row["waits"]][:2] == [
        (1, "node1", "eth8"), (1, "node1", "eth9")
    ]  # fmt: skip
    assert hang.why([stands]) == ["node0: path eth0 -> eth8@node1 is down: its node says so"]


def test_a_peer_of_another_node_has_its_rank_where_pids_say_nothing() -> None:
    """All processes have pid 1 in containers; and no name is known before the first path."""
    paths = [path("eth0", "", "never-reached", peer_pid=1, peer_rank=3)]
    peers = [waiting(pid=1, rank=3, process_id="cc")]
    stands = look(rank(0), nics=[nic("eth0")], peers=peers, paths=paths)
    assert hang.stands(stands) == (
        "no path to node1:1 (rank 3) for 18s of 60s: the NICs here are healthy; "
        "paths to node1's NICs never-reached"
    )
    console = Console(width=200, color_system=None)
    contained = replace(stands, process=replace(stands.process, pid=1))
    shown = [path_view.path_table(paths), path_view.peer_table(stands)]
    shown += [view.nic_table([(found, {})]) for found in (stands, contained)]
    with console.capture() as got:
        for one in shown:
            console.print(one)
    text = got.get()
    assert "node1:1 rank 3" in text and re.search(r"^node1 +1 +3 +up", text, re.M), text
    assert re.search(r"^node0 +40 +eth0", text, re.M), text
    assert re.search(r"^node0 +1 +0/2 +eth0", text, re.M), text


def test_who_ramps_or_is_held_back_is_not_at_fault() -> None:
    nics = [nic("eth0", "ramping"), nic("eth1", "damped", reuse_mono_ns=NOW + 12 * S)]
    nics.append(nic("eth2", "failed"))
    paths = [path("eth0"), path("eth1"), path("eth2")]
    stands = look(nics=nics, peers=[waiting()], paths=paths)
    assert hang.stands(stands).endswith(
        ": NIC eth2 failed, NIC eth1 held back for another 12s (damped); paths to node1's eth8 down"
    )
    far = path("eth0", state="damped", reuse_mono_ns=NOW + 5 * S)
    text = hang.stands(replace(stands, paths=[far]))
    assert text.endswith("paths to node1's eth8 held back for another 5s (damped)")


def test_no_path_for_memory_of_devices() -> None:
    """Paths that are up serve others, and sockets would not serve: neither is named."""
    paths = [
        path("eth2"),
        path("eth0", via="verbs"),
        path("eth1", "eth9", "up"),
        path("eth0", "eth7", "ramping"),
    ]
    peers = [waiting(waits_for="device-path")]
    assert hang.stands(
        look(nics=[nic("eth0", "failed"), nic("eth1")], peers=peers, paths=paths)
    ) == ("no path that may carry device memory to node1:7 for 18s of 60s: NIC eth0 failed")


def test_some_here_and_some_there() -> None:
    nics = [nic("eth0", "failed"), nic("eth1", fault="blackhole both")]
    paths = [path("eth0"), path("eth1"), path("eth2", "eth9")]
    text = hang.stands(look(nics=nics, peers=[waiting()], paths=paths))
    assert text.endswith(
        ": NIC eth0 failed, NIC eth1 healthy, fault injected; paths to node1's eth9 down"
    )


def test_silent_paths_of_one_direction() -> None:
    """The paths of the direction that goes on are not to blame."""
    peers = [waiting(state="suspect", cause="every path is silent"), peer(index=1, direction="rx")]
    paths = [path(state="up"), path(remote="eth9", state="up", peer=1)]
    text = hang.stands(look(nics=[nic()], peers=peers, paths=paths))
    assert text == (
        "no path to node1:7 for 18s of 60s, every path is silent: the NICs here are healthy; "
        "paths to node1's eth8 silent"
    )


def test_many_peers_and_nics_stay_a_line() -> None:
    nics = [nic(f"eth{n}", "failed") for n in range(8)]
    peers = [waiting(index=n, process_id=str(n), pid=n) for n in range(8)]
    paths = [path(f"eth{n}", peer=n) for n in range(8)]
    text = hang.stands(look(nics=nics, peers=peers, paths=paths))
    assert "no path to node1:0 for 18s of 60s; and 7 more: NIC eth0 failed, " in text
    assert text.endswith("NIC eth3 failed and 4 more") and len(text) < 150


@pytest.mark.parametrize("state", ["gone", "closed"])
def test_who_is_gone_is_not_waited_for(state: str) -> None:
    assert hang.waits(look(peers=[waiting(state=state)])) == []
    assert hang.waits(look(peers=[waiting()], state="died")) == []


# Bytes that are not sent again


def test_bytes_on_a_path_whose_end_is_not_confirmed() -> None:
    stuck = path(inflight_bytes=1 << 20, heard_mono_ns=NOW - 5 * S, cause="no answer")
    up = path("eth1", "eth9", "up", inflight_bytes=1 << 20, heard_mono_ns=NOW - 5 * S)
    stands = look(rank(0), nics=[nic("eth0", "failed")], peers=[peer()], paths=[stuck, up])
    (wait,) = hang.waits(stands)
    assert wait.kind == "unsent"
    assert [(spot.nic, spot.here) for spot in wait.spots] == [("eth8", False), ("eth0", True)]
    text = (
        "1.0 MiB to node1:7 may not be sent again: node1 has not confirmed the end of path "
        "eth0 -> eth8 for 5s: "
    )
    assert hang.stands(stands) == text + "NIC eth0 failed; paths to node1's eth8 down"
    well = replace(stands, nics=[nic("eth0", "ramping")])
    assert hang.stands(well) == text + "paths to node1's eth8 down"
    for other in (
        replace(stuck, heard_mono_ns=NOW - 2 * S),  # a failover
        replace(stuck, inflight_bytes=0),
        replace(stuck, state="up"),
        replace(stuck, heard_mono_ns=0, since_mono_ns=NOW - 2 * S),
        replace(stuck, heard_mono_ns=NOW - 60 * S, since_mono_ns=NOW - 2 * S),
    ):
        assert hang.waits(replace(stands, paths=[other, up])) == [], other


# Who is late


def test_the_rank_that_has_not_called() -> None:
    first, late = look(rank(0, 8, 12)), look(rank(1, 7, 13))
    text = "has not called #8 (all-reduce of 4.0 MiB) for 12s; no NIC is at fault"
    assert causes(first, late) == ["", text]
    for row in rows(first, late):
        (wait,) = row["waits"]
        assert (wait["kind"], wait["rank"], wait["host"], wait["pid"]) == ("late", 1, "node1", 41)
        assert (wait["nic"], wait["for_s"], wait["of_s"], wait["peer"]) == ("", 12.0, None, None)
    assert [row["behind"] for row in rows(first, late)] == [0, 1]


def test_nobody_is_behind_what_was_called_after_its_rows() -> None:
    """A job goes on after a rank's rows are published, and while the others are read."""
    first, later = look(rank(0, 7, 0.2)), look(rank(1, 12, -0.1))
    assert [row["behind"] for row in rows(first, replace(later, mono_ns=NOW + S))] == [0, 0]
    assert [row["behind"] for row in rows(first, look(rank(1, 12, 0.05)))] == [0, 0]
    assert [row["behind"] for row in rows(first, look(rank(1, 12, 0.15)))] == [5, 0]
    stopped = look(rank(0, 7, 5), silent_s=5)
    assert [row["behind"] for row in rows(stopped, look(rank(1, 12, 4.9)))] == [0, 0]


def test_nics_that_may_be_why_are_named() -> None:
    """A rank may be late because of them; one that ramps works, one that is drained is so on
    purpose."""
    text = "has not called #8 (all-reduce of 4.0 MiB) for 12s; "
    first, late = look(rank(0, 8, 12)), look(rank(1, 7, 13))
    full = path("eth0", "eth8", "up", weight=100)
    for nics, paths, words in (
        ([nic("eth0", "failed")], [], "not well: node1's NIC eth0 failed"),
        ([nic(fault="loss 1")], [], "not well: node1's NIC eth0 healthy, fault injected: loss 1"),
        (
            [nic("eth0", "damped", reuse_mono_ns=NOW + 9 * S)], [],
            "not well: node1's NIC eth0 held back for another 9s (damped)",
        ),
        (
            [nic(weight=100)], [replace(full, weight=40)],
            "not well: node1's path eth0 -> eth8@node1 at 40 % of its share",
        ),
        ([nic(weight=100)], [full], "no NIC is at fault"),
        ([nic("eth0", "ramping"), nic("eth1", "drained")], [full], "no NIC is at fault"),
        ([nic("eth0", "ramping", weight=60)], [replace(full, weight=40)], "no NIC is at fault"),
        ([nic(weight=100)], [replace(full, weight=0)], "no NIC is at fault"),
    ):  # fmt: skip
        assert causes(first, replace(late, nics=nics, paths=paths))[1] == text + words
    assert (
        "node0's NIC eth0 failed" in causes(replace(first, nics=[nic("eth0", "failed")]), late)[1]
    )


def test_one_that_waits_within_an_earlier_operation() -> None:
    first, late = look(rank(0, 8, 12)), look(rank(1, 7, 13))
    late = replace(late, gauges={"requests_in_flight": 3})
    text = "has not called #8 (all-reduce of 4.0 MiB) for 12s"
    assert causes(first, late)[1] == (
        f"{text}, and waits within an operation before that; no NIC is at fault"
    )
    other = rank(1, id="fedcba9876543210", op="broadcast")
    two = replace(late, comms=[*late.comms, other])
    assert (
        "waits within an operation before that or one of another communicator"
        in causes(first, two)[1]
    )
    inside = replace(late, comms=[*late.comms, replace(other, calling=True)])
    assert f"{text}, and is inside broadcast of communicator fedcba98; " in causes(first, inside)[1]


def test_one_inside_its_call_is_there_already() -> None:
    """The call counts when it returns: the others may all be inside it."""
    first, late = look(rank(0, 7, 12, calling=True)), look(rank(1, 7, 13))
    assert causes(first, late)[1].startswith("has not called #8 (all-reduce of 4.0 MiB) for 12s")
    sends = look(rank(0, 7, 12, calling=True, op="send"))
    assert causes(sends, late) == ["", ""], "that is no collective"


@pytest.mark.parametrize(
    ("first", "late"),
    [
        (rank(0, 8, 12), rank(1, 8, 12)),
        (rank(0, 8, 2), rank(1, 7, 13)),
        (rank(0, 8, 12), rank(1, 7, 2)),
        (rank(0, 9, 12), rank(1, 7, 13, calling=True)),
        (rank(0, 8, 12), rank(1, 7, 13, state="finalized")),
    ],
    ids=["not behind", "the other has just called", "busy", "inside a call", "over"],
)
def test_who_is_not_late(first: Comm, late: Comm) -> None:
    assert causes(look(first), look(late)) == ["", ""]


def test_a_rank_without_a_path_is_not_late() -> None:
    """And who waits behind one may be: a NIC is at fault then."""
    first, stands, late = (
        look(rank(0, 8, 12, ranks=3)),
        look(rank(1, 7, 13, ranks=3), peers=[waiting()]),
        look(rank(2, 7, 13, ranks=3)),
    )
    found = causes(first, stands, late)
    assert found[1].startswith("stalled: ") and "has not called" not in found[1]
    assert found[2] == "has not called #8 (all-reduce of 4.0 MiB) for 12s"


def test_a_stopped_rank() -> None:
    found = causes(look(rank(0)), look(rank(1), silent_s=7))
    assert found == ["", "stopped or starved: silent for 7s"]
    row, _ = rows(look(rank(0)), look(rank(1), silent_s=7))
    (wait,) = row["waits"]
    assert (wait["kind"], wait["rank"], wait["host"]) == ("silent", 1, "node1")
    assert wait["for_s"] == pytest.approx(7, abs=1)


# What is not seen


def test_ranks_of_other_nodes_are_not_seen() -> None:
    def notes(*looks: Snapshot) -> list[str]:
        return Seen(looks).coverage([ID])

    there = [peer(host="node3"), peer(host="node1"), peer(host="gone", state="gone")]
    first, second = (look(rank(n, 8, 12, ranks=4, nodes=4), peers=there) for n in (0, 1))
    text = "communicator 01234567: {} of 4 ranks are seen here, none of them behind; run this on "
    assert notes(first) == [text.format(1) + "node1, node3 and the other nodes too"]
    assert notes(first, second) == [text.format(2) + "node3 and the other nodes too"]
    late = look(rank(1, 7, 13, ranks=4))
    (note,) = notes(first, late)
    assert note.startswith("communicator 01234567: 2 of 4 ranks are seen here; run this on ")
    assert causes(first, late)[1].endswith("; no NIC of the ranks seen here is at fault")
    assert notes(look(rank(0, ranks=1))) == notes(look(rank(0, ago=1, ranks=4))) == []
    assert Seen([first]).coverage(["another"]) == []
    assert notes(look(rank(0, ranks=4)))[0].endswith("run this on the other nodes too")


# Real jobs


NODE0 = ["127.0.1.1", "127.0.2.1"]
BLAMED = {(0, "node0", address) for address in NODE0}


def points(row: dict[str, Any]) -> set[tuple[int, str, str]]:
    return {(wait["rank"], wait["host"], wait["nic"]) for wait in row["waits"]}


def in_json(name: str) -> list[dict[str, Any]]:
    found = call_json("ps", "--comms", "--job", name)["communicators"]
    return sorted(found, key=lambda row: int(row["rank"]))


def failed_nics(name: str) -> list[int]:
    """By rank: how many of its NICs are not healthy."""
    return [
        sum(nic.state != "healthy" for nic in process.snapshot().nics)
        for process in processes(name)
    ]


def test_all_nics_of_a_node_fail(build: Build) -> None:
    """The rank without a path, and the one at the other end, both point at the NICs that fail-nic
    took away, until they are back."""
    name = f"hang-{os.getpid()}"
    with preloaded(build, name, ["--duration", "120"], {}, ranks=2) as running:
        until(lambda: meets(name, 2) and all(c.operations > 20 for c in comms(name)), "it runs", 60)
        assert [row["waits"] for row in in_json(name)] == [[], []]
        pids = [process.pid for process in processes(name)]
        call("fail-nic", NODE0[0], "--pid", str(pids[0]))
        # Else rank 1 may find that nothing answers its NIC, with nobody left to ask.
        until(lambda: failed_nics(name) == [1, 0], "the first one is blamed", 30)
        call("fail-nic", NODE0[1], "--pid", str(pids[0]))

        def has_no_path(row: dict[str, Any]) -> bool:
            return {w["kind"] for w in row["waits"]} == {"no-path"} and points(row) == BLAMED

        until(lambda: all(has_no_path(row) for row in in_json(name)), "both ranks wait", 30)
        first, second = in_json(name)
        for row, other in ((first, pids[1]), (second, pids[0])):
            assert {wait["kind"] for wait in row["waits"]} == {"no-path"}
            assert {wait["peer"]["pid"] for wait in row["waits"]} == {other}
            assert {wait["of_s"] for wait in row["waits"]} == {60.0}
            assert points(row) == BLAMED
        assert {wait["fault"] for wait in first["waits"]} == {"blackhole both"}
        shown = call("ps", "--comms", "--pid", str(pids[0])).stdout
        (line,) = [line for line in shown.splitlines() if f"no path to node1:{pids[1]}" in line]
        assert re.search(
            r" 0/2 .* stalled: no path to node1:\d+ \(rank 1\) for \S+( ms)? of 60s", line
        )
        for address in NODE0:
            assert re.search(rf"NIC {re.escape(address)} \w+, fault injected", line), line
            assert f"node0: NIC {address} is " in shown
        assert "ranks are seen here" not in shown, "also with --pid all ranks are looked at"
        status = call("status", "--job", name).stdout
        assert status.count(" of 60s") == 4  # a line of each process and a row of its communicator
        assert "the NICs here are healthy; paths to node0's 127.0." in status
        for address in NODE0:
            call("recover-nic", address, "--pid", str(pids[0]))
        until(lambda: not any(row["waits"] for row in in_json(name)), "it goes on", 30)
        assert running.running


def test_a_rank_that_stands_still_and_one_that_is_stopped(build: Build, tmp_path: Path) -> None:
    name = f"late-{os.getpid()}"
    with working(build, name, tmp_path, "life_worker.py", 2, "revoke"):
        until(lambda: meets(name, 2) and all(c.operations > 20 for c in comms(name)), "it runs", 60)
        end_at(tmp_path, "pause")
        until(lambda: len(list(tmp_path.glob("resumed.*"))) == 2, "the pause is over", 60)
        end_at(tmp_path, "stall")
        until(lambda: all(row["waits"] for row in in_json(name)), "rank 1 is late", 60)
        first, second = in_json(name)
        (wait,) = first["waits"]
        assert (wait["kind"], wait["rank"], wait["host"], wait["nic"]) == ("late", 1, "node1", "")
        assert (first["behind"], second["behind"]) == (0, 1)
        late = f"has not called #{second['operations'] + 1} (all-reduce of "
        # A busy machine may keep the process silent for a while, or make a path count as slow.
        words = re.compile(re.escape(late) + r".*(no NIC is at fault|not well: .* of its share)")
        argv = ("ps", "--comms", "--pid", str(second["pid"]))
        until(lambda: words.search(call(*argv).stdout), late, 30)
        os.kill(second["pid"], signal.SIGSTOP)
        try:
            until(lambda: in_json(name)[0]["waits"][0]["kind"] == "silent", "it is silent", 30)
            shown = call("ps", "--comms", "--job", name).stdout
            assert re.search(r" 1/2 .* silent for \d+s .* stopped or starved", shown), shown
        finally:
            os.kill(second["pid"], signal.SIGCONT)


# Processes that cannot be read


def test_processes_that_cannot_be_read(start_writer: StartWriter) -> None:
    """Unknown, dead, and damaged: each is said, as `status` does."""
    writer = start_writer()
    pid = str(writer.pid)
    writer.kill()
    stderr = call("ps", "--comms", "--pid", pid).stderr
    assert f"no process with pid {pid} uses R2CCL here; --all lists" in stderr
    assert "no communicators are followed" in call("ps", "--comms", "--all", "--pid", pid).stderr
    assert "--all" not in call("plan", "show", "--pid", pid).stderr
    os.truncate(writer.path, 1000)
    for words in (["ps", "--comms", "--all"], ["ps", "--comms", "--all", "--json"], ["status"]):
        result = call(*words, "--pid", pid, code=1)
        assert f"Error: {writer.path.name}" in result.stderr, words
    for word in ("0", "-1", "x"):
        assert "--pid" in call("ps", "--comms", "--pid", word, code=2).stderr


def test_one_of_several_cannot_be_read(start_writer: StartWriter) -> None:
    """Is warned of, and the others are shown."""
    good, bad = start_writer(), start_writer()
    bad.kill()
    os.truncate(bad.path, 1000)
    stderr = call("ps", "--comms", "--all").stderr
    assert f"warning: {bad.path.name}" in stderr and good.process.running
