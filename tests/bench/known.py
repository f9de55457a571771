"""What the failure model promises beside lost NICs: how soon a NIC that is slow or loses packets is
known for it, how soon one that works again is found and fully used, and how soon a process hears
that its peer was killed. Many faults of each kind.

Rung 4: one pair of processes sends messages over a shaped lab. Times are CLOCK_MONOTONIC, counted
from just before the lab (or the kernel) is asked; the baseline of each is what that call itself
takes in the same run. It cannot show what a physical NIC or switch does.

`--add-to FILE` keeps the times in a file and `--slice SECONDS` ends a run early, so that hundreds
of faults can be had a few minutes at a time.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import resume
from figures import Row, Section, percentile
from rig import Bed, BenchError, Options, Sides, clean_env, commit, lab_bed, plugin_sides

from r2ccl_ctl import paths
from r2ccl_ctl.control import Process
from r2ccl_ctl.journal import Event
from r2ccl_ctl.lab import Lab

MESSAGE = ["--size", "256K", "--outstanding", "8"]
MS = 1e6
GREY_NICS, GREY_RATE, LOSS_PERCENT = 4, 250_000_000, 3.0
GREY_FAULTS = 20  # in one process: its journal keeps 64 words about weights, then one a minute
GREY_S = 3.0  # a weight that has not followed by then has not
SLOW_SETTLE_S, LOSSY_SETTLE_S = 1.2, 3.0  # after it was mended, until it is called well again
BACK_NICS, BACK_RATE = 8, 60_000_000
AWAY_S, EVERY_S, BACK_S = 1.0, 0.8, 15.0
GONE_S = 5.0
TITLE = "Time until a grey, mended or dead end is known"
LIMITS = {"slow": 1000.0, "lossy": 1000.0, "found": 1000.0, "full": 5000.0, "gone": 1000.0}


class Times:
    """Milliseconds by what they are of; in a file, if there is one, written after each fault."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.of: dict[str, list[float]] = {}
        self.commits: list[str] = []
        if path and path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                self.of, self.commits = found["times"], found["commits"]
            except (ValueError, KeyError, TypeError) as err:
                raise BenchError(f"{path} holds no times of `known`: {err}; move it away") from err
        self.commits = sorted({*self.commits, commit()})

    def add(self, name: str, since_ns: int, at_ns: int) -> None:
        self.of.setdefault(name, []).append(round((at_ns - since_ns) / MS, 3))
        if self.path:
            text = json.dumps({"commits": self.commits, "times": self.of})
            self.path.write_text(text + "\n", encoding="utf-8")

    def count(self, name: str) -> int:
        return len(self.of.get(name, []))


@dataclass
class Until:
    """When to begin no more faults."""

    times: Times
    runs: int
    end: float
    late: bool = False  # one more was wanted after that

    def more(self, name: str) -> bool:
        short = self.times.count(name) < self.runs
        self.late |= short and time.monotonic() >= self.end
        return short and not self.late


@contextmanager
def moving(bed: Bed) -> Iterator[tuple[Lab, resume.Watch, Sides]]:
    """Messages without pause, and both journals."""
    assert bed.lab is not None
    words = (*MESSAGE, "--seconds", "3600")
    with plugin_sides(bed, *words, limit=3600, env=resume.UNDAMPED) as sides:
        watch = resume.Watch(resume.processes(sides))
        try:
            time.sleep(1.0)
            yield bed.lab, watch, sides
        finally:
            watch.close()


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    times = Times(options.add_to)
    until = Until(times, 1 if options.smoke else options.runs, options.slice_end())
    parts: dict[str, Callable[[Options, Until], None]] = {
        "slow": _slow,
        "lossy": _lossy,
        "return": _return,
        "killed": _killed,
    }
    section.details["commits"] = times.commits
    section.notes.append(
        "2 nodes, one pair of processes, 256 KiB messages, 8 outstanding. Grey: "
        f"{GREY_NICS} NICs of {GREY_RATE / 1e9:g} Gbit/s, one of them slowed to 10 % or losing "
        f"{LOSS_PERCENT:g} % of its packets. Return: {BACK_NICS} NICs of {BACK_RATE / 1e9:g} "
        f"Gbit/s, one broken every {EVERY_S:g} s, for {AWAY_S:g} s each, no flap damping; full "
        "weight comes after the ramp of 3 s. Killed: a fresh pair each time, either side in turn."
    )
    try:
        for name, part in parts.items():
            if options.wants(name) and not (name == "lossy" and options.smoke):  # as "slow"
                part(options, until)
    finally:
        _rows(section, times, until.runs)
    if until.late:
        section.cut = options.sliced()


