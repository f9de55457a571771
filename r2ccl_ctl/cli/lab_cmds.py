"""`r2ccl-ctl lab ...`: thin commands over r2ccl_ctl.lab."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from r2ccl_ctl.cli.common import Number, json_option
from r2ccl_ctl.lab import (
    DEFAULT_NAME,
    DIRECTIONS,
    VARIANTS,
    Lab,
    LabError,
    LabSpec,
    LabUsageError,
    known_labs,
    known_nics,
    nsexec,
    parse_counts,
    parse_rates,
    remove,
    userns,
)
from r2ccl_ctl.units import show_bytes

F = TypeVar("F", bound=Callable[..., Any])
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")


class LabFailure(click.ClickException):
    """A LabError as click prints it."""


class LabUsageFailure(LabFailure):
    """A LabUsageError as click prints it."""

    exit_code = 2


def plain_errors(command: F) -> F:
    """Turn LabError into a message and an exit code."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except LabUsageError as err:
            raise LabUsageFailure(str(err)) from err
        except LabError as err:
            raise LabFailure(str(err)) from err

    return wrapper  # type: ignore[return-value]


def _fitting(words: Iterable[str], incomplete: str) -> list[str]:
    """Those that begin so; of what a damaged file says nothing that is more than a word."""
    return [word for word in words if word.startswith(incomplete) and _WORD.fullmatch(word)]


