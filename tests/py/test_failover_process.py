"""Processes that die, stop, fork, leave or are attacked under a running job, and odd sets of NICs.

Rung 3: loopback NICs, r2ccl_perf and failover_worker.py on the stand-in for NCCL. It cannot prove
what a host that goes silent as a whole does (rung 4), nor anything about GPUs (rung 6).
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build, RunBounded
from failover_bed import PerfJob, loopback, running_pair, running_perf, until

WORKER = ROOT / "tests/py/failover_worker.py"
NODES: dict[str, Any] = {"emulate_nodes": 2, "per_node": 1, "nics": 2}


def works(build: Build, *what: str | int | Path, **more: Any) -> Any:
    argv = [sys.executable, str(WORKER), *(str(word) for word in what)]
    return running_perf(build, argv=argv, **{**NODES, **more})


def output(job: PerfJob) -> str:
    return "\n".join(rank.output for rank in job.job.ranks)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_killed_rank(build: Build, victim: int) -> None:
    """All others learn it by themselves, long before anybody's patience ends."""
    spec: dict[str, Any] = {"emulate_nodes": 4, "per_node": 1, "nics": 2, "grace": 20.0}
    with running_perf(build, seconds=30, **spec) as job:
        job.moving()
        job.sides[victim].signal(signal.SIGKILL)
        job.end(25)
        codes = [rank.code for rank in job.job.ranks]
        ends = [rank.ended_at or 0.0 for rank in job.job.ranks]
        assert codes[victim] == 128 + signal.SIGKILL, str(job)
        assert all(code == 2 for rank, code in enumerate(codes) if rank != victim), str(job)
        assert max(ends) - ends[victim] < 5.0, f"{ends}: {job}"


def test_fork_in_the_middle(build: Build, tmp_path: Path) -> None:
    """A child that ends with all exit handlers takes nothing with it."""
    with works(build, "fork", tmp_path / "id") as job:
        job.ready()
        assert job.end(40) == 0, str(job)
        assert not job.named("replay", "connection-failed"), str(job)


def test_rank_that_leaves(build: Build, tmp_path: Path) -> None:
    """Ending without a word is like dying: the other rank gets an error."""
    with works(build, "leave", tmp_path / "id", grace=20.0) as job:
        job.end(40)
        zero, one = job.job.ranks
        assert (zero.code, one.code) == (2, 0), str(job)
        assert (zero.ended_at or 0) - (one.ended_at or 0) < 5.0, str(job)


@pytest.mark.slow
def test_many_communicators(build: Build, tmp_path: Path) -> None:
    """A hundred communicators one after the other leave nothing behind."""
    with works(build, "recreate", tmp_path / "id", 100, timeout=240.0) as job:
        assert job.end(200) == 0, str(job)  # 12 s on a machine with time
    for line in output(job).splitlines():
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        early, late = found["early"], found["late"]
        assert late["fds"] <= early["fds"] + 2, found
        assert late["threads"] <= early["threads"], found
        assert late["maps"] <= early["maps"] + 12, found
    assert output(job).count('"late"') == 2, str(job)


