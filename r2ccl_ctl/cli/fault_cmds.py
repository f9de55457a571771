"""Faults from a file: faults apply."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from r2ccl_ctl.cli.act_cmds import ask, show_answers, target_options
from r2ccl_ctl.cli.common import R2Group, selection
from r2ccl_ctl.control import Selection
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.faults import Rule, read_rules


@click.group(cls=R2Group)
def faults() -> None:
    """Faults from a file of rules."""


@faults.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@target_options
@click.option("--check", is_flag=True, help="Only read FILE, and show what would be done when.")
def apply(
    file: Path,
    pid: int | None,
    job: str | None,
    node: str | None,
    everything: bool,
    timeout: str,
    check: bool,
) -> None:
    """Apply the fault rules of FILE to running processes.

    A line is `NIC KIND [direction=tx|rx|both] [after=BYTES] [for=DURATION] [at=DURATION]`, with the
    words of fail-nic; KIND `recover` is recover-nic. `at` is counted from now; the command ends
    after the last rule. All rules are checked before the first one is applied; one that then
    cannot be applied, such as for a NIC that no process has, does not keep back those after it.

    \b
    Example:
      r2ccl-ctl faults apply rules.txt --job 4711
    with these rules:
      # NIC  KIND         when and how
      eth1   blackhole    at=2s for=500ms
      eth2   slow=100mbit direction=tx
      eth2   recover      at=10s
    """
    rules = read_rules(file)
    if check:
        for rule in rules:
            click.echo(f"{rule.at_s:g}s: {rule}")
        return
    start = time.monotonic()
    failed = 0
    for rule in rules:
        time.sleep(max(0.0, start + rule.at_s - time.monotonic()))
        failed += not _apply(rule, selection(pid, job, node, everything), timeout)
    if failed:
        click.echo(f"Error: {failed} of {len(rules)} rules were not applied everywhere", err=True)
        sys.exit(1)


def _apply(rule: Rule, wanted: Selection, timeout: str) -> bool:
    try:
        answers = ask(wanted, rule.nic, timeout, rule.command)
        show_answers(answers, False, str(rule))
    except SystemExit:
        return False
    except R2UsageError:  # several jobs: no rule can be meant
        raise
    except R2Error as err:  # the rules after it may undo those before it
        click.echo(f"Error: {rule}: {err}", err=True)
        return False
    return True
