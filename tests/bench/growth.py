"""Memory, threads and sockets of a process as its peers grow, beside the stand-in's sockets.

Rung 3: every process is a node of its own on loopback, with two NICs, in an alltoall. What counts
is what one more peer costs, and that it costs the same at 8 as at 64 processes.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Row, Section
from rig import BenchError, Options, perf_spec

from r2ccl_ctl import launch, paths
from r2ccl_ctl.job import Job

SIZES = (2, 4, 8, 16, 32, 64)
NICS = 2
LINEAR = 1.25
LIMIT_S = 120.0
# The stand-in's threads sleep where they would poll: what is counted does not depend on it, and 64
# processes' polling would leave few cores nothing to make connections with.
IDLE = {"HOSTNCCL_SPIN_US": "0", "HOSTNCCL_NAP_US": "20000", "HOSTNCCL_BOOTSTRAP_TIMEOUT": "100"}
START_SIZES = (64, 256)
NODES_MAX = 128  # of loopback NICs; more processes share nodes
START_LIMIT_S = 300.0
_HERTZ = os.sysconf("SC_CLK_TCK")
TITLE = "Memory, threads and sockets per process as peers grow"

START_TITLE = "Seconds until every process of a job has sent to the next one"


@dataclass(frozen=True)
class Start:
    """Seconds since the launch began, and what the ranks' processors had done by the end."""

    launched: float  # all processes exist
    joined: float  # rank 0 has its communicator
    done: float
    cpu: float
    threads: float  # of cpu, in the plugin's own threads

    def parts(self) -> dict[str, float]:
        return {
            "all have sent and received": self.done,
            "of it until all processes exist": self.launched,
            "of it until rank 0 has its communicator": self.joined - self.launched,
            "of it connections and the exchange": self.done - self.joined,
            "processor time of all": self.cpu,
        }


@dataclass(frozen=True)
class Use:
    """One process, or the mean of several. pss_kib: its share of shared pages counted."""

    pss_kib: float
    rss_kib: float
    threads: float
    sockets: float
    descriptors: float


def use_of(pid: int) -> Use:
    """What a running process uses now."""
    folder = Path("/proc") / str(pid)
    rollup = (folder / "smaps_rollup").read_text(encoding="utf-8")
    status = (folder / "status").read_text(encoding="utf-8")
    links = []
    for name in os.listdir(folder / "fd"):
        try:
            links.append(os.readlink(folder / "fd" / name))
        except OSError:
            continue
    return Use(
        pss_kib=_field(rollup, "Pss"),
        rss_kib=_field(rollup, "Rss"),
        threads=_field(status, "Threads"),
        sockets=sum(link.startswith("socket:") for link in links),
        descriptors=len(links),
    )


def _field(text: str, name: str) -> float:
    match = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    if match is None:
        raise BenchError(f"no {name} in /proc: this kernel is too old for the growth benchmark")
    return float(match[1])


