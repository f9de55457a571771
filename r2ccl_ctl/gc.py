"""Sweeping the objects of processes that are gone."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from r2ccl_ctl.control import OTHER, Process, list_processes

DEFAULT_AGE_S = 600.0
YOUNG_S = 60.0  # a process that sets its object up looks dead for a moment


@dataclass(frozen=True)
class Swept:
    """One object that was removed, or would be; `error` when it could not."""

    process: Process
    age_s: float
    bytes: int
    error: str = ""


@dataclass
class Sweep:
    """What came of a sweep. spared: damaged objects that were old enough, but too young to be
    certain that nobody sets them up."""

    removed: list[Swept]
    spared: int = 0


def age_s(process: Process, now_ns: int) -> float:
    """Since it was last heard of."""
    last = max(process.created_real_ns, process.alive_real_ns, process.ended_real_ns)
    return max(0.0, (now_ns - last) / 1e9)


def sweep(
    older_than_s: float = DEFAULT_AGE_S, *, dry_run: bool = False, now_ns: int | None = None
) -> Sweep:
    """Remove what no process holds and nobody has heard of for that long. Of this user, or, as
    root, of all."""
    found = Sweep([])
    now_ns = time.time_ns() if now_ns is None else now_ns
    for process in list_processes(dead=True):
        lives = process.running or process.state == OTHER
        if lives or os.geteuid() not in (0, process.uid):
            continue
        age = age_s(process, now_ns)
        if age < older_than_s:
            continue
        if process.state == "damaged" and age < YOUNG_S:
            found.spared += 1
            continue
        size = 0
        error = ""
        with contextlib.suppress(OSError):
            size = process.path.stat().st_size
        if not dry_run:
            try:
                process.path.unlink()
            except FileNotFoundError:
                continue
            except OSError as err:
                error = err.strerror or str(err)
        found.removed.append(Swept(process, age, size, error))
    return found
