"""The running jobs of this machine, seen and steered through their control segments.

    for process in list_processes():
        print(process.snapshot().nics)
    send_command(process, Command("fail-nic", nic="eth1"), timeout=2.0)

Every R2Error says what is wrong and what to do. Times: `_real_ns` since 1970, `_mono_ns` since the
machine's start, both in nanoseconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from r2ccl_ctl import jobname, order, rows, unread
from r2ccl_ctl.errors import R2Error, R2UsageError, plain
from r2ccl_ctl.pids import is_gone, own_pidns, start_ticks
from r2ccl_ctl.rows import Comm, Nic, PathRow, Peer, Timing, word
from r2ccl_ctl.rows import find_nic as find_nic
from r2ccl_ctl.segment import OtherLayout, Segment, SegmentError, layout

SCHEMA = 1
SHM = Path("/dev/shm")
OTHER = unread.OTHER
SILENT_S = 3.0
FRESH_NS = 10 * 10**9
POLL_S, LOOK_S = 0.002, 0.2  # at the slot of a command; whether anybody is left to answer

_NAME = re.compile(r"r2ccl\.(\d{1,10})\.(\d{1,20})\.(\d{1,10})\.(\d{1,20})(?:\.(\d{1,4}))?")


@dataclass(frozen=True)
class Process:
    """A process that has, or had, a control segment.

    state: running; ended (closed in order); died (did not); damaged (`problem` says why, and most
    other fields are what the object's name tells); OTHER (the same of one that lives and whose
    segment has another `layout` than this tool reads). pid: as its own PID namespace counts.
    local_pid: as ours does, None where that is not known. layout: None where it is not known.
    """

    name: str
    path: Path
    state: str
    pid: int
    local_pid: int | None
    uid: int
    pidns: int
    problem: str = ""
    host: str = ""
    job: str = ""
    rank: int | None = None
    ranks: int | None = None
    mode: str = ""
    verify: bool = False
    nccl_version: str = ""
    net_api: int | None = None
    plugin_version: str = ""
    process_id: str = ""
    comm: str = ""
    command: str = ""
    warning: str = ""
    created_real_ns: int = 0
    alive_real_ns: int = 0
    alive_mono_ns: int = 0
    ended_real_ns: int = 0
    comms: int = 0
    plan_stop: bool = False
    plan: str = ""
    recording: str = ""
    layout: int | None = None

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def silent_s(self) -> float:
        """Seconds since the plugin's last sign of life, 0 when that is not long: a process that is
        stopped or starved."""
        if not self.running or not self.alive_mono_ns:
            return 0.0
        gap = (time.monotonic_ns() - self.alive_mono_ns) / 1e9
        return gap if gap > SILENT_S else 0.0

    @property
    def title(self) -> str:
        """For messages: "node-a pid 17 (job 4711, rank 3)"."""
        parts = [f"job {self.job}"] if self.job else []
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        host = f"{self.host} " if self.host else ""
        return f"{host}pid {self.pid}" + (f" ({', '.join(parts)})" if parts else "")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Process:
        """What as_dict gave, after JSON; maybe of another version, which may have more fields."""
        known = {one.name: row[one.name] for one in fields(cls) if one.name in row}
        return cls(**{**known, "path": Path(row["path"])})

    def snapshot(self) -> Snapshot:
        """All tables, and the process as it is now. Raises SegmentError when the object is gone or
        damaged."""
        with open_segment(self.path) as segment:
            return read_snapshot(segment)


@dataclass(frozen=True)
class Snapshot:
    """One look at a process. Rows are whole; the tables were read one after the other. times: of
    r2_seg_times, "failover" and "resume"."""

    process: Process
    real_ns: int
    mono_ns: int
    counters: dict[str, int]
    gauges: dict[str, int]
    missing: list[str]
    nics: list[Nic]
    peers: list[Peer]
    paths: list[PathRow]
    comms: list[Comm]
    times: dict[str, dict[str, Any]] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "process": self.process.as_dict()}


@dataclass(frozen=True)
class Command:
    """What to ask of a process: ping, fail-nic, recover-nic, ... in the words of segment.h.

    fault: a kind of faults.py. direction: tx, rx, both. rate: bytes per second (slow).
    loss_ppm: of a million (loss). for_ms: 0 is until recover-nic. weight: of set-weight. force: of
    drain-nic, the last usable NIC, too. plan: of plan, whether plans may be taken. record: of
    record, whether times of collectives are recorded.
    """

    verb: str
    nic: str = ""
    fault: str = "none"
    direction: str = "none"
    rate: int = 0
    loss_ppm: int = 0
    after_bytes: int = 0
    after_ops: int = 0
    for_ms: int = 0
    weight: int = 0
    force: bool = False
    plan: bool = False
    record: bool = False


NUMBERS = (
    *("rate", "loss_ppm", "after_bytes", "after_ops", "for_ms", "weight", "force", "plan"),
    "record",
)


@dataclass(frozen=True)
class Answer:
    """What a process said. ok False: it refused, or there was no answer in time."""

    process: Process
    ok: bool
    text: str
    code: int = 0


# Finding processes


def _is_own(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and (int(match[2]), int(match[3])) == (own_pidns(), os.getpid())


def open_segment(path: Path, *, write: bool = False) -> Segment:
    return Segment(path, write=write, own=_is_own(path.name))


def list_processes(*, dead: bool = False, directory: Path | None = None) -> list[Process]:
    """Running processes, and with `dead` those that left an object behind, `in_order`. Other users'
    are listed where they may be read."""
    found = []
    for name in _names(directory):
        if _NAME.fullmatch(name):
            process = describe((directory or SHM) / name)
            if process is not None and (dead or process.running):
                found.append(process)
    return order.in_order(found)


def _names(directory: Path | None) -> list[str]:
    try:
        return sorted(os.listdir(directory or SHM))
    except FileNotFoundError:
        return []
    except OSError as err:
        raise R2Error(
            f"{directory or SHM}, where control segments are, cannot be listed: {err.strerror}"
        ) from err


def unreadable(*, gone: bool = False, directory: Path | None = None) -> dict[int, int]:
    """Pid -> user of the objects that may not be read by us; unless `gone`, without those whose
    processes are known to be that."""
    found = {}
    for name in _names(directory):
        match = _NAME.fullmatch(name)
        path = (directory or SHM) / name
        if match is None or os.access(path, os.R_OK, effective_ids=True):
            continue
        pidns, pid, start = int(match[2]), int(match[3]), int(match[4])
        if not gone and pidns == own_pidns() and is_gone(pid, start):
            continue
        with contextlib.suppress(OSError):
            found[pid] = path.stat().st_uid
    return found


def of_others(wanted: Selection, *, directory: Path | None = None) -> str:
    """A sentence about processes that may be meant and that we may not read, or ""."""
    there = unreadable(gone=wanted.pid is not None, directory=directory)
    return unread.others_text(there, wanted.pid)


def left_out(
    wanted: Selection, found: Iterable[Process] = (), *, directory: Path | None = None
) -> str:
    """A sentence about running processes that may be meant and whose segments have another layout,
    unless they are among those `found`, or ""."""
    there = list_processes(dead=True, directory=directory)
    return unread.layouts_text(there, found, wanted.pid)


def describe(path: Path) -> Process | None:
    """What there is to know about one object, None when it is not for our eyes or gone."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    pidns, pid = int(match[2]), int(match[3])
    try:
        with open_segment(path) as segment:
            return _process(segment)
    except SegmentError as err:
        if not os.access(path, os.R_OK):
            return None
        # Whether one of another layout was closed in order nobody knows: it counts while it lives.
        other = err if isinstance(err, OtherLayout) else None
        here = pid if pidns == own_pidns() and start_ticks(pid) == int(match[4]) else None
        lives = other is not None and (here or other.holder is not None)
        with contextlib.suppress(OSError):
            return Process(
                name=path.name,
                path=path,
                state=OTHER if lives else "damaged",
                pid=pid,
                local_pid=(here or other.holder or None) if other and lives else None,
                uid=path.stat().st_uid,
                pidns=pidns,
                problem=str(err),
                created_real_ns=path.stat().st_ctime_ns,
                layout=other.version if other else None,
            )
        return None


