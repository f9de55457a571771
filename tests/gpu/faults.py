"""Schedules of NIC failures that follow the progress of a job, not the clock.

An event happens when the job has done a given share of its work: a fast and a slow job both meet it
in the middle. Or it happens a number of milliseconds after the event before it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

ACTIONS = ("carrier", "admin", "silent", "silent-tx", "silent-rx", "up")
SCENARIOS = (
    "one", "remote", "admin", "row", "replay", "two", "silent", "silent-tx", "flap", "all", "tour",
)
# What lasts a while whatever the progress (flap) does not come last.
TOUR = ("remote", "flap", "admin", "replay", "two", "silent", "silent-tx", "one")


class FaultError(Exception):
    """A schedule that cannot be: the text names the part and the remedy."""


@dataclass(frozen=True)
class Event:
    """at: share of the work done, 0 to 1; after_ms: pause after that (or after the last event)."""

    action: str
    node: int
    nic: int
    at: float | None = None
    after_ms: float = 0.0

    def words(self) -> str:
        when = f"{self.at:g}" if self.at is not None else f"+{self.after_ms:g}ms"
        return f"{when}:{self.action}:n{self.node}:nic{self.nic}"


class Target(Protocol):
    """What faults are done to: a lab, or a recorder in tests."""

    def fail(self, node: int, nic: int, kind: str) -> None: ...

    def recover(self, node: int, nic: int) -> None: ...


_EVENT = re.compile(r"(?:(?P<at>[0-9.]+)|\+(?P<ms>[0-9.]+)ms):(?P<act>[a-z-]+):n(?P<n>\d+):"
                    r"nic(?P<r>\d+)")


def parse_schedule(text: str) -> list[Event]:
    """Events from `0.2:carrier:n0:nic0,+15ms:carrier:n1:nic0,0.6:up:n0:nic0`."""
    events = []
    for part in text.split(","):
        match = _EVENT.fullmatch(part.strip())
        if match is None or match["act"] not in ACTIONS:
            raise FaultError(
                f"event '{part}' is not understood: write SHARE:ACTION:nNODE:nicNIC or "
                f"+MSms:ACTION:nNODE:nicNIC with ACTION one of {', '.join(ACTIONS)}"
            )
        at = float(match["at"]) if match["at"] else None
        if at is not None and at > 1:
            raise FaultError(f"event '{part}': the share of the work is between 0 and 1")
        after = float(match["ms"]) if match["ms"] else 0.0
        events.append(Event(match["act"], int(match["n"]), int(match["r"]), at, after))
    return events


def scenario(name: str, nics: int) -> list[Event]:
    """The events of a named scenario on two nodes with `nics` NICs each."""
    if nics < 2:
        raise FaultError(f"scenario {name}: {nics} NIC per node; failures need at least 2")
    last = nics - 1
    if name == "one":
        return [Event("carrier", 0, 0, 0.2), Event("up", 0, 0, 0.6)]
    if name == "remote":
        return [Event("carrier", 1, last, 0.2), Event("up", 1, last, 0.6)]
    if name == "admin":
        return [Event("admin", 0, last, 0.2), Event("up", 0, last, 0.6)]
    if name == "row":
        return [
            Event("carrier", 0, 0, 0.15), Event("up", 0, 0, 0.4),
            Event("carrier", 0, last, 0.6), Event("up", 0, last, 0.85),
        ]
    if name == "replay":
        # The second failure falls into the replay of the first. With two NICs the same rail
        # fails from its other end: both ends of the only other rail must survive.
        second = Event("carrier", 0, 1, None, 15) if nics > 2 else Event("carrier", 1, 0, None, 15)
        heal = Event("up", second.node, second.nic, None, 1)
        return [Event("carrier", 0, 0, 0.2), second, Event("up", 0, 0, 0.6), heal]
    if name == "two":
        if nics < 3:
            raise FaultError("scenario two: takes 2 NICs of one node away and so needs 3 or more")
        return [
            Event("carrier", 0, 0, 0.15), Event("carrier", 0, 1, 0.35),
            Event("up", 0, 1, 0.6), Event("up", 0, 0, 0.7),
        ]
    if name in ("silent", "silent-tx"):
        return [Event(name, 0, 0, 0.2), Event("up", 0, 0, 0.6)]
    if name == "flap":
        pulses = []
        for i in range(5):
            pulses.append(Event("carrier", 0, 0, 0.2 if i == 0 else None, 60))
            pulses.append(Event("up", 0, 0, None, 40))
        return pulses
    if name == "all":
        down = [Event("carrier", 0, r, 0.3 if r == 0 else None, 5) for r in range(nics)]
        return [*down, Event("up", 0, last, None, 2000), *(
            Event("up", 0, r, 0.6 if r == 0 else None, 5) for r in range(last)
        )]
    if name == "tour":
        return tour(nics)
    raise FaultError(f"scenario '{name}' does not exist: choose from {', '.join(SCENARIOS)}")


def tour(nics: int) -> list[Event]:
    """Most scenarios one after the other within one job, each in its own window of progress."""
    names = [name for name in TOUR if name != "two" or nics > 2]
    width = 1.0 / len(names)
    return [
        event if event.at is None else replace(event, at=round((i + event.at) * width, 4))
        for i, name in enumerate(names)
        for event in scenario(name, nics)
    ]


@dataclass
class Done:
    """An event that was carried out: when (monotonic seconds) and how long the order took."""

    event: Event
    began: float
    took_s: float
    error: str | None = None

    def to_json(self, start: float) -> dict[str, Any]:
        words = asdict(self.event)
        return {**words, "t_s": round(self.began - start, 4), "took_s": round(self.took_s, 4),
                "error": self.error}


class FaultThread:
    """Carries out a schedule in a thread of its own. Call progress() as work gets done."""

    def __init__(self, target: Target, events: Sequence[Event]) -> None:
        self._target = target
        self._events = list(events)
        self._share = 0.0
        self._stop = False
        self._cond = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self.done: list[Done] = []

    def start(self) -> None:
        self._thread.start()

    def progress(self, share: float) -> None:
        with self._cond:
            self._share = max(self._share, share)
            self._cond.notify_all()

    def stop(self) -> bool:
        """Ends the thread, heals what is still broken; True when every event was carried out."""
        with self._cond:
            self._stop = True
            self._cond.notify_all()
        self._thread.join(timeout=30)
        complete = len(self.done) == len(self._events) and not any(d.error for d in self.done)
        self._heal()
        return complete

    def _heal(self) -> None:
        broken: set[tuple[int, int]] = set()
        for item in self.done:
            key = (item.event.node, item.event.nic)
            if item.event.action == "up":
                broken.discard(key)
            else:
                broken.add(key)
        for node, nic in sorted(broken):
            self._target.recover(node, nic)

    def _wait(self, event: Event) -> bool:
        """Waits until the event is due; False when the job is over."""
        with self._cond:
            if event.at is not None:
                at = event.at
                self._cond.wait_for(lambda: self._stop or self._share >= at)
            if event.at is None and event.after_ms > 0:
                self._cond.wait_for(lambda: self._stop, timeout=event.after_ms / 1000)
            return not self._stop

    def _run(self) -> None:
        for event in self._events:
            if not self._wait(event):
                return
            began = time.monotonic()
            error = None
            try:
                if event.action == "up":
                    self._target.recover(event.node, event.nic)
                else:
                    self._target.fail(event.node, event.nic, event.action)
            except Exception as err:  # the report names it; the job goes on
                error = f"{type(err).__name__}: {err}"
            self.done.append(Done(event, began, time.monotonic() - began, error))
            if error:
                return
