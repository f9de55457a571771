"""How long until a lost NIC is known on both ends and traffic goes on, over many faults.

Rung 4. One pair of processes sends messages without pause through all faults. A NIC of either node
loses its carrier, its packets vanish (those of one direction, too), or the kernel resets its
connections (`ss -K`; the last three not in the smoke run). Times are CLOCK_MONOTONIC of this
machine, counted from just before the lab is asked to break the NIC. So the milliseconds the lab
itself takes count as the plugin's; their median is printed beside. Completion errors of RDMA are
completion.py's.
"""

from __future__ import annotations

import array
import bisect
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from figures import Row, Section, percentile
from rig import Bed, BenchError, Options, Sides, lab_bed, plugin_sides

from r2ccl_ctl import control
from r2ccl_ctl.control import Process
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.journal import Cursor, Event
from r2ccl_ctl.lab import Lab

NICS = 2
RATE = 500_000_000
MESSAGE = ["--size", "256K", "--outstanding", "8"]
LOOK_S = 0.002
END_S = 30.0  # for the messages that are under way
STEADY_S = 0.4  # after a NIC is back: longer than a black hole's stall
GIVE_UP_S = 10.0
MS = 1e6

# kind of fault -> row -> (median, p95, max) in milliseconds, from the failure model.
Limits = dict[str, tuple[float, float | None, float | None]]
SILENT: Limits = {
    "known at the NIC's node": (300, None, None),
    "known at the other node": (300, None, None),
    "traffic resumed": (350, None, None),
    "NIC back after it was mended": (1000, None, None),
}
TARGETS: dict[str, Limits] = {
    "carrier": {
        "known at the NIC's node": (10, None, None),
        "known at the other node": (11, None, None),
        "traffic resumed": (20, 50, 200),
        "NIC back after it was mended": (1000, None, None),
    },
    "silent": SILENT,
    "silent-tx": SILENT,
    "silent-rx": SILENT,
    "reset": {"traffic resumed": (20, 50, None)},
}
WORDS = {
    "carrier": "link down",
    "silent": "silent black hole",
    "silent-tx": "silent black hole, sent only",
    "silent-rx": "silent black hole, received only",
    "reset": "connections reset",
}
BACK = "NIC back after it was mended"
TITLE = "Time until a lost NIC is known and traffic goes on"


@dataclass(frozen=True)
class Kind:
    """A kind of fault, as its rows name it. call: what makes it; back: the lost path is."""

    title: str
    limits: Limits
    call: str = "the lab's own call"
    back: str = BACK


@dataclass
class Fault:
    """One fault and what followed; nanoseconds of CLOCK_MONOTONIC, 0: was not seen or looked for.
    nic: as its node names it; ends: the lost path's NICs, own one first, as either node has them.
    """

    node: int
    nic: str
    at: int
    call: int  # how long making it took
    down: dict[int, int] = field(default_factory=dict)
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)  # after it was down; a reset needs no mending
    causes: dict[int, str] = field(default_factory=dict)
    replay: int = 0
    resume: int = 0
    healed: int = 0
    back: int = 0
    end: int = 0

    def complete(self) -> bool:
        return len(self.down) == 2 and self.replay > 0 and self.resume > 0

    def concerns(self, node: int, event: Event) -> bool:
        return (event.nic if node == self.node else event.remote_nic) == self.nic

    def is_back(self, node: int, event: Event) -> bool:
        path = (event.nic, event.remote_nic)
        return event.event == "path-up" and self.ends.get(node) == path


