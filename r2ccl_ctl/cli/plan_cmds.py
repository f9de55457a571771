"""plan: what AllReduces run as, and the operator's word about it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from r2ccl_ctl.cli.act_cmds import Said, show_said, target_options
from r2ccl_ctl.cli.common import R2Group, json_option, say_left_out, selection, selection_options
from r2ccl_ctl.cli.read_cmds import show_comms
from r2ccl_ctl.control import Answer, Command, list_processes, select_targets, send_commands
from r2ccl_ctl.units import parse_duration


@click.group(cls=R2Group)
def plan() -> None:
    """See and steer the plans of running jobs (R2CCL_PLAN).

    \b
    Example:
      r2ccl-ctl plan show --job 4711
    """


@plan.command("show")
@selection_options
@json_option
def show_plans(pid: int | None, job: str | None, node: str | None, as_json: bool) -> None:
    """Show what the communicators of running processes run as.

    PLAN: the schedule; CAUSE: why it is that one, or why there is no plan.

    \b
    Example:
      r2ccl-ctl plan show --job 4711
    """
    wanted = selection(pid, job, node)
    found = [process for process in list_processes() if wanted.wants(process)]
    show_comms(found, wanted, as_json)
    say_left_out(wanted)
    stopped = [process.title for process in found if process.plan_stop]
    if stopped and not as_json:
        click.echo(f"plan off was said to: {', '.join(stopped)}", err=True)


def _say(
    on: bool,
    pid: int | None,
    job: str | None,
    node: str | None,
    everything: bool,
    timeout: str,
    as_json: bool,
) -> None:
    wanted = selection(pid, job, node, everything)
    processes = select_targets(wanted)
    say_left_out(wanted, processes)
    command = Command("plan", plan=on)
    answers = send_commands(
        [(process, command) for process in processes], timeout=parse_duration(timeout)
    )
    show_said([_said(answer, on) for answer in answers], as_json, enough=one_of_each_job)


def one_of_each_job(said: Sequence[Said]) -> bool:
    """A word that one process takes counts for all ranks of its communicators; others of the job,
    such as data loaders, follow none."""
    return {one.process.job for one in said if one.ok} == {one.process.job for one in said}


def _said(answer: Answer, on: bool) -> Said:
    """What comes of it: the process takes every such word, and may have no use for it."""
    process, ok, text = answer.process, answer.ok, answer.text
    if ok and process.plan in ("off", "shadow"):  # no plan to go back from: so it was meant
        ok, text = not on, f"started with R2CCL_PLAN={process.plan}: nothing changes"
    elif ok and not process.comms:
        ok = False
        text = (
            "no communicator is followed here (no shim, or none made yet): nothing changes; plan "
            f"{'on' if on else 'off'} holds for those that are made later with the shim"
        )
    return Said(process, ok, text, more={"code": answer.code})


@plan.command("off")
@target_options
@json_option
def plan_off(
    pid: int | None,
    job: str | None,
    node: str | None,
    everything: bool,
    timeout: str,
    as_json: bool,
) -> None:
    """Return to NCCL's own choice, at the next operation that the ranks agree on.

    One process of a communicator is enough: its word counts for all ranks, until plan on. Losing
    NICs is survived as before. Ends with 1 when no process of a job follows a communicator that
    could have a plan; where plans are off already, with 0.

    \b
    Example:
      r2ccl-ctl plan off --job 4711
    """
    _say(False, pid, job, node, everything, timeout, as_json)


@plan.command("on")
@target_options
@json_option
def plan_on(
    pid: int | None,
    job: str | None,
    node: str | None,
    everything: bool,
    timeout: str,
    as_json: bool,
) -> None:
    """Let plans be taken again after plan off.

    It needs processes that were started with R2CCL_PLAN=auto. Ends with 1 when no process of a job
    has a use for it.

    \b
    Example:
      r2ccl-ctl plan on --job 4711
    """
    _say(True, pid, job, node, everything, timeout, as_json)
