"""A NIC that is slow or loses packets, but lives: what is left of AllReduce, and how soon.

Rung 4. Four NICs of 1 Gbit/s on two nodes; one of them is slowed to a tenth by the lab's shaper, or
loses a few per cent of its packets (nf_tables). An AllReduce on the stand-in runs meanwhile. What
is kept stands beside the same run with R2CCL_GREY=0 and beside what the rates add up to. "What the
rates add up to" is the run's own bus bandwidth before the fault, in proportion to the rates: so the
overhead of the stand-in and of the machine is on both sides.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from figures import Row, Section, median, percentile
from rig import Bed, BenchError, Options, lab_bed, perf_spec

from r2ccl_ctl import control, launch, paths
from r2ccl_ctl.demo.feeds import Timeline, Window
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.job import Job
from r2ccl_ctl.journal import Cursor, Event
from r2ccl_ctl.lab import Lab

GBIT = 10**9
NICS = 4
MIB = 1 << 20
VICTIM = f"nic{NICS - 1}"
TARGET = 0.95
KNOWN_MS = 1000.0
SETTLE_S = 1.0  # what the failure model allows for weights to follow
LOSS_PERCENT = 3.0
TITLE = "A slow or lossy NIC: what AllReduce keeps, and when the weight follows"


@dataclass(frozen=True)
class Plan:
    """rate: of each NIC, slowed: of the victim, bits per second. Phases in seconds."""

    rate: int
    slowed: int
    size: int
    before: float
    after: float
    follow_runs: int


FULL = Plan(GBIT, GBIT // 10, 64 * MIB, 4.0, 8.0, 15)
SMOKE = Plan(GBIT // 10, GBIT // 100, 4 * MIB, 3.0, 3.0, 1)


@dataclass
class Run:
    """One AllReduce run with a fault in it: windows of before and after, and what was said."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    reason: str = ""


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    plan = SMOKE if options.smoke else FULL
    turns = 1 if options.smoke else min(3, options.repetitions)
    slow = (NICS - 1 + plan.slowed / plan.rate) / NICS
    trouble = Trouble(
        "slowed to 10 %",
        "slow",
        lambda lab: lab.set_rate("n0", VICTIM, plan.slowed),
        lambda lab: lab.set_rate("n0", VICTIM, plan.rate),
        0.8,
    )
    if options.wants("slow"):
        _kept(section, options, plan, turns, "one of 4 NICs at 10 %", trouble.begins, slow, TARGET)
    if options.wants("follow"):
        lasted = _follow(section, options, plan, trouble)
        _healthy(section, options, plan, lasted)
    if options.wants("lossy") and not options.smoke:  # the same code as "follow"
        _follow(section, options, plan, LOSSY)
    section.notes.append(
        f"2 nodes x {NICS} NICs of {plan.rate / GBIT:g} Gbit/s, AllReduce of "
        f"{plan.size // MIB} MiB, on the stand-in; the second after the fault is left out of the "
        "bandwidth. Baseline: the bus bandwidth of the same run before the fault times the share "
        "of rates that is left."
    )


Fault = Callable[[Lab], None]


@dataclass(frozen=True)
class Trouble:
    """What is done to the victim, and mended. word: what its journal calls it; settle: seconds
    after either, until the other may come."""

    name: str
    word: str
    begins: Fault
    ends: Fault
    settle: float


LOSSY = Trouble(
    f"loses {LOSS_PERCENT:g} % of its packets",
    "lossy",
    lambda lab: lab.fail_link("n0", VICTIM, "silent", loss=LOSS_PERCENT),
    lambda lab: lab.recover_link("n0", VICTIM),
    3.0,
)


def _kept(
    section: Section,
    options: Options,
    plan: Plan,
    turns: int,
    name: str,
    fault: Fault,
    left: float,
    target: float | None,
) -> None:
    found: dict[bool, list[Run]] = {True: [], False: []}
    try:
        for turn in range(turns):
            for grey, runs in found.items():
                options.say(f"{name}: turn {turn + 1}, R2CCL_GREY={int(grey)}")
                runs.append(_one(plan, fault, grey))
    finally:
        for grey, runs in found.items():
            values = [median(one.after) / 1e9 for one in runs]
            bound = [median(one.before) / 1e9 * left for one in runs]
            words = "grey failures watched" if grey else "R2CCL_GREY=0"
            section.compare(
                f"{name}: all_reduce, {words}",
                values,
                bound,
                "GB/s",
                "what the rates add up to",
                target if grey else None,
            )
    reasons = {one.reason for one in found[True] if one.reason}
    section.details[f"{name}: reasons"] = sorted(reasons)