def _process(segment: Segment) -> Process:
    path, header, row = segment.path, segment.header(), segment.row("process", "r2_seg_process", 0)
    match = _NAME.fullmatch(path.name)
    assert match is not None
    pidns, pid, start = int(match[2]), int(match[3]), int(match[4])
    holder = segment.lock_holder()
    here = pidns == own_pidns() and start_ticks(pid) == start
    # A program that closes all its descriptors drops the lock and lives on: its fresh sign of life
    # says so. One that replaced itself (exec) has none.
    fresh = time.monotonic_ns() - header["alive_mono_ns"] < FRESH_NS
    held = holder is not None or (here and (fresh or _is_own(path.name)))
    alive = held and not header["ended_real_ns"]
    local_pid = pid if here else (holder or None)
    state = "running" if alive else "ended" if header["ended_real_ns"] else "died"
    return Process(
        name=path.name,
        path=path,
        state=state,
        pid=pid,
        local_pid=local_pid,
        uid=segment.uid,
        pidns=pidns,
        host=row["host"],
        job=row["job"],
        rank=row["rank"] if row["rank"] >= 0 else None,
        ranks=row["ranks"] or None,
        mode=row["mode"],
        verify=bool(row["verify"]),
        nccl_version=rows.version(row["nccl_version"]),
        net_api=row["net_api"] or None,
        plugin_version=row["plugin_version"],
        process_id=row["process_id"],
        comm=f"{row['comm']:016x}" if row["comm"] else "",
        command=row["command"],
        warning=row["warning"],
        plan_stop=bool(row["plan_stop"]),
        plan=word("r2_seg_plan", "R2_SEG_PLAN_", row["plan"]).replace("unknown", ""),
        recording=word("r2_seg_recording", "R2_SEG_RECORDING_", row["recording"]),
        created_real_ns=header["created_real_ns"],
        alive_real_ns=header["alive_real_ns"],
        alive_mono_ns=header["alive_mono_ns"],
        ended_real_ns=header["ended_real_ns"],
        comms=sum(1 for _ in segment.used_rows("comms", "r2_seg_comm")),
        layout=header["version"],
    )


