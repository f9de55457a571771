"""`r2ccl-ctl validate`: a thin command over r2ccl_ctl.validate."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from r2ccl_ctl import paths, remote
from r2ccl_ctl.cli.common import (
    WholeNumber,
    add_row,
    json_option,
    of_a_check,
    of_option,
    print_json,
    show,
    table,
)
from r2ccl_ctl.cli.host_options import host_options
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.interrupts import Interrupted, signals_interrupt
from r2ccl_ctl.units import parse_duration, parse_size, show_span
from r2ccl_ctl.validate import bed as beds
from r2ccl_ctl.validate import mpi, report, run
from r2ccl_ctl.validate.cases import NAMES, Case, choose

LAB_NODES, LAB_NICS, LAB_RATE = 2, 3, "200mbit"


@click.command()
@host_options("Real nodes, two or more.")
@click.option(
    "--per-node",
    type=WholeNumber(min=1, max=64),
    metavar="P",
    help="Ranks of each host. Default: its GPUs, or 1.",
)
@click.option(
    "--nic",
    "nics",
    multiple=True,
    metavar="NIC",
    help="NIC of the first host to fail. Give the option twice to name the second NIC, too.",
)
@click.option(
    "--case",
    "chosen",
    multiple=True,
    metavar="CASE",
    shell_complete=lambda ctx, param, text: [name for name in NAMES if name.startswith(text)],
    help=f"Only this case; may be repeated. {', '.join(NAMES)}.",
)
@click.option("--size", metavar="BYTES", help="Size of the AllReduce. Default: 32M, in a lab 8M.")
@click.option(
    "--seconds",
    metavar="DURATION",
    help="Unit of time: a failure lasts two of it. Default: 5s, in a lab 2s.",
)
@click.option(
    "--nccl",
    default="auto",
    show_default=True,
    metavar="WHICH",
    help="standin, system, auto (the stand-in where there is no GPU), or a libnccl.so.2.",
)
@click.option(
    "--nccl-tests",
    "tests_dir",
    default="",
    metavar="DIR",
    help="Folder of all_reduce_perf, for the cases that use it. Default: from PATH.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Results folder. Default: r2ccl-validate here; build/validate in a checkout.",
)
@click.option("--again", is_flag=True, help="Run finished cases anew.")
@click.option("--dry-run", is_flag=True, help="Say what would run, and start nothing.")
@json_option
@of_a_check()
def validate(
    hosts: list[str],
    via: str,
    per_node: int | None,
    nics: tuple[str, ...],
    chosen: tuple[str, ...],
    size: str | None,
    seconds: str | None,
    nccl: str,
    tests_dir: str,
    output: Path | None,
    again: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Prove on your own nodes that NIC failures lose nothing and cost little.

    Runs AllReduces on the hosts while NICs of the first one fail in several ways. Every value is
    checked. Bytes per NIC come from the kernel's counters. One more run, without R2CCL, is
    the reference.

    Without --hosts it makes a small lab on this machine. That takes about three minutes.
    An interrupted run goes on where it was: finished cases are not run again.

    The report is report.html in the results folder, beside report.md and report.json. Ends with 0
    if all cases passed, 1 if something was slow, 2 if a case failed, 3 if a case showed nothing or
    could not be run.

    \b
    Example:
      r2ccl-ctl validate
      r2ccl-ctl validate --hosts node1,node2
      r2ccl-ctl validate --hosts node1,node2 --via "srun --overlap" --nccl-tests ~/nccl-tests/build
    """
    if len(hosts) == 1:
        raise R2UsageError(f"--hosts {hosts[0]}: give two or more, or none for a lab")
    if dry_run and as_json:
        raise R2UsageError("--dry-run prints text: leave it or --json out")
    lab = not hosts
    tests = mpi.find(tests_dir) if tests_dir or not lab else ""
    if tests and not mpi.starter(via):
        tests = ""
    wanted = choose(chosen, nccl_tests=bool(tests), lab=lab)
    bytes_ = of_option("--size", parse_size, size or ("8M" if lab else "32M"))
    unit = of_option("--seconds", parse_duration, seconds or ("2s" if lab else "5s"))
    if not 1 << 16 <= bytes_ <= 4 << 30:
        raise R2UsageError(f"--size {size}: give 64K to 4G")
    if not 0.5 <= unit <= 3600:
        raise R2UsageError(f"--seconds {seconds}: give 0.5 to 3600")
    folder = output if output is not None else _folder()
    if dry_run:
        _say_plan(hosts, via, wanted, unit)
        return
    if lab:
        from r2ccl_ctl.lab import userns

        userns.rerun_whole(f"validate-{os.getpid()}")
    with _interrupts(folder), _bed(hosts, via) as bed:
        setup = _setup(bed, via, per_node, bytes_, unit, nics, nccl, tests)
        _say_hosts(bed)
        results, records = _validate(bed, setup, wanted, folder, again=again)
    doc = report.document(setup, results, records)
    _show(results, doc, as_json=as_json)
    _write(results, doc, records, folder)
    sys.exit(doc["exit_code"])


