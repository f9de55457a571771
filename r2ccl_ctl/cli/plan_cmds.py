"""plan: what AllReduces run as, and the operator's word about it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from r2ccl_ctl import planner
from r2ccl_ctl.cli.act_cmds import Said, show_said
from r2ccl_ctl.cli.common import (
    R2Group,
    WholeNumber,
    add_row,
    count_option,
    json_option,
    of_option,
    print_json,
    say_left_out,
    selection_options,
    show,
    table,
    target_options,
)
from r2ccl_ctl.cli.read_cmds import show_comms
from r2ccl_ctl.control import (
    SCHEMA,
    Answer,
    Command,
    Process,
    Selection,
    list_processes,
    select,
    select_targets,
    send_commands,
)
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.units import (
    parse_rate,
    parse_size,
    rfc3339,
    show_bytes,
    show_rate,
)


class PlanGroup(R2Group):
    """`plan --nodes 4 ...` is `plan predict --nodes 4 ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("--") and args[0] != "--help":
            args = ["predict", *args]
        return super().parse_args(ctx, args)


@click.group(cls=PlanGroup)
def plan() -> None:
    """See, predict and steer what AllReduce runs as (R2CCL_PLAN).

    Options without a command are those of predict.

    \b
    Example:
      r2ccl-ctl plan show --job 4711
    """


def _lost(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:n|node)?(\d+):(?:nic)?(\d+)", text)
    if match is None:
        raise R2UsageError(f"--fail '{text}': give NODE:NIC, both from 0, such as 3:0")
    return int(match[1]), int(match[2])


_OF_NODES = ("nodes", "gpus", "nics", "rate", "failed")


@plan.command("predict")
@click.option("--nodes", type=WholeNumber(min=1), help="Nodes of the job.")
@count_option("--gpus", 1, "Ranks of each node.")
@count_option("--nics", 1, "NICs of each node.")
@click.option("--rate", metavar="RATE", help="Of each NIC, such as 100gbit.")
@click.option("--fail", "failed", multiple=True, metavar="NODE:NIC", help="A NIC that is lost.")
@click.option("--size", default="256M", show_default=True, help="Of one rank's data.")
@click.option(
    "--mode",
    type=click.Choice(list(planner.WISHES)),
    default="auto",
    show_default=True,
    help="As R2CCL_MODE.",
)
@click.option("--job", metavar="JOB", help="Take the nodes of this running job as they are.")
@json_option
def predict(
    nodes: int | None,
    gpus: int,
    nics: int,
    rate: str | None,
    failed: tuple[str, ...],
    size: str,
    mode: str,
    job: str | None,
    as_json: bool,
) -> None:
    """Print what AllReduce would run as, and the time it takes.

    This is the shim's own planner. Times are of the network, at the given rates. ring is NCCL's
    over all ranks, r2ccl-allreduce is by its authors' formula, and no schedule takes less than
    bound. direct also counts the cores that handle messages, and 200 GB/s within a node.

    \b
    Example:
      r2ccl-ctl plan predict --nodes 8 --nics 4 --rate 100gbit --fail 3:0 --size 256M
    """
    length, remark = of_option("--size", parse_size, size), ""
    if job is not None:
        given = click.get_current_context().get_parameter_source
        if any(given(name) is ParameterSource.COMMANDLINE for name in _OF_NODES):
            raise R2UsageError(
                "--job has its own nodes: leave out --nodes, --gpus, --nics, --rate and --fail"
            )
        found, gpus, remark = planner.of_job(select(Selection(job=job)))
    else:
        if nodes is None or rate is None:
            raise R2UsageError("give --nodes and --rate, or --job")
        lost = [_lost(text) for text in failed]
        found = planner.imagined(nodes, nics, of_option("--rate", parse_rate, rate), lost)
    answer = planner.predict(found, length, mode, gpus)
    if as_json:
        print_json(_as_dict(found, gpus, length, mode, answer, remark))
        return
    _show(found, length, answer, remark)


def _as_dict(
    nodes: Sequence[planner.Node],
    gpus: int,
    size: int,
    mode: str,
    answer: planner.Prediction,
    remark: str,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "time": rfc3339(time.time_ns()),
        "size": size,
        "gpus": gpus,
        "mode": mode,
        "chosen": answer.chosen,
        "why": answer.why,
        "remark": remark,
        "from_bytes": answer.from_bytes,
        "gain": round(answer.gain, 4),
        "bound_s": answer.bound,
        "stock_s": answer.times.get("stock"),
        "direct_s": answer.times.get("direct"),
        "r2ccl_allreduce_s": answer.times.get("r2ccl-allreduce"),
        "nodes": [
            {
                "node": node.name,
                "capacity": node.capacity,
                "share": round(node.share, 4),
                "weight": round(weight, 5) if answer.chosen == "direct" else None,
            }
            for node, weight in zip(nodes, answer.weights, strict=True)
        ],
    }


def _show(
    nodes: Sequence[planner.Node], size: int, answer: planner.Prediction, remark: str
) -> None:
    click.echo(answer.why)
    if answer.from_bytes:
        click.echo(f"holds from {show_bytes(answer.from_bytes)} on")
    found = table("SCHEDULE", f">{show_bytes(size)}", ">OF BOUND")
    rows = {"ring (stock)": answer.times.get("stock"), "direct": answer.times.get("direct")}
    rows |= {"r2ccl-allreduce": answer.times.get("r2ccl-allreduce"), "bound": answer.bound}
    for name, seconds in rows.items():
        told = seconds is not None and 0 < answer.bound < float("inf")
        add_row(
            found,
            name,
            "-" if seconds is None else f"{seconds * 1e3:.1f} ms",
            f"{seconds / answer.bound:.3f}" if told and seconds is not None else "-",
        )
    show(found)
    for node, weight in zip(nodes, answer.weights, strict=True):
        if node.share < 1:
            owns = f", owns {weight:.1%}" if answer.chosen == "direct" else ""
            click.echo(f"{node.name}: {node.share:.0%} of {show_rate(node.capacity)} left{owns}")
    if remark:
        click.echo(remark)


@plan.command("show")
@selection_options
@json_option
def show_plans(wanted: Selection, as_json: bool) -> None:
    """Show what the communicators of running processes run as.

    PLAN: the schedule; CAUSE: why it is that one, or why there is no plan.

    \b
    Example:
      r2ccl-ctl plan show --job 4711
    """
    found = [process for process in list_processes() if wanted.wants(process)]
    show_comms(found, wanted, as_json)
    say_left_out(wanted)
    for line in () if as_json else _why_none(found):
        click.echo(line, err=True)


def _why_none(found: Sequence[Process]) -> list[str]:
    """What no communicator's row can say."""
    reasons = {
        "plan off was said to": [p for p in found if p.plan_stop],
        "no plans, R2CCL_MODE or R2CCL_PLAN says off": [p for p in found if p.plan == "off"],
        "no communicator is followed (started without the shim, or none made yet)": [
            p for p in found if p.plan != "off" and not p.comms
        ],
    }
    return [
        f"{why}: {', '.join(process.title for process in who)}"
        for why, who in reasons.items()
        if who
    ]


def _say(
    on: bool,
    wanted: Selection,
    timeout: float,
    as_json: bool,
) -> None:
    processes = select_targets(wanted)
    say_left_out(wanted, processes)
    command = Command("plan", plan=on)
    answers = send_commands([(process, command) for process in processes], timeout=timeout)
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
    wanted: Selection,
    timeout: float,
    as_json: bool,
) -> None:
    """Return to NCCL's own choice.

    It begins at the next operation that the ranks agree on. It holds for R2CCL_ALLREDUCE=direct,
    too. One process of a communicator is enough: the command holds for all its ranks, until plan
    on. The job survives the loss of NICs as before. Ends with 1 when no process of a job has a
    communicator that could have a plan; with 0 if plans are off already.

    \b
    Example:
      r2ccl-ctl plan off --job 4711
    """
    _say(False, wanted, timeout, as_json)


@plan.command("on")
@target_options
@json_option
def plan_on(
    wanted: Selection,
    timeout: float,
    as_json: bool,
) -> None:
    """Allow plans again after plan off.

    It needs processes that were started with R2CCL_PLAN=auto or R2CCL_ALLREDUCE=direct. Ends with 1
    when no process of a job has a use for it.

    \b
    Example:
      r2ccl-ctl plan on --job 4711
    """
    _say(True, wanted, timeout, as_json)
