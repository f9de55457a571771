"""`r2ccl-ctl launch`: a thin command over r2ccl_ctl.launch."""

from __future__ import annotations

import sys

import click

from r2ccl_ctl import launch as launching
from r2ccl_ctl.cli.common import Number, WholeNumber, not_empty
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.lab import DEFAULT_NAME, userns


class Failure(click.ClickException):
    """An error of ours as click prints it, with its own exit code."""


class UsageFailure(Failure):
    exit_code = 2


@click.command(context_settings={"ignore_unknown_options": False})
@click.option(
    "-n",
    "--ranks",
    type=WholeNumber(min=1),
    metavar="N",
    help="How many ranks. Default: --per-node (or 1) on every node.",
)
@click.option(
    "--lab",
    is_flag=False,
    flag_value=DEFAULT_NAME,
    default=None,
    metavar="[NAME]",
    help="Run in the nodes of a lab (default name: r2lab) instead of on this machine.",
)
@click.option(
    "--per-node",
    type=WholeNumber(min=1),
    metavar="P",
    help="Ranks of each node. Default: spread evenly.",
)
@click.option(
    "--emulate-nodes",
    default=1,
    show_default=True,
    metavar="K",
    help="Without a lab: pretend K nodes on loopback, each with a rank at least.",
)
@click.option(
    "--nics",
    "--nics-per-node",
    default=0,
    metavar="M",
    help="Without a lab: M loopback NICs per node (127.0.1.1, 127.0.2.1, ...), 16 at most.",
)
@click.option(
    "--nccl",
    default="auto",
    show_default=True,
    metavar="WHICH",
    help="standin, system, auto (stand-in where no GPU is), or path of a libnccl.so.2.",
)
@click.option(
    "--plugin",
    default="",
    metavar="PATH",
    help="Another net plugin than the built one; none for NCCL's own transports.",
)
@click.option(
    "--env",
    "env",
    multiple=True,
    metavar="K=V",
    help="Set a variable for every rank, over everything else; repeatable.",
)
@click.option(
    "--timeout",
    type=Number(min=0, min_open=True),
    metavar="S",
    help="End the job after S seconds, with exit code 124.",
)
@click.option(
    "--grace",
    default=5.0,
    show_default=True,
    type=Number(min=0),
    metavar="S",
    help="When a rank fails the others get S seconds before SIGTERM.",
)
@click.option(
    "--job",
    default="",
    callback=not_empty,
    metavar="ID",
    help="Job id, of at most 63 bytes; default: R2CCL_JOB, else a random one.",
)
@click.option("--no-prefix", is_flag=True, help="Do not put [rank] before every line.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(
    ranks: int | None,
    lab: str | None,
    per_node: int | None,
    emulate_nodes: int,
    nics: int,
    nccl: str,
    plugin: str,
    env: tuple[str, ...],
    timeout: float | None,
    grace: float,
    job: str,
    no_prefix: bool,
    command: tuple[str, ...],
) -> None:
    """Start ranks of CMD on this machine, or in the nodes of a lab.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun
    does, R2CCL_RANK, R2CCL_NRANKS, R2CCL_RENDEZVOUS, R2CCL_RENDEZVOUS_TOKEN and R2CCL_JOB, and
    what NCCL needs to use the plugin. The exit code is that of the first rank that failed.

    \b
    Example:
      r2ccl-ctl launch -n 4 --emulate-nodes 2 --nics 4 -- r2ccl_perf --op all_reduce -b 1M -e 64M
      r2ccl-ctl launch --lab --per-node 2 -- python3 train.py
    """
    if lab is not None and (emulate_nodes != 1 or nics):
        raise click.UsageError("--emulate-nodes and --nics are for runs without --lab")
    try:
        if lab is not None:
            userns.rerun(lab)
        spec = launching.LaunchSpec(
            argv=command,
            ranks=ranks or 0,
            lab=lab,
            per_node=per_node or 0,
            emulate_nodes=emulate_nodes,
            nics=nics,
            nccl=nccl,
            plugin=plugin,
            env=launching.parse_env(env),
            job=job,
            grace=grace,
            timeout=timeout,
            prefix=not no_prefix,
        )
        code = launching.run(spec)
    except R2UsageError as err:
        raise UsageFailure(str(err)) from err
    except R2Error as err:
        raise Failure(str(err)) from err
    sys.exit(code)
