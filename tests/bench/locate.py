"""How often a lost path's verdict is right, over many faults of each kind, and how soon it is given.

Rung 4. Three ranks on three nodes go round a ring without pause; a fault is made, and every process
that lost a path has to say in its journal which NIC is at fault. A case is right when both ends of
each pair of nodes that the fault separates have given a verdict, and every verdict given is right.
Times are counted from just before the lab is asked to break something: finding out that a path is
silent is in them. It cannot show what a physical switch does.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from figures import Row, Section, percentile
from rig import BenchError, Options, perf_spec

from r2ccl_ctl import control, launch, paths
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.journal import Cursor, Event
from r2ccl_ctl.lab import Lab, LabSpec

NODES = 3
NICS = 4
RATE = 200_000_000
MS = 1e6
PATIENCE_S = 3.0  # for verdicts
HEAL_S = 15.0
TARGET = 0.99
TITLE = "Which NIC is at fault"
LOCAL, REMOTE, BETWEEN = "local NIC", "remote NIC", "link or switch"
VARIANTS = ("rail-only", "one-subnet")

Expected = dict[tuple[int, int], str]  # (node that judges, node at the other end) -> verdict


@dataclass(frozen=True)
class Kind:
    """A kind of fault: how it is made on a NIC of node `a` (and `b`), and what each end is to
    say."""

    name: str
    make: Callable[[Lab, str, int, int], None]
    expect: Callable[[int, int], Expected]


@dataclass
class Case:
    """One fault and what was said; times in nanoseconds of CLOCK_MONOTONIC."""

    kind: str
    nic: str
    nodes: tuple[int, int]
    at: int
    expected: Expected
    said: list[tuple[int, int, str]] = field(default_factory=list)  # judge, other end, cause
    given: list[int] = field(default_factory=list)

    def missing(self) -> list[tuple[int, int]]:
        have = {(judge, other) for judge, other, _ in self.said}
        # A verdict on the NIC itself is one for all of its paths.
        have |= {(judge, o) for judge, other, _ in self.said if other < 0 for o in range(NODES)}
        return [pair for pair in self.expected if pair not in have]

    def wrong(self) -> list[str]:
        found = []
        for judge, other, cause in self.said:
            wanted = {v for (j, o), v in self.expected.items() if j == judge and other in (o, -1)}
            verdict = cause.split(":")[0].split(",")[0]
            if verdict not in wanted:
                found.append(f"n{judge} -> n{other}: {cause}")
        return found

    @property
    def right(self) -> bool:
        return not self.missing() and not self.wrong()


def one_nic(a: int, _b: int) -> Expected:
    others = [n for n in range(NODES) if n != a]
    return {(a, o): LOCAL for o in others} | {(o, a): REMOTE for o in others}


def one_pair(a: int, b: int) -> Expected:
    return {(a, b): BETWEEN, (b, a): BETWEEN}


def whole_rail(_a: int, _b: int) -> Expected:
    return {(x, y): BETWEEN for x, y in itertools.permutations(range(NODES), 2)}


KINDS = [
    Kind("NIC without carrier", lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic), one_nic),
    Kind("NIC set down", lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic, "admin"), one_nic),
    Kind(
        "NIC sends into the void",
        lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic, "silent", direction="tx"),
        one_nic,
    ),
    Kind(
        "NIC hears nothing",
        lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic, "silent", direction="rx"),
        one_nic,
    ),
    Kind("rail switched off", lambda lab, nic, a, b: lab.fail_rail(nic), whole_rail),
    Kind("one pair cut", lambda lab, nic, a, b: lab.cut_pair(f"n{a}", f"n{b}", nic), one_pair),
]


class Bed:
    """A running job of one rank per node, and its journals."""

    def __init__(self, lab: Lab, job: launch.Job) -> None:
        self.lab, self.job = lab, job
        self.processes = [self._process(rank.pid) for rank in job.ranks]
        self.cursors = [Cursor(process) for process in self.processes]

    def _process(self, pid: int) -> control.Process:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                return control.find(pid)
            except R2Error:
                if not self.job.running:
                    break
                time.sleep(0.05)
        raise BenchError("a rank has no control segment within 20 s")

    def close(self) -> None:
        for cursor in self.cursors:
            cursor.close()
        self.job.kill(0)

    def drain(self) -> Iterator[tuple[int, Event]]:
        for node, cursor in enumerate(self.cursors):
            for event in cursor.events():
                yield node, event

    def healthy(self) -> bool:
        """All NICs in service and a path of every NIC between all nodes, everywhere."""
        for process in self.processes:
            snapshot = process.snapshot()
            up = Counter(path.nic for path in snapshot.paths if path.state == "up")
            if any(nic.state != "healthy" for nic in snapshot.nics):
                return False
            if any(up[nic.name] < NODES - 1 for nic in snapshot.nics):
                return False
        return True

    def wait_healthy(self) -> None:
        until = time.monotonic() + HEAL_S
        while not self.healthy():
            if not self.job.running:
                raise BenchError("the job ended early")
            if time.monotonic() > until:
                raise BenchError(f"not all NICs are back {HEAL_S:g} s after they were mended")
            time.sleep(0.02)

    def counters(self, name: str) -> int:
        return sum(process.snapshot().counters[name] for process in self.processes)


def run_case(bed: Bed, kind: Kind, nic: str, a: int, b: int) -> Case:
    bed.wait_healthy()
    time.sleep(1.2)  # longer than a verdict on the same pair stands
    for _ in bed.drain():
        pass
    case = Case(kind.name, nic, (a, b), time.monotonic_ns(), kind.expect(a, b))
    kind.make(bed.lab, nic, a, b)
    try:
        until, settled = time.monotonic() + PATIENCE_S, 0.0
        while time.monotonic() < until and not (settled and time.monotonic() > settled):
            for node, event in bed.drain():
                _note(case, node, event)
            if not case.missing() and not settled:
                settled = time.monotonic() + 0.7  # later ones have to be right, too
            time.sleep(0.005)
    finally:
        bed.lab.recover_all()
    return case


def _note(case: Case, node: int, event: Event) -> None:
    if event.event != "verdict" or event.mono_ns < case.at:
        return
    if event.nic != case.nic:
        case.said.append((node, node, f"about {event.nic}: {event.cause}"))
        return
    other = int(event.peer_host[1:]) if event.peer_host else -1
    case.said.append((node, other, event.cause))
    case.given.append(event.mono_ns - case.at)


@contextmanager
def running(variant: str) -> Iterator[Bed]:
    spec = LabSpec(
        nodes=NODES,
        nics=(NICS,),
        rates=(RATE,),
        name=f"bench-locate-{os.getpid()}",
        variant=variant,
    )
    command = [str(paths.perf_path()), "-b", "256K", "--duration", "36000", "-c", "0"]
    with Lab.up(spec) as lab:
        env = {"R2CCL_LOG": "info"}
        job_spec = perf_spec(command, lab, NODES, 1, NICS, False, env, 36000)
        with launch.start(job_spec, echo=False) as job:
            bed = Bed(lab, job)
            try:
                yield bed
            finally:
                bed.close()


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails."""
    runs = 1 if options.smoke else options.runs
    seed = random.randrange(1 << 32)
    section.details["seed"] = seed
    rng = random.Random(seed)
    for variant in VARIANTS[:1] if options.smoke else VARIANTS:
        with running(variant) as bed:
            for kind in KINDS:
                if variant == "one-subnet" and kind.name == "rail switched off":
                    continue  # there is one bridge for all: nothing is left to be told over
                cases = []
                for turn in range(runs):
                    a, b = rng.sample(range(NODES), 2)
                    case = run_case(bed, kind, f"nic{rng.randrange(NICS)}", a, b)
                    cases.append(case)
                    if not case.right:
                        options.say(
                            f"{variant}, {kind.name}, {case.nic} of {case.nodes}: wrong "
                            f"{case.wrong()}, missing {case.missing()}, said {case.said}"
                        )
                    elif turn % 10 == 0:
                        options.say(f"{variant}, {kind.name} {turn + 1} of {runs}")
                _rows(section, variant, kind, cases)
            section.details[f"{variant}: rounds"] = bed.counters("locate_rounds")
            section.details[f"{variant}: probes"] = bed.counters("locate_probes")
    section.notes.append(
        f"{NODES} nodes x {NICS} NICs, one rank each, default settings; seed {seed}. Right: all "
        "processes that lost a path have given a verdict, and each verdict is right."
    )


def _rows(section: Section, variant: str, kind: Kind, cases: list[Case]) -> None:
    right = sum(case.right for case in cases)
    given = [t / MS for case in cases for t in case.given]
    name = f"{variant}: {kind.name}"
    section.rows.append(
        Row(
            f"{name}, right of {len(cases)}",
            right / len(cases) * 100,
            "%",
            target=TARGET * 100,
            judged="value",
            at_least=True,
            samples=len(cases),
        )
    )
    if given:
        for word, share in (("median", 0.5), ("max", 1.0)):
            section.rows.append(
                Row(
                    f"{name}, verdict after, {word}",
                    percentile(given, share),
                    "ms",
                    target=None,
                    judged="value",
                    at_least=False,
                    samples=len(given),
                )
            )
    section.details[f"{name}: verdicts"] = dict(
        Counter(cause.split(":")[0] for case in cases for _, _, cause in case.said)
    )
    section.details[f"{name}: not right"] = [
        {"nic": c.nic, "nodes": c.nodes, "missing": c.missing(), "wrong": c.wrong(), "said": c.said}
        for c in cases
        if not c.right
    ]
