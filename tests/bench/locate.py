"""How often the verdict on a lost path is right, over many faults, and how soon it is given.

Rung 4. Three ranks on three nodes go round a ring without pause; a fault is made, and every process
that lost a path has to say in its journal which NIC is at fault. A case is right when both ends of
each pair of nodes that the fault separates have given a verdict, and every verdict is right. Times
are counted from just before the lab is asked to break something: finding out that a path is silent
is in them. It cannot show what a physical switch does.
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
QUIET_S = 0.3
TARGET = 0.99
TITLE = "Which NIC is at fault"
LOCAL, REMOTE, BETWEEN = "local NIC", "remote NIC", "link or switch"
VARIANTS = ("rail-only", "one-subnet")

End = tuple[int, str]  # node, NIC
# (the judge's NIC, the NIC at the other end) -> the only right verdict; None: there is none.
Truth = Callable[[End, End], str | None]


@dataclass(frozen=True)
class Kind:
    """A kind of fault: how it is made on a NIC of node `a` (and `b`), and what is true of any pair
    of NICs. Also which (judging node, other node) have to give a verdict on the rail."""

    name: str
    make: Callable[[Lab, str, int, int], None]
    truth: Callable[[str, int, int], Truth]
    judges: Callable[[int, int], list[tuple[int, int]]]


@dataclass
class Case:
    """One fault and what was said; times in nanoseconds of CLOCK_MONOTONIC."""

    kind: str
    nic: str
    nodes: tuple[int, int]
    at: int
    truth: Truth
    judges: list[tuple[int, int]]
    said: list[tuple[End, End, str]] = field(default_factory=list)  # judge, other end, cause
    given: list[int] = field(default_factory=list)

    def missing(self) -> list[tuple[int, int]]:
        have = {(o[0], e[0]) for o, e, _ in self.said if self.nic in (o[1], e[1])}
        # A verdict on the node's own NIC is one for all paths of it, also those that it ended.
        own = {j[0] for j, e, cause in self.said if j[1] == self.nic and cause.startswith(LOCAL)}
        own |= {node for node, other in have if other < 0}
        have |= {(node, other) for node in own for other in range(NODES)}
        return [pair for pair in self.judges if pair not in have]

    def wrong(self) -> list[str]:
        found = []
        for own, other, cause in self.said:
            verdict = cause.split(":")[0].split(",")[0]
            if verdict != self.truth(own, other):
                found.append(f"n{own[0]} {own[1]} -> n{other[0]} {other[1]}: {cause}")
        return found

    @property
    def right(self) -> bool:
        return not self.missing() and not self.wrong()


def one_nic(nic: str, a: int, _b: int) -> Truth:
    def truth(own: End, other: End) -> str | None:
        return LOCAL if own == (a, nic) else REMOTE if other == (a, nic) else None

    return truth


def one_pair(nic: str, a: int, b: int) -> Truth:
    def truth(own: End, other: End) -> str | None:
        return BETWEEN if {own, other} == {(a, nic), (b, nic)} else None

    return truth


def whole_rail(nic: str, _a: int, _b: int) -> Truth:
    def truth(own: End, other: End) -> str | None:
        return BETWEEN if nic in (own[1], other[1]) else None

    return truth


def around(a: int, _b: int) -> list[tuple[int, int]]:
    return [pair for pair in itertools.permutations(range(NODES), 2) if a in pair]


def these_two(a: int, b: int) -> list[tuple[int, int]]:
    return [(a, b), (b, a)]


def everybody(_a: int, _b: int) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(NODES), 2))


KINDS = [
    Kind(
        "NIC without carrier", lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic), one_nic, around
    ),
    Kind(
        "NIC set down", lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic, "admin"), one_nic, around
    ),
    Kind(
        "NIC sends into the void",
        lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic, "silent", direction="tx"),
        one_nic,
        around,
    ),
    Kind(
        "NIC hears nothing",
        lambda lab, nic, a, b: lab.fail_link(f"n{a}", nic, "silent", direction="rx"),
        one_nic,
        around,
    ),
    Kind("rail switched off", lambda lab, nic, a, b: lab.fail_rail(nic), whole_rail, everybody),
    Kind(
        "one pair cut",
        lambda lab, nic, a, b: lab.cut_pair(f"n{a}", f"n{b}", nic),
        one_pair,
        these_two,
    ),
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
            if any(nic.state not in ("healthy", "ramping") for nic in snapshot.nics):
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

    def wait_quiet(self) -> None:
        """Nothing more is said of the fault before."""
        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            if any(event.event == "verdict" for _, event in self.drain()):
                until = time.monotonic() + QUIET_S
            time.sleep(0.02)

    def counters(self, name: str) -> int:
        return sum(process.snapshot().counters[name] for process in self.processes)


def run_case(bed: Bed, kind: Kind, nic: str, a: int, b: int) -> Case:
    bed.wait_healthy()
    bed.wait_quiet()
    truth, judges = kind.truth(nic, a, b), kind.judges(a, b)
    case = Case(kind.name, nic, (a, b), time.monotonic_ns(), truth, judges)
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
    other = (int(event.peer_host[1:]) if event.peer_host else -1, event.remote_nic)
    case.said.append(((node, event.nic), other, event.cause))
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
        # The same NICs fail time and again here: they are not to be left alone for it.
        env = {"R2CCL_LOG": "info", "R2CCL_DAMP": "0", "R2CCL_RAMP": "500ms"}
        job_spec = perf_spec(command, lab, NODES, 1, NICS, False, env, 36000)
        with launch.start(job_spec, echo=False) as job:
            bed = Bed(lab, job)
            try:
                yield bed
            finally:
                bed.close()


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    seed = random.randrange(1 << 32)
    section.details["seed"] = seed
    section.notes.append(
        f"{NODES} nodes x {NICS} NICs, one rank each, default settings but for damping, off, and "
        f"the ramp, 0.5 s; seed {seed}. Right: all processes that lost a path have given a "
        "verdict, and each verdict is right."
    )
    # Each is asked for: what parts there are is told by that.
    wanted = [variant for variant in VARIANTS if options.wants(variant)]
    for variant in wanted[:1] if options.smoke else wanted:
        cases: list[Case] = []
        try:
            _variant(options, section, variant, cases, random.Random(f"{seed} {variant}"))
        finally:
            for kind in kinds_of(variant):
                _rows(section, variant, kind, [one for one in cases if one.kind == kind.name])


def kinds_of(variant: str) -> list[Kind]:
    # With one bridge for all nothing is left to be told over once that is off.
    return [k for k in KINDS if variant != "one-subnet" or k.name != "rail switched off"]


def _variant(
    options: Options, section: Section, variant: str, cases: list[Case], rng: random.Random
) -> None:
    """Cases of all kinds in turn."""
    runs = 1 if options.smoke else options.runs
    last = ""
    with running(variant) as bed:
        for turn in range(runs):
            for kind in kinds_of(variant):
                a, b = rng.sample(range(NODES), 2)
                # Another NIC than before: a verdict on a pair stands for a second.
                last = rng.choice([f"nic{i}" for i in range(NICS) if f"nic{i}" != last])
                case = run_case(bed, kind, last, a, b)
                cases.append(case)
                if not case.right:
                    options.say(
                        f"{variant}, {kind.name}, {case.nic} of {case.nodes}: wrong "
                        f"{case.wrong()}, missing {case.missing()}, said {case.said}"
                    )
            if turn % 10 == 0:
                options.say(f"{variant}: {turn + 1} of {runs} of each kind")
        for name in ("rounds", "probes"):
            section.details[f"{variant}: {name}"] = bed.counters(f"locate_{name}")


def _rows(section: Section, variant: str, kind: Kind, cases: list[Case]) -> None:
    if not cases:
        return
    right = sum(case.right for case in cases)
    given = [ns / MS for case in cases for ns in case.given]
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
        f"{case.nic} of {case.nodes}: wrong {case.wrong()}, missing {case.missing()}"
        for case in cases
        if not case.right
    ]
