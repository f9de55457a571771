"""A storm: NICs that hundreds of communicators use are lost and flap, under the preloaded shim.

Rung 3: processes of the stand-in for NCCL on emulated nodes with loopback NICs, the shim with
R2CCL_PLAN=on. Each has as many communicators as COMMS says, of one process of every node (and, with
`world`, one of all processes); what every rank of every one of them did is read from its control
segment. It says nothing about how fast anything is with a core for each process.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from figures import MeasurementWrong, Row, Section
from rig import BenchError, Options, perf_spec

from r2ccl_ctl import control, journal, launch, paths, rows
from r2ccl_ctl.control import Command, Process
from r2ccl_ctl.job import Job
from r2ccl_ctl.rows import Comm
from r2ccl_ctl.segment import Segment

TITLE = "A storm: lost and flapping NICs that all communicators use"
FLAPS, PHASE_S = 2, 3.0
THREADS_EACH = 5  # of a communicator of one process while its plan is made; twice that to spare
LATE_S = 1.0  # by which a look may come too late
MESSAGES_EACH = 8.0  # propose, promise, decision, what it has; and questions where ranks wait
IDS = 2048  # as tests/shim/storm.c has it
STOP, LARGE, WRONG, MADE, BEGUN = range(5)
BOARD = 4 * (6 + IDS) + 128 * IDS
# Threads that poll would leave cores for nothing else, nor would many processes' heartbeats.
ENV = {
    "R2CCL_PLAN": "on",
    "R2CCL_PLAN_KEEP": "0",  # each of the stand-in's communicators has three threads
    "R2CCL_DAMP": "0",  # a NIC that flaps is the plan's matter here
    "R2CCL_HEARTBEAT": "2s",
    "R2CCL_SPIN": "0",
    "R2CCL_LANES": "1",
    "R2CCL_GREY": "0",
    "HOSTNCCL_GPU_THREADS": "1",
    "HOSTNCCL_SPIN_US": "0",
    "HOSTNCCL_BOOTSTRAP_TIMEOUT": "200",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_BUFFSIZE": "65536",
}


@dataclass(frozen=True)
class Size:
    """spread, world: see above. small_gain: with one of `nics` lost a plan gains less than 5 %.
    nap_us: of the stand-in's threads. hold_s: R2CCL_PLAN_HOLD, more than operations take. limit_s:
    for each step."""

    nodes: int
    per_node: int
    comms: int
    nics: int
    spread: int
    world: bool
    small_gain: bool
    nap_us: int
    hold_s: float
    limit_s: float

    @property
    def processes(self) -> int:
        return self.nodes * self.per_node

    @property
    def all_comms(self) -> int:
        groups = self.comms - self.world
        return groups * self.per_node + self.world

    def __str__(self) -> str:
        return f"{self.processes} processes x {self.comms} communicators"


FULL = Size(16, 16, 16, 2, 1, False, False, 2000, 20, 400)
SMALL = Size(8, 4, 16, 4, 2, True, True, 2000, 20, 60)
SMOKE = Size(4, 2, 4, 3, 2, True, True, 2000, 10, 60)


@dataclass(frozen=True)
class Counts:
    """Of one communicator: what its ranks said to each other, and its lowest rank did."""

    messages: int
    events: int
    rounds: int
    proposals: int
    agreed: int
    ranks: int

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.messages - before.messages,
            self.events - before.events,
            self.rounds - before.rounds,
            self.proposals - before.proposals,
            self.agreed - before.agreed,
            self.ranks,
        )


@dataclass
class View:
    """All communicators at one moment: of each its ranks' rows."""

    at: float
    comms: dict[str, list[Comm]] = field(default_factory=dict)

    def counts(self) -> dict[str, Counts]:
        found = {}
        for name, ranks in self.comms.items():
            lead = next(row for row in ranks if row.rank == 0)
            found[name] = Counts(
                sum(row.plan_messages for row in ranks),
                lead.plan_events,
                lead.plan_rounds,
                lead.plan_proposals,
                lead.plan_agreed,
                len(ranks),
            )
        return found

    def everywhere(self, holds: Callable[[Comm], object]) -> bool:
        return all(holds(row) for ranks in self.comms.values() for row in ranks)

    def alike(self) -> bool:
        """All ranks of each have the same plan."""
        return all(
            len({(row.epoch, row.plan) for row in ranks}) == 1 for ranks in self.comms.values()
        )


