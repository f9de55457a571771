"""`r2ccl-ctl trace`: journals of all ranks for Perfetto."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from r2ccl_ctl import trace as traces
from r2ccl_ctl.cli.common import complete_job, of_option
from r2ccl_ctl.cli.host_options import host_options
from r2ccl_ctl.cli.overview_view import number
from r2ccl_ctl.control import Process, Selection, open_segment, select
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.journal import Event, read_all
from r2ccl_ctl.rows import comm, nic
from r2ccl_ctl.segment import SegmentError
from r2ccl_ctl.trace import Sample
from r2ccl_ctl.units import parse_duration, show_span

STEP_S = 0.1
ONE_CLOCK = "one machine: all ranks have the same clock"
RATES = {
    "nic": ("Mbit/s", "sent by", 8e-6),
    "comm": ("per second", "collectives of", 1.0),
    "bus": ("GB/s", "bus bandwidth of", 1e-9),
}
Counters = dict[str, list[tuple[int, dict[str, float]]]]  # host and label -> rows in time


@click.command()
@click.option("--job", metavar="JOB", shell_complete=complete_job, help="Ranks of this job.")
@host_options("Ranks on these hosts.")
@click.option(
    "--for",
    "span",
    default="0s",
    show_default=True,
    metavar="DURATION",
    help="Also record throughput for so long, while the job runs.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A case of `validate` in place of running ranks: DIR/cases/NAME.json.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("r2ccl-trace.json"),
    show_default=True,
    metavar="FILE",
    help="Where the trace goes; -: standard output.",
)
def trace(
    job: str | None,
    hosts: list[str],
    via: str,
    span: str,
    record: Path | None,
    output: Path,
) -> None:
    """Write a trace of all ranks, for Perfetto or Chrome.

    Open it at ui.perfetto.dev or chrome://tracing. Each failover is a span with its stages:
    detected, told to the peer, fenced, replayed, resumed. Every event of the journals is a mark.
    Journals hold the last 1024 events of a rank, also of one that has ended (until `r2ccl-ctl gc`).

    With --for, counters show what each NIC sends, and collectives per second and bus
    bandwidth of each communicator (with the shim). A record of `validate` has them already.

    Clocks of hosts differ. With --hosts, helpers measure the offsets, and the trace says how large
    the error of each may be.

    \b
    Example:
      r2ccl-ctl trace --job 4711
      r2ccl-ctl trace --hosts node1,node2 --for 30s -o trace.json
      r2ccl-ctl trace --record r2ccl-validate/cases/one.json
    """
    seconds = of_option("--for", parse_duration, span)
    if record is not None:
        if hosts or job or seconds:
            raise R2UsageError(
                "--record needs no running ranks: leave out --job, --hosts and --for"
            )
        events, samples, notes = of_record(record)
    elif hosts:
        events, samples, notes = of_hosts(hosts, via, job or "", seconds)
    else:
        events, samples, notes = of_this_machine(job, seconds)
    if not events:
        raise R2Error("no journal of that job has an event")
    found = traces.document(events, samples, notes)
    text = json.dumps(found) + "\n"
    piped = str(output) == "-"
    if piped:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    spans = len(traces.failovers(events))
    ranks = len({event.process.name for event in events})
    what = f"{number(len(events), 'event', 's')} of {number(ranks, 'process', 'es')}, "
    what += number(spans, "failover", "s")
    click.echo(what if piped else f"{output}: {what}", err=piped)
    for note in notes:
        click.echo(f"note: {note}", err=True)


Parts = tuple[list[Event], list[Sample], list[str]]


def of_this_machine(job: str | None, seconds: float) -> Parts:
    """Ranks here, ended ones too."""
    processes = select(Selection(job=job), dead=True)
    running = [process for process in processes if process.running]
    counters: Counters = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for process in running:
            with contextlib.suppress(SegmentError), open_segment(process.path) as segment:
                nics = [nic(i, row) for i, row in segment.used_rows("nics", "r2_seg_nic")]
                comms = [comm(i, row) for i, row in segment.used_rows("comms", "r2_seg_comm")]
                tables = [vars(row) for row in nics], [vars(row) for row in comms]
                _count(counters, time.monotonic_ns(), process, *tables)
        time.sleep(STEP_S)
    events, lost = [], 0
    for process in processes:
        with contextlib.suppress(SegmentError):
            mine = read_all(process)
            events += mine
            lost += sum(event.lost for event in mine)
    return events, _samples(counters), [ONE_CLOCK, *_lost(lost)]


def of_hosts(hosts: Sequence[str], via: str, job: str, seconds: float) -> Parts:
    """Ranks on several hosts, on our clock."""
    from r2ccl_ctl.interrupts import signals_interrupt
    from r2ccl_ctl.validate import bed as beds

    events: list[Event] = []
    counters: Counters = {}
    lost = 0
    with signals_interrupt(), beds.of_hosts(hosts, via) as bed:
        if seconds and not job:
            raise R2UsageError("--for with --hosts needs --job: which job's NICs?")
        if seconds:
            bed.all("watch", job=job, ifnames=[], rdma=[], count=1 << 30)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for host, reply in zip(bed.hosts, bed.all("poll"), strict=True):
                known = {row["name"]: Process.from_dict(row) for row in reply["processes"]}
                for name, rows in reply["rows"].items():
                    at = reply["mono_ns"] + host.offset_ns
                    _count(counters, at, known[name], rows["nics"], rows["comms"])
            time.sleep(STEP_S)
        for host, reply in zip(bed.hosts, bed.all("journals", job=job), strict=True):
            for rank in reply["ranks"]:
                process = Process.from_dict(rank["process"])
                for row in rank["events"]:
                    event = Event(process=process, **row)
                    lost += event.lost
                    events.append(replace(event, mono_ns=event.mono_ns + host.offset_ns))
        notes = [
            f"{host.name}: its clock is known to {show_span(host.error_ns / 1e9)} or better"
            if host.error_ns > 10**6
            else f"{host.name}: its clock is known to {host.error_ns / 1e3:.0f} us or better"
            for host in bed.hosts
        ]
    return events, _samples(counters), [*notes, *_lost(lost)]


def of_record(path: Path) -> Parts:
    """A case of `validate`: the kernel's counters, and the bandwidth of its collectives."""
    from r2ccl_ctl.validate.judge import bus_factor, events_of

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        events = events_of(record)
        samples = []
        for host, rows in zip(record["hosts"], record["samples"], strict=True):
            sent = [(ns, {name: float(row[0]) for name, row in now.items()}) for ns, now in rows]
            samples += traces.rates(host["host"], sent, "Mbit/s", "sent by", 8e-6)
        first = record["hosts"][0]["host"]
        for window in record["windows"]:
            if window["seconds"] > 0:
                speed = window["bytes"] / window["seconds"] * bus_factor(record) / 1e9
                samples.append(Sample(window["end_ns"], first, "AllReduce", "bus GB/s", speed))
        errors = {host["name"]: host["error_ns"] for host in record["hosts"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        why = f"it has no {err}" if isinstance(err, KeyError) else why
        raise R2UsageError(f"--record {path} is no file of DIR/cases of `validate`: {why}") from err
    notes = [
        f"{name}: its clock is known to {ns / 1e3:.0f} us or better" for name, ns in errors.items()
    ]
    return events, samples, notes


def _count(
    counters: Counters,
    at: int,
    process: Process,
    nics: Sequence[dict[str, Any]],
    comms: Sequence[dict[str, Any]],
) -> None:
    """One look at one rank. Two jobs may have the same ranks, two communicators the same name."""
    who = f"rank {process.rank} " if process.rank is not None else ""
    who += f"pid {process.pid}"
    sent = {f"{row['name']} {who}": float(row["tx_bytes"]) for row in nics}
    names = [f"{row['name']} {row['id'][:8]} {who}".lstrip() for row in comms]
    done = {name: float(row["operations"]) for name, row in zip(names, comms, strict=True)}
    bus = {name: float(row["bus_bytes"]) for name, row in zip(names, comms, strict=True)}
    for kind, row in (("nic", sent), ("comm", done), ("bus", bus)):
        if row:
            counters.setdefault(f"{kind}|{process.host}|{process.name}", []).append((at, row))


def _samples(counters: Counters) -> list[Sample]:
    found = []
    for key, rows in counters.items():
        kind, host, _ = key.split("|", 2)
        found += traces.rates(host, rows, *RATES[kind])
    return sorted(found, key=lambda sample: sample.ns)


def _lost(count: int) -> list[str]:
    return [f"{count} older events are no longer in the journals"] if count else []