# ---- grey


def _slow(options: Options, until: Until) -> None:
    def change(lab: Lab, node: str, nic: str, bad: bool) -> None:
        lab.set_rate(node, nic, GREY_RATE // 10 if bad else GREY_RATE)

    _grey(options, until, "NIC at 10 %", "slow:", change, SLOW_SETTLE_S)


def _lossy(options: Options, until: Until) -> None:
    def change(lab: Lab, node: str, nic: str, bad: bool) -> None:
        if bad:
            lab.fail_link(node, nic, "silent", loss=LOSS_PERCENT)
        else:
            lab.recover_link(node, nic)

    _grey(options, until, f"NIC loses {LOSS_PERCENT:g} %", "lossy:", change, LOSSY_SETTLE_S)


Change = Callable[[Lab, str, str, bool], None]


def _grey(
    options: Options, until: Until, name: str, word: str, change: Change, settle: float
) -> None:
    turn = 0
    while until.more(f"{name}: weight follows"):
        with lab_bed("known", GREY_NICS, (GREY_RATE,)) as bed, moving(bed) as (lab, watch, _):
            time.sleep(3.0)  # what each NIC carries is known
            for _ in range(GREY_FAULTS):
                if not until.more(f"{name}: weight follows"):
                    break
                nic = f"nic{turn % GREY_NICS}"
                _grey_once(until.times, name, word, lab, watch, nic, change)
                time.sleep(settle)
                turn += 1
        options.say(f"{name}: {until.times.count(f'{name}: weight follows')}")


def _grey_once(
    times: Times, name: str, word: str, lab: Lab, watch: resume.Watch, nic: str, change: Change
) -> None:
    for _ in watch.drain():
        pass
    at = time.monotonic_ns()
    change(lab, "n0", nic, True)
    done = time.monotonic_ns()
    first = named = 0
    while not named and time.monotonic_ns() - at < GREY_S * 1e9:
        for _, event in watch.drain():
            if event.event != "weight" or event.nic != nic or event.mono_ns < at:
                continue
            first = first or event.mono_ns
            if event.cause.startswith(word):
                named = named or event.mono_ns
        time.sleep(0.005)
    times.add(f"{name}: the lab's own call", at, done)
    # Not within the time: the whole of it, so that it shows.
    times.add(f"{name}: weight follows", at, first or at + int(GREY_S * 1e9))
    times.add(f"{name}: named as {word[:-1]}", at, named or at + int(GREY_S * 1e9))
    change(lab, "n0", nic, False)


# ---- back


@dataclass
class Away:
    """A NIC of node 0 that was broken; when it was mended, found again, at full weight."""

    began: float
    mended: int = 0
    call: int = 0
    found: int = 0
    full: int = 0


def _return(options: Options, until: Until) -> None:
    for mode, words in (("carrier", "link up again"), ("silent", "packets pass again")):
        if until.more(f"{words}: at full weight"):
            _return_of(options, until, mode, words)


def _return_of(options: Options, until: Until, mode: str, words: str) -> None:
    with lab_bed("known", BACK_NICS, (BACK_RATE,)) as bed, moving(bed) as (lab, watch, _):
        away: dict[str, Away] = {}
        turn, next_at = 0, time.monotonic()
        while away or until.more(f"{words}: at full weight"):
            now = time.monotonic()
            nic = f"nic{turn % BACK_NICS}"
            if now >= next_at and nic not in away and until.more(f"{words}: at full weight"):
                lab.fail_link("n0", nic, mode)
                away[nic] = Away(now)
                turn, next_at = turn + 1, now + EVERY_S
                options.say(f"{words}: {turn}") if turn % 20 == 0 else None
            _mend(lab, away, now)
            for node, event in watch.drain():
                if node == 0 and event.nic in away:
                    _back(until.times, words, away, event)
            time.sleep(0.005)


def _mend(lab: Lab, away: dict[str, Away], now: float) -> None:
    for nic, one in away.items():
        if not one.mended and now - one.began > AWAY_S:
            one.mended = time.monotonic_ns()
            lab.recover_link("n0", nic)
            one.call = time.monotonic_ns()
        elif one.mended and now - one.began > AWAY_S + BACK_S:
            raise BenchError(f"{nic} is not back {BACK_S:g} s after it was mended")


def _back(times: Times, words: str, away: dict[str, Away], event: Event) -> None:
    one = away[event.nic]
    if not one.mended or event.mono_ns < one.mended:
        return
    if event.event == "path-up":
        one.found = one.found or event.mono_ns
    elif event.event in ("nic-down", "nic-damped"):
        one.found = 0
    elif event.event == "nic-up":
        times.add(f"{words}: the lab's own call", one.mended, one.call)
        times.add(f"{words}: found", one.mended, one.found or event.mono_ns)
        times.add(f"{words}: at full weight", one.mended, event.mono_ns)
        del away[event.nic]


# ---- killed


def _moved(process: Process) -> int:
    counters = process.snapshot().counters
    return counters["messages_received"] + counters["messages_sent"]


@contextmanager
def pair(bed: Bed) -> Iterator[tuple[resume.Watch, Sides]]:
    """As `moving`, of a program that hears of its peer's end from the engine alone."""
    tool, at = str(paths.native_dir() / "stress" / "pair"), bed.meeting()
    words = ["--size", "256K", "--outstanding", "8", "--count", "100000000"]
    envs = [clean_env(R2CCL_NICS=bed.r2ccl_nics(node)) for node in (0, 1)]
    sides = Sides(
        bed, [tool, "--listen", at, *words], [tool, "--dial", at, *words], (envs[0], envs[1])
    )
    with sides:
        processes = resume.processes(sides)
        until = time.monotonic() + GONE_S
        while not all(_moved(process) > 20 for process in processes):
            if time.monotonic() > until:
                raise BenchError(f"no messages move: {sides.errors()}")
            time.sleep(0.01)
        watch = resume.Watch(processes)
        try:
            yield watch, sides
        finally:
            watch.close()


def _killed(options: Options, until: Until) -> None:
    name = "peer process killed: known"
    while until.more(name):
        with lab_bed("known", 2, (GREY_RATE,)) as bed:
            for _ in range(25):  # ports are used once
                if not until.more(name):
                    break
                _kill_once(bed, until.times, name)
            options.say(f"{name}: {until.times.count(name)}")


def _kill_once(bed: Bed, times: Times, name: str) -> None:
    with pair(bed) as (watch, sides):
        victim = times.count(name) % 2
        procs = [sides.sender, sides.receiver]  # as the journals
        at = time.monotonic_ns()
        procs[victim].send_signal(signal.SIGKILL)
        procs[victim].wait(GONE_S)
        reaped = time.monotonic_ns()
        gone = 0
        while not gone and time.monotonic_ns() - at < 2 * GONE_S * 1e9:
            for node, event in watch.drain():
                if node != victim and event.event == "peer-gone":
                    gone = event.mono_ns
            time.sleep(0.002)
        if not gone:
            raise BenchError(f"not known {2 * GONE_S:g} s after a process was killed")
        try:  # its sends and receives have failed, so it ends
            procs[1 - victim].wait(2 * GONE_S)
        except subprocess.TimeoutExpired:
            raise BenchError("the peer of a killed process goes on") from None
        ended = time.monotonic_ns()
    times.add("peer process killed: its parent knows", at, reaped)
    times.add(name, at, gone)
    times.add("peer process killed: the other one has ended", at, ended)


# ---- rows

BASES = ("the lab's own call", "its parent knows")


def _limit(name: str) -> float | None:
    for word, limit in (
        ("named as slow", LIMITS["slow"]),
        ("weight follows", LIMITS["slow"]),
        ("named as lossy", LIMITS["lossy"]),
        (": found", LIMITS["found"]),
        ("at full weight", LIMITS["full"]),
        ("killed: known", LIMITS["gone"]),
    ):
        if word in name:
            return limit
    return None


def _rows(section: Section, times: Times, runs: int) -> None:
    for name, values in times.of.items():
        kind, _, what = name.partition(": ")
        if what in BASES:
            continue
        base = next((b for b in BASES if f"{kind}: {b}" in times.of), None)
        for word, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0)):
            section.rows.append(
                Row(
                    f"{name}, {word}",
                    percentile(values, share),
                    "ms",
                    baseline=percentile(times.of[f"{kind}: {base}"], share) if base else None,
                    baseline_name=base or "",
                    target=_limit(name) if word == "median" else None,
                    judged="value",
                    at_least=False,
                    samples=len(values),
                    note=f"{len(values)} of {runs}" if len(values) < runs else "",
                )
            )
    section.details["times, ms"] = times.of
