"""Faults from a file: faults apply."""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from r2ccl_ctl.cli.act_cmds import Said, answered, ask, print_said, said_dict
from r2ccl_ctl.cli.common import (
    R2Group,
    drop_output,
    json_option,
    print_json,
    refusal,
    say_left_out,
    target_options,
)
from r2ccl_ctl.control import SCHEMA, Selection, list_processes, select_targets, with_nic
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.faults import Rule, parse_for, read_rules
from r2ccl_ctl.interrupts import Interrupted, signals_interrupt
from r2ccl_ctl.units import rfc3339

LOOK_S = 0.5


@click.group(cls=R2Group)
def faults() -> None:
    """Apply faults from a file of rules.

    \b
    Example:
      r2ccl-ctl faults apply rules.txt --check
    """


@faults.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@target_options
@click.option(
    "--check",
    is_flag=True,
    help="Only read FILE, check its NICs, and show the rules in order of time.",
)
@json_option
def apply(
    file: Path,
    wanted: Selection,
    timeout: float,
    check: bool,
    as_json: bool,
) -> None:
    """Apply the fault rules of FILE to running processes.

    FILE `-` is standard input. A line is `NIC KIND [direction=tx|rx|both] [after=BYTES] [ops=N]
    [for=DURATION] [at=DURATION]`, with the words of fail-nic; KIND `recover` is recover-nic. `ops`:
    the fault begins at that send or receive of each process. `at` is counted from now; the command
    ends after the last rule. All rules are checked before the first one is applied. If a rule
    cannot be applied (no process has that NIC), the later ones are applied all the same.

    The command ends early when no process is left. Then, and after Ctrl-C or SIGTERM, it lists the
    faults that may still be there. --check ends with 1 if no process has a NIC of the file, unless
    no process runs. --json prints one object per line: each rule with its answers, then the end.

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
        if not _check(rules, wanted, as_json):
            sys.exit(1)
        return
    start = time.monotonic()
    course = Course(rules, wanted, timeout, as_json)
    try:
        with signals_interrupt():
            for rule in rules:
                if not _wait(start + rule.at_s, wanted, looks=bool(course.taken)):
                    click.echo(f"Error: no target is left: {course.stopped}", err=True)
                    course.show_end("no target is left")
                    sys.exit(1)
                course.apply(rule)
    except KeyboardInterrupt as err:
        course.show_stopped("interrupted")
        sys.exit(128 + (err.number if isinstance(err, Interrupted) else signal.SIGINT))
    except R2Error as err:
        course.show_stopped(str(err))
        raise
    except OSError as err:
        drop_output()
        course.show_stopped(refusal(err))
        raise
    course.show_end("")
    if course.failed:
        click.echo(
            f"Error: {course.failed} of {len(rules)} rules were not applied everywhere", err=True
        )
        sys.exit(1)


@dataclass
class Course:
    """What came of the rules so far."""

    rules: Sequence[Rule]
    wanted: Selection
    timeout: float
    as_json: bool
    taken: list[tuple[Rule, float]] = field(default_factory=list)
    """With the moment from which on each is certain to be over by itself."""
    jobs: set[str] = field(default_factory=set)
    """Whose processes took them."""
    under_way: list[Rule] = field(default_factory=list)
    done: int = 0
    failed: int = 0

    @property
    def stopped(self) -> str:
        return f"stopped after {self.done} of {len(self.rules)} rules"

    def apply(self, rule: Rule) -> None:
        """Ask the processes, and show what they said."""
        self.under_way = [rule]
        said: list[Said] = []
        error = ""
        try:
            said = answered(ask(self.wanted, rule.nic, self.timeout, rule.command), str(rule))
        except R2UsageError:  # several jobs: no rule can be meant, and nobody was asked
            self.under_way = []
            raise
        except R2Error as err:  # the rules after it may undo those before it
            error = str(err)
            click.echo(f"Error: line {rule.line}: {rule}: {error}", err=True)
        self.under_way = []
        self.done += 1
        every = not error and all(one.ok for one in said)
        if any(one.ok for one in said):
            self.taken.append((rule, over_at(rule, time.monotonic())))
        self.jobs |= {one.process.job for one in said if one.ok}
        self.failed += not every
        if self.as_json:
            rows = [said_dict(one) for one in said]
            _line({**rule_dict(rule), "ok": every, "error": error, "answers": rows})
        print_said(said, quiet=self.as_json)

    def recover(self, rule: Rule) -> str:
        """The command that takes it back."""
        wanted = self.wanted
        given = (("--job", wanted.job), ("--node", wanted.node), ("--pid", wanted.pid))
        words = [f" {option} {shlex.quote(str(value))}" for option, value in given if value]
        if wanted.everything or (not str(wanted) and self.jobs - {""} != self.jobs):
            words.append(" --all")
        elif not str(wanted):
            words += [f" --job {shlex.quote(name)}" for name in sorted(self.jobs)]
        return f"r2ccl-ctl recover-nic{''.join(words)} {rule.nic}"

    def show_stopped(self, why: str) -> None:
        """That rules are left, and what may still stand of those before."""
        with contextlib.suppress(OSError):  # the terminal may be gone, and the JSON go elsewhere
            click.echo(f"Error: {self.stopped}", err=True)
            for rule in standing(self.taken):
                click.echo(f"still in force: {rule} ({self.recover(rule)})", err=True)
            for rule in self.under_way:
                click.echo(f"interrupted, may be in force: {rule} ({self.recover(rule)})", err=True)
        with contextlib.suppress(OSError):
            self.show_end(why)

    def show_end(self, stopped: str) -> None:
        """The last line of --json; `stopped`: why rules were left, or nothing."""
        if not self.as_json:
            return
        done = {"rules": len(self.rules), "done": self.done, "failed": self.failed}
        left = {"standing": standing(self.taken), "under_way": self.under_way}
        faults = {
            key: [{**rule_dict(rule), "recover": self.recover(rule)} for rule in found]
            for key, found in left.items()
        }
        _line({**done, "ok": not (stopped or self.failed), "stopped": stopped, **faults})


def rule_dict(rule: Rule) -> dict[str, Any]:
    """A rule in JSON: the words of its line."""
    return {
        "line": rule.line,
        "nic": rule.nic,
        "kind": rule.kind,
        "direction": rule.direction,
        "after": rule.after,
        "ops": rule.ops,
        "for": rule.duration,
        "at_s": rule.at_s,
    }


def _line(row: dict[str, Any]) -> None:
    print_json({"schema": SCHEMA, "time": rfc3339(time.time_ns()), **row}, line=True)


def _check(rules: Sequence[Rule], wanted: Selection, as_json: bool) -> bool:
    """Show what would be done when; whether every NIC is known."""
    if not as_json:
        for rule in rules:
            click.echo(f"{rule.at_s:g}s: {rule}")
    strange = _strange_nics(rules, wanted)
    for rule in rules if as_json else ():
        error = strange.get(rule.nic, "")
        _line({**rule_dict(rule), "ok": not error, "error": error})
    return not strange


def _wait(until: float, wanted: Selection, *, looks: bool) -> bool:
    """Until that moment; False as soon as there is nobody any more whom rules could be for."""
    while True:
        if looks and not any(wanted.wants(process) for process in list_processes()):
            return False
        left = until - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, LOOK_S))


def over_at(rule: Rule, taken: float) -> float:
    """When a rule that was taken by then is over by itself, at the latest. The time of one with
    `after` or `ops` begins when these have passed, which nobody here knows."""
    if rule.duration is None or rule.after is not None or rule.ops is not None:
        return math.inf
    return taken + parse_for(rule.duration) / 1000


def standing(taken: Sequence[tuple[Rule, float]]) -> list[Rule]:
    """Of the rules that were applied the last of each NIC, unless it gave the NIC back or is
    over."""
    now = time.monotonic()
    last = {rule.nic: (rule, over) for rule, over in taken}
    return [rule for rule, over in last.values() if rule.kind != "recover" and now < over]


def _strange_nics(rules: Sequence[Rule], wanted: Selection) -> dict[str, str]:
    """NICs that no process has, with what is to be said about each."""
    try:
        processes = select_targets(wanted)
        say_left_out(wanted, processes)
    except R2UsageError:
        raise
    except R2Error as err:
        if str(wanted):  # these were to be looked at
            raise
        click.echo(f"NICs were not looked for: {err}", err=True)
        return {}
    strange = {}
    for name, line in {rule.nic: rule.line for rule in reversed(rules)}.items():
        try:
            list(with_nic(processes, name))
        except R2Error as err:
            strange[name] = str(err)
            click.echo(f"Error: line {line}: {err}", err=True)
    return strange