class Storm:
    """The running job. `seen`: of each communicator its counts, each with the first moment."""

    def __init__(self, size: Size, job: Job, board: mmap.mmap) -> None:
        self.size, self.job, self._board = size, job, board
        self.processes: list[Process] = []
        self.seen: dict[str, list[tuple[float, Counts]]] = {}
        self._segments: list[Segment] = []

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def word(self, which: int) -> int:
        return int(struct.unpack_from("I", self._board, 4 * which)[0])

    def set(self, which: int, value: int) -> None:
        struct.pack_into("I", self._board, 4 * which, value)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.size.limit_s
        while not holds():
            self.alive()
            if time.monotonic() > end:
                told = f"{self.size}: not within {self.size.limit_s:g} s: {what}"
                raise BenchError("\n".join([told, *self.plans(), *self.nics()]))
            time.sleep(0.1)

    def plans(self) -> list[str]:
        """For people: what communicators have, the rarest first."""
        found: Counter[str] = Counter()
        for ranks in self.look().comms.values():
            lead = next(row for row in ranks if row.rank == 0)
            words = {f"{row.plan or 'none'} ({row.cause})" for row in ranks}
            found[
                f"{len(ranks)} ranks: {', '.join(sorted(words))}; events {lead.plan_events}, "
                f"looks {lead.plan_rounds}, proposals {lead.plan_proposals}, "
                f"agreed {lead.plan_agreed}"
            ] += 1
        return [f"{n} times {text}" for text, n in found.most_common()[::-1][:16]]

    def nics(self) -> list[str]:
        """NICs that are not healthy, or that a fault is injected at."""
        found = []
        for process in self.processes:
            for nic in process.snapshot().nics:
                if nic.state != "healthy" or nic.fault:
                    found.append(f"{process.title}: {nic.name} {nic.state} {nic.fault} {nic.cause}")
        return found[:16]

    def alive(self) -> None:
        for rank in self.job.ranks:
            if rank.code is not None:
                said = rank.output[-500:]
                raise BenchError(f"rank {rank.place.rank} ended with {rank.code}: {said}")

    def look(self) -> View:
        """Keeps what is new of the counts, too."""
        view = View(time.monotonic())
        for segment in self._segments:
            for index, row in segment.used_rows("comms", "r2_seg_comm"):
                comm = rows.comm(index, row)
                view.comms.setdefault(comm.id, []).append(comm)
        for name, counts in view.counts().items():
            known = self.seen.setdefault(name, [])
            if not known or known[-1][1] != counts:
                known.append((view.at, counts))
        return view

    def meet(self) -> None:
        """All ranks have made their communicators and know each other."""
        size = self.size
        self.until(lambda: self.word(MADE) == size.processes, "all communicators are made")
        self.until(lambda: self.word(BEGUN) > 1, "a round of operations")
        found = [p for p in control.list_processes() if p.job == self.job.name]
        self.processes = sorted(found, key=lambda process: process.rank or 0)
        self._segments = [control.open_segment(process.path) for process in self.processes]
        self.until(self._met, "the ranks have met and said what their nodes have")

    def _met(self) -> bool:
        view, size = self.look(), self.size
        return (
            len(view.comms) == size.all_comms
            and sum(map(len, view.comms.values())) == size.processes * size.comms
            and view.everywhere(lambda row: row.nodes == size.nodes)
            and all(c.events >= size.nodes and c.rounds for c in view.counts().values())
        )

    def tell(self, verb: str, nics: list[tuple[int, int]]) -> None:
        """To all processes of nodes, about a NIC of each: (node, NIC)."""
        commands = []
        for node, nic in nics:
            name = launch.loopback_nics(node, self.size.nics).split(",")[nic]
            down = verb == "fail-nic"
            first = node * self.size.per_node
            commands += [
                (process, Command(verb, name, *(("error", "both") if down else ())))
                for process in self.processes[first : first + self.size.per_node]
            ]
        for answer in control.send_commands(commands, timeout=60):
            if not answer.ok:
                raise BenchError(f"{verb}: {answer.text}")

    def large(self) -> None:
        """A round of large operations; every element of their results is right."""
        before = self.look()
        number = self.word(BEGUN) + 2
        self.set(LARGE, number)
        self.until(lambda: self.word(BEGUN) > number, "a round of large operations")
        self.checked()
        after = self.look()
        for name, ranks in after.comms.items():
            ran = sum(r.planned for r in ranks) - sum(r.planned for r in before.comms[name])
            if ran != len(ranks):
                raise MeasurementWrong(f"{name}: {ran} of {len(ranks)} ranks ran it as planned")

    def checked(self) -> None:
        if self.word(WRONG):
            raise MeasurementWrong(f"{self.word(WRONG)} elements are wrong")

    def end(self) -> None:
        self.set(STOP, self.word(BEGUN) + 2)
        code = self.job.wait(self.size.limit_s)
        if code:
            raise BenchError(f"the job ended with {code}")
        self.checked()

    def taken_ns(self) -> list[int]:
        """When each rank of each communicator ran on a tree for the first time."""
        found = []
        for process in self.processes:
            for event in journal.read_all(process):
                if re.match(r"plan \d+ from operation \d+ on: tree", event.cause):
                    found.append(event.mono_ns)
        return found


