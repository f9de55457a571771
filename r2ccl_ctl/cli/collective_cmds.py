"""collectives: how long they take on the network, as NCCL's profiler tells the plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import click

from r2ccl_ctl.cli.act_cmds import Said, show_said
from r2ccl_ctl.cli.common import (
    R2Group,
    add_row,
    json_option,
    print_json,
    say_left_out,
    selection_options,
    show,
    table,
    target_options,
)
from r2ccl_ctl.cli.plan_cmds import one_of_each_job
from r2ccl_ctl.cli.view import document
from r2ccl_ctl.control import (
    Command,
    Process,
    Selection,
    Snapshot,
    select,
    select_targets,
    send_commands,
)
from r2ccl_ctl.rows import Timing, take
from r2ccl_ctl.segment import SegmentError
from r2ccl_ctl.units import show_bytes


@click.group(cls=R2Group)
def collectives() -> None:
    """See how long collectives take, and start or stop recording it.

    Recording is off at the start of a job. It needs NCCL 2.28 to 2.32. If
    NCCL loads a profiler of your own (NCCL_PROFILER_PLUGIN or libnccl-profiler.so), that one is
    used, and R2CCL records nothing.

    \b
    Example:
      r2ccl-ctl collectives on --job 4711
      r2ccl-ctl collectives show --job 4711
    """


@collectives.command("show")
@selection_options
@json_option
def show_times(wanted: Selection, as_json: bool) -> None:
    """Show the times of recorded collectives.

    There is a line for each communicator of a process, kind of collective and class of sizes.

    A time begins with the first data that this rank's GPU hands to the network. It ends when the
    rank's last network operation is over. So it has no waiting for earlier kernels, and nothing of
    collectives that need no network. Some processes of a node may have none. What another process
    sends for this rank (PXN) is left out. So is AllReduce that R2CCL carries out in place of NCCL
    (`r2ccl-ctl plan show`).

    COMM is NCCL's own id of the communicator. UP TO: sizes as nccl-tests counts them. MEDIAN and
    P95 are estimates within buckets (8 us, 16 us, 32 us, ...). BUS GB/S is the mean, as nccl-tests
    counts bus bandwidth.

    A collective in a CUDA graph is recorded only if recording was on when the graph was captured.

    \b
    Example:
      r2ccl-ctl collectives show --job 4711
    """
    processes = select(wanted)
    say_left_out(wanted, processes)
    snapshots = []
    for process in processes:
        with contextlib.suppress(SegmentError):
            snapshots.append(process.snapshot())
    if as_json:
        rows = [timing_dict(one, timing) for one in snapshots for timing in one.timings]
        print_json(document("collectives", rows))
        return
    if any(one.timings for one in snapshots):
        show(timing_table(snapshots))
    for line in notes(snapshots):
        click.echo(line, err=True)


def timing_dict(snapshot: Snapshot, timing: Timing) -> dict[str, Any]:
    process = snapshot.process
    return {
        "node": process.host,
        "pid": process.pid,
        "job": process.job,
        "recording": process.recording,
        **take(vars(timing), "comm rank ranks op up_to longest_ns count"),
        "total": sum(timing.count),
        "median_s": timing.quantile(0.5),
        "p95_s": timing.quantile(0.95),
        "bus_bytes_per_s": bus_rate(timing),
    }


def bus_rate(timing: Timing) -> float:
    return timing.bus_bytes / timing.ns * 1e9 if timing.ns else 0.0


def timing_table(snapshots: Sequence[Snapshot]) -> Any:
    found = table(
        *("NODE", ">PID", "COMM", "RANK", "COLLECTIVE", ">UP TO", ">COUNT"),
        *(">MEDIAN", ">P95", ">LONGEST", ">BUS GB/S"),
    )
    for snapshot in snapshots:
        for timing in sorted(snapshot.timings, key=lambda t: (t.comm, t.op, t.up_to)):
            add_row(
                found,
                snapshot.process.host,
                snapshot.process.pid,
                timing.comm[:8],
                f"{timing.rank}/{timing.ranks}",
                timing.op,
                show_bytes(timing.up_to),
                sum(timing.count),
                short(timing.quantile(0.5)),
                short(timing.quantile(0.95)),
                short(timing.longest_ns / 1e9),
                f"{bus_rate(timing) / 1e9:.3f}",
            )
    return found


def short(seconds: float) -> str:
    """0.0000213 -> "21.3 us"."""
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def notes(snapshots: Sequence[Snapshot]) -> list[str]:
    """Who has nothing to show, and why; what is missing."""

    def who(state: str) -> list[Process]:
        return [s.process for s in snapshots if s.process.recording == state and not s.timings]

    reasons = {
        "recording is off (`r2ccl-ctl collectives on`)": who("off"),
        "nothing yet, or no collective that needs the network": who("on"),
        CANNOT: who("cannot"),
    }
    lost = sum(snapshot.counters["timings_dropped"] for snapshot in snapshots)
    return [
        *(f"{why}: {', '.join(p.title for p in names)}" for why, names in reasons.items() if names),
        *([f"{lost} collectives are not in here: there was no room for them"] if lost else []),
    ]


CANNOT = (
    "cannot record (no communicator, NCCL before 2.28, or another profiler in NCCL_PROFILER_PLUGIN "
    "or libnccl-profiler.so)"
)


def say(on: bool, wanted: Selection, timeout: float, as_json: bool) -> None:
    processes = select_targets(wanted)
    say_left_out(wanted, processes)
    command = Command("record", record=on)
    answers = send_commands([(process, command) for process in processes], timeout=timeout)
    said = [Said(a.process, a.ok, a.text, more={"code": a.code}) for a in answers]
    show_said(said, as_json, enough=one_of_each_job)


@collectives.command("on")
@target_options
@json_option
def turn_on(wanted: Selection, timeout: float, as_json: bool) -> None:
    """Record the times of collectives, in running processes.

    It holds for communicators that are made later as well. Ends with 1 if no process of a job can
    record.

    \b
    Example:
      r2ccl-ctl collectives on --job 4711
    """
    say(True, wanted, timeout, as_json)


@collectives.command("off")
@target_options
@json_option
def turn_off(wanted: Selection, timeout: float, as_json: bool) -> None:
    """Stop recording. What was recorded stays.

    \b
    Example:
      r2ccl-ctl collectives off --job 4711
    """
    say(False, wanted, timeout, as_json)
