"""The journal of a process: what happened to its NICs, paths and peers, in order.

The ring holds the newest events; the numbers tell when some were missed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from r2ccl_ctl.control import Process, describe, open_segment
from r2ccl_ctl.rows import word
from r2ccl_ctl.segment import Segment

UNFINISHED_S = 1.0


@dataclass(frozen=True)
class Event:
    """One event. `lost`: how many before it this reader could not have."""

    process: Process
    number: int
    real_ns: int
    mono_ns: int
    event: str
    nic: str
    remote_nic: str
    peer_host: str
    peer_pid: int
    generation: int
    bytes: int
    duration_us: int
    cause: str
    lost: int = 0

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["process"]
        return found


class Cursor:
    """A place in the journal of one process. Keeps the object open, so that the end of a journal
    can be read when the object was swept. Use as a context manager."""

    def __init__(self, process: Process, *, start: int = 0) -> None:
        self.process = process
        self.next = start
        self._segment: Segment = open_segment(process.path)
        self._stuck: tuple[int, float] = (-1, 0.0)

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._segment.close()

    def head(self) -> int:
        """Number of events ever written."""
        return int(self._segment.header()["event_head"])

    def events(self) -> Iterator[Event]:
        """What came since the last call. Stops before an event that is still being written, for
        at most a second."""
        rows = self._segment.tables["events"].rows
        head = self.head()
        lost = max(0, head - rows - self.next)
        self.next = min(max(self.next, head - rows), head)
        while self.next < head:
            row = self._row(self.next)
            if row is None:
                if self._wait_for(self.next):
                    return
                lost += 1
            else:
                yield self._event(row, lost)
                lost = 0
            self.next += 1

    def ended(self) -> bool:
        """True when no more events can come."""
        return bool(self._segment.header()["ended_real_ns"]) or not self._alive()

    def _alive(self) -> bool:
        now = describe(self.process.path)
        return now is not None and now.running

    def _row(self, number: int) -> dict[str, Any] | None:
        """The event's row; None when it is not there (yet, or any more)."""
        table = self._segment.tables["events"]
        offset = table.offset + number % table.rows * table.stride
        stamp = ((2 * number + 2) % (1 << 64)).to_bytes(8, "little")
        if self._segment.read(offset, 8) != stamp:  # before the row: one copy has no order
            return None
        data = self._segment.read(offset, table.stride)
        if self._segment.read(offset, 8) != stamp:
            return None
        return self._segment.layout.parse("r2_seg_journal_entry", data)

    def _wait_for(self, number: int) -> bool:
        """True while an absent event may still be finished by its writer."""
        table = self._segment.tables["events"]
        offset = table.offset + number % table.rows * table.stride
        stamp = int.from_bytes(self._segment.read(offset, 8), "little")
        if stamp > 2 * number + 1 or not self._alive():
            return False
        now = time.monotonic()
        if self._stuck[0] != number:
            self._stuck = (number, now)
        return now - self._stuck[1] < UNFINISHED_S

    def _event(self, row: dict[str, Any], lost: int) -> Event:
        names = (
            "real_ns mono_ns nic remote_nic peer_host peer_pid generation bytes duration_us cause"
        )
        return Event(
            process=self.process,
            number=self.next,
            lost=lost,
            event=word("r2_seg_event", "R2_EV_", row["event"]),
            **{name: row[name] for name in names.split()},
        )


def read_all(process: Process) -> list[Event]:
    """What the ring holds now."""
    with Cursor(process) as cursor:
        return list(cursor.events())