@contextmanager
def _job(
    bed: Bed, plan: Plan, seconds: float, grey: bool, more: dict[str, str] | None = None
) -> Iterator[tuple[Job, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline"
        command = [str(paths.perf_path()), "--op", "all_reduce", "-b", str(plan.size), "-c", "0"]
        command += ["--duration", f"{seconds:g}", "--window", "1", "--timeout", "60"]
        command += ["--timeline", str(timeline)]
        env = {**(more or {}), **({} if grey else {"R2CCL_GREY": "0"})}
        spec = perf_spec(command, bed.lab, 2, 1, NICS, False, env, seconds + 90)
        with launch.start(spec, echo=False) as job:
            _until_windows(job, timeline)
            yield job, timeline


def _until_windows(job: Job, timeline: Path) -> None:
    until = time.monotonic() + 40
    while not timeline.is_file() or timeline.stat().st_size == 0:
        if not job.running or time.monotonic() > until:
            raise BenchError(f"all_reduce does not run: {job.ranks[0].output[-400:]}")
        time.sleep(0.02)


def _one(plan: Plan, fault: Fault, grey: bool) -> Run:
    """A fresh lab: what TCP and the plugin have learned of an earlier fault is gone."""
    found = Run()
    with lab_bed("grey", NICS, (plan.rate,)) as bed, ExitStack() as stack:
        assert bed.lab is not None
        job, timeline = stack.enter_context(_job(bed, plan, plan.before + plan.after, grey))
        watch = _watch(job, stack)
        time.sleep(plan.before)
        at = time.monotonic_ns()
        fault(bed.lab)
        code = job.wait(plan.before + plan.after + 60)
        if code != 0:
            raise BenchError(f"all_reduce ended with {code}: {job.ranks[0].output[-400:]}")
        windows = Timeline(timeline).poll()
        if any(window.wrong > 0 for window in windows):
            raise BenchError("wrong values")
        found.before = _rates(windows, lambda w: w.end_ns < at)[1:]
        settled = at + int(SETTLE_S * 1e9)
        found.after = _rates(windows, lambda w: w.begin_ns > settled)
        if not found.before or not found.after:
            raise BenchError(f"{len(windows)} windows are too few")
        first = _first_weight(watch, at)
        if first is not None:
            found.reason = first.cause
    return found


def _rates(windows: Sequence[Window], wanted: Callable[[Window], bool]) -> list[float]:
    return [window.algbw_gbs * 1e9 for window in windows if wanted(window)]


def _watch(job: Job, stack: ExitStack) -> list[Cursor]:
    """The journals of all ranks."""
    cursors = []
    for rank in job.ranks:
        until = time.monotonic() + 20
        while True:
            try:
                process = control.find(rank.pid)
                break
            except R2Error:
                if time.monotonic() > until:
                    raise BenchError("no control segment within 20 s") from None
                time.sleep(0.02)
        cursors.append(Cursor(process))
        stack.callback(cursors[-1].close)
    return cursors


def _first_weight(watch: Sequence[Cursor], since: int) -> Event | None:
    """The first change of the victim's weight, on whichever side."""
    events = [
        event
        for cursor in watch
        for event in cursor.events()
        if event.event == "weight" and event.mono_ns >= since and event.nic == VICTIM
    ]
    return min(events, key=lambda event: event.mono_ns, default=None)


@dataclass
class Followed:
    """What was said in so many turns of the trouble and its end; milliseconds."""

    there: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    named: list[float] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)
    missed: int = 0
    turns: int = 0


def _follow(section: Section, options: Options, plan: Plan, trouble: Trouble) -> float:
    """How long until the weight follows, there and back, many times in one run, and whether it is
    the NIC that is named. Seconds that it took."""
    found = Followed()
    seconds = plan.follow_runs * (6.4 + 2 * trouble.settle) + 10
    try:
        with lab_bed("follow", NICS, (plan.rate,)) as bed, ExitStack() as stack:
            assert bed.lab is not None
            job, _ = stack.enter_context(_job(bed, plan, seconds, True))
            watch = _watch(job, stack)
            time.sleep(plan.before)
            _weights(watch)
            began = time.monotonic()
            for turn in range(plan.follow_runs):
                if turn % 5 == 0:
                    options.say(f"{trouble.name}: {turn + 1} of {plan.follow_runs}")
                _follow_once(bed.lab, watch, trouble, found)
            lasted = time.monotonic() - began
            job.kill(grace=0.1)
    finally:
        _followed(section, options, found, trouble)
    return lasted


def _follow_once(lab: Lab, watch: Sequence[Cursor], trouble: Trouble, found: Followed) -> None:
    for change, into in ((trouble.begins, found.there), (trouble.ends, found.back)):
        word = trouble.word if into is found.there else ""
        took = _until_weight(lab, watch, change, word)
        if took.weight is None:
            found.missed += 1
        else:
            into.append(took.weight)
        if took.named is not None and word:
            found.named.append(took.named)
        found.others += took.others
        time.sleep(trouble.settle)
    found.turns += 1


def _followed(section: Section, options: Options, found: Followed, trouble: Trouble) -> None:
    if not found.turns:
        return
    word = trouble.word
    for name, values in ((trouble.name, found.there), (f"no longer {word}", found.back)):
        if not values and not options.smoke:
            section.errors.append(f"{name}: the weight never followed")
        promised = values is found.there or word == "slow"  # a loss is forgotten in seconds
        _times(section, f"{name}: weight follows", values, promised)
    _times(section, f"{trouble.name}: named as {word}", found.named, True)
    of, blamed = f"of {found.turns}", [event for event in found.others if _blames(event)]
    section.rows += [
        _count(f"{trouble.name}: the NIC is named so", len(found.named), of, found.turns),
        _count(f"{trouble.name}: paths of other NICs called slow or lossy", len(blamed), of, None),
    ]
    section.details[f"other NICs, while one was {word}"] = [
        f"{event.nic}: {event.cause}" for event in found.others
    ]
    section.details[f"{word}: weight did not follow within 3 s"] = found.missed


def _healthy(section: Section, options: Options, plan: Plan, seconds: float) -> None:
    options.say(f"no fault for {seconds:.0f} s")
    with lab_bed("well", NICS, (plan.rate,)) as bed, ExitStack() as stack:
        job, _ = stack.enter_context(_job(bed, plan, plan.before + seconds + 10, True))
        watch = _watch(job, stack)
        time.sleep(plan.before)
        _weights(watch)
        time.sleep(seconds)
        blamed = [event for event in _weights(watch) if _blames(event)]
        job.kill(grace=0.1)
    section.rows.append(
        _count(f"no fault for {seconds:.0f} s: paths called slow or lossy", len(blamed), "", 0)
    )
    section.details["blamed without a fault"] = [f"{e.nic}: {e.cause}" for e in blamed]


def _times(section: Section, name: str, values: Sequence[float], promised: bool) -> None:
    for word, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0)) if values else ():
        section.rows.append(
            Row(
                f"{name}, {word}",
                percentile(values, share),
                "ms",
                target=KNOWN_MS if promised and word == "median" else None,
                judged="value",
                at_least=False,
                samples=len(values),
            )
        )