class Watch:
    """The journals of both sides, read as they grow. Node 0 sends, node 1 receives."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.cursors = [Cursor(process) for process in processes]

    def close(self) -> None:
        for cursor in self.cursors:
            cursor.close()

    def drain(self) -> Iterator[tuple[int, Event]]:
        for node, cursor in enumerate(self.cursors):
            for event in cursor.events():
                yield node, event

    def follow(self, fault: Fault) -> None:
        """Fill in the fault from what the journals say; BenchError when that takes too long."""
        until = time.monotonic() + GIVE_UP_S
        while not fault.complete():
            for node, event in self.drain():
                _note(fault, node, event)
            if time.monotonic() > until:
                raise BenchError(
                    f"{GIVE_UP_S:g} s after {fault.nic} of n{fault.node} failed: known at nodes "
                    f"{sorted(fault.down)}, replay {bool(fault.replay)}, resumed "
                    f"{bool(fault.resume)}"
                )
            time.sleep(LOOK_S)

    def until_up(self, fault: Fault) -> int:
        """Wait until both sides have the path of this NIC again; when the later one had it."""
        seen = fault.up
        until = time.monotonic() + 3 * GIVE_UP_S
        while len(seen) < 2:
            for node, event in self.drain():
                if fault.is_back(node, event):
                    seen[node] = event.mono_ns
            if time.monotonic() > until:
                raise BenchError(f"{fault.nic} is not back {3 * GIVE_UP_S:g} s after it was mended")
            time.sleep(LOOK_S)
        return max(seen.values())


def _note(fault: Fault, node: int, event: Event) -> None:
    if event.mono_ns < fault.at:
        return
    mine = fault.concerns(node, event)
    if event.event == "path-down" and mine and node not in fault.down:
        fault.down[node], fault.causes[node] = event.mono_ns, event.cause
        fault.ends[node] = (event.nic, event.remote_nic)
    elif fault.is_back(node, event):
        fault.up[node] = event.mono_ns
    elif node == 0 and event.event == "replay" and mine and not fault.replay:
        fault.replay = event.mono_ns
    elif node == 0 and event.event == "resume" and fault.replay and not fault.resume:
        fault.resume = event.mono_ns


UNDAMPED = {"R2CCL_DAMP": "0"}  # every NIC fails dozens of times


@dataclass
class Series:
    """So many faults of a kind; those so far were followed to their end."""

    kind: Kind
    runs: int
    faults: list[Fault] = field(default_factory=list)

    def more(self) -> bool:
        return len(self.faults) < self.runs

    def say(self, options: Options) -> None:
        done, last = len(self.faults), self.faults[-1]
        if done % 10 == 1:
            known = (max(last.down.values()) - last.at) / MS
            options.say(f"{self.kind.title}, {done} of {self.runs}: known after {known:.1f} ms")


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails or is cut off."""
    runs = 2 if options.smoke else options.runs
    modes = list(filter(options.wants, ("carrier", "silent") if options.smoke else WORDS))
    if modes:
        section.notes.append(
            f"2 nodes x {NICS} NICs of 0.5 Gbit/s, 256 KiB messages, 8 outstanding, default "
            "settings (heartbeats every 100 ms, 3 misses) without flap damping. Resumed: the first "
            "acknowledgement over another path after the lost bytes were queued again. Stall: the "
            "longest time without a completed message around the fault."
        )
    for mode in modes:
        series = Series(Kind(WORDS[mode], TARGETS[mode]), runs)
        with lab_bed("resume", NICS, (RATE,)) as bed:
            _run_mode(options, section, mode, series, bed)


def _run_mode(options: Options, section: Section, mode: str, series: Series, bed: Bed) -> None:
    lab = bed.lab
    assert lab is not None

    def breaks(sides: Sides) -> None:
        _break_often(lab, sides, mode, series, options)

    under_traffic(section, series, bed, UNDAMPED, breaks)


def under_traffic(
    section: Section,
    series: Series,
    bed: Bed,
    env: Mapping[str, str],
    breaks: Callable[[Sides], None],
) -> None:
    """Messages without pause while `breaks` makes faults; rows of those that were followed to their
    end, also when it fails or is cut off. Wrong values are an error of the section."""
    with tempfile.TemporaryDirectory() as folder:
        log = str(Path(folder) / "done")
        words = (*MESSAGE, "--seconds", "3600")
        with plugin_sides(bed, *words, log=log, limit=3600, env=env) as sides:
            try:
                breaks(sides)
            finally:
                section.errors += _end(sides)
                rows(section, series, _read_times(log))


def _end(sides: Sides) -> list[str]:
    """Ends the messages; what is wrong with how they ended."""
    sides.ends_at = time.monotonic() + END_S
    sides.sender.send_signal(signal.SIGTERM)
    try:
        sides.finish()
    except BenchError as err:
        return [str(err)]
    return []


def _break_often(lab: Lab, sides: Sides, mode: str, series: Series, options: Options) -> None:
    with ExitStack() as stack:
        watch = Watch(processes(sides))
        stack.callback(watch.close)
        resets = Resets(lab, stack) if mode == "reset" else None
        time.sleep(0.5)
        while series.more():
            turn = len(series.faults)
            node, nic = turn % 2, f"nic{turn // 2 % NICS}"
            series.faults.append(_break_once(lab, watch, node, nic, mode, resets))
            series.say(options)


def _break_once(
    lab: Lab, watch: Watch, node: int, nic: str, mode: str, resets: Resets | None
) -> Fault:
    for _ in watch.drain():
        pass
    at = time.monotonic_ns()
    if resets:
        resets(node, nic)
    else:
        what, _, direction = mode.partition("-")
        lab.fail_link(f"n{node}", nic, what, direction=direction or "both")
    fault = Fault(node, nic, at, time.monotonic_ns() - at)
    fault.healed = at + fault.call
    try:
        watch.follow(fault)
        time.sleep(0.05)
    finally:
        if not resets:
            lab.recover_link(f"n{node}", nic)
            fault.healed = time.monotonic_ns()
    fault.back = watch.until_up(fault)
    time.sleep(STEADY_S)
    fault.end = time.monotonic_ns()
    return fault


