"""status and top over several hosts: a stand-in for ssh leads into mount namespaces, each with
/dev/shm of its own (rung 3). It cannot prove what a real ssh does: test_real_ssh.py does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, missing
from segment_bed import StartWriter, program, start_writer
from test_cli import call
from test_cli_operator import on_a_pty

from r2ccl_ctl import control, gather, overview, verdict
from r2ccl_ctl.cli import read_cmds
from r2ccl_ctl.control import Selection
from r2ccl_ctl.gather import HostLook
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.rows import Comm

__all__ = ["start_writer"]

TOOL = [sys.executable, "-m", "r2ccl_ctl"]
SSH = """#!/bin/sh
# Takes the options and the host as ssh does; each host is a mount namespace.
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
echo "Welcome to $host"
case $host in
    slow*) exec sleep 60 ;;
    chatty) head -c 300000 /dev/zero | tr '\\0' x >&2 ;;
    h*) ;;
    *) echo "ssh: Could not resolve hostname $host" >&2; exit 255 ;;
esac
exec nsenter -t "$(cat "$FAKE_HOSTS/$host")" -U --preserve-credentials -m sh -c "$*"
"""


@dataclass
class Nodes:
    """Emulated hosts. start: a process with a segment on one of them; kill: all of a host."""

    folder: Path
    env: dict[str, str]
    start: Callable[..., subprocess.Popen[bytes]]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*TOOL, *words], env=self.env, cwd=ROOT, capture_output=True,
                              text=True, timeout=60)  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """h1, h2 and chatty."""
    if not program().is_file():
        missing("build", f"{program()}: not there; run `make native`")
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    path = f"{ssh.parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "FAKE_HOSTS": str(tmp_path), "COLUMNS": "200"}
    with contextlib.ExitStack() as stack:

        def keep(popen: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
            stack.callback(popen.wait, 10)
            stack.callback(popen.kill)
            return popen

        for host in ("h1", "h2", "chatty"):
            enter = "mount -t tmpfs none /dev/shm && echo ready && exec sleep 120"
            holder = keep(subprocess.Popen(["unshare", "-Urm", "sh", "-c", enter],
                                           stdout=subprocess.PIPE))  # fmt: skip
            assert holder.stdout
            if holder.stdout.readline() != b"ready\n":
                missing("lab", "mount namespaces are refused here")
            (tmp_path / host).write_text(str(holder.pid))

        def start(host: str, *options: str) -> subprocess.Popen[bytes]:
            words = ["nsenter", "-t", (tmp_path / host).read_text(), "-U", "-m",
                     "--preserve-credentials", str(program()), "--seconds", "60"]  # fmt: skip
            popen = keep(subprocess.Popen([*words, *options], stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE))  # fmt: skip
            assert popen.stdout and popen.stdout.readline().startswith(b"ready")
            return popen

        yield Nodes(tmp_path, env, start)


def test_each_process_is_a_row_and_silent_hosts_stand_above(nodes: Nodes) -> None:
    nodes.start("h1", "--job", "a", "--rank", "0")
    nodes.start("h2", "--job", "a", "--rank", "1")
    done = nodes.run("status", "--hosts", "h1,h2,nowhere")
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[0] == "3 hosts, 1 without an answer"
    assert lines[1].startswith("host nowhere does not answer: it ended with code 255: ssh: Could")
    rows = [line.split() for line in lines if " node-a " in line]
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("0", "healthy", "2/2"), ("1", "healthy", "2/2")
    ]  # fmt: skip
    assert nodes.run("status", "--hosts", "nowhere").returncode == 1


def test_json_has_all_processes_and_hosts(nodes: Nodes) -> None:
    for host in ("h1", "h2"):
        nodes.start(host, "--job", "a")
    done = nodes.run("status", "--hosts", "h1,h2,nowhere", "--json")
    document = json.loads(done.stdout)
    assert [(h["host"], h["processes"], bool(h["error"])) for h in document["hosts"]] == [
        ("h1", 1, False), ("h2", 1, False), ("nowhere", 0, True)
    ]  # fmt: skip
    assert [row["verdict"] for row in document["processes"]] == ["healthy"] * 2
    assert len({row["segment"] for row in document["processes"]}) == 2


def test_ps(nodes: Nodes) -> None:
    for host in ("h1", "h2"):
        nodes.start(host, "--job", "a")
    done = nodes.run("ps", "--hosts", "h1,h2,nowhere")
    assert sum(" node-a " in f" {line}" for line in done.stdout.splitlines()) == 2
    assert "warning: host nowhere does not answer" in done.stderr and done.returncode == 0


def test_ps_does_not_repeat_itself_for_each_silent_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    looks = [HostLook(f"h{i}", [], [], "it ended with code 255") for i in range(60)]
    with pytest.raises(SystemExit):
        read_cmds.ps_there(looks, Selection(), comms=False, as_json=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and lines[4] == "warning: and 56 more"


def test_ranks_of_other_hosts_are_behind(
    start_writer: StartWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alone is not: who is behind is a comparison."""
    snapshot = start_writer().process.snapshot()
    looks = []
    for rank, operations in enumerate((9, 5)):
        comm = Comm(
            index=0, id="c0ffee0000000000", parent="", name="", state="ready", rank=rank, ranks=2,
            nodes=2, local_ranks=1, device=0, plan="", epoch=0, operations=operations, p2p=0,
            op="all-reduce", op_bytes=0, op_mono_ns=snapshot.mono_ns - 10**9, calling=False,
            cause="", since_real_ns=0, since_mono_ns=0, planned=0, plan_wait_ns=0,
        )  # fmt: skip
        process = replace(snapshot.process, host=f"h{rank}", process_id=str(rank))
        looks.append(HostLook(f"h{rank}", [replace(snapshot, process=process, comms=[comm])]))
    read_cmds.ps_there(looks, Selection(), comms=True, as_json=True)
    rows = json.loads(capsys.readouterr().out)["communicators"]
    assert [(row["node"], row["behind"], row["ranks_seen"]) for row in rows] == [
        ("h0", 0, 2), ("h1", 4, 2)
    ]  # fmt: skip


