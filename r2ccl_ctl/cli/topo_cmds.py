"""topo: GPUs and NICs of this host."""

from __future__ import annotations

import itertools
from pathlib import Path

import click

from r2ccl_ctl import gpus as cards
from r2ccl_ctl import hostnics, topo_svg
from r2ccl_ctl import topo as topology
from r2ccl_ctl.cli.common import add_row, json_option, print_json, show, table
from r2ccl_ctl.cli.view import document, spill_rows
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.gpus import Gpu
from r2ccl_ctl.hostnics import HostNics
from r2ccl_ctl.topo import Service


@click.command()
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw the PCIe tree and the home NICs into this file.",
)
@json_option
def topo(svg: Path | None, as_json: bool) -> None:
    """Show GPUs and NICs of this host, and which NICs serve each GPU.

    First a matrix with the words of `nvidia-smi topo -m`. PIX: behind the same PCIe switch. PXB:
    behind several. PHB: at the same host bridge. NODE: in the same NUMA node. SYS: across. Then the
    PCIe tree. Then each GPU's home NIC, and the order in which others take over.

    NCCL chooses the home NIC itself. Where several are equally near, its choice may be another one.
    The NICs are those that a job would use; `r2ccl-ctl doctor` says why others are left out.

    \b
    Example:
      r2ccl-ctl topo
      r2ccl-ctl topo --svg topology.svg
    """
    if svg and as_json:
        raise R2UsageError("--svg draws a picture: give it without --json")
    nics = hostnics.load()
    found = cards.list_gpus()
    if found is None:
        click.echo("warning: the NVIDIA driver does not answer: no GPUs shown", err=True)
    if nics.error:
        click.echo(f"warning: {nics.error}", err=True)
    if svg:
        svg.write_text(topo_svg.picture(found or [], nics.nics), encoding="utf-8")
        click.echo(f"{svg} has the picture", err=True)
    elif as_json:
        served = topology.services(found or [], nics.nics)
        rows = [{**vars(nic), "spill_order": hostnics.spill_names(nics.nics, home)}
                for home, nic in enumerate(nics.nics)]  # fmt: skip
        ways = [
            {"gpu": one.gpu.index, "nic": nic.name, "distance": way}
            for one in served
            for nic, way in zip(nics.nics, one.ways, strict=True)
        ]
        gpus = [one.as_dict() for one in served]
        print_json({**document("nics", rows), "gpus": gpus, "distances": ways})
    else:
        _show(found or [], nics)


def _show(gpus: list[Gpu], nics: HostNics) -> None:
    served = topology.services(gpus, nics.nics)
    if served:
        matrix = table("", *(nic.name for nic in nics.nics), "NUMA")
        for one in served:
            add_row(matrix, f"GPU {one.gpu.index}", *one.ways, _numa(one.gpu.numa))
        show(matrix)
        click.echo()
    click.echo("\n".join(topology.tree(gpus, nics.nics)))
    click.echo()
    if served:
        homes = table("GPU", "HOME NIC", "WHY", "THEN")
        for one in served:
            add_row(homes, one.gpu.index, one.home.name, one.why, _then(one) or "-")
        show(homes)
        return
    click.echo("no GPU is known here (NVML)", err=True)
    order = table("HOME NIC", *(f"THEN {word.upper()}" for word in hostnics.NEARNESS))
    for row in spill_rows(nics.nics):
        add_row(order, *row)
    show(order)


def _then(service: Service) -> str:
    """The NICs that take over, each distance once."""
    near = itertools.groupby(service.order, key=lambda one: one[1])
    return "; ".join(f"{word}: {', '.join(nic.name for nic, _ in some)}" for word, some in near)


def _numa(number: int | None) -> str:
    return "-" if number is None else str(number)
