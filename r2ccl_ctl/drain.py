"""Waiting until nothing of the jobs is left on a NIC that is being drained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from r2ccl_ctl.control import OTHER, Process, describe, find_nic
from r2ccl_ctl.errors import R2Error

POLL_S = 0.02


@dataclass(frozen=True)
class Drained:
    """What became of a drain in one process. `paths`: not closed yet when the time was over."""

    process: Process
    done: bool
    text: str
    paths: int = 0


def look(process: Process, nic: str) -> Drained:
    """How far it is. A process that has ended has nothing on the NIC."""
    try:
        now = describe(process.path)
        if now is None or not (now.running or now.state in ("damaged", OTHER)):
            return Drained(process, True, "the process has ended")
        found = find_nic(process.snapshot().nics, nic)
    except R2Error as err:
        return Drained(process, False, str(err))
    if found is None:
        return Drained(process, False, f"no NIC '{nic}' any more")
    if found.state != "drained":
        return Drained(process, False, f"{nic} is {found.state}: the drain was undone")
    if found.draining:
        return Drained(process, False, f"{nic} is still in use", found.draining)
    return Drained(process, True, f"nothing is on {nic} any more: safe to unplug")


def is_drained(process: Process, nic: str) -> bool:
    try:
        found = find_nic(process.snapshot().nics, nic)
    except R2Error:
        return False
    return found is not None and found.state == "drained"


def wait(pairs: Sequence[tuple[Process, str]], timeout: float) -> list[Drained]:
    """Wait until every process has let go of its NIC, or was undrained; `timeout` in seconds."""
    end = time.monotonic() + timeout
    while True:
        found = [look(process, nic) for process, nic in pairs]
        waiting = [one for one in found if not one.done and one.paths]
        if not waiting or time.monotonic() > end:
            return found
        time.sleep(POLL_S)