def find(pid: int, *, directory: Path | None = None) -> Process:
    """The newest process with this pid, running or not; R2Error if there is none."""
    found = [p for p in list_processes(dead=True, directory=directory) if _has_pid(p, pid)]
    if not found:
        raise R2Error(f"no control segment of pid {pid}: `r2ccl-ctl ps --all` lists what there is")
    return max(found, key=lambda process: (process.running, process.created_real_ns))


def _has_pid(process: Process, pid: int) -> bool:
    return pid in (process.pid, process.local_pid)


@dataclass(frozen=True)
class Selection:
    """Which processes are meant. Several conditions: all must hold."""

    pid: int | None = None
    job: str | None = None
    node: str | None = None
    everything: bool = False

    def wants(self, process: Process) -> bool:
        return (
            (self.pid is None or _has_pid(process, self.pid))
            and (self.job is None or process.job == jobname.kept(self.job))
            and (self.node is None or process.host == self.node)
        )

    def __str__(self) -> str:
        parts = [
            f"{word} {value or repr(value)}"
            for word, value in (("pid", self.pid), ("job", self.job), ("node", self.node))
            if value is not None
        ]
        return plain(", ".join(parts))


class Nobody(R2Error):
    """No process is here at all."""


def select(
    wanted: Selection, *, dead: bool = False, directory: Path | None = None
) -> list[Process]:
    """The processes meant, at least one, or R2Error with what there is instead."""
    there = list_processes(dead=dead, directory=directory)
    found = [process for process in there if wanted.wants(process)]
    if found:
        return found
    other = left_out(wanted, directory=directory)
    hidden = ". ".join(filter(None, (of_others(wanted, directory=directory), other)))
    if there:
        there.sort(key=lambda process: not process.running)
        titles = "; ".join(process.title for process in there[:8])
        more = f"; and {len(there) - 8} more: `r2ccl-ctl ps`" if len(there) > 8 else ""
        more += f". {hidden}" if hidden else ""
        raise R2Error(f"no {_what(dead)} with {wanted}. There are: {titles}{more}")
    if hidden:
        can = "this r2ccl-ctl can read" if other else "you may read"
        raise R2Error(f"no {_what(dead)} that {can}. {hidden}")
    where = f"with {wanted} " if str(wanted) else ""
    raise Nobody(
        f"no {_what(dead)} {where}on this machine. Start one with `r2ccl-ctl run -- CMD`; if it "
        "runs in a container, use r2ccl-ctl there or share /dev/shm; if it is another user's, "
        "use sudo; if it found no room in /dev/shm, it has said so"
    )


def _what(dead: bool) -> str:
    return "process of R2CCL, running or ended," if dead else "running process of R2CCL"