@contextlib.contextmanager
def storm(size: Size, env: dict[str, str] | None = None) -> Iterator[Storm]:
    with tempfile.TemporaryDirectory(prefix="r2ccl-storm-") as folder:
        file = Path(folder) / "board"
        file.write_bytes(bytes(BOARD))
        program = paths.native_dir() / "tests/shim/storm"
        words = [
            "nice",
            "-n",
            "10",
            str(program),
            str(file),
            str(size.comms),
            str(size.spread),
            str(int(size.world)),
        ]
        more = {"LD_PRELOAD": str(paths.shim_path()), "HOSTNCCL_NAP_US": str(size.nap_us)}
        more["R2CCL_PLAN_HOLD"] = f"{size.hold_s:g}"
        given = ENV | more | (env or {})
        spec = perf_spec(words, None, size.nodes, size.per_node, size.nics, False, given, 3000)
        with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), BOARD) as board:
            with launch.start(spec, echo=False) as job:
                running = Storm(size, job, board)
                try:
                    yield running
                finally:
                    running.close()
                    job.kill(grace=0.1)


# What is done to it


@dataclass
class Found:
    """small: proposals for a loss that gains a plan less than 5 %. change: of the loss, by
    communicator. made_s: from it until the last rank of the last communicator ran as planned.
    held_s: from an agreed plan to the next proposal, of the communicator where that was shortest;
    flap_events: meanwhile; rounds: of operations."""

    small: int | None = None
    change: dict[str, Counts] = field(default_factory=dict)
    made_s: float = 0
    flap_events: int = 0
    held_s: float = 0
    rounds: int = 0

    def messages(self) -> dict[int, float]:
        """For each proposal and rank, by the number of ranks: the mean of such communicators."""
        by_size: dict[int, list[float]] = {}
        for c in self.change.values():
            by_size.setdefault(c.ranks, []).append(c.messages / c.ranks / max(1, c.proposals))
        return {ranks: sum(each) / len(each) for ranks, each in sorted(by_size.items())}

    def total(self, what: str) -> int:
        return sum(getattr(c, what) for c in self.change.values())


def blow(size: Size, say: Callable[[str], None], env: dict[str, str] | None = None) -> Found:
    """The whole of it."""
    found = Found()
    with storm(size, env) as job:
        job.meet()
        say(f"{size}: {size.all_comms} communicators have met")
        if size.small_gain:
            found.small = _small(job)
            say(f"proposals for less than 5 %: {found.small}")
        lost = _lose(job, found)
        say(f"a plan on all after {found.made_s:.1f} s")
        job.large()
        say("large operations ran as planned")
        _flap(job, lost, found)
        say(f"held for {found.held_s:.1f} s while they flap")
        found.rounds = job.word(BEGUN)
        job.end()
    return found


def _small(job: Storm) -> int:
    before = job.look().counts()
    job.tell("fail-nic", [(1, 1)])
    job.until(
        lambda: all(
            (new := counts.since(before[name])).events > 0 and new.rounds > 0
            for name, counts in job.look().counts().items()
        ),
        "the planner has looked at the loss",
    )
    time.sleep(1)  # for what would be proposed
    return sum(c.since(before[name]).proposals for name, c in job.look().counts().items())


