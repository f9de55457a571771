"""Faults from a file: faults apply."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from r2ccl_ctl.cli.act_cmds import ask, show_answers, target_options
from r2ccl_ctl.cli.common import R2Group, selection
from r2ccl_ctl.control import Selection, list_processes, select_targets, with_nic
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.faults import Rule, read_rules

LOOK_S = 0.5


@click.group(cls=R2Group)
def faults() -> None:
    """Faults from a file of rules.

    \b
    Example:
      r2ccl-ctl faults apply rules.txt --check
    """


@faults.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@target_options
@click.option(
    "--check",
    is_flag=True,
    help="Only read FILE, look for its NICs, and show what would be done when.",
)
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
    It stops when, after a rule was applied, no process is left that a rule could be for; stopped
    early, it lists the faults that may still stand.
    --check ends with 1 when there is such a NIC; while no process runs, none is looked for.

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
        if not _nics_known(rules, selection(pid, job, node, everything)):
            sys.exit(1)
        return
    start = time.monotonic()
    wanted = selection(pid, job, node, everything)
    taken: list[Rule] = []
    jobs: set[str] = set()  # whose processes took them
    under_way: list[Rule] = []
    done = failed = 0
    try:
        for rule in rules:
            if not _wait(start + rule.at_s, wanted, looks=bool(taken)):
                click.echo(
                    f"Error: no target is left: stopped after {done} of {len(rules)} rules",
                    err=True,
                )
                sys.exit(1)
            under_way = [rule]
            took, every = _apply(rule, wanted, timeout)
            under_way.clear()
            taken += [rule] if took else []
            jobs |= took
            failed += not every
            done += 1
    except (KeyboardInterrupt, R2Error) as err:
        click.echo(f"Error: stopped after {done} of {len(rules)} rules", err=True)
        again = "r2ccl-ctl recover-nic" + "".join(
            f" {option} {shlex.quote(value)}"
            for option, value in (("--job", job), ("--node", node), ("--pid", pid and str(pid)))
            if value
        )
        if everything or (not str(wanted) and jobs - {""} != jobs):
            again += " --all"
        elif not str(wanted):
            again += "".join(f" --job {shlex.quote(name)}" for name in jobs)
        for rule in standing(taken):
            click.echo(f"still stands: {rule} ({again} {rule.nic})", err=True)
        for rule in under_way if isinstance(err, KeyboardInterrupt) else ():
            click.echo(f"under way, may stand: {rule} ({again} {rule.nic})", err=True)
        if isinstance(err, R2Error):
            raise
        sys.exit(130)
    if failed:
        click.echo(f"Error: {failed} of {len(rules)} rules were not applied everywhere", err=True)
        sys.exit(1)


def _wait(until: float, wanted: Selection, *, looks: bool) -> bool:
    """Until that moment; False as soon as there is nobody any more whom rules could be for."""
    while True:
        if looks and not any(wanted.wants(process) for process in list_processes()):
            return False
        left = until - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, LOOK_S))


def standing(done: Sequence[Rule]) -> list[Rule]:
    """Of the rules that were applied the last of each NIC, unless it gave the NIC back. Those with
    a time of their own may be over."""
    last = {rule.nic: rule for rule in done}
    return [rule for rule in last.values() if rule.kind != "recover"]


def _nics_known(rules: Sequence[Rule], wanted: Selection) -> bool:
    try:
        processes = select_targets(wanted)
    except R2UsageError:
        raise
    except R2Error as err:
        if str(wanted):  # these were to be looked at
            raise
        click.echo(f"NICs were not looked for: {err}", err=True)
        return True
    known = True
    for name, line in {rule.nic: rule.line for rule in reversed(rules)}.items():
        try:
            list(with_nic(processes, name))
        except R2Error as err:
            click.echo(f"Error: line {line}: {err}", err=True)
            known = False
    return known


def _apply(rule: Rule, wanted: Selection, timeout: str) -> tuple[set[str], bool]:
    """The jobs with a process that took it, and whether every process did."""
    try:
        answers = ask(wanted, rule.nic, timeout, rule.command)
    except R2UsageError:  # several jobs: no rule can be meant
        raise
    except R2Error as err:  # the rules after it may undo those before it
        click.echo(f"Error: {rule}: {err}", err=True)
        return set(), False
    took = {answer.process.job for _, answer in answers if answer.ok}
    try:
        show_answers(answers, False, str(rule))
    except SystemExit:
        return took, False
    return took, True