def test_hosts_of_the_peers(nodes: Nodes, start_writer: StartWriter) -> None:
    """This host knows h1 only, and h1 knows more. It answers without ssh, and another job's peers
    are not followed."""
    job = start_writer("--rank", "0", "--peer", "h1").job
    start_writer("--peer", "h7", job=f"{job}-other")
    nodes.start("h1", "--job", job, "--rank", "1", "--host", "h1", "--peer", "chatty")
    for rank, peer in ((2, "nowhere"), (3, "-oX=y")):
        nodes.start("chatty", "--job", job, "--rank", str(rank), "--host", "c", "--peer", peer)
    words = ("--hosts", "peers", "--job", job)
    document = json.loads(nodes.run("status", *words, "--json").stdout)
    assert sorted(row["rank"] for row in document["processes"]) == [0, 1, 2, 3]
    hosts = {one["host"]: one["error"] for one in document["hosts"]}
    assert list(hosts) == [socket.gethostname(), "h1", "chatty", "nowhere", "-oX=y"], hosts
    assert "Could not resolve" in hosts.pop("nowhere")
    assert "no host name" in hosts.pop("-oX=y") and not any(hosts.values())
    done = nodes.run("status", *words, "--check")
    assert done.returncode == verdict.UNKNOWN and "host nowhere does not answer" in done.stdout
    done = nodes.run("ps", *words)
    assert (
        done.stdout.count("segment_writer") == 4 and "host nowhere does not answer" in done.stderr
    )
    text = nodes.run("top", *words, "--count", "1").stdout
    assert text.startswith("5 hosts, 2 without an answer"), text


def test_names_of_a_node_that_are_here_are_not_asked(
    start_writer: StartWriter, tmp_path: Path
) -> None:
    """Emulated nodes, or containers that share /dev/shm."""
    job = start_writer("--host", "n0", "--peer", "n1").job
    start_writer("--host", "n1", "--peer", "n0")
    done = call("status", "--hosts", "peers", "--job", job, "--via", "false", "--json")
    document = json.loads(done.stdout)
    assert [one["error"] for one in document["hosts"]] == [""]
    assert len(document["processes"]) == 2


def test_peers_of_nobody() -> None:
    words = ("--hosts", "peers", "--job", "nobody")
    for command in ("status", "ps"):
        text = call(command, *words, code=1).output
        assert "no process with job nobody uses R2CCL here" in text, text
    done = call("status", *words, "--check", code=verdict.UNKNOWN)
    assert done.stdout.startswith("R2CCL UNKNOWN: --hosts peers: no process")
    assert "leave out the other hosts" in call("top", "--hosts", "peers,h1", code=2).output
    assert "is for ps, status and top" in call("doctor", "--hosts", "peers", code=2).output


@pytest.mark.parametrize(
    ("hosts", "code", "word"),
    [
        ("h1,h2", verdict.HEALTHY, "R2CCL HEALTHY: 1 process on 2 hosts"),
        ("h1,nowhere", verdict.UNKNOWN, "R2CCL UNKNOWN: host nowhere does not answer: it ended"),
        ("h2", verdict.UNKNOWN, "R2CCL UNKNOWN: no process uses R2CCL on 1 host"),
    ],
)
def test_check(nodes: Nodes, hosts: str, code: int, word: str) -> None:
    nodes.start("h1", "--job", "a")
    done = nodes.run("status", "--hosts", hosts, "--check")
    assert done.stdout.startswith(word) and done.stdout.count("\n") == 1, done
    assert done.returncode == code


def test_a_host_keeps_nobody_waiting(nodes: Nodes) -> None:
    nodes.start("h1", "--job", "a")
    slow = [f"slow{n}" for n in range(8)]
    words = ["--hosts", ",".join([*slow, "h1", "chatty"]), "--timeout", "6s"]
    begun = time.monotonic()
    done = nodes.run("status", *words, "--json")
    assert time.monotonic() - begun < 30
    hosts = {one["host"]: one for one in json.loads(done.stdout)["hosts"]}
    assert {hosts[name]["error"] for name in slow} == {"no answer in 6 s"}
    assert hosts["h1"]["processes"] == 1 and hosts["chatty"]["error"] == ""