class Resets:
    """Ends connections in a node's kernel, which tells the other end as well."""

    LOOP = 'while read -r a; do echo $(ss -K -H -n -t state established src "$a" | wc -l); done'

    def __init__(self, lab: Lab, stack: ExitStack) -> None:
        self.lab = lab
        self.shells = [
            lab.popen(
                f"n{node}",
                ["sh", "-c", self.LOOP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for node in range(2)
        ]
        for shell in self.shells:
            stack.callback(shell.wait, 10)
            stack.callback(shell.kill)

    def __call__(self, node: int, nic: str) -> None:
        """All connections of the NIC's address; BenchError when there was none to end."""
        shell = self.shells[node]
        assert shell.stdin is not None and shell.stdout is not None
        shell.stdin.write(self.lab.address(f"n{node}", nic).encode() + b"\n")
        shell.stdin.flush()
        said = b""
        if select.select([shell.stdout], [], [], GIVE_UP_S)[0]:
            said = shell.stdout.readline().strip()
        if not said.isdigit() or not int(said):
            raise BenchError(
                f"ss -K reset no connection of {nic} in n{node} (it needs iproute2, and a kernel "
                "with CONFIG_INET_DIAG_DESTROY)"
            )


def processes(sides: Sides) -> list[Process]:
    """The control segments of sender and receiver, once both have one."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            return [control.find(proc.pid) for proc in (sides.sender, sides.receiver)]
        except R2Error:
            if sides.sender.poll() is not None or sides.receiver.poll() is not None:
                raise BenchError(f"a side ended early: {sides.errors()}") from None
            time.sleep(0.05)
    raise BenchError("no control segment of both sides within 20 s")


def _read_times(path: str) -> array.array[int]:
    """None where the receiver came to no end: it writes them then."""
    times = array.array("Q")
    if Path(path).exists():
        times.frombytes(Path(path).read_bytes())
    return times


def stall(times: Sequence[int], begin: int, end: int) -> int:
    """The longest gap between completed messages that overlaps [begin, end]."""
    first = max(1, bisect.bisect_right(times, begin))
    last = min(len(times) - 1, bisect.bisect_left(times, end))
    return max((times[i] - times[i - 1] for i in range(first, last + 1)), default=0)


def stall_before(times: Sequence[int], begin: int, end: int) -> int:
    """The same, of what lies before `end`: a gap that goes on after it may be the next fault's."""
    return stall([*times[: bisect.bisect_left(times, end)], end], begin, end) if times else 0


def calm_gap(times: Sequence[int], begin: int, end: int) -> int:
    """The longest gap between messages that were both completed within [begin, end]."""
    inside = times[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
    return max((b - a for a, b in zip(inside, inside[1:], strict=False)), default=0)


def rows(section: Section, series: Series, times: Sequence[int]) -> None:
    """Without `times`, when messages were done, nothing is said of stalls."""
    kind, faults = series.kind, series.faults
    if len(faults) < series.runs:
        section.notes.append(f"{kind.title}: {len(faults)} of {series.runs} faults.")
    measures: dict[str, Callable[[Fault], int]] = {
        "known at the NIC's node": lambda f: f.down[f.node] - f.at,
        "known at the other node": lambda f: f.down[1 - f.node] - f.at,
        "lost bytes queued again": lambda f: f.replay - f.at,
        "traffic resumed": lambda f: f.resume - f.at,
        "stall": lambda f: stall(times, f.at, f.healed),
        "stall before the fault": lambda f: calm_gap(times, f.at - int(100 * MS), f.at),
        kind.back: lambda f: f.back - f.healed,
        "stall while it comes back": lambda f: stall_before(times, f.healed, f.end),
        kind.call: lambda f: f.call,
    }
    for name, measure in measures.items():
        if name.startswith("stall") and not times:
            continue
        values = [measure(f) / MS for f in faults if f.back or name != kind.back]
        if not values:
            continue
        limits = kind.limits.get(name, (None, None, None))
        points = (("median", 0.5), ("p95", 0.95), ("max", 1.0))
        for (word, share), target in zip(points, limits, strict=True):
            if (
                target is None
                and word != "median"
                and name in (kind.call, "lost bytes queued again")
            ):
                continue
            section.rows.append(
                Row(
                    f"{kind.title}: {name}, {word}",
                    percentile(values, share),
                    "ms",
                    target=target,
                    judged="value",
                    at_least=False,
                    samples=len(values),
                )
            )
        section.details[f"{kind.title}: {name}, ms"] = [round(value, 3) for value in values]
    causes: dict[str, int] = {}
    for fault in faults:
        for node, cause in fault.causes.items():
            side = "NIC's node" if node == fault.node else "other node"
            causes[f"{side}: {cause}"] = causes.get(f"{side}: {cause}", 0) + 1
    section.details[f"{kind.title}: causes"] = causes