def select_targets(wanted: Selection) -> list[Process]:
    """The running processes that a command is for. Without a condition they must be of one job
    and of this user, so that nobody fails a neighbour's NIC by mistake."""
    found = select(wanted)
    if wanted.everything or wanted.pid is not None or wanted.job is not None:
        return found
    mine = [process for process in found if process.uid == os.geteuid()] or found
    jobs = sorted({process.job for process in mine})
    if len(jobs) > 1:
        names = ", ".join(job or "(without a name)" for job in jobs)
        raise R2UsageError(
            f"several jobs run here: {names}. Say which with --job, --pid, or --all for every one"
        )
    return mine


# Reading


def read_snapshot(segment: Segment) -> Snapshot:
    process = _process(segment)
    counters = segment.single("counters", "r2_seg_counters")
    times = {name: counters.pop(name) for name in ("failover", "resume")}
    gauges = segment.single("gauges", "r2_seg_gauges")
    bits = gauges.pop("missing")
    words = layout().enum("r2_seg_missing", "R2_SEG_MISSING_")
    nics = [rows.nic(index, row) for index, row in segment.used_rows("nics", "r2_seg_nic")]
    peers = [rows.peer(index, row) for index, row in segment.used_rows("peers", "r2_seg_peer")]
    nic_names = {nic.index: nic.name for nic in nics}
    peer_rows = {peer.index: peer for peer in peers}
    found = [
        rows.path(index, row, nic_names, peer_rows)
        for index, row in segment.used_rows("paths", "r2_seg_path")
    ]
    return Snapshot(
        process=process,
        real_ns=time.time_ns(),
        mono_ns=time.monotonic_ns(),
        counters=counters,
        gauges=gauges,
        missing=[word for bit, word in words.items() if bits & bit],
        nics=rows.with_inflight(nics, found),
        peers=peers,
        paths=found,
        comms=[rows.comm(index, row) for index, row in segment.used_rows("comms", "r2_seg_comm")],
        times=times,
        timings=[rows.timing(i, row) for i, row in segment.used_rows("timings", "r2_seg_timing")],
    )


# Commands


@dataclass
class Posted:
    """A command in a process's mailbox, until `wait` has the answer. Use as a context manager."""

    process: Process
    command: Command
    segment: Segment
    offset: int = 0
    request_id: int = 0
    _locked: list[tuple[int, int]] = field(default_factory=list)

    def __enter__(self) -> Posted:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for offset, size in self._locked:
            with contextlib.suppress(OSError, SegmentError):
                if self.request_id and self._state(offset) == "posted":
                    self._set_state("free")  # nobody is left who would say what came of it
                self.segment.unlock(offset, size)
        self._locked.clear()
        self.segment.close()

    def post(self, deadline: float) -> None:
        """Put it into a free slot; R2Error when none gets free before `deadline`."""
        table = self.segment.tables["commands"]
        while True:
            for index in range(table.rows):
                offset = table.offset + index * table.stride
                if not self.segment.try_lock(offset, table.stride):
                    continue
                if self._state(offset) == "free":
                    self._locked.append((offset, table.stride))
                    self._fill(offset)
                    return
                self.segment.unlock(offset, table.stride)
            if time.monotonic() > deadline:
                raise R2Error(f"its mailbox is full and stays so: {_HUNG}")
            time.sleep(POLL_S)

    def wait(self, deadline: float) -> Answer:
        """The answer; withdraws the command when none comes before `deadline`, or none can."""
        pause, look, silent = POLL_S, time.monotonic() + LOOK_S, ""
        while True:
            row = self._row(self.offset)
            state = _COMMAND_STATE(row["state"])
            if state in ("done", "failed"):
                row = self._row(self.offset)  # behind its state: one copy has no order
                if row["answered_id"] == self.request_id:
                    self._set_state("free")
                    return Answer(self.process, state == "done", row["result"], row["code"])
                self._fill(self.offset)  # of a client that gave up in this slot
            if silent:  # known before this look at the slot; `close` withdraws the command
                return Answer(self.process, False, silent)
            if time.monotonic() > min(look, deadline):
                look = time.monotonic() + LOOK_S
                silent = self._why_silent(time.monotonic() > deadline)
            time.sleep(pause)
            pause = min(pause * 1.3, 0.02)

    def _why_silent(self, late: bool) -> str:
        if (now := describe(self.process.path)) is not None and now.running:
            return f"no answer in time: {_HUNG}" if late else ""
        return f"it {now.state if now is not None else 'ended'} before it could answer"

    def _row(self, offset: int) -> dict[str, Any]:
        data = self.segment.read(offset, self.segment.tables["commands"].stride)
        return layout().parse("r2_seg_command", data)

    def _state(self, offset: int) -> str:
        return _COMMAND_STATE(self._row(offset)["state"])

    def _set_state(self, state: str) -> None:
        self.segment.write(self.offset, struct.pack("=I", _number(_STATES, state)))

    def _fill(self, offset: int) -> None:
        self.offset = offset
        self.request_id = int.from_bytes(os.urandom(8), "little") | 1
        raw = _encode(self.command, self.request_id)
        self.segment.write(offset + 4, raw[4:])
        self._set_state("posted")


