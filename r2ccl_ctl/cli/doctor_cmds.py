"""doctor: checks before a job."""

from __future__ import annotations

import sys

import click

from r2ccl_ctl.cli.common import json_option, of_a_check, print_json
from r2ccl_ctl.cli.host_options import host_options
from r2ccl_ctl.cli.overview_view import number
from r2ccl_ctl.cli.view import document
from r2ccl_ctl.doctor import hosts as between
from r2ccl_ctl.doctor import local
from r2ccl_ctl.doctor.finding import SEVERITIES, Finding, exit_code, worst_first

STYLES = {"error": "red", "warning": "yellow", "note": "cyan", "ok": "green"}


@click.command()
@host_options("Also between these hosts.")
@click.option("--quiet", "-q", is_flag=True, help="Only warnings and errors.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@of_a_check()
def doctor(
    hosts: list[str], via: str, quiet: bool, as_json: bool, command: tuple[str, ...]
) -> None:
    """Check hosts before a job: NICs, kernel settings, limits, NCCL, variables.

    Each finding has a severity, its evidence, and a remedy. It says which NICs a job would use, and
    why it would not use each other one. No job has to run.

    With --hosts a helper starts on each host. The helpers compare the hosts and send bytes from
    every NIC to its partner. R2CCL must be at the same place on all hosts.

    With CMD it also checks which NCCL the program uses. The shim (LD_PRELOAD) does not work with
    a statically linked NCCL. CMD is not started.

    Ends with 0 without a problem, 1 with warnings, 2 with errors, 3 if a host gave no answer or the
    checks could not be made.

    \b
    Example:
      r2ccl-ctl doctor
      r2ccl-ctl doctor --hosts node1,node2
      r2ccl-ctl doctor -- all_reduce_perf -b 8 -e 1G
      r2ccl-ctl doctor --hostfile hosts.txt --via srun --json
    """
    found = worst_first(
        between.check(hosts, via, command) if hosts else local.check_all(command)[1]
    )
    if as_json:
        print_json(document("findings", [one.as_dict() for one in found]))
    else:
        show_findings(found, quiet=quiet)
    sys.exit(exit_code(found))


def show_findings(found: list[Finding], *, quiet: bool = False) -> None:
    """For people; how many of each severity there are goes to stderr."""
    shown = [one for one in found if not quiet or one.severity in ("warning", "error")]
    for one in shown:
        node = f"{one.node}: " if one.node else ""
        mark = click.style(f"{one.severity:8}", fg=STYLES[one.severity])
        click.echo(f"{mark} {one.check}: {node}{one.evidence}")
        if one.remedy:
            click.echo(f"{'':8} remedy: {one.remedy}")
    texts = []
    for word in reversed(SEVERITIES):
        count = sum(one.severity == word for one in found)
        texts.append(f"{count} ok" if word == "ok" else number(count, word, "s"))
    click.echo(", ".join(texts), err=True)
