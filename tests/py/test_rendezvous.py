"""How ranks of r2ccl_perf find each other where the port is not theirs alone, and the ports that
`launch` gives. Rung 3; one case makes a network namespace (rung 4).

Not proven: that no program outside R2CCL takes a port between its choice and rank 0's bind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from conftest import Build, run_process
from segment_bed import until

from r2ccl_ctl import launch, ports
from r2ccl_ctl.job import LaunchSpec
from r2ccl_ctl.ports import Ports, PortsError

LIMIT = 60.0


def place() -> tuple[str, int]:
    """An address of this test's own, and a port that the kernel gives nobody."""
    numbers = (random.randrange(16, 250), random.randrange(250), random.randrange(1, 250))
    return f"127.{numbers[0]}.{numbers[1]}.{numbers[2]}", random.randrange(20000, 30000)


class Rank:
    """One rank of r2ccl_perf, as a process; ended with the test."""

    def __init__(
        self,
        build: Build,
        tmp: Path,
        at: tuple[str, int],
        rank: int,
        ranks: int,
        env: Mapping[str, str],
        word: str = "",
        names: tuple[str, str] = ("R2CCL_RANK", "R2CCL_NRANKS"),
    ) -> None:
        self.file = tmp / f"said-{len(list(tmp.iterdir()))}"
        command = [*word.split(), str(build.perf), "-b", "1K", "-n", "1", "--timeout", "40"]
        with self.file.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={
                    **os.environ,
                    names[0]: str(rank),
                    names[1]: str(ranks),
                    "R2CCL_RENDEZVOUS": f"{at[0]}:{at[1]}",
                    "HOSTNCCL_BOOTSTRAP_ADDR": "127.0.0.1",
                    "HOSTNCCL_SOCKET_ADDRS": "127.0.0.1",
                    "NCCL_NET_PLUGIN": "none",
                    **env,
                },
            )

    @property
    def said(self) -> str:
        return self.file.read_text(errors="replace")

    def ends(self, code: int) -> str:
        try:
            found = self.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {LIMIT} s: {self.said}", pytrace=False)
        assert found == code, f"exit code {found}: {self.said}"
        return self.said


class Start:
    """Makes ranks."""

    def __init__(self, build: Build, tmp: Path) -> None:
        self.build, self.tmp, self.ranks = build, tmp, list[Rank]()

    def __call__(
        self,
        at: tuple[str, int],
        rank: int,
        ranks: int = 2,
        token: str = "",
        names: tuple[str, str] = ("R2CCL_RANK", "R2CCL_NRANKS"),
        **env: str,
    ) -> Rank:
        more = {"R2CCL_RENDEZVOUS_TOKEN": token} if token else {}
        made = Rank(self.build, self.tmp, at, rank, ranks, {**more, **env}, names=names)
        self.ranks.append(made)
        return made


@pytest.fixture
def start(build: Build, tmp_path: Path) -> Iterator[Start]:
    made = Start(build, tmp_path)
    yield made
    for rank in made.ranks:
        rank.process.kill()
        rank.process.wait(timeout=20)


def listens(at: tuple[str, int]) -> bool:
    address = "".join(f"{int(part):02X}" for part in reversed(at[0].split(".")))
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return any(f" {address}:{at[1]:04X} 00000000:0000 0A " in line for line in lines)


# ---- two jobs, one port


def test_another_jobs_rank_is_turned_away(start: Start) -> None:
    """The port is job A's; B's rank is told so, and B goes on once its own rank 0 has the port."""
    at = place()
    first = start(at, 0, token="a")
    until(lambda: listens(at), "rank 0 of A", LIMIT)
    stray = start(at, 1, token="b")
    until(lambda: "another job's" in stray.said, "B's rank turned away", LIMIT)
    assert f"{at[0]}:{at[1]}" in stray.said
    late = start(at, 0, token="b")
    until(lambda: "is in use" in late.said, "B's rank 0 waits for the port", LIMIT)
    second = start(at, 1, token="a")
    assert "turned away rank 1 of another job" in first.ends(0)
    second.ends(0)
    late.ends(0)
    stray.ends(0)


# Who numbers the ranks, and what it calls their job.
STARTERS = {
    "torchrun": (("RANK", "WORLD_SIZE"), "TORCHELASTIC_RUN_ID"),
    "mpirun": (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "PMIX_NAMESPACE"),
    "pmi": (("PMI_RANK", "PMI_SIZE"), "PMI_JOBID"),
}


