"""What all benchmarks stand on: where the programs are, two sides of a run, labs, the machine.

Every process that is started here is waited for, with a limit, and killed at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from figures import MeasurementWrong

from r2ccl_ctl import launch, paths
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.lab import Lab, LabError, LabSpec, nsexec
from r2ccl_ctl.lab.spec import tbf_burst

ROOT = Path(__file__).resolve().parents[2]
PORT_BASE = 20100
_HERTZ = os.sysconf("SC_CLK_TCK")


class BenchError(R2Error):
    """A benchmark could not be carried out; the text says why."""


@dataclass(frozen=True)
class Options:
    """smoke: seconds only, to see that everything runs. runs: faults of each kind. parts: of
    sections that have several; none: all of them. nccl: of `cost`, as LaunchSpec has it. asked:
    the parts that wants() was asked for."""

    smoke: bool = False
    runs: int = 100
    repetitions: int = 5
    parts: tuple[str, ...] = ()
    nccl: str = "standin"
    asked: list[str] = field(default_factory=list)

    def wants(self, part: str) -> bool:
        self.asked.append(part)
        return not self.parts or part in self.parts

    def say(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)


def program(name: str) -> str:
    """A program of build/bench."""
    found = paths.native_dir() / "bench" / name
    if not found.is_file():
        raise BenchError(f"{found} is not there: run `make native`")
    return str(found)


def clean_env(**more: str) -> dict[str, str]:
    """Our environment without settings that would change what is measured."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("R2CCL_", "R2CC_", "NCCL_"))}
    return env | more


# Beds: two nodes with NICs, on loopback or in a lab


