"""What operators see and hear of two engines on loopback NICs: who waits for whom, that a peer is
given up, that a dead NIC stays dead, who calls, and settings that cannot be followed. Rung 3: real
sockets and processes, injected faults. It cannot prove what link events do (rung 4)."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, Build
from failover_bed import Side, loopback, running_pair, until
from test_health import LONG, state

from r2ccl_ctl import control, hang

A, B = "127.0.1.1", "127.0.2.1"


def stands(side: Side) -> str:
    return hang.stands(side.snapshot())


def test_a_node_without_paths_says_so(build: Build) -> None:
    """Both NICs vanish, one after the other: whom it waits for, since when and until when; none of
    them is called healed while nothing answers on it; all of that is over when they are back."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="300ms") as pair:
        pair.moving()
        until("both connections are shown", lambda: pair.tx.snapshot().peers[0].connections == 2)
        peer = pair.tx.snapshot().peers[0]
        assert peer.direction == "tx"
        assert pair.rx.snapshot().peers[0].direction == "rx"
        assert time.monotonic_ns() - peer.heard_mono_ns < 10 * 10**9
        heard = [path.heard_mono_ns for path in pair.tx.snapshot().paths]
        assert 0 <= time.monotonic_ns() - max(heard) < 10 * 10**9, heard
        assert stands(pair.tx) == ""
        pair.tx.fail(A, "blackhole")
        until(f"probing: {pair}", lambda: state(pair.tx, A) == "probing")
        pair.moving()
        pair.tx.fail(B, "blackhole")
        until(f"stalled: {pair}", lambda: stands(pair.tx) != "")
        seen = set()
        end = time.monotonic() + 7
        while time.monotonic() < end:
            seen.add(state(pair.tx, A))
            time.sleep(0.05)
        text = stands(pair.tx)
        assert re.match(r"no path to \S+:\d+ for \d+s of 60s\b", text), text
        assert f":{pair.rx.segment.pid} " in text
        assert set(re.findall(r"NIC (\S+) \w+, fault injected", text)) == {A, B}, text
        assert not seen & {"ramping", "healthy"}, f"{seen} {pair}"
        pair.tx.recover(A)
        pair.tx.recover(B)
        until(f"goes on: {pair}", lambda: stands(pair.tx) == "")
        pair.finish()


def test_a_peer_that_is_given_up_is_told_once(build: Build) -> None:
    with running_pair(
        build.path, *LONG, nics=loopback(2), R2CCL_NO_PATH_TIMEOUT="2s", R2CCL_LOG="warn"
    ) as pair:
        pair.moving()
        for nic in (A, B):
            pair.tx.fail(nic, "blackhole")
        pair.wait()
        lines = re.findall(r"WARN NET/R2CCL: peer .* is given up; .*", pair.text())
        assert lines and len(lines) == len(set(lines)) <= 2, str(pair)
        causes = [line.partition("fail: ")[2] for line in lines]
        assert all("R2CCL_NO_PATH_TIMEOUT" in cause or "gone" in cause for cause in causes), lines


def perf(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "r2ccl_ctl", "launch", "-n", "2", "--emulate-nodes", "2"]
    argv += ["--nccl", "standin", "--timeout", "60", *options]
    argv += ["--", "r2ccl_perf", "--op", "all_reduce", "-b", "4K", "-n", "1", "-w", "0"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_settings_that_cannot_be_followed_are_told() -> None:
    words = {
        "R2CCL_CPUS": "999",
        "R2CCL_TCP_CONGESTION": "nonesuch",
        "R2CCL_SHM_GROUP": "nonesuch",
    }
    options = [word for name, value in words.items() for word in ("--env", f"{name}={value}")]
    done = perf(*options)
    assert done.returncode == 0, done
    for name, value in words.items():
        assert done.stderr.count(f"[0] WARN NET/R2CCL: {name}={value}") == 1, done.stderr


def test_no_room_for_a_segment_is_told(build: Build) -> None:
    """The job goes on, and says without NCCL_DEBUG that nobody will see it."""
    argv = [sys.executable, "-m", "r2ccl_ctl", "launch", "-n", "2", "--emulate-nodes", "2"]
    argv += ["--nccl", "standin", "--timeout", "60", "--", "sh", "-c"]
    argv += ["trap '' XFSZ; ulimit -f 100; exec \"$0\" --op all_reduce -b 4K -n 1 -w 0 -c 1"]
    argv += [str(build.path / "r2ccl_perf")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done
    said = r"\[0\] WARN NET/R2CCL: no control segment \(\d+ KiB in /dev/shm: File too large\)"
    assert len(re.findall(said, done.stderr)) == 1, done.stderr


def taken_port(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket, int]:
    """Of both addresses the same port, whatever else runs here."""
    for _ in range(20):
        one = stack.enter_context(socket.socket())
        other = stack.enter_context(socket.socket())
        one.bind(("127.0.1.1", 0))
        port = one.getsockname()[1]
        with contextlib.suppress(OSError):
            other.bind(("127.0.1.2", port))
            return one, other, port
    pytest.fail("no port that both addresses have")


def test_a_port_that_is_taken_is_told() -> None:
    """No port on any NIC: the job ends, and says why without NCCL_DEBUG."""
    with contextlib.ExitStack() as stack:
        one, other, port = taken_port(stack)
        one.listen()
        other.listen()
        done = perf("--nics", "1", "--env", f"R2CCL_PORT_RANGE={port}-{port}")
    assert done.returncode != 0, done
    text = f"cannot listen: no port is free. R2CCL_PORT_RANGE={port}-{port} has 1 port. A node "
    text += "needs one for each of its processes (1 here), two with the shim: widen the range"
    assert text in done.stderr, done.stderr
    assert "no NIC can be used" in done.stderr


def test_a_deaf_nic_is_shown() -> None:
    """One of two NICs has no port: the job runs, and the NIC shows that it cannot be reached."""
    name = f"deaf-nic-{os.getpid()}"
    with socket.socket() as taken:
        taken.bind(("127.0.2.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = [sys.executable, "-m", "r2ccl_ctl", "launch", "-n", "2", "--emulate-nodes", "2"]
        argv += ["--nics", "2", "--nccl", "standin", "--job", name, "--timeout", "60"]
        argv += ["--env", f"R2CCL_PORT_RANGE={port}-{port}", "--", "r2ccl_perf"]
        argv += ["--op", "all_reduce", "-b", "64K", "--duration", "50"]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, cwd=ROOT) as popen:
            try:

                def first() -> list[control.Process]:
                    found = [p for p in control.list_processes() if p.job == name]
                    return [
                        p
                        for p in found
                        if p.rank == 0 and any(peer.connections for peer in p.snapshot().peers)
                    ]

                until("a rank", lambda: bool(first()), 30)
                (process,) = first()
                nics = {nic.name: nic for nic in process.snapshot().nics}
                assert "cannot listen" in nics["127.0.2.1"].cause
                assert nics["127.0.1.1"].cause == ""
                assert process.net_api == 12 and re.match(r"\d+\.\d+", process.nccl_version)
                assert process.comm != ""
                peers = process.snapshot().peers
                assert len({p.process_id for p in peers}) == 1
                assert {p.direction for p in peers if p.connections} <= {"tx", "rx"}
                assert {p.rank for p in peers if p.host} == {1}
            finally:
                popen.terminate()
                popen.wait(30)
