"""Commands for planned work on NICs: drain-nic, undrain-nic, set-weight."""

from __future__ import annotations

import click

from r2ccl_ctl import drain
from r2ccl_ctl.cli.act_cmds import (
    Said,
    ask,
    nic_argument,
    show_answers,
    show_said,
)
from r2ccl_ctl.cli.common import WholeNumber, json_option, of_option, only_with, target_options
from r2ccl_ctl.control import Answer, Command, Selection
from r2ccl_ctl.units import parse_duration


@click.command("drain-nic")
@nic_argument
@target_options
@click.option("--wait", is_flag=True, help="Wait until nothing is on NIC: then it is safe to pull.")
@click.option(
    "--wait-timeout",
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="How long --wait waits.",
)
@click.option("--force", is_flag=True, help="Drain the last usable NIC as well; the job stalls.")
@json_option
def drain_nic(
    nic: str,
    wanted: Selection,
    timeout: float,
    wait: bool,
    wait_timeout: str,
    force: bool,
    as_json: bool,
) -> None:
    """Move the traffic of running processes off NIC, losslessly.

    NIC takes nothing new, here and at the peers. When all bytes under way are acknowledged, its
    paths close. With --wait, exit code 0 means that no job has traffic on NIC any more: pull the
    cable. It stays out of use until undrain-nic.

    \b
    Example:
      r2ccl-ctl drain-nic eth1 --wait --job 4711
    """
    patience = of_option("--wait-timeout", parse_duration, wait_timeout)
    only_with("--wait-timeout", "--wait", wait)
    answers = ask(
        wanted,
        nic,
        timeout,
        lambda name: Command("drain-nic", nic=name, force=force),
    )
    if not wait or not all(answer.ok for _, answer in answers):
        show_answers(answers, as_json, "is being drained")
        return
    found = drain.wait([(answer.process, name) for name, answer in answers], patience)
    show_said([_said(one, nic) for one in found], as_json)


def _said(one: drain.Drained, nic: str) -> Said:
    shown = one.text
    if not one.done and one.paths:
        shown += f" ({one.paths} paths); it goes on: wait again"
    return Said(one.process, one.done, one.text, shown, {"nic": nic, "paths": one.paths})


@click.command("undrain-nic")
@nic_argument
@target_options
@json_option
def undrain_nic(
    nic: str,
    wanted: Selection,
    timeout: float,
    as_json: bool,
) -> None:
    """Let running processes use NIC again after drain-nic.

    Test chunks have to arrive on it first, then its share grows. Its past failures are forgotten
    (flap damping), so this also takes a damped NIC back at once.

    \b
    Example:
      r2ccl-ctl undrain-nic eth1
    """
    answers = ask(
        wanted,
        nic,
        timeout,
        lambda name: Command("undrain-nic", nic=name),
    )
    show_answers(answers, as_json, "may be used again")


@click.command("set-weight")
@nic_argument
@click.argument("weight", type=WholeNumber(0, 100), metavar="WEIGHT")
@target_options
@json_option
def set_weight(
    nic: str,
    weight: int,
    wanted: Selection,
    timeout: float,
    as_json: bool,
) -> None:
    """Limit the share of NIC in the traffic of running processes.

    WEIGHT is a percentage: 100 lets NIC carry what it can, 50 at most half as much as a NIC of 100
    beside it. With 0 it is a warm spare: its paths are open and watched, and carry data only when
    no other NIC can.

    \b
    Example:
      r2ccl-ctl set-weight eth3 0
    """
    answers: list[tuple[str, Answer]] = ask(
        wanted,
        nic,
        timeout,
        lambda name: Command("set-weight", nic=name, weight=weight),
    )
    show_answers(answers, as_json, f"has weight {weight}")
