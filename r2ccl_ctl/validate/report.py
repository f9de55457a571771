"""The report: one HTML file without anything outside it, Markdown and JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r2ccl_ctl import __version__
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.units import rfc3339, show_bytes, show_rate, show_span
from r2ccl_ctl.validate import picture
from r2ccl_ctl.validate.cases import Case
from r2ccl_ctl.validate.judge import (
    CODES,
    FAILED,
    PASSED,
    SKIPPED,
    SLOW,
    UNKNOWN,
    Result,
    beside_reference,
    events_of,
    judge,
    verdict,
)
from r2ccl_ctl.validate.run import SCHEMA, Setup

TEMPLATE = "report.html.j2"
EVENTS = (
    "fault-injected", "fault-cleared", "nic-down", "nic-probing", "nic-ramping", "nic-up",
    "nic-drained", "nic-damped", "path-down", "fenced", "replay", "resume", "path-up", "verdict",
    "no-path", "operator", "warning", "error", "connection-failed", "peer-gone", "weight",
)  # fmt: skip
EVENTS_MOST = 200
WORDS = {
    PASSED: "Every case passed: no value was wrong, and traffic went on.",
    SLOW: "No value was wrong and traffic went on, but something was slower than it should be.",
    FAILED: "At least one case failed.",
    UNKNOWN: "Something could not be shown. This is no proof.",
}
LAB_NOTE = (
    "The hosts were emulated on one machine: this run shows nothing about physical NICs, cables "
    "or switches."
)
FAULT_NOTE = (
    "Faults were injected in R2CCL's transport, as `r2ccl-ctl fail-nic` does. Only the case "
    "'cable' cuts a link."
)
LEGEND = (
    "Wrong: values that were not what they should be; every value was compared. Bus bandwidth as "
    "nccl-tests counts it, over the whole case. Share: bandwidth while NICs were away, of the "
    "bandwidth before; in brackets what the remaining NICs could give. Resumed: from the fault "
    "until traffic went on."
)
STANDIN_NOTE = "A CPU stand-in took the place of NCCL: the bandwidths say nothing about GPUs."


class NoHtml(R2Error):
    """The report cannot be made as HTML."""


def results_of(
    chosen: Sequence[Case], records: Mapping[str, Any], skipped: Mapping[str, str]
) -> list[Result]:
    """In the order of the matrix."""
    found: dict[str, Result] = {}
    for case in chosen:
        if case.name in skipped:
            found[case.name] = Result(case.name, case.title, SKIPPED, [skipped[case.name]])
        elif case.name in records:
            found[case.name] = judge(case, records[case.name])
        else:
            found[case.name] = Result(case.name, case.title, UNKNOWN, ["not run"])
    beside_reference(found)
    return list(found.values())


def document(setup: Setup, results: Sequence[Result], records: Mapping[str, Any]) -> dict[str, Any]:
    """All that the report says, as data."""
    word = verdict(results)
    first = next(iter(records.values()), None)
    hosts = first["hosts"] if first else []
    processes = [p for r in records.values() for p in r["processes"].values()]
    return {
        "schema": SCHEMA,
        "time": rfc3339(time.time_ns()),
        "verdict": word,
        "exit_code": CODES[word],
        "summary": WORDS[word],
        "notes": notes(setup, hosts),
        "setup": dict(vars(setup)),
        "versions": {
            "r2ccl": __version__,
            "plugin": sorted({p["plugin_version"] for p in processes}),
            "nccl": sorted({p["nccl_version"] for p in processes if p["nccl_version"]}),
            "net_api": sorted({p["net_api"] for p in processes if p["net_api"]}),
            "mode": sorted({p["mode"] for p in processes}),
        },
        "hosts": hosts,
        "cases": [
            r.as_dict() | {"steps": records[r.name]["steps"] if r.name in records else []}
            for r in results
        ],
    }


def notes(setup: Setup, hosts: Sequence[Any]) -> list[str]:
    """What the run does not show."""
    found = [LAB_NOTE] if setup.bed == "lab" else []
    found.append(FAULT_NOTE)
    gpus = any(host["gpus"] for host in hosts)
    if setup.nccl == "standin" or (setup.nccl == "auto" and not gpus):
        found.append(STANDIN_NOTE)
    for host in hosts:
        found += [f"{host['name']}: {text}" for text in host["hindrances"]]
    return found


def events(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What happened to NICs and paths, for people: times from the first collective."""
    start = record["windows"][0]["begin_ns"] if record["windows"] else record["began_ns"]
    rows = []
    for event in events_of(record):
        if event.event in EVENTS:
            rank = event.process.rank
            rows.append({
                "t": (event.mono_ns - start) / 1e9,
                "who": f"rank {rank}" if rank is not None else f"pid {event.process.pid}",
                "host": event.process.host, "event": event.event, "nic": event.nic,
                "remote_nic": event.remote_nic, "cause": event.cause,
                "bytes": show_bytes(event.bytes) if event.bytes else "",
            })  # fmt: skip
    return rows