class Bed:
    """Two nodes, 0 the sender and 1 the receiver. On loopback unless `lab` is given."""

    def __init__(self, nics: int, lab: Lab | None = None) -> None:
        self.nics, self.lab = nics, lab
        self._ports = 0

    @property
    def where(self) -> str:
        return "lab" if self.lab else "loopback"

    def argv(self, node: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in a node and dies with this thread."""
        plan: dict[str, Any] = {"deathsig": int(signal.SIGKILL), "parent": os.getpid()}
        if self.lab:
            plan = self.lab.plan(f"n{node}", signal.SIGKILL)
        return nsexec.argv_for(plan, list(command))

    def nic_options(self, node: int, nics: Sequence[int]) -> list[str]:
        """--nic of rawsock, for these NICs."""
        out = []
        for nic in nics:
            if self.lab:
                out += ["--nic", f"{self.lab.address(f'n{node}', f'nic{nic}')}%nic{nic}"]
            else:
                out += ["--nic", f"127.0.{nic + 1}.{node + 1}"]
        return out

    def r2ccl_nics(self, node: int) -> str:
        if self.lab:
            return ",".join(self.lab.nics(f"n{node}"))
        return launch.loopback_nics(node, self.nics)

    def meeting(self) -> str:
        """ADDRESS:PORT for the next control connection."""
        self._ports = self._ports % 400 + 1
        address = self.lab.address("n1", "mgmt0") if self.lab else "127.0.0.1"
        return f"{address}:{PORT_BASE + os.getpid() % 30 * 400 + self._ports}"


@contextlib.contextmanager
def lab_bed(name: str, nics: int, rates: Sequence[int | None], nodes: int = 2) -> Iterator[Bed]:
    """A lab of our own; `rates` in bits per second, one for all NICs or one each."""
    spec = LabSpec(
        nodes=nodes, nics=(nics,), rates=tuple(rates), name=f"bench-{name}-{os.getpid()}"
    )
    try:
        lab = Lab.up(spec)
    except LabError as err:
        raise BenchError(str(err)) from err
    with lab:
        yield Bed(nics, lab)


def burst_credit(rates: Sequence[int]) -> int:
    """Bytes that the shapers on the way (the node's end and the fabric's) may have saved up."""
    return sum(2 * tbf_burst(rate) for rate in rates)


# Two sides of a run


@dataclass(frozen=True)
class Iteration:
    """One iteration as the sender printed it."""

    bytes: int
    seconds: float
    cpu_send: float
    cpu_recv: float

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds

    @property
    def per_cpu(self) -> float:
        """Bytes per CPU second of both sides together."""
        return self.bytes / (self.cpu_send + self.cpu_recv)


class Sides:
    """A running receiver and sender. Use as a context manager: both are gone at its end."""

    def __init__(
        self,
        bed: Bed,
        receiver: Sequence[str],
        sender: Sequence[str],
        env: tuple[Mapping[str, str], Mapping[str, str]] | None = None,
        limit: float = 120.0,
    ) -> None:
        self.ends_at = time.monotonic() + limit
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self.procs: list[subprocess.Popen[bytes]] = []
        envs = env or (clean_env(), clean_env())
        try:
            for node, command in ((1, receiver), (0, sender)):
                self.procs.append(
                    subprocess.Popen(
                        bed.argv(node, command),
                        env=dict(envs[node]),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=self._errors,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.close()
            raise

    @property
    def receiver(self) -> subprocess.Popen[bytes]:
        return self.procs[0]

    @property
    def sender(self) -> subprocess.Popen[bytes]:
        return self.procs[1]

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for proc in self.procs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(proc.pid, signal.SIGKILL)
            proc.wait()
            if proc.stdout:
                proc.stdout.close()
        self._errors.close()

    def iterations(self) -> Iterator[Iteration]:
        """The sender's lines as they come; raises BenchError when a side fails or hangs."""
        buffer = b""
        assert self.sender.stdout is not None
        fd = self.sender.stdout.fileno()
        os.set_blocking(fd, False)
        while True:
            if b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                yield parse_iteration(json.loads(line))
                continue
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                self._check_time()
                time.sleep(0.002)
                continue
            if not data:
                break
            buffer += data
        self.finish()

    def finish(self) -> None:
        """Both sides ended by themselves, and well."""
        for proc in self.procs:
            try:
                code = proc.wait(timeout=max(0.1, self.ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BenchError(f"a side hangs: {self.errors()}") from None
            if code != 0:
                raise BenchError(f"a side ended with {code}: {self.errors()}")

    def errors(self) -> str:
        # Not by a seek: sides that still run write where this descriptor stands.
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), size, 0).decode(errors="replace")
        return text.strip()[-4000:] or "(no message)"

    def _check_time(self) -> None:
        if time.monotonic() > self.ends_at:
            raise BenchError(f"still running past its limit: {self.errors()}")


def parse_iteration(row: Mapping[str, Any]) -> Iteration:
    if row["wrong"]:
        raise MeasurementWrong(f"{row['wrong']} words arrived wrong")
    return Iteration(row["bytes"], row["seconds"], row["cpu_send_s"], row["cpu_recv_s"])


def raw(bed: Bed, nics: Sequence[int], *options: str, limit: float = 120.0) -> list[Iteration]:
    """rawsock over these NICs."""
    tool, at = program("rawsock"), bed.meeting()
    receiver = [tool, "--listen", at, *bed.nic_options(1, nics)]
    sender = [tool, "--dial", at, *bed.nic_options(0, nics), *options]
    with Sides(bed, receiver, sender, limit=limit) as sides:
        return list(sides.iterations())


def plugin_sides(
    bed: Bed,
    *options: str,
    log: str = "",
    limit: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Sides:
    """msgs over all NICs of the bed, running."""
    tool, at = program("msgs"), bed.meeting()
    receiver = [tool, "--listen", at, *(["--log", log] if log else [])]
    sender = [tool, "--dial", at, *options]
    envs = [
        clean_env(R2CCL_NICS=bed.r2ccl_nics(node), R2CCL_JOB=f"bench-{os.getpid()}", **(env or {}))
        for node in (0, 1)
    ]
    return Sides(bed, receiver, sender, (envs[0], envs[1]), limit)


def plugin(
    bed: Bed, *options: str, limit: float = 120.0, env: Mapping[str, str] | None = None
) -> list[Iteration]:
    """msgs over all NICs of the bed, to its end."""
    with plugin_sides(bed, *options, limit=limit, env=env) as sides:
        return list(sides.iterations())


# Collectives on the stand-in


@dataclass
class Perf:
    """One result line of r2ccl_perf. cpu: of all ranks, per iteration; standin: by which NCCL."""

    size: int
    seconds: float
    busbw: float
    cpu: float
    standin: bool = True


def perf(
    argv: Sequence[str],
    *,
    lab: Lab | None = None,
    nodes: int = 2,
    per_node: int = 1,
    nics: int = 2,
    sockets: bool = False,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    nccl: str = "standin",
) -> list[Perf]:
    """r2ccl_perf; `sockets`: over NCCL's Socket transport instead of the plugin."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "perf.json"
        command = [str(paths.perf_path()), *argv, "--timeout", "60", "--json", str(out)]
        spec = perf_spec(command, lab, nodes, per_node, nics, sockets, env or {}, timeout, nccl)
        with launch.start(spec, echo=False) as job:
            code = job.wait(timeout + 30)
            if code != 0:
                said = "".join(rank.output[-400:] for rank in job.ranks[:2])
                raise BenchError(f"{' '.join(argv)} ended with {code}: {said.strip()}")
        found = json.loads(out.read_text(encoding="utf-8"))
    if found["wrong"]:
        raise MeasurementWrong(f"{' '.join(argv)}: {found['wrong']} wrong values")
    return [
        Perf(
            row["size"],
            row["out_of_place"]["time_us"] / 1e6,
            row["out_of_place"]["busbw_gbs"] * 1e9,
            row["out_of_place"]["cpu_us"] / 1e6,
            found["standin"],
        )
        for row in found["results"]
    ]


def perf_spec(
    command: Sequence[str],
    lab: Lab | None,
    nodes: int,
    per_node: int,
    nics: int,
    sockets: bool,
    env: Mapping[str, str],
    timeout: float,
    nccl: str = "standin",
) -> launch.LaunchSpec:
    """How the ranks are started. The stand-in is not harsh here: that would be measured
    too. In a lab its sockets use the shaped NICs, not the management one."""
    names = {k: v for k, v in os.environ.items() if k.startswith(("R2CCL_", "R2CC_", "NCCL_"))}
    if set(names) - {"R2CCL_BUILD_DIR"}:
        raise BenchError(f"unset {', '.join(sorted(names))}: they change what is measured")
    return launch.LaunchSpec(
        argv=command,
        lab=lab.name if lab else None,
        emulate_nodes=1 if lab else nodes,
        per_node=per_node,
        nics=0 if lab else nics,
        nccl=nccl,
        plugin="none" if sockets else "",
        env={"HOSTNCCL_HARSH": "off"} | ({"NCCL_SOCKET_IFNAME": "nic"} if lab else {}) | dict(env),
        timeout=timeout,
    )


# The machine


def machine() -> dict[str, Any]:
    """Hardware class, kernel and versions."""
    cpu = re.search(r"^model name\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    flags = " hypervisor " in _read("/proc/cpuinfo").replace("\n", " ")
    cc = subprocess.run(
        ["cc", "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout.splitlines()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "virtual": flags,
        "memory_gib": round(int(memory[1]) / 1048576) if memory else None,
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control").strip(),
        "python": platform.python_version(),
        "cc": cc[0] if cc else "",
        "commit": commit(),
    }


def hardware_class(found: Mapping[str, Any]) -> str:
    kind = "virtual machine" if found["virtual"] else "machine"
    return f"{kind}, {found['cores']} cores ({found['cpu']}), {found['memory_gib']} GiB"


def commit() -> str:
    """The checkout's commit, with a + when files differ from it."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass
class Cores:
    """Who used the machine's cores since this was made: shares of all of them, 0 to 1."""

    _before: tuple[float, float, float, float] = field(default_factory=lambda: _ticks())

    def busy(self) -> float:
        """Everything, interrupts included."""
        now = _ticks()
        return (now[1] - self._before[1]) / max(1.0, now[0] - self._before[0])

    def others(self) -> float:
        """Programs that are neither we nor children of ours that have ended."""
        now = _ticks()
        foreign = (now[2] - self._before[2]) - (now[3] - self._before[3])
        return max(0.0, foreign / max(1.0, now[0] - self._before[0]))


def _ticks() -> tuple[float, float, float, float]:
    """Seconds so far: all cores, busy ones, of programs, of programs of our own."""
    words = _read("/proc/stat").split("\n", 1)[0].split()[1:9]
    user, nice, system, idle, wait, irq, softirq, steal = (int(w) / _HERTZ for w in words)
    programs = user + nice + system + steal
    own = sum(
        use.ru_utime + use.ru_stime
        for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return programs + irq + softirq + idle + wait, programs + irq + softirq, programs, own