def complete_lab(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The labs that are remembered, for the shell."""
    try:
        return _fitting(known_labs(), incomplete)
    except OSError:
        return []


def _nics(ctx: click.Context) -> dict[str, list[str]]:
    """The NICs of each node of the lab that is meant, for the shell; none if it cannot be read."""
    try:
        return known_nics(ctx.params.get("name") or DEFAULT_NAME)
    except (LabError, OSError):
        return {}


def complete_node(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The lab's nodes but the one that is named already, for the shell."""
    named = ctx.params.get("node_a")
    return _fitting((node for node in _nics(ctx) if node != named), incomplete)


def complete_nic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The NICs that the node has, or both nodes have, for the shell."""
    there = _nics(ctx)
    named = [ctx.params[key] for key in ("node", "node_a", "node_b") if ctx.params.get(key)]
    first, *others = [there.get(node, []) for node in named] or [[]]
    return _fitting((nic for nic in first if all(nic in nics for nics in others)), incomplete)


name_option = click.option(
    "--name",
    default=DEFAULT_NAME,
    show_default=True,
    envvar="R2CCL_LAB",
    metavar="LAB",
    shell_complete=complete_lab,
    help="Which lab; several may be up at once.",
)


def _load(name: str) -> Lab:
    userns.rerun(name)
    return Lab.load(name)


@click.group()
def lab() -> None:
    """Emulate nodes and NICs on this machine, and break links.

    Nodes n0, n1, ... are network namespaces with their own host names. Their NICs are nic0, nic1,
    ..., each on its own rail (subnet). Needs root, or user namespaces.

    \b
    Example:
      r2ccl-ctl lab up --nodes 2 --nics 4 --rate 1gbit
      r2ccl-ctl lab exec n0 -- python3 train.py
      r2ccl-ctl lab fail-link n0 nic1
      r2ccl-ctl lab recover-link n0 nic1
      r2ccl-ctl lab down
    """


@lab.command()
@click.option("--nodes", default=2, show_default=True, help="How many nodes.")
@click.option(
    "--nics",
    default="2",
    show_default=True,
    metavar="M[,M...]",
    help="NICs of each node: one count for all, or one per node (4,2).",
)
@click.option(
    "--rate",
    default="none",
    show_default=True,
    metavar="RATE[,RATE...]",
    help="Rate of each NIC: 1gbit, 500mbit, none; one for all, or one per NIC.",
)
@click.option(
    "--variant",
    default="rail-only",
    show_default=True,
    type=click.Choice(VARIANTS),
    help="How the rails are connected.",
)
@click.option("--mtu", default=9000, show_default=True, help="MTU of every NIC, bytes.")
@click.option("--ipv6", is_flag=True, help="Give the NICs IPv6 addresses too.")
@name_option
@plain_errors
def up(nodes: int, nics: str, rate: str, variant: str, mtu: int, ipv6: bool, name: str) -> None:
    """Build a lab.

    \b
    Example:
      r2ccl-ctl lab up --nodes 2 --nics 2 --rate 1gbit,3gbit
    """
    spec = LabSpec(
        nodes=nodes,
        nics=parse_counts(nics),
        rates=parse_rates(rate),
        name=name,
        variant=variant,
        mtu=mtu,
        ipv6=ipv6,
    )
    userns.rerun_up(name)
    Lab.up(spec).close()
    click.echo(
        f"lab '{name}' is up: {nodes} nodes ({', '.join(spec.node_names()[:8])}"
        f"{', ...' if nodes > 8 else ''}), {spec.rails} rails, {variant}"
    )


@lab.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("node", shell_complete=complete_node)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@name_option
@plain_errors
def exec_(node: str, command: tuple[str, ...], name: str) -> None:
    """Run CMD inside NODE, in place of this process. Ends with its exit code; 127 if it is not
    found, 126 where it cannot be run.

    \b
    Example:
      r2ccl-ctl lab exec n0 -- cat /sys/class/net/nic0/carrier
    """
    with_lab = _load(name)
    argv = nsexec.argv_for(with_lab.plan(node), list(command))
    with_lab.close()
    os.execv(argv[0], argv)


@lab.command("fail-link")
@click.argument("node", shell_complete=complete_node)
@click.argument("nic", shell_complete=complete_nic)
@click.option("--silent", is_flag=True, help="Packets vanish, the carrier stays up.")
@click.option("--admin", is_flag=True, help="Set the node's own end down, as `ip link set` does.")
@click.option(
    "--loss",
    type=Number(min=0, max=100, min_open=True),
    metavar="PCT",
    help="Lose this share of packets at random.",
)
@click.option(
    "--direction",
    type=click.Choice(DIRECTIONS),
    default="both",
    show_default=True,
    help="For --silent and --loss: what the node sends, receives, or both.",
)
@name_option
@plain_errors
def fail_link(
    node: str, nic: str, silent: bool, admin: bool, loss: float | None, direction: str, name: str
) -> None:
    """Break NIC of NODE. By default the node sees its carrier go down.

    \b
    Example:
      r2ccl-ctl lab fail-link n0 nic1 --silent --direction rx
    """
    if silent + admin + (loss is not None) > 1:
        raise click.UsageError("--silent, --admin and --loss exclude each other: give one")
    quiet = silent or loss is not None
    if direction != "both" and not quiet:
        raise click.UsageError("--direction goes with --silent or --loss only")
    mode = "silent" if quiet else "admin" if admin else "carrier"
    it = _load(name)
    it.fail_link(node, nic, mode, direction=direction, loss=100.0 if loss is None else loss)
    it.close()
    what = {"carrier": "no carrier", "admin": "set down", "silent": "loses every packet"}[mode]
    if loss is not None:
        what = f"loses {loss:g} % of the packets"
    which = {"tx": " that it sends", "rx": " that it should receive", "both": ""}[direction]
    which_lab = "" if name == DEFAULT_NAME else f" --name {name}"
    undo = f"r2ccl-ctl lab recover-link {node} {nic}{which_lab}"
    click.echo(f"{node} {nic}: {what}{which}; `{undo}` undoes it")


@lab.command("recover-link")
@click.argument("node", required=False, shell_complete=complete_node)
@click.argument("nic", required=False, shell_complete=complete_nic)
@click.option("--all", "everything", is_flag=True, help="Every fault of the lab.")
@name_option
@plain_errors
def recover_link(node: str | None, nic: str | None, everything: bool, name: str) -> None:
    """Undo every fault of NIC of NODE.

    Faults are: down, silent, loss and cut pairs.

    \b
    Example:
      r2ccl-ctl lab recover-link n0 nic1
      r2ccl-ctl lab recover-link --all
    """
    if everything == (node is not None) or (node is None) != (nic is None):
        raise click.UsageError("give NODE and NIC, or --all")
    it = _load(name)
    if node is not None and nic is not None:
        it.recover_link(node, nic)
        click.echo(f"{node} {nic}: up")
    else:
        it.recover_all()
        click.echo("every link: up")
    it.close()


@lab.command("cut-pair")
@click.argument("node_a", shell_complete=complete_node)
@click.argument("node_b", shell_complete=complete_node)
@click.argument("nic", shell_complete=complete_nic)
@click.option("--undo", is_flag=True, help="Let them reach each other again.")
@name_option
@plain_errors
def cut_pair(node_a: str, node_b: str, nic: str, undo: bool, name: str) -> None:
    """Cut two nodes off from each other over NIC. Carriers stay up.

    \b
    Example:
      r2ccl-ctl lab cut-pair n0 n1 nic0
    """
    it = _load(name)
    it.cut_pair(node_a, node_b, nic, cut=not undo)
    it.close()
    click.echo(f"{node_a} - {node_b} over {nic}: {'joined' if undo else 'cut'}")


@lab.command()
@click.argument("node", shell_complete=complete_node)
@click.argument("nic", shell_complete=complete_nic)
@click.argument("rate")
@name_option
@plain_errors
def rate(node: str, nic: str, rate: str, name: str) -> None:
    """Shape NIC of NODE to RATE, in both directions.

    RATE `none` ends the shaping.

    \b
    Example:
      r2ccl-ctl lab rate n0 nic1 500mbit
    """
    it = _load(name)
    it.set_rate(node, nic, rate)
    it.close()
    click.echo(f"{node} {nic}: rate {rate}")


@lab.command()
@json_option
@name_option
@plain_errors
def status(as_json: bool, name: str) -> None:
    """Nodes, NICs, rates, links and faults.

    \b
    Example:
      r2ccl-ctl lab status --json
    """
    it = _load(name)
    found = it.status()
    it.close()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(
        f"lab {found['lab']}  {found['variant']}  mtu {found['mtu']}  since {found['created']}"
    )
    for line in table(found):
        click.echo(line)
    for cut in found["cut_pairs"]:
        click.echo(f"cut: {' - '.join(cut['nodes'])} over {cut['nic']}")
    others = [other for other in known_labs() if other != name]
    if others:
        click.echo(f"other labs: {', '.join(others)}")


def table(found: dict[str, Any]) -> list[str]:
    """The NICs of a status as aligned rows, a header first."""
    rows = [("NODE", "NIC", "ADDRESS", "RATE", "LINK", "FAULTS", "TX BYTES", "RX BYTES")]
    for node in found["nodes"]:
        for nic in node["nics"]:
            link = "up" if nic["carrier"] else "no carrier" if nic["admin_up"] else "down"
            rows.append(
                (
                    node["node"],
                    nic["nic"],
                    nic["address"],
                    nic["rate"],
                    link,
                    " ".join(nic["faults"]) or "-",
                    show_bytes(nic["tx_bytes"]),
                    show_bytes(nic["rx_bytes"]),
                )
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


@lab.command()
@name_option
@plain_errors
def down(name: str) -> None:
    """Remove a lab, and end what runs in its nodes.

    A lab that was left half built is removed, too.

    \b
    Example:
      r2ccl-ctl lab down
    """
    userns.rerun_down(name)
    ended = remove(name)
    if ended is None:
        click.echo(f"no lab '{name}': nothing to take down")
        return
    more = f", {ended} process{'' if ended == 1 else 'es'} ended" if ended else ""
    click.echo(f"lab '{name}' is gone{more}")