def cell(figures: Mapping[str, Any], key: str, form: str = "{:.3g}") -> str:
    value = figures.get(key)
    return "" if value is None else form.format(value)


def row_of(result: Result) -> list[str]:
    """A line of the table of cases."""
    f = result.figures
    share = cell(f, "share", "{:.0%}")
    if share:
        share += f" ({f['expected_share']:.0%})"
    elif f.get("beside_reference"):
        share = f"{f['beside_reference']:.0%} of reference"
    return [
        result.name,
        result.title,
        result.status,
        cell(f, "wrong", "{}"),
        cell(f, "collectives", "{}"),
        cell(f, "busbw_gbs"),
        share,
        cell(f, "resume_ms", "{:.0f} ms"),
        "; ".join(result.reasons),
    ]


COLUMNS = ("CASE", "WHAT", "RESULT", ">WRONG", ">COLLECTIVES", ">BUSBW GB/s", "SHARE", ">RESUMED",
           "WHY")  # fmt: skip


def markdown(doc: Mapping[str, Any], results: Sequence[Result]) -> str:
    head = [c.removeprefix(">").lower() for c in COLUMNS]
    lines = [f"# R2CCL validation: {doc['verdict']}", "", doc["summary"], ""]
    lines += [f"- {note}" for note in doc["notes"]]
    lines += ["", f"{_bed_line(doc)}. {doc['time']}", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        cells = [text.replace("|", "\\|").replace("\n", " ") for text in row_of(result)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", LEGEND]
    lines += ["", "What the first host's NICs sent, by the kernel's counters:", ""]
    lines += ["| case | nic | before | while failed | after |", "|---|---|---|---|---|"]
    for result in results:
        for row in result.nics:
            rates = [_rate(row[key]) for key in ("before", "failed", "after")]
            lines.append(f"| {result.name} | {row['nic']} | " + " | ".join(rates) + " |")
    lines += ["", "| host | system | kernel | NICs | GPUs | R2CCL |", "|---|---|---|---|---|---|"]
    for host in doc["hosts"]:
        names = ", ".join(nic["name"] for nic in host["nics"])
        lines.append(f"| {host['name']} | {host['system']} | {host['kernel']} | {names} | "
                     f"{len(host['gpus'])} | {host['version']} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _bed_line(doc: Mapping[str, Any]) -> str:
    setup = doc["setup"]
    return (
        f"{len(setup['hosts'])} hosts ({setup['bed']}), ranks on each: {setup['per_node']}, "
        f"AllReduce of {show_bytes(setup['size'])}, a unit of time is {setup['seconds']:g} s"
    )


def _rate(value: float | None) -> str:
    return "not known" if value is None else show_rate(value) or "0"


def html(
    doc: Mapping[str, Any], results: Sequence[Result], records: Mapping[str, Any], command: str
) -> str:
    """Everything in one file."""
    try:
        import jinja2
    except ImportError as err:
        raise NoHtml(f"it needs jinja2 ({err}): pip install jinja2") from err
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined,
                             trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    env.filters |= {"rate": _rate, "bytes": show_bytes, "span": show_span}
    cases = []
    for result in results:
        record = records.get(result.name)
        rows = events(record) if record else []
        cases.append({
            "result": result, "cells": row_of(result), "record": record,
            "picture": picture.draw(record) if record else "",
            "events": rows[:EVENTS_MOST], "more": max(0, len(rows) - EVENTS_MOST),
        })  # fmt: skip
    text: str = env.get_template(TEMPLATE).render(
        doc=doc, cases=cases, columns=[c.removeprefix(">") for c in COLUMNS],
        bed=_bed_line(doc), command=command, legend=LEGEND,
    )  # fmt: skip
    return text


def write(folder: Path, name: str, text: str) -> Path:
    """As a whole: where there is no room, what was there before stays."""
    path, new = folder / name, folder / f".{name}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as err:
        with contextlib.suppress(OSError):
            new.unlink()
        raise R2Error(f"{path}: {err.strerror}") from err
    return path