def _count(name: str, found: int, unit: str, target: float | None) -> Row:
    return Row(name, found, unit, target=target, judged="value", at_least=bool(target))


def _blames(event: Event) -> bool:
    return event.cause.startswith(("slow:", "lossy:"))


def _weights(watch: Sequence[Cursor]) -> list[Event]:
    return [event for cursor in watch for event in cursor.events() if event.event == "weight"]


@dataclass
class Took:
    """Milliseconds until some side changed the victim's weight, and until it was named, and what
    was said of other NICs; None: not within 3 s."""

    weight: float | None = None
    named: float | None = None
    others: list[Event] = field(default_factory=list)


def _until_weight(lab: Lab, watch: Sequence[Cursor], change: Fault, word: str) -> Took:
    """word: how it is to be named; "": a change of weight is enough."""
    took = Took(others=[event for event in _weights(watch) if event.nic != VICTIM])
    at = time.monotonic_ns()
    change(lab)
    while time.monotonic_ns() - at < 3 * 10**9:
        if (took.named if word else took.weight) is not None:
            break
        events = sorted(_weights(watch), key=lambda event: event.mono_ns)
        took.others += [event for event in events if event.nic != VICTIM]
        for event in events:
            if event.nic != VICTIM or event.mono_ns < at:
                continue
            since = (event.mono_ns - at) / 1e6
            took.weight = since if took.weight is None else took.weight
            if word and took.named is None and event.cause.startswith(f"{word}:"):
                took.named = since
        time.sleep(0.005)
    return took
