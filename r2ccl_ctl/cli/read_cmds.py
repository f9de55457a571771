"""Commands that only look: ps, status, nics, journal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import click

from r2ccl_ctl import gpus, hang, hostnics, nodeseg, overview, verdict
from r2ccl_ctl.cli import comm_view, node_view, view
from r2ccl_ctl.cli.common import (
    WholeNumber,
    json_option,
    print_json,
    say_left_out,
    selection_options,
    show,
)
from r2ccl_ctl.cli.host_options import OF_HOSTS, host_options, host_timeout
from r2ccl_ctl.cli.overview_view import (
    host_dicts,
    host_texts,
    number,
    overview_view,
    with_hosts,
)
from r2ccl_ctl.cli.scene import (
    NAMED,
    Here,
    Looks,
    Scene,
    beside,
    chosen,
    report,
    source,
    watch_options,
)
from r2ccl_ctl.control import (
    OTHER,
    Process,
    Selection,
    Snapshot,
    left_out,
    list_processes,
    of_others,
    unreadable,
)
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.gather import HostLook, hosts_of
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.journal import Cursor, Event
from r2ccl_ctl.segment import SegmentError

if TYPE_CHECKING:
    from rich.console import RenderableType

FOLLOW_S = 0.1
RESCAN_S = 0.5


@click.command()
@click.option("--all", "everything", is_flag=True, help="Processes that are gone as well.")
@click.option(
    "--comms",
    "-c",
    is_flag=True,
    help="List their communicators (of processes that run with libr2ccl.so).",
)
@selection_options
@host_options(OF_HOSTS, peers=True)
@host_timeout
@json_option
def ps(
    everything: bool,
    comms: bool,
    wanted: Selection,
    hosts: list[str],
    via: str,
    timeout: float,
    as_json: bool,
) -> None:
    """List the processes that use R2CCL, or their communicators.

    In a hang, the other ranks wait for the rank that is BEHIND. CAUSE says why a rank waits:

    \b
    "no path to HOST:PID (rank 3) for 18s of 60s": the NICs named there, of this
      node or of HOST, are at fault. After the 60s (R2CCL_NO_PATH_TIMEOUT) the rank
      gets an error.
    "may not be sent again": HOST does not confirm the end of a path.
    "has not called #8": its application is late, or waits in an earlier operation.
    "stopped or starved": its process does not run.

    The lines below the table have the causes of these NICs, and other nodes to check. With --hosts
    the processes of all those hosts are listed, and their ranks are compared.

    With --json each communicator has `waits`, with an entry for each NIC or rank that it waits for;
    docs/json.md has the fields. Processes of other users that you may not read are counted below
    the table. With --json they are in `unreadable`.

    STATE "other version": the process runs with another build of R2CCL, and this tool cannot read
    its segment. Use the tool of that build.

    \b
    Example:
      r2ccl-ctl ps --all
      r2ccl-ctl ps --comms
      r2ccl-ctl ps --comms --hosts node1,node2
    """
    if hosts:
        if everything:
            raise R2UsageError("--all is of this host: leave it or --hosts out")
        with hosts_of(hosts, via, timeout, wanted.job) as several:
            ps_there(several.look(), wanted, comms=comms, as_json=as_json)
        return
    found = [
        process
        for process in list_processes(dead=True)
        if wanted.wants(process)
        and (everything or process.running or (process.state == OTHER and not comms))
    ]
    more = "" if everything else "; --all lists those that are gone as well"
    if comms:
        show_comms(found, wanted, as_json, more)
    elif as_json:
        rows = [view.process_dict(process) for process in found]
        print_json({**view.document("processes", rows), **unread_dict(wanted)})
    elif found:
        show(view.process_table(found))
    hidden = "" if as_json else of_others(wanted)
    if not (comms or as_json or found or hidden):
        click.echo(nobody(wanted) + more, err=True)
    if hidden:
        click.echo(hidden, err=True)
    say_left_out(wanted, [] if comms else found)


def ps_there(looks: list[HostLook], wanted: Selection, *, comms: bool, as_json: bool) -> None:
    """ps of several hosts. Who waits for whom is a comparison of all of them."""
    everybody = [snapshot for look in looks for snapshot in look.snapshots]
    chosen = [snapshot for snapshot in everybody if wanted.wants(snapshot.process)]
    there = {"unreadable": [], "hosts": host_dicts(looks)}
    if comms:
        print_comms(chosen, Seen(everybody), there if as_json else None)
    elif as_json:
        rows = [view.process_dict(snapshot.process) for snapshot in chosen]
        print_json({**view.document("processes", rows), **there})
    elif chosen:
        show(view.process_table(snapshot.process for snapshot in chosen))
    if not as_json:
        texts = [text for look in looks for text in host_texts(look)]
        for text in texts[:NAMED]:
            click.echo(f"warning: {text}", err=True)
        if len(texts) > NAMED:
            click.echo(f"warning: and {len(texts) - NAMED} more", err=True)
        if not chosen:
            click.echo(nobody(wanted, " there"), err=True)
    if all(look.error for look in looks):
        sys.exit(1)


def unread_dict(wanted: Selection) -> dict[str, Any]:
    """In JSON, what `of_others` says in words."""
    there = unreadable(gone=wanted.pid is not None)
    meant = {pid: uid for pid, uid in there.items() if wanted.pid in (None, pid)}
    rows = [{"pid": pid, "uid": uid} for pid, uid in sorted(meant.items())]
    return {"unreadable": rows, "hosts": []}


def nobody(wanted: Selection, where: str = " here") -> str:
    meant = f" with {wanted}" if str(wanted) else ""
    return f"no process{meant} uses R2CCL{where}"


def show_comms(processes: list[Process], wanted: Selection, as_json: bool, more: str = "") -> None:
    """`more`: what to say to somebody who looks for a process that is not there."""
    snapshots, problems = [], []
    for process in processes:
        try:
            snapshots.append(process.snapshot())
        except SegmentError as err:
            if process.path.exists():  # else it has just ended in order
                problems.append(err)
    if problems and not snapshots:
        raise problems[0]
    for problem in problems:
        click.echo(f"warning: {problem}", err=True)
    if not processes and not as_json:
        click.echo(nobody(wanted) + more, err=True)
        return
    print_comms(snapshots, beside(wanted, snapshots), unread_dict(wanted) if as_json else None)


def print_comms(snapshots: list[Snapshot], seen: Seen, unread: dict[str, Any] | None) -> None:
    """unread: with JSON, what cannot be read."""
    if unread is not None:
        rows = [
            {
                "node": snapshot.process.host,
                "pid": snapshot.process.pid,
                "job": snapshot.process.job,
                **comm_view.comm_dict(comm, snapshot, seen),
            }
            for snapshot in snapshots
            for comm in snapshot.comms
        ]
        print_json({**view.document("communicators", rows), **unread})
    elif any(snapshot.comms for snapshot in snapshots):
        show(comm_view.comm_table(snapshots, seen, titles=True))
        notes = hang.why(snapshot for snapshot in snapshots if snapshot.comms)
        notes += seen.coverage(comm.id for snapshot in snapshots for comm in snapshot.comms)
        if notes:
            click.echo("\n" + "\n".join(notes))
    elif snapshots:
        click.echo(
            "no communicators are followed here: processes show theirs when they run with "
            "LD_PRELOAD=libr2ccl.so",
            err=True,
        )


def show_check(wanted: Selection, hosts: list[str], via: str, timeout: float) -> NoReturn:
    """One line about the chosen processes; the exit code says the same."""
    if hosts:
        try:
            with source(wanted, hosts, via, timeout) as where:
                scene = where.look()
        except R2UsageError:
            raise
        except R2Error as err:
            click.echo(f"R2CCL {verdict.WORDS[verdict.UNKNOWN]}: {err}")
            sys.exit(verdict.UNKNOWN)
        snapshots, seen = [snapshot for snapshot, _ in scene.looks], scene.seen
        unread = [text for host in scene.hosts for text in host_texts(host)]
        place = f" on {number(len(scene.hosts), 'host', 's')}"
    else:
        snapshots, unread = readable(wanted)
        seen, place = beside(wanted, snapshots), ""
    reasons = [
        reason
        for snapshot in snapshots
        for reason in verdict.judge(snapshot, hang.stands(snapshot, seen))
    ]
    reasons += [verdict.Reason(verdict.UNKNOWN, text) for text in unread]
    if not snapshots and not unread:
        hidden = [] if hosts else [t for t in (of_others(wanted), left_out(wanted)) if t]
        text = "; ".join(hidden) or nobody(wanted, place or " here")
        reasons.append(verdict.Reason(verdict.UNKNOWN, text))
    code = verdict.worst(reasons)
    count = number(len(snapshots), "process", "es") + place
    click.echo(f"R2CCL {verdict.WORDS[code]}: {verdict.line(reasons, NAMED) or count}")
    sys.exit(code)


def readable(wanted: Selection) -> tuple[list[Snapshot], list[str]]:
    """The chosen processes of this host, and of those that cannot be read, why."""
    snapshots, unread = [], []
    for process in list_processes():
        if wanted.wants(process):
            try:
                snapshots.append(process.snapshot())
            except SegmentError as err:
                unread.append(str(err))
    return snapshots, unread


@click.command()
@selection_options
@host_options(OF_HOSTS, peers=True)
@host_timeout
@click.option("--details", "-d", is_flag=True, help="All peers and all paths.")
@click.option("--check", is_flag=True, help="For monitoring: one line, and an exit code.")
@watch_options
@json_option
def status(
    wanted: Selection,
    hosts: list[str],
    via: str,
    timeout: float,
    details: bool,
    check: bool,
    every: float | None,
    as_json: bool,
) -> None:
    """Show NICs, peers, paths and counters of running processes.

    With --pid it also shows a process that is gone, as it was at its end. If a process waits, a
    line says why, as in `ps --comms`.

    Paths are listed that carry nothing, or have less WEIGHT than their NIC, such as slow ones.
    --details lists all, also closed ones and spares. A (spare) carries nothing while a better pair
    of NICs works. DIR tx: this process sends on the path, and decides its weight.

    With --hosts a helper starts on each host, all at the same time. Each process is a row, the
    worst job first. Hosts without an answer are listed above. --details shows all of each process.
    R2CCL must be at the same place on all hosts. "peers" are this host, the hosts of its jobs'
    peers, and the hosts of theirs. --via must reach them by their host names.

    --check ends with 0 if the job is healthy, 1 if it is degraded, 2 if it is in danger, 3 if that
    is unknown. Degraded: a NIC or a path is lost. In danger: one path to a peer is left, or none.
    Unknown: no process runs, or a process or host does not answer.

    \b
    Example:
      r2ccl-ctl status --watch
      r2ccl-ctl status --check
      r2ccl-ctl status --job 4711 --json
      r2ccl-ctl status --hosts node1,node2
      r2ccl-ctl status --hosts peers --check
    """

    if check:
        if as_json or details or every is not None:
            raise R2UsageError("--check prints one line: leave --json, --details and --watch out")
        show_check(wanted, hosts, via, timeout)

    def dicts(scene: Scene) -> dict[str, Any]:
        rows = [view.snapshot_dict(snapshot, rates, scene.seen) for snapshot, rates in scene.looks]
        return {**view.document("processes", rows), "hosts": host_dicts(scene.hosts)}

    def render(scene: Scene) -> RenderableType:
        if scene.hosts and not details:
            return overview_view(overview.jobs(scene.looks, scene.seen), scene.hosts)
        blocks = view.status_view(scene.looks, scene.seen, details=details)
        return with_hosts(scene.hosts, blocks)

    with source(wanted, hosts, via, timeout) as where:
        report(where, as_json=as_json, every=every, render=render, as_dicts=dicts)


@click.command()
@selection_options
@watch_options
@json_option
def nics(
    wanted: Selection,
    every: float | None,
    as_json: bool,
) -> None:
    """List the NICs: state, weight, rates, injected faults, verdicts.

    The verdicts are the latest of all processes. TOWARDS: the NICs at the other ends of the failed
    paths. STATE "recovered": the NIC had failed and works again.

    The last table is the order in which other NICs take over for a connection whose home is HOME
    NIC. Among idle NICs the nearest one comes first: the same PCIe switch, the same NUMA node,
    across. Spares (weight 0) come last.

    GPUS: the nearest ones, by nvidia-smi's index, if NVML is there. `r2ccl-ctl topo --help`
    explains the distances.

    \b
    Example:
      r2ccl-ctl nics --job 4711
    """

    def dicts(scene: Scene) -> dict[str, Any]:
        looks, seen = scene.looks, Seen(snapshot for snapshot, _ in scene.looks)
        found = view.document(
            "nics",
            [
                {
                    "node": snapshot.process.host,
                    "pid": snapshot.process.pid,
                    "job": snapshot.process.job,
                    "silent_s": round(snapshot.process.silent_s, 1),
                    "stands": hang.stands(snapshot, seen),
                    **view.nic_dict(nic, rates),
                    "spill_order": hostnics.spill_names(snapshot.nics, home),
                    "gpus": [near.as_dict() for near in gpus.nearest(nic, machine(looks))],
                }
                for snapshot, rates in looks
                for home, nic in enumerate(snapshot.nics)
            ],
        )
        found["node_verdicts"] = [one.as_dict() for one in verdicts(looks)]
        return found

    known: list[gpus.Gpu] = []
    asked: list[bool] = []

    def machine(looks: Looks) -> list[gpus.Gpu]:
        """The GPUs of this machine; asked for once, and only where a NIC can be near one."""
        if not asked and any(nic.pci_path for snapshot, _ in looks for nic in snapshot.nics):
            asked.append(True)
            answer = gpus.list_gpus()
            if answer is None:
                click.echo("warning: the NVIDIA driver does not answer: no GPUs shown", err=True)
            known.extend(answer or [])
        return known

    def verdicts(looks: Looks) -> list[node_view.Verdict]:
        return node_view.node_verdicts(nodeseg.list_segments(), [snapshot for snapshot, _ in looks])

    def render(scene: Scene) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        looks = scene.looks
        nics, shared = view.nics_view(looks, machine(looks)), verdicts(looks)
        return Group(nics, Text(""), node_view.node_table(shared)) if shared else nics

    report(Here(wanted), as_json=as_json, every=every, render=render, as_dicts=dicts)


def show_events(events: list[Event], as_json: bool, titled: bool) -> None:
    for event in events:
        if as_json:
            print_json(view.event_dict(event), line=True)
        else:
            show(view.event_line(event, titled=titled))
    if events:
        sys.stdout.flush()


class Reader:
    """The journals of all chosen processes, of those that start later too. With a chosen pid, of
    its newest process only. `waits`: there may be none yet. Use as a context manager."""

    def __init__(self, wanted: Selection, *, dead: bool, waits: bool = False) -> None:
        self.wanted = wanted
        self.cursors: dict[str, Cursor] = {}
        self.damaged: set[str] = set()
        try:
            processes = chosen(wanted, dead=dead, remedy="--all shows what happened to them")
        except R2Error:
            if not waits or wanted.pid is not None:
                raise
            click.echo("no such process yet; waiting for one (Ctrl-C ends)", err=True)
            processes = []
        say_left_out(wanted, processes)
        problems = self._add(processes[-1:] if wanted.pid is not None else processes)
        if problems and not self.cursors and not (waits and wanted.pid is None):
            raise problems[0]
        for problem in problems:
            click.echo(f"warning: {problem}", err=True)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for cursor in self.cursors.values():
            cursor.close()

    def _add(self, processes: list[Process]) -> list[SegmentError]:
        """Also those whose journals cannot be read, as errors."""
        problems = []
        for process in processes:
            if process.name not in self.cursors:
                try:
                    self.cursors[process.name] = Cursor(process)
                except SegmentError as err:
                    problems.append(err)
        return problems

    def rescan(self) -> None:
        if self.wanted.pid is None:
            self._add([p for p in list_processes() if self.wanted.wants(p)])

    def batch(self) -> list[Event]:
        """What is new, in order of time."""
        found: list[Event] = []
        for name, cursor in self.cursors.items():
            try:
                found += cursor.events()
            except SegmentError as err:
                if name not in self.damaged:
                    self.damaged.add(name)
                    click.echo(f"warning: {err}", err=True)
        return sorted(found, key=lambda event: event.real_ns)

    def over(self) -> bool:
        """True when nothing more can come: only of a chosen pid is that known."""
        return self.wanted.pid is not None and all(c.ended() for c in self.cursors.values())


def follow_events(reader: Reader) -> Iterator[list[Event]]:
    """Batches of events until there can be no more."""
    scanned = time.monotonic()
    while True:
        over = reader.over()
        if time.monotonic() - scanned > RESCAN_S:
            reader.rescan()
            scanned = time.monotonic()
        yield reader.batch()
        if over:
            return
        time.sleep(FOLLOW_S)


@click.command()
@selection_options
@click.option("--all", "everything", is_flag=True, help="Processes that are gone as well.")
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Then wait for more, also of processes that start later, until Ctrl-C.",
)
@click.option(
    "--last",
    "-n",
    type=WholeNumber(min=0),
    metavar="N",
    help="Of what is there already, only the last N events.",
)
@json_option
def journal(
    wanted: Selection,
    everything: bool,
    follow: bool,
    last: int | None,
    as_json: bool,
) -> None:
    """Show what happened, when, and why: failures, replays, recoveries.

    With --pid it also shows a process that is gone, with --all all of them whose journals are still
    there. These are the 16 newest of a user, for an hour, and up to 64 for a minute. --json prints
    one object per line.

    \b
    Example:
      r2ccl-ctl journal --follow
      r2ccl-ctl journal --pid 4242 --json
    """
    with (
        Reader(wanted, dead=everything or wanted.pid is not None, waits=follow) as reader,
        contextlib.suppress(KeyboardInterrupt),
    ):
        events = reader.batch()
        if last is not None:
            events = events[max(len(events) - last, 0) :]
        show_events(events, as_json, titled=wanted.pid is None)
        if follow:
            for batch in follow_events(reader):
                show_events(batch, as_json, titled=wanted.pid is None)
