"""`r2ccl-ctl shim`: thin commands over r2ccl_ctl.shim."""

from __future__ import annotations

from pathlib import Path

import click

from r2ccl_ctl import paths
from r2ccl_ctl import shim as shims
from r2ccl_ctl.cli.common import R2Group, WholeNumber, json_option, print_json
from r2ccl_ctl.errors import R2UsageError

NCCL = click.option(
    "--nccl",
    "nccl",
    required=True,
    type=click.Path(path_type=Path),
    help="The real libnccl.so.2.",
)


@click.group(cls=R2Group)
def shim() -> None:
    """The LD_PRELOAD shim: where it is, what it reaches, one for a newer NCCL.

    \b
    Example:
      r2ccl-ctl shim check --pid 4242
    """


@shim.command("path")
@click.option("--named", is_flag=True, help="The one with NCCL's own name, libnccl.so.2.")
def path_(named: bool) -> None:
    """Print the path of libr2ccl.so.

    \b
    Example:
      LD_PRELOAD=$(r2ccl-ctl shim path) python train.py
      VLLM_NCCL_SO_PATH=$(r2ccl-ctl shim path --named) vllm serve MODEL
    """
    click.echo(paths.named_shim_path() if named else paths.shim_path())


@shim.command()
@NCCL
@json_option
def lacks(nccl: Path, as_json: bool) -> None:
    """List the functions of an NCCL that R2CCL's library lacks.

    R2CCL's library with NCCL's name does not pass these on.

    \b
    Example:
      r2ccl-ctl shim lacks --nccl /usr/lib/x86_64-linux-gnu/libnccl.so.2
    """
    found = shims.lacking(nccl)
    if as_json:
        print_json({"schema": 1, "nccl": str(nccl), "lacks": found})
    elif found:
        click.echo("\n".join(found))
    else:
        click.echo("nothing: it passes on every function of this NCCL", err=True)


@shim.command("build")
@NCCL
@click.option(
    "--output",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    help="Where to write it; name it libnccl.so.2. The folder must be there.",
)
def build_(nccl: Path, output: Path) -> None:
    """Make a library with NCCL's name for a newer NCCL.

    It has every function of that NCCL. Those that the shim does not know are passed on as they are.
    Needs a C compiler. Keep libnccl-net-r2ccl.so beside it or in one of the two folders above.

    \b
    Example:
      r2ccl-ctl shim build --nccl /opt/nccl/lib/libnccl.so.2 -o ./libnccl.so.2
    """
    if output.exists() and nccl.exists() and output.samefile(nccl):
        raise R2UsageError(f"--output '{output}' is the NCCL itself")
    added = shims.build(nccl, output)
    click.echo(
        f"{output}: {len(added)} functions added" + (f": {', '.join(added)}" if added else "")
    )


@shim.command()
@click.option("--pid", required=True, type=WholeNumber(min=1), help="A running process.")
@json_option
def check(pid: int, as_json: bool) -> None:
    """Say how a process reaches NCCL, and whether R2CCL is on the way.

    Finds an NCCL that was linked statically, which the shim cannot reach, and says what to do.

    \b
    Example:
      r2ccl-ctl shim check --pid 4242
    """
    found = shims.reach(pid)
    if as_json:
        print_json({"schema": 1, **vars(found), "verdict": found.verdict()})
    else:
        click.echo(found.verdict())