@pytest.mark.parametrize("starter", STARTERS)
def test_the_starters_name_for_the_job(start: Start, starter: str) -> None:
    """Two jobs of a size without a token: what their starter calls them tells them apart, and does
    not make one rank of two that it calls the same."""
    names, job = STARTERS[starter]
    at = place()
    first = start(at, 0, 3, names=names, **{job: "a" * 70})  # longer than a token may be
    until(lambda: listens(at), "rank 0", LIMIT)
    other = start(at, 1, 3, names=names, **{job: "b"}, R2CCL_RENDEZVOUS_TIMEOUT="1")
    assert "another job's (3 ranks)" in other.ends(2)
    mine = start(at, 1, 3, names=names, **{job: "a" * 70})
    until(lambda: established(mine), "rank 1 has its id", LIMIT)
    twin = start(at, 1, 3, names=names, **{job: "a" * 70}, R2CCL_RENDEZVOUS_TIMEOUT="1")
    assert "one of this number is there" in twin.ends(2)
    last = start(at, 2, 3, names=names, **{job: "a" * 70})
    for rank in (first, mine, last):
        rank.ends(0)


def established(rank: Rank) -> bool:
    """Whether the stand-in's bootstrap has begun: it listens."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{rank.process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = os.readlink(fd).removeprefix("socket:[").rstrip("]")
                for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[9] == inode and words[3] == "0A":
                        return True
    return False


def test_token_too_long(start: Start) -> None:
    said = start(place(), 0, token="x" * 64).ends(2)
    assert "R2CCL_RENDEZVOUS_TOKEN=xxx" in said and "at most 63" in said


# ---- strangers


def test_strangers_at_rank_0(start: Start) -> None:
    """Who is silent, who says something else, who goes at once."""
    at = place()
    first = start(at, 0, token="a")
    until(lambda: listens(at), "rank 0", LIMIT)
    with contextlib.ExitStack() as stack:
        for words in (b"", b"GET / HTTP/1.0\r\n\r\n", b"r2perf1\0", b"r2perf2\0" + bytes(30)):
            stranger = stack.enter_context(socket.create_connection(at, timeout=LIMIT))
            stranger.sendall(words)
        socket.create_connection(at, timeout=LIMIT).close()
        second = start(at, 1, token="a")
        first.ends(0)
        second.ends(0)


@pytest.mark.parametrize("answer", [None, b"SSH-2.0-OpenSSH_9.2\r\n" * 20])
def test_something_else_has_the_port(start: Start, answer: bytes | None) -> None:
    at = place()
    done = threading.Event()
    with socket.create_server(at) as server, contextlib.ExitStack() as stack:
        server.settimeout(0.1)

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError, OSError):
                    peer = server.accept()[0]
                    if answer is None:
                        stack.enter_context(peer)  # silent
                        continue
                    peer.sendall(answer)
                    peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            said = start(at, 1, token="a", R2CCL_RENDEZVOUS_TIMEOUT="2").ends(2)
            assert f"{at[0]}:{at[1]} within 2 s: what listens there does not answer" in said
            said = start(at, 0, token="a", R2CCL_RENDEZVOUS_TIMEOUT="2").ends(2)
            assert (
                f"rank 0 cannot listen on {at[0]}:{at[1]}: {os.strerror(errno.EADDRINUSE)}" in said
            )
        finally:
            done.set()
            thread.join(timeout=20)


def test_nobody_there(start: Start) -> None:
    at = place()
    said = start(at, 1, R2CCL_RENDEZVOUS_TIMEOUT="1").ends(2)
    assert f"{at[0]}:{at[1]} within 1 s: {os.strerror(errno.ECONNREFUSED)}" in said


def test_ranks_that_do_not_come(start: Start) -> None:
    """Whoever else keeps coming does not keep rank 0 waiting."""
    at = place()
    begin = time.monotonic()
    first = start(at, 0, 3, token="a", R2CCL_RENDEZVOUS_TIMEOUT="3")
    start(at, 1, 3, token="b")
    assert f"only 1 of 3 ranks came to {at[0]}:{at[1]} within 3 s" in first.ends(2)
    assert time.monotonic() - begin < 30


SELF = """
import os, pathlib, subprocess, sys, time
def low_high(low, high):
    pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{low} {high}")
def opened():
    lines = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    return int(lines[1][lines[0].index("ActiveOpens")])
def rank(number):
    env = {**os.environ, "R2CCL_RANK": str(number), "R2CCL_NRANKS": "2",
           "R2CCL_RENDEZVOUS": "127.0.0.1:29600"}
    return subprocess.Popen([sys.argv[1], "-b", "1K", "-n", "1", "--timeout", "40"], env=env)
subprocess.run([sys.argv[2], "link", "set", "lo", "up"], check=True)
low_high(29600, 29601)  # 29600 is the source port of whoever connects
second = rank(1)
end = time.monotonic() + 40
while opened() < 3 and time.monotonic() < end:
    time.sleep(0.01)