def test_top_sorts_and_filters(nodes: Nodes) -> None:
    for rank in (1, 0):
        nodes.start("h1", "--job", "b", "--rank", str(rank))
    silent = nodes.start("h2", "--job", "a", "--rank", "2")
    nodes.start("h2", "--job", "a", "--rank", "0")
    silent.send_signal(signal.SIGSTOP)
    time.sleep(control.SILENT_S + 1)

    def ranks(*words: str) -> list[str]:
        text = nodes.run("top", "--hosts", "h1,h2", "--count", "1", *words).stdout
        return [line.split()[0] for line in text.splitlines() if " node-a " in line]

    try:
        assert ranks() == ["2", "0", "0", "1"]  # the worst job first, its worst process first
        assert ranks("--sort", "rank") == ["0", "2", "0", "1"]
        assert ranks("--unwell") == ["2"]
        assert ranks("--job", "b") == ["0", "1"]
    finally:
        silent.send_signal(signal.SIGCONT)


def test_top_refreshes_in_place_and_a_host_may_come_back(nodes: Nodes) -> None:
    (nodes.folder / "h9").write_text("0")
    nodes.start("h1", "--job", "a")
    argv = ["env", *(f"{n}={nodes.env[n]}" for n in ("PATH", "FAKE_HOSTS")), *TOOL]
    argv += ["top", "--hosts", "h1,h9", "--interval", "200ms"]

    def script(await_text: Callable[[str], None], pid: int) -> None:
        await_text("2 hosts, 1 without an answer")
        (nodes.folder / "h9").write_text((nodes.folder / "h2").read_text())
        await_text("2 hosts, 0 without an answer")
        os.kill(pid, signal.SIGINT)

    text = on_a_pty(argv, script)
    assert text.count("\x1b[?1049h") == 1  # one screen


def test_on_this_host(start_writer: StartWriter) -> None:
    writer = start_writer("--rank", "3")
    lines = call("top", "--job", writer.job, "--count", "1").stdout.splitlines()
    assert lines[0].startswith(f"job {writer.job}  healthy  1 ")
    assert lines[2].split()[:4] == ["3", "node-a", str(writer.pid), "healthy"]


def test_options_without_effect_are_refused() -> None:
    assert "--via has no effect" in call("status", "--via", "srun", code=2).output
    assert "--timeout has no effect" in call("top", "--timeout", "1s", code=2).output


def test_an_empty_hostfile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none yet\n")
    text = call("status", "--hostfile", str(tmp_path / "hosts"), code=2).output
    assert "names no host" in text


# What comes over the wire


def test_a_snapshot_is_whole_and_its_times_are_ours(start_writer: StartWriter) -> None:
    snapshot = start_writer().process.snapshot()
    wire = json.loads(json.dumps(snapshot.as_dict()))
    assert gather.restored(wire, 0) == snapshot
    later = gather.restored(wire, 10**18)
    assert later.mono_ns == snapshot.mono_ns + 10**18
    assert later.process.alive_mono_ns == snapshot.process.alive_mono_ns + 10**18
    times = [(a.reuse_mono_ns, b.reuse_mono_ns)
             for a, b in zip(snapshot.nics, later.nics, strict=True)]  # fmt: skip
    assert all(b == (a + 10**18 if a else 0) for a, b in times)  # 0: not known
    assert later.real_ns == snapshot.real_ns


def test_hosts_that_share_their_processes_show_them_once(start_writer: StartWriter) -> None:
    snapshot = start_writer().process.snapshot()
    looks = [HostLook("a", [snapshot]), HostLook("b", [snapshot])]
    assert [len(look.snapshots) for look in gather.once_each(looks)] == [1, 0]


def test_another_version_is_no_answer() -> None:
    member = gather.Member("a", "sh", 1)
    with pytest.raises(Exception, match="it has R2CCL 0.0, and here is"):
        member._restored({"version": "0.0"})


def test_a_screen_is_not_overrun(start_writer: StartWriter) -> None:
    from rich.console import Console

    from r2ccl_ctl.cli.common import Whole, fitted
    from r2ccl_ctl.cli.overview_view import overview_view

    snapshot = start_writer().process.snapshot()
    many: list[Any] = [
        (replace(snapshot, process=replace(snapshot.process, rank=rank)), {}) for rank in range(40)
    ]
    jobs = overview.jobs(many, Seen([]))
    out = Console(width=200)
    with out.capture() as captured:
        out.print(overview_view(jobs, [], 12))
    lines = captured.get().splitlines()
    assert len(lines) <= 12 and lines[-1].startswith("and 32 more"), lines
    # Rows that are longer than the terminal is wide take more lines.
    narrow = Console(width=60, height=24)
    view = fitted(narrow, lambda lines: overview_view(jobs, [], lines))
    with narrow.capture() as captured:
        narrow.print(Whole(view))
    lines = captured.get().splitlines()
    assert 15 < len(lines) < 24 and lines[-1].startswith("and "), lines
