"""What heartbeats cost: CPU, bytes on the wire, and that a process with very many paths is capped.

Rung 3: one process in the middle, its peers light processes on loopback NICs; nothing moves but
heartbeats. The baseline is the same process with heartbeats of calm paths ten minutes apart, so
that timers and housekeeping are on both sides: the look at each peer every 25 ms while the
application waits for it, every 100 ms otherwise.

Three kinds of paths. Idle: of peers that no request waits for. Waiting: the application waits for a
message on every connection, and nothing is under way. In use: as many heartbeats as paths get that
something is under way on, every 100 ms, but nothing moves; the setting for calm paths makes it so.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from figures import Row, Section, median
from rig import BenchError, Options, clean_env, program

OFF = {
    "R2CCL_HEARTBEAT": "60s"
}  # of calm paths 600 s: nothing is under way; how often peers are looked at stays
CPU_TARGET = 0.1  # per cent of a core per 100 paths
WIRE_TARGET = {"in use": 40.0, "idle": 4.0}  # kbit/s of a path, both directions
# kind -> options of star, settings, heartbeats of a path per second
KINDS: dict[str, tuple[list[str], dict[str, str], int]] = {
    "idle": ([], {}, 1),
    "waiting": (["--active"], {}, 1),
    "in use": (["--active"], {"R2CCL_HEARTBEAT": "10ms"}, 10),
    "bare": (["--bare"], {}, 10),
    "blind": (["--blind"], {}, 10),
}
CAP = 1000  # engine/beats.c
LIMIT_S = 240
TITLE = "Heartbeats: CPU and bytes of a path, and the limit of a process"


@dataclass(frozen=True)
class Found:
    """One run. cpu: per cent of a core, of the I/O threads. wire: bit/s of all paths."""

    paths: int
    cpu: float
    beats: float
    wire: float


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when a later part fails."""
    turns = 1 if options.smoke else min(3, options.repetitions)
    few, many = ((2, 2), (4, 4)) if options.smoke else ((8, 8), (64, 8))
    for kind in ("idle", "waiting", "in use"):
        _costs(section, options, kind, few, turns)
    for kind in ("idle", "in use"):
        _capped(section, options, kind, many)
    section.notes.append(
        "Loopback: the sender's CPU time includes the receiver's share of TCP. Waiting: a message "
        "waits on every connection, nothing moves. Idle and waiting paths have a heartbeat every "
        f"second, those in use every 100 ms from both ends, at most {CAP} a second for the process."
    )


def _costs(
    section: Section, options: Options, kind: str, size: tuple[int, int], turns: int
) -> None:
    with_them, without = [], []
    plain: dict[str, list[float]] = {"bare": [], "blind": []}
    for turn in range(turns):
        options.say(f"heartbeats, {kind}, {size[0]} peers x {size[1]} NICs: turn {turn + 1}")
        with_them.append(_star(size, kind, options, {}))
        without.append(_star(size, kind, options, OFF))
        for calls in plain if kind == "in use" else ():
            found = _star(size, calls, options, {})
            beats = with_them[-1].beats / with_them[-1].paths
            plain[calls].append(found.cpu / found.beats * beats * 100)
    per_100 = [
        (a.cpu / a.paths - b.cpu / b.paths) * 100 for a, b in zip(with_them, without, strict=True)
    ]
    section.rows.append(
        Row(
            f"paths {kind}: CPU for heartbeats of 100 paths",
            max(0.0, median(per_100)),
            "% of a core",
            target=CPU_TARGET,
            judged="value",
            at_least=False,
            samples=turns,
        )
    )
    if plain["bare"]:
        section.rows[-1].note = (
            f"of it, by the same calls on plain sockets: {median(plain['bare']):.3f}, "
            f"by `send` alone: {median(plain['blind']):.3f}"
        )
    section.rows.append(
        Row(
            f"paths {kind}: CPU of the I/O thread, {size[0]} peers x {size[1]} NICs",
            median([one.cpu for one in with_them]),
            "% of a core",
            baseline=median([one.cpu for one in without]) or None,
            baseline_name="without heartbeats",
            samples=turns,
        )
    )
    if kind not in WIRE_TARGET:
        return
    section.rows.append(
        Row(
            f"a path {kind}: on the wire",
            median([one.wire / one.paths / 1000 for one in with_them]),
            "kbit/s",
            target=WIRE_TARGET[kind],
            judged="value",
            at_least=False,
            samples=turns,
            note="both directions, headers included",
        )
    )


def _capped(section: Section, options: Options, kind: str, size: tuple[int, int]) -> None:
    options.say(f"heartbeats, {kind}, {size[0]} peers x {size[1]} NICs")
    found = _star(size, kind, options, {})
    uncapped = found.paths * KINDS[kind][2]
    name = f"paths {kind}, {size[0]} peers x {size[1]} NICs"
    section.rows.append(
        Row(
            f"{name}: heartbeats of the process",
            found.beats,
            "1/s",
            baseline=float(uncapped),
            baseline_name="without a limit",
            target=CAP * 1.05,
            judged="value",
            at_least=False,
            note=f"{found.paths} paths",
        )
    )
    section.rows.append(Row(f"{name}: CPU of the I/O thread", found.cpu, "% of a core"))
    section.rows.append(Row(f"{name}: on the wire, all paths", found.wire / 1e6, "Mbit/s"))


def _star(size: tuple[int, int], kind: str, options: Options, env: dict[str, str]) -> Found:
    peers, nics = size
    command = [program("star"), "--peers", str(peers), "--nics", str(nics)]
    command += ["--seconds", "1" if options.smoke else "5"]
    words, settings, _ = KINDS[kind]
    command += words
    try:
        done = subprocess.run(
            command,
            env=clean_env(**settings | env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise BenchError(f"{' '.join(command)}: still running after {LIMIT_S} s") from err
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-400:]}")
    row = json.loads(done.stdout)
    if row["failures"]:
        raise BenchError(f"{' '.join(command)}: {row['failures']} paths failed")
    seconds = row["seconds"]
    return Found(
        paths=row["paths"],
        cpu=100 * row["io_cpu_s"] / seconds,
        beats=row["heartbeats"] / seconds,
        wire=8 * row["wire_bytes"] / seconds,
    )
