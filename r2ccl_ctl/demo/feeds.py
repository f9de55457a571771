"""What the running job tells: the windows of r2ccl_perf, the ranks' journals, NIC counters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from r2ccl_ctl import rows
from r2ccl_ctl.control import Process, open_segment
from r2ccl_ctl.journal import Cursor, Event
from r2ccl_ctl.rows import Nic
from r2ccl_ctl.segment import Segment, SegmentError


@dataclass(frozen=True)
class Window:
    """One AllReduce: when the one before it was reported, when it was, how long it took itself.

    begin_ns to end_ns holds the operation, the filling of its buffers before and the check of all
    values after it. wrong: values of all ranks; -1 would be unchecked.
    """

    begin_ns: int
    end_ns: int
    iteration: int
    seconds: float
    bytes: int
    wrong: int

    @property
    def algbw_gbs(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Timeline:
    """The file that r2ccl_perf --timeline writes, read while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.windows: list[Window] = []
        self._at = 0
        self._rest = b""

    def poll(self) -> list[Window]:
        """The windows that are new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        fresh = []
        for line in lines:
            row = json.loads(line)
            end = int(row["monotonic_ns"])
            before = self.windows[-1].end_ns if self.windows else end - int(row["time_us"] * 1000)
            window = Window(
                begin_ns=before,
                end_ns=end,
                iteration=int(row["iteration"]),
                seconds=float(row["time_us"]) / 1e6,
                bytes=int(row["size"]),
                wrong=int(row["wrong"]),
            )
            self.windows.append(window)
            fresh.append(window)
        return fresh


@dataclass(frozen=True)
class Sample:
    """Bytes that node 0's NICs have sent so far, over all its ranks."""

    mono_ns: int
    sent: dict[str, int]


class RankFeed:
    """One rank's journal and NIC table. The object stays readable when the rank has ended."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._cursor = Cursor(process)
        try:
            self._segment: Segment = open_segment(process.path)
        except BaseException:
            self._cursor.close()
            raise

    def events(self) -> list[Event]:
        return list(self._cursor.events())

    def nics(self) -> list[Nic]:
        return [rows.nic(i, row) for i, row in self._segment.used_rows("nics", "r2_seg_nic")]

    def close(self) -> None:
        self._cursor.close()
        self._segment.close()


class JobFeed:
    """All ranks of the job. Use as a context manager."""

    def __init__(self, processes: Iterable[Process], watched: str) -> None:
        self.ranks: list[RankFeed] = []
        self.events: list[Event] = []
        self.samples: list[Sample] = []
        self.nics: list[Nic] = []  # of the watched node, as its first rank sees them
        self.lost = 0
        self._watched = watched
        try:
            for process in processes:
                self.ranks.append(RankFeed(process))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> JobFeed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def poll_events(self) -> list[Event]:
        """The events that are new, in the order of time."""
        fresh = [event for rank in self.ranks for event in rank.events()]
        fresh.sort(key=lambda event: event.mono_ns)
        self.lost += sum(event.lost for event in fresh)
        self.events += fresh
        return fresh

    def poll_nics(self, now_ns: int) -> None:
        """One more sample."""
        sent: dict[str, int] = {}
        first = True
        for rank in self.ranks:
            if rank.process.host != self._watched:
                continue
            with contextlib.suppress(SegmentError):
                nics = rank.nics()
                for nic in nics:
                    sent[nic.name] = sent.get(nic.name, 0) + nic.tx_bytes
                if first:
                    self.nics = nics
                    first = False
        if sent:
            self.samples.append(Sample(now_ns, sent))

    def rates(self, seconds: float = 1.0) -> dict[str, float]:
        """Bytes per second that each NIC sent over about the last so many seconds."""
        if len(self.samples) < 2:
            return {}
        last = self.samples[-1]
        first = next(s for s in self.samples if s.mono_ns >= last.mono_ns - int(seconds * 1e9))
        if first is last:
            first = self.samples[-2]
        span = (last.mono_ns - first.mono_ns) / 1e9
        return {nic: (sent - first.sent.get(nic, 0)) / span for nic, sent in last.sent.items()}