_HUNG = "the process is stopped, starved or hung; try again with a longer --timeout"
_STATES = ("r2_seg_command_state", "R2_SEG_CMD_")


def _COMMAND_STATE(number: int) -> str:
    return word(*_STATES, number)


def _number(enum: tuple[str, str], wanted: str) -> int:
    for number, name in layout().enum(*enum).items():
        if name == wanted:
            return number
    raise R2UsageError(f"'{wanted}' is none of {', '.join(layout().enum(*enum).values())}")


def _encode(command: Command, request_id: int) -> bytes:
    """The slot's bytes, its state left 0."""
    lay = layout()
    nic = command.nic.encode()
    if len(nic) >= lay.constants["R2_SEG_NAME"]:
        raise R2UsageError(f"'{command.nic}' is too long for the name of a NIC")
    cdata: Any = lay.ffi.new("struct r2_seg_command *")
    cdata.verb = _number(("r2_seg_verb", "R2_SEG_VERB_"), command.verb)
    cdata.request_id = request_id
    cdata.client_pid = os.getpid()
    cdata.fault = _number(("r2_seg_fault", "R2_SEG_FAULT_"), command.fault)
    cdata.direction = _number(("r2_seg_direction", "R2_SEG_DIR_"), command.direction)
    cdata.nic = nic
    try:
        for name in NUMBERS:
            setattr(cdata, name, getattr(command, name))
    except OverflowError as err:
        raise R2UsageError(f"a value is out of range: {err}") from err
    return bytes(lay.ffi.buffer(cdata))


def send_command(process: Process, command: Command, *, timeout: float = 2.0) -> Answer:
    """Ask one process, and wait for its answer."""
    return send_commands([(process, command)], timeout=timeout)[0]


def send_commands(
    pairs: Sequence[tuple[Process, Command]], *, timeout: float = 2.0
) -> list[Answer]:
    """Ask several processes, all before the first answer is awaited. One that cannot be asked has
    an Answer that says so. `timeout` in seconds, for all together."""
    deadline = time.monotonic() + timeout
    answers: dict[int, Answer] = {}
    with contextlib.ExitStack() as stack:
        posted: list[tuple[int, Posted]] = []
        for index, (process, command) in enumerate(pairs):
            try:
                if not process.running:
                    raise R2Error(f"it has {process.state}: it can take no commands")
                segment = open_segment(process.path, write=True)
                item = stack.enter_context(Posted(process, command, segment))
                item.post(deadline)
                posted.append((index, item))
            except R2UsageError:
                raise
            except R2Error as err:
                answers[index] = Answer(process, False, str(err))
        for index, item in posted:
            try:
                answers[index] = item.wait(deadline)
            except R2Error as err:
                answers[index] = Answer(item.process, False, str(err))
    return [answers[index] for index in range(len(pairs))]


def with_nic(processes: Iterable[Process], name: str) -> Iterator[tuple[Process, str]]:
    """The processes that have this NIC, each with the NIC's own name there. R2Error, with the NICs
    that exist, when none has it."""
    known: dict[str, None] = {}
    none = True
    for process in processes:
        with contextlib.suppress(SegmentError):
            nics = process.snapshot().nics
            known.update({nic.name: None for nic in nics})
            nic = find_nic(nics, name)
            if nic is not None:
                none = False
                yield process, nic.name
    if none:
        raise R2Error(f"no NIC '{plain(name)}'. NICs: {', '.join(sorted(known)) or 'none'}")