print("opened", opened(), flush=True)
low_high(32768, 60999)
codes = [rank(0).wait(timeout=50), second.wait(timeout=50)]
sys.exit(0 if codes == [0, 0] else f"exit codes {codes}")
"""


@pytest.mark.lab
def test_a_rank_does_not_talk_to_itself(lab_rights: None, build: Build) -> None:
    """A connection to a port where nobody listens yet may get that very port as its own: then it is
    established, with itself."""
    import shutil

    ip = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert ip, "no `ip` in PATH (package iproute2)"
    rights = ["-n"] if os.geteuid() == 0 else ["-rn"]
    env = {"HOSTNCCL_BOOTSTRAP_ADDR": "127.0.0.1", "HOSTNCCL_SOCKET_ADDRS": "127.0.0.1"}
    run_process(
        ["unshare", *rights, sys.executable, "-c", SELF, build.perf, ip],
        env={**env, "NCCL_NET_PLUGIN": "none", "R2CCL_RENDEZVOUS_TIMEOUT": "30"},
        timeout=150,
        code=0,
    )


# ---- the ports that `launch` gives


def test_ports_are_not_the_kernels() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if len(ports.quiet_ports()) < ports.LEAST:
        pytest.skip("the kernel's own range leaves no ports here")
    with Ports(2) as held:
        assert len(set(held.numbers)) == 2
        assert all(port < low or port > high for port in held.numbers)


def quiet(count: int) -> list[int]:
    """Ports side by side that nobody has."""
    for _ in range(50):
        first = random.randrange(12000, 30000)
        with contextlib.suppress(PortsError), Ports(count, range(first, first + count)) as held:
            return sorted(held.numbers)
    pytest.fail("no free ports")


def test_ports_are_held_against_other_processes() -> None:
    some = quiet(2)
    script = (
        "import sys; from r2ccl_ctl.ports import Ports\n"
        "held = Ports(1, [int(a) for a in sys.argv[1:]])\n"
        "print(*held.numbers, flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", script, *map(str, some)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        with Ports(1, some) as mine:
            assert sorted([theirs, *mine.numbers]) == some
            with pytest.raises(PortsError):
                Ports(1, some)
        other.kill()  # and by no means after they have ended
        other.wait(timeout=20)
    with Ports(2, some):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "0.0.0.0", "::1", "::"])
def test_ports_that_somebody_has(address: str) -> None:
    some = quiet(2)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, some[0]), family=family)
    except OSError as err:
        pytest.skip(f"{address}: {err}")
    with server, Ports(1, some) as held:
        assert held.numbers == some[1:]


def test_kernels_ports_where_none_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "quiet_ports", lambda: range(10240, 10240 + ports.LEAST - 1))
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with Ports(2) as held:
        assert len(set(held.numbers)) == 2
        assert all(low <= port <= high for port in held.numbers)


def test_quiet_ports_are_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "SYSCTL", str(tmp_path))
    assert list(ports.quiet_ports()) == [*range(10240, 32768), *range(61000, 65536)]
    (tmp_path / "ip_local_port_range").write_text("10300\t65000\n")
    (tmp_path / "ip_local_reserved_ports").write_text("10241,10250-10299\n")
    assert list(ports.quiet_ports()) == [10240, *range(10242, 10250), *range(65001, 65536)]
    (tmp_path / "ip_local_port_range").write_text("nothing\n")
    (tmp_path / "ip_local_reserved_ports").write_text("\n")
    assert len(ports.quiet_ports()) == 22528 + 4536


SAY = "echo $R2CCL_RENDEZVOUS_TOKEN $MASTER_PORT ${R2CCL_RENDEZVOUS##*:}; read line"


def launched(script: str, **more: object) -> LaunchSpec:
    words = ["sh", "-c", script]
    return LaunchSpec(argv=words, nccl="system", plugin="none", timeout=60, **more)  # type: ignore[arg-type]


def test_a_job_holds_its_ports(tmp_path: Path) -> None:
    """As long as it runs, and a token of its own; also where it has the name of another."""
    gate = tmp_path / "gate"
    script = f"{SAY}; until [ -e {gate} ]; do sleep 0.05; done"
    with (
        launch.start(launched(script, ranks=2, job="same"), echo=False) as first,
        launch.start(launched(script, ranks=2, job="same"), echo=False) as second,
    ):
        jobs = (first, second)
        until(lambda: all(r.output for job in jobs for r in job.ranks), "their words", LIMIT)
        words = [[rank.output.split() for rank in job.ranks] for job in jobs]
        assert words[0][0] == words[0][1] and words[1][0] == words[1][1]
        assert len({word for job in words for word in job[0]}) == 6
        assert all(len(job[0][0]) == 32 for job in words)
        given = [int(port) for job in words for port in job[0][1:]]
        with pytest.raises(PortsError):
            Ports(1, given)
        gate.touch()
        assert [job.wait(LIMIT) for job in jobs] == [0, 0]
    with Ports(4, given):
        pass