def _lose(job: Storm, found: Found) -> list[tuple[int, int]]:
    """One node loses half of its bandwidth, and (`small_gain`) others less, all at once."""
    before, began = job.look().counts(), time.monotonic_ns()
    others = [(node, 1) for node in range(3, job.size.nodes, 2)]
    fresh = [(1, 2), *others] if job.size.small_gain else [(1, 1)]
    job.tell("fail-nic", fresh)
    job.until(
        lambda: (view := job.look()).everywhere(lambda row: row.plan) and view.alike(),
        "a plan, the same on all ranks of each communicator",
    )
    found.change = {name: c.since(before[name]) for name, c in job.look().counts().items()}
    found.made_s = (max(job.taken_ns()) - began) / 1e9
    return [(1, 1), *fresh] if job.size.small_gain else fresh


def _flap(job: Storm, lost: list[tuple[int, int]], found: Found) -> None:
    """The NICs come and go, and stay in the end: every communicator goes back to NCCL's own choice,
    once its plan has been held."""
    before = job.look().counts()
    for _ in range(FLAPS):
        job.tell("recover-nic", lost)
        _watch(job)
        job.tell("fail-nic", lost)
        _watch(job)
    job.tell("recover-nic", lost)
    job.until(
        lambda: (view := job.look()).everywhere(lambda row: not row.plan) and view.alike(),
        "NCCL's own choice, on all ranks of each communicator",
    )
    after = job.look().counts()
    found.flap_events = sum(c.since(before[name]).events for name, c in after.items())
    found.held_s = min(held_s(job.seen[name], c) for name, c in before.items())


def _watch(job: Storm) -> None:
    end = time.monotonic() + PHASE_S
    while time.monotonic() < end:
        job.look()
        job.alive()
        time.sleep(0.1)


def held_s(seen: list[tuple[float, Counts]], plan: Counts) -> float:
    """From when the plan was agreed, which `plan` counts, to the next proposal."""
    agreed = next(at for at, counts in seen if counts.agreed == plan.agreed)
    return next(at for at, counts in seen if counts.proposals > plan.proposals) - agreed


# What it says


def problems(found: Found, size: Size) -> list[str]:
    """What must not be."""
    wrong = []
    if found.small:
        wrong.append(f"{found.small} proposals for a gain below 5 %")
    if size.small_gain and found.total("rounds") * 2 > found.total("events"):
        wrong.append(f"{found.total('rounds')} planning rounds for {found.total('events')} events")
    if found.held_s < size.hold_s - LATE_S:
        wrong.append(f"a plan was held for {found.held_s:.1f} s, not {size.hold_s:g}")
    wrong += [
        f"{each:.1f} messages of each of {ranks} ranks for a proposal"
        for ranks, each in found.messages().items()
        if each > MESSAGES_EACH
    ]
    return wrong


def _room_for(size: Size) -> None:
    """The kernel has numbers for all threads: where it has not, communicators fail to be made."""
    file = Path("/proc/sys/kernel/pid_max")
    has, needed = int(file.read_text(encoding="ascii")), size.processes * size.comms * THREADS_EACH
    if has < 2 * needed:
        raise BenchError(
            f"{size} want numbers for about {2 * needed} threads and kernel.pid_max is {has}: "
            f"raise it first (sysctl -w kernel.pid_max={1 << 22})"
        )


def run(options: Options, section: Section) -> None:
    size = SMOKE if options.smoke else FULL
    _room_for(size)
    found = blow(size, options.say)
    section.errors += problems(found, size)
    figures = [
        ("events of bandwidth at lowest ranks, for the loss", found.total("events"), ""),
        ("planning rounds for them", found.total("rounds"), ""),
        ("proposals for them", found.total("proposals"), ""),
        ("of these agreed", found.total("agreed"), ""),
        ("from the loss to the last rank's first operation as planned", found.made_s, "s"),
        ("events while NICs flap", found.flap_events, ""),
        ("shortest time from an agreed plan to the next proposal", found.held_s, "s"),
    ]
    section.rows += [Row(f"{size}: {what}", float(value), unit) for what, value, unit in figures]
    section.rows += [
        Row(f"{size}: messages for a proposal and rank, of {ranks} ranks", each, "")
        for ranks, each in found.messages().items()
    ]
    section.notes.append(
        f"{size.all_comms} communicators of {size.nodes} nodes; {found.rounds} rounds of "
        f"operations, every element checked; R2CCL_PLAN_HOLD={size.hold_s:g}"
    )