def mean(uses: Sequence[Use]) -> Use:
    names = ("pss_kib", "rss_kib", "threads", "sockets", "descriptors")
    return Use(**{n: statistics.fmean(getattr(use, n) for use in uses) for n in names})


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails."""
    sizes: tuple[int, ...] = (2, 4) if options.smoke else SIZES
    sizes = tuple(size for size in sizes if options.wants(str(size)))
    found: dict[str, dict[int, Use]] = {"plugin": {}, "sockets": {}}
    for size in sizes:
        for name, table in found.items():
            options.say(f"{size} processes, {name}")
            table[size] = _measure(size, name == "sockets")
    _rows(section, found, sizes)
    section.details["per process"] = {
        name: {size: vars(use) for size, use in table.items()} for name, table in found.items()
    }
    section.notes.append(
        f"alltoall on the stand-in, every process a node with {NICS} loopback NICs; after all "
        "connections have carried data. Proportional set size: shared pages counted in shares."
    )


def _measure(size: int, sockets: bool) -> Use:
    command = [str(paths.perf_path()), "--op", "alltoall", "-b", str(size * 4096), "-c", "0"]
    command += ["--duration", "600", "--window", "1", "--timeout", "60"]
    spec = perf_spec(command, None, size, 1, NICS, sockets, IDLE, LIMIT_S)
    with launch.start(spec, echo=False) as job:
        _wait_for_lines(job, "", LIMIT_S)
        try:
            return mean([use_of(rank.pid) for rank in job.ranks])
        except OSError as err:
            raise BenchError(
                f"a rank of {size} ended while it was looked at: {_said(job)}"
            ) from err
        finally:
            job.kill(grace=0.1)


def _said(job: Job) -> str:
    """The last words of those that ended, or of the first."""
    ended = [rank for rank in job.ranks if rank.code] or job.ranks[:1]
    return "".join(f"rank {r.place.rank}, code {r.code}: {r.output[-300:]}" for r in ended[:3])


def _wait_for_lines(job: Job, kind: str, limit_s: float) -> None:
    """Rank 0 has printed a line of its heading (kind "#"), or a result: all have carried data."""
    until = time.monotonic() + limit_s
    while not any(line.startswith("#") == bool(kind) for line in job.ranks[0].output.splitlines()):
        if any(rank.code is not None for rank in job.ranks) or time.monotonic() > until:
            raise BenchError(f"a job of {len(job.ranks)} does not run: {_said(job)}")
        time.sleep(0.01)


def _rows(section: Section, found: dict[str, dict[int, Use]], sizes: Sequence[int]) -> None:
    measures = {
        "PSS": ("pss_kib", "MiB", 1 / 1024),
        "RSS": ("rss_kib", "MiB", 1 / 1024),
        "threads": ("threads", "", 1.0),
        "sockets": ("sockets", "", 1.0),
    }
    for name, (field, unit, scale) in measures.items():
        for size in sizes:
            ours = getattr(found["plugin"][size], field) * scale
            theirs = getattr(found["sockets"][size], field) * scale
            section.rows.append(
                Row(
                    f"{size} processes: {name} of each",
                    ours,
                    unit,
                    baseline=theirs,
                    baseline_name="stand-in's sockets",
                )
            )
    for name in ("pss_kib", "sockets"):
        _slope(section, name, found, sizes)


def _slope(
    section: Section, name: str, found: dict[str, dict[int, Use]], sizes: Sequence[int]
) -> None:
    """What one more peer costs among many, against what it costs among few."""
    if len(sizes) < 3:
        return
    few, middle, many = sizes[0], sizes[len(sizes) // 2], sizes[-1]
    slopes = []
    for low, high in ((few, middle), (middle, many)):
        low_use, high_use = (getattr(found["plugin"][size], name) for size in (low, high))
        slopes.append((high_use - low_use) / (high - low))
    words, unit = {"pss_kib": ("PSS", "KiB"), "sockets": ("sockets", "")}[name]
    section.rows.append(
        Row(
            f"{words} for one more peer, {middle} to {many} processes",
            slopes[1],
            unit,
            baseline=slopes[0],
            baseline_name=f"{few} to {middle}",
            target=LINEAR,
            at_least=False,
            note="linear in peers",
        )
    )


def run_start(options: Options, section: Section) -> None:
    """Each process sends to the next: the connections of a ring, without a ring's many steps."""
    sizes = (4,) if options.smoke else START_SIZES
    found: dict[str, dict[int, Start]] = {"plugin": {}, "sockets": {}}
    for size in [size for size in sizes if options.wants(str(size))]:
        for name, table in found.items():
            options.say(f"{size} processes, {name}")
            table[size] = _start(size, name == "sockets")
        for (what, ours), theirs in zip(
            found["plugin"][size].parts().items(),
            found["sockets"][size].parts().values(),
            strict=True,
        ):
            section.rows.append(
                Row(
                    f"{size} processes: {what}",
                    ours,
                    "s",
                    baseline=theirs,
                    baseline_name="stand-in's sockets",
                )
            )
        section.rows.append(
            Row(
                f"{size} processes: of it in the plugin's threads",
                found["plugin"][size].threads,
                "s",
            )
        )
    section.details["starts"] = {
        name: {size: vars(start) for size, start in table.items()} for name, table in found.items()
    }
    section.notes.append(
        f"sendrecv of 4 KiB on the stand-in, {NICS} loopback NICs a node, at most {NODES_MAX} "
        f"nodes, {len(os.sched_getaffinity(0))} cores for all: processor time over cores is the "
        "least that it can take here."
    )


def _start(size: int, sockets: bool) -> Start:
    command = [str(paths.perf_path()), "--op", "sendrecv", "-b", "4096", "-c", "0"]
    command += ["--duration", "600", "--window", "1", "--timeout", "200"]
    per_node = -(-size // NODES_MAX)
    spec = perf_spec(command, None, size // per_node, per_node, NICS, sockets, IDLE, START_LIMIT_S)
    began = time.monotonic()
    with launch.start(spec, echo=False) as job:
        launched = time.monotonic() - began
        try:
            _wait_for_lines(job, "#", START_LIMIT_S)
            joined = time.monotonic() - began
            _wait_for_lines(job, "", START_LIMIT_S)
            done = time.monotonic() - began
            used = [_cpu_s(rank.pid) for rank in job.ranks]
        finally:
            job.kill(grace=0.1)
    whole, own = map(sum, zip(*used, strict=True))
    return Start(launched, joined, done, whole, own)


def _cpu_s(pid: int) -> tuple[float, float]:
    """Processor time of a process, and of it that of the plugin's threads."""
    whole = own = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text(encoding="utf-8").rpartition(")")
        fields = rest.split()
        seconds = (int(fields[11]) + int(fields[12])) / _HERTZ
        whole += seconds
        own += seconds if "(r2ccl-" in name else 0
    return whole, own
