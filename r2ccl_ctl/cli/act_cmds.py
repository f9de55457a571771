"""Commands that change a running job: fail-nic, recover-nic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click

from r2ccl_ctl import drain
from r2ccl_ctl.cli.common import (
    F,
    complete_nic,
    json_option,
    of_option,
    print_json,
    say_left_out,
    target_options,
)
from r2ccl_ctl.cli.view import document
from r2ccl_ctl.control import (
    Answer,
    Command,
    Process,
    Selection,
    select_targets,
    send_commands,
    with_nic,
)
from r2ccl_ctl.faults import KINDS, KINDS_HELP, parse_for, parse_kind
from r2ccl_ctl.units import parse_size, show_bytes, show_span


def nic_argument(command: F) -> F:
    return click.argument("nic", shell_complete=complete_nic)(command)


def ask(
    wanted: Selection, nic: str, timeout: float, make: Callable[[str], Command]
) -> list[tuple[str, Answer]]:
    """Ask every chosen process that has the NIC. (the NIC's name there, its answer)."""
    targets = select_targets(wanted)
    say_left_out(wanted, targets)
    pairs = list(with_nic(targets, nic))
    answers = send_commands([(process, make(name)) for process, name in pairs], timeout=timeout)
    return [(name, answer) for (_, name), answer in zip(pairs, answers, strict=True)]


@dataclass(frozen=True)
class Said:
    """What came of a command at one process; `more` are further values of its JSON row."""

    process: Process
    ok: bool
    text: str
    shown: str = ""
    """What a person reads instead of `text`."""
    more: Mapping[str, Any] = field(default_factory=dict)


def _all_did(said: Sequence[Said]) -> bool:
    return all(one.ok for one in said)


def show_said(
    said: Sequence[Said], as_json: bool, enough: Callable[[Sequence[Said]], bool] = _all_did
) -> None:
    """Print what came of it; exit with 1 unless that is enough."""
    came = enough(said)
    if as_json:
        print_json(document("answers", [said_dict(one) for one in said]))
    print_said(said, quiet=as_json, came=came)
    if not came:
        sys.exit(1)


def print_said(said: Sequence[Said], *, quiet: bool, came: bool = False) -> None:
    """A line of each process: what was done, unless `quiet`; what was not, on stderr, an error
    unless the whole `came`."""
    for one in said:
        line = f"{one.process.title}: {one.shown or one.text}"
        if not one.ok:
            click.echo(line if came else f"Error: {line}", err=True)
        elif not quiet:
            click.echo(line)


def said_dict(one: Said) -> dict[str, Any]:
    """Its row in JSON."""
    process = one.process
    return {
        "node": process.host,
        "pid": process.pid,
        "job": process.job,
        "rank": process.rank,
        "ok": one.ok,
        "text": one.text,
        **one.more,
    }


def answered(answers: Sequence[tuple[str, Answer]], done: str) -> list[Said]:
    """What the processes answered about a NIC; `done` is said for one that only agreed."""
    return [
        Said(a.process, a.ok, a.text, a.text or f"{name} {done}", {"nic": name, "code": a.code})
        for name, a in answers
    ]


def show_answers(answers: Sequence[tuple[str, Answer]], as_json: bool, done: str) -> None:
    """What the processes answered about a NIC, as `show_said` does."""
    show_said(answered(answers, done), as_json)


def fault_words(kind: str, direction: str, after_bytes: int, for_ms: int) -> str:
    """What was asked for, as it was understood: "slow=100mbit, tx only, for 30s"."""
    parts = [kind] if direction == "both" else [kind, f"{direction} only"]
    if after_bytes:
        parts.append(f"after {show_bytes(after_bytes)} more")
    parts.append(f"for {show_span(for_ms / 1000)}" if for_ms else "until recover-nic")
    return ", ".join(parts)


@click.command("fail-nic")
@nic_argument
@target_options
@click.option(
    "--kind",
    default="blackhole",
    show_default=True,
    metavar=KINDS,
    help=KINDS_HELP,
)
@click.option(
    "--direction",
    type=click.Choice(["tx", "rx", "both"]),
    default="both",
    show_default=True,
    help="What the NIC sends, what it receives, or both.",
)
@click.option("--after", metavar="BYTES", help="Only when that many more bytes have passed.")
@click.option(
    "--for",
    "duration",
    metavar="DURATION",
    help="Recover by itself after that time. Default: until recover-nic.",
)
@json_option
def fail_nic(
    nic: str,
    wanted: Selection,
    timeout: float,
    kind: str,
    direction: str,
    after: str | None,
    duration: str | None,
    as_json: bool,
) -> None:
    """Take NIC away from running processes.

    NIC is a name, an interface or an address that `r2ccl-ctl nics` shows. The processes are not
    told: they find out as they would with a real failure, and the journal shows how. Without
    --pid, --job or --all it means your only job on this machine.

    \b
    Example:
      r2ccl-ctl fail-nic eth1
      r2ccl-ctl fail-nic 127.0.2.1 --kind slow=100mbit --for 30s --job 4711
    """
    fault, rate, loss_ppm = of_option("--kind", parse_kind, kind)
    after_bytes = 0 if after is None else of_option("--after", parse_size, after)
    for_ms = 0 if duration is None else of_option("--for", parse_for, duration)
    answers = ask(
        wanted,
        nic,
        timeout,
        lambda name: Command(
            "fail-nic",
            nic=name,
            fault=fault,
            direction=direction,
            rate=rate,
            loss_ppm=loss_ppm,
            after_bytes=after_bytes,
            for_ms=for_ms,
        ),
    )
    what = fault_words(kind, direction, after_bytes, for_ms)
    said = answered(answers, "has the fault")
    show_said(
        [replace(one, shown=f"{one.shown} ({what})" if one.ok else "") for one in said], as_json
    )


@click.command("recover-nic")
@nic_argument
@target_options
@json_option
def recover_nic(
    nic: str,
    wanted: Selection,
    timeout: float,
    as_json: bool,
) -> None:
    """Give NIC back to running processes.

    Ends every fault that fail-nic has put on it, and forgets its past failures (flap damping). The
    processes probe it and take it into use by themselves, within about a second.

    \b
    Example:
      r2ccl-ctl recover-nic eth1
    """
    answers = ask(
        wanted,
        nic,
        timeout,
        lambda name: Command("recover-nic", nic=name),
    )
    said = answered(answers, "has no fault any more")
    show_said([replace(one, shown=one.shown + _drained(one)) for one in said], as_json)


def _drained(one: Said) -> str:
    """What recover-nic does not undo."""
    left = one.ok and drain.is_drained(one.process, one.more["nic"])
    return "; it stays drained until undrain-nic" if left else ""