def listeners(pid: int) -> list[tuple[str, int]]:
    """Where this process listens on loopback NICs."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(link.readlink()))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        address, port = words[1].split(":")
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            if not host.startswith("127.0.0."):
                found.append((host, int(port, 16)))
    return found


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_strangers(build: Build, seed: int) -> None:
    """Garbage, half handshakes and hundreds of sockets that say nothing reach the listeners: the
    job goes on, and they do not stay."""
    rnd = random.Random(seed)
    with running_perf(build, **NODES) as job, contextlib.ExitStack() as stack:
        job.moving()
        before = [descriptors(side.pid) for side in job.sides]
        doors = [door for side in job.sides for door in listeners(side.pid)]
        assert len(doors) >= 4, doors
        calls: list[socket.socket] = []
        for number in range(600):
            call = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            call.settimeout(2.0)
            with contextlib.suppress(OSError):
                call.connect(doors[number % len(doors)])
                if number % 3:
                    call.sendall(rnd.randbytes(rnd.choice([1, 7, 64, 200, 5000])))
                calls.append(call)
        assert len(calls) > 100
        during = max(
            descriptors(side.pid) - was for side, was in zip(job.sides, before, strict=True)
        )
        assert during < 300, f"{during} more descriptors: {job}"
        job.moving()
        until(
            "strangers are shown the door",
            lambda: all(
                descriptors(side.pid) <= was + 16
                for side, was in zip(job.sides, before, strict=True)
            ),
            20.0,
        )
        assert not job.named("path-down", "connection-failed"), str(job)
        for side in job.sides:
            assert side.counter("handshakes_rejected") >= 100, str(job)
        job.finish()


@pytest.mark.parametrize(("a", "b"), [(1, 4), (3, 2), (4, 1)])
def test_unequal_numbers_of_nics(build: Build, a: int, b: int) -> None:
    words = ("--size", "1M", "--conns", 3, "--bidir", "--stall", 20)
    with running_pair(
        build.path, *words, nics=loopback(a), PAIR_NICS_B=loopback(b, last=9)
    ) as pair:
        pair.moving(60)
        pair.finish()


def test_verify_mode_under_faults(build: Build) -> None:
    words = ("--size", "300000", "--count", 2000, "--conns", 2, "--bidir", "--stall", 20)
    with running_pair(build.path, *words, "--faults", 11, nics=loopback(3), R2CCL_VERIFY=1) as pair:
        pair.finish()
        assert not pair.tx.counter("crc_errors") and not pair.rx.counter("crc_errors"), str(pair)


def test_ipv6(build: Build) -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with running_pair(build.path, "--size", "1M", nics="::1") as pair:
        pair.moving(40)
        pair.finish()


ALONE = {"HOSTNCCL_SOCKET_ADDRS": "127.0.0.1", "HOSTNCCL_BOOTSTRAP_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("R2CCL_MODE", "off", "R2CCL_MODE is off"),
        ("NCCL_SOCKET_IFNAME", "=nosuchnic0", "NCCL_SOCKET_IFNAME==nosuchnic0 matches"),
        ("R2CCL_NICS", "=nosuchnic0", "R2CCL_NICS: nosuchnic0 does not exist"),
        ("R2CCL_NICS", "10.99.99.99", "R2CCL_NICS: 10.99.99.99 is no address of this node"),
    ],
)
def test_no_usable_nic_falls_back(build: Build, name: str, value: str, says: str) -> None:
    """Without a NIC for us NCCL takes its own transport; a NIC that was asked for is named."""
    env = {**ALONE, "NCCL_DEBUG": "INFO", name: value}
    with running_perf(build, "-b", "64K", "-n", 2, env=env, ranks=2) as job:
        assert job.end(40) == 0, str(job)
        assert "Using network Socket" in output(job), str(job)
        assert "Out of bounds values : 0 OK" in output(job), str(job)
        lines = [line for line in job.job.ranks[0].output.splitlines() if says in line]
        assert len(lines) == 1, str(job)


def test_without_shared_memory(build: Build) -> None:
    env: dict[str, str | int] = {"R2CCL_SHM": 0}
    with running_perf(build, "-b", "1M", "-n", 5, env=env, **NODES) as job:
        named = False
        while job.job.running and not named:
            named = any(side.is_named() for side in job.sides)
            time.sleep(0.002)
        assert not named, str(job)
        assert job.end(40) == 0, str(job)
        assert "Out of bounds values : 0 OK" in output(job), str(job)


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("attack_exit", ["3"], ["ok"]),
        ("attack_credit", [], ["side 0 ok", "side 1 ok"]),
    ],
)
def test_attack(
    build: Build, run_bounded: RunBounded, program: str, words: list[str], said: list[str]
) -> None:
    """A peer that dies before it acknowledges CLOSE; a credit that is lost with all paths."""
    finished = run_bounded(
        [build.path / "stress" / program, *words],
        env={
            "R2CCL_NICS": "127.0.1.1,127.0.2.1",
            "R2CCL_IO_THREADS": "4",
            "R2CCL_SHM": "0",
        },
        timeout=60,
    )
    assert sorted(finished.stdout.split("\n")) == ["", *said], finished