def _folder() -> Path:
    checkout = paths.checkout()
    return checkout / "build" / "validate" if checkout is not None else Path("r2ccl-validate")


@contextlib.contextmanager
def _interrupts(folder: Path) -> Iterator[None]:
    with signals_interrupt():
        try:
            yield
        except Interrupted as signal:
            click.echo(
                f"validate: interrupted; nothing is left running. Finished cases are in {folder}: "
                "the same command goes on",
                err=True,
            )
            sys.exit(128 + signal.number)


def _bed(hosts: list[str], via: str) -> contextlib.AbstractContextManager[beds.Bed]:
    if hosts:
        return beds.of_hosts(hosts, via)
    return beds.of_lab(LAB_NODES, LAB_NICS, LAB_RATE)


def _setup(
    bed: beds.Bed,
    via: str,
    per_node: int | None,
    size: int,
    seconds: float,
    nics: tuple[str, ...],
    nccl: str,
    tests: str,
) -> run.Setup:
    """What the hosts say decides what was not given."""
    first = bed.hosts[0].facts
    there = [nic["name"] for nic in first["nics"]]
    for name in nics:
        if name not in there:
            raise R2UsageError(
                f"--nic {name}: {bed.hosts[0].name} has {', '.join(there) or 'none'}"
            )
    if len(nics) > 2 or len(set(nics)) < len(nics):
        raise R2UsageError("--nic: give one or two different NICs")
    order = [*nics, *(n for n in [*there[1:], *there[:1]] if n not in nics)]
    each = per_node or (1 if bed.lab is not None else len(first["gpus"]) or 1)
    return run.Setup(
        bed=bed.kind,
        hosts=tuple(host.name for host in bed.hosts),
        per_node=each,
        size=size,
        seconds=seconds,
        victims=tuple(order[:2]),
        nccl=nccl,
        nccl_tests=tests,
        via=via,
    )


def _validate(
    bed: beds.Bed, setup: run.Setup, wanted: list[Case], folder: Path, *, again: bool
) -> tuple[list[Any], dict[str, Any]]:
    from rich.console import Console

    from r2ccl_ctl.validate.screen import Screen

    screen = Screen(Console(stderr=True, highlight=False, markup=False, emoji=False))
    fit, skipped = run.plan(setup, wanted, min(len(h.facts["nics"]) for h in bed.hosts))
    try:
        records = run.run_cases(bed, setup, fit, folder, screen, again=again)
    finally:
        screen.end()
    return report.results_of(wanted, records, skipped), records


def _write(results: list[Any], doc: dict[str, Any], records: dict[str, Any], folder: Path) -> None:
    report.write(folder, "report.json", json.dumps(doc, indent=2) + "\n")
    report.write(folder, "report.md", report.markdown(doc, results))
    command = shlex.join(["r2ccl-ctl", *sys.argv[1:]])
    try:
        report.write(folder, "report.html", report.html(doc, results, records, command))
    except report.NoHtml as err:
        click.echo(f"warning: report.html is left out: {err}", err=True)
    click.echo(f"report: {folder}/report.html, report.md, report.json", err=True)


def _say_plan(hosts: list[str], via: str, wanted: list[Case], unit: float) -> None:
    total = 0.0
    for case in wanted:
        seconds = run.seconds_of(case, unit)
        total += seconds
        click.echo(f"{case.name}: {case.title}, {show_span(seconds)}")
    click.echo(f"in all about {show_span(total)}")
    if not hosts:
        click.echo(f"a lab of {LAB_NODES} nodes with {LAB_NICS} NICs of {LAB_RATE} each")
    for host in hosts:
        click.echo(shlex.join(remote.argv_for(via, host, os.environ, beds.AGENT)))


def _say_hosts(bed: beds.Bed) -> None:
    for host in bed.hosts:
        facts = host.facts
        names = ", ".join(nic["name"] for nic in facts["nics"]) or facts["nics_error"] or "none"
        click.echo(f"{host.name}: NICs {names}; {len(facts['gpus'])} GPUs", err=True)
        for text in facts["hindrances"]:
            click.echo(f"warning: {host.name}: {text}", err=True)


def _show(results: list[Any], doc: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(doc)
    else:
        out = table(*report.COLUMNS)
        for result in results:
            add_row(out, *report.row_of(result))
        show(out)
        click.echo()
        click.echo(f"{doc['verdict']}: {doc['summary']}")
