"""Commands around a job: build, run, env, gc, completion."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from r2ccl_ctl import env as environment
from r2ccl_ctl import gc as sweeping
from r2ccl_ctl import nodeseg, paths, settings_view
from r2ccl_ctl.cli.common import (
    F,
    Failure,
    json_option,
    not_empty,
    of_option,
    print_json,
)
from r2ccl_ctl.cli.view import document, process_dict
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.units import parse_duration, show_bytes, show_span


class NotFound(Failure):
    """A program that is not there, as shells and env(1) say it."""

    exit_code = 127


class NotRunnable(Failure):
    """One that is there."""

    exit_code = 126


@click.command()
def build() -> None:
    """Build the native parts of a checkout (`make native`).

    \b
    Example:
      r2ccl-ctl build
    """
    root = paths.checkout()
    if root is None:
        click.echo(f"already built: this installation has its native parts in {paths.native_dir()}")
        paths.plugin_path()
        return
    if shutil.which("make") is None:
        raise R2Error("make not found: install make and gcc, then try again")
    code = subprocess.run(["make", "-C", str(root), "native"], check=False).returncode
    if code:
        raise R2Error(f"make native ended with code {code}; its messages are above")


def environment_options(command: F) -> F:
    for option in (
        click.option(
            "--nics", metavar="LIST", default="", callback=not_empty, help="Sets R2CCL_NICS."
        ),
        click.option(
            "--by-name",
            is_flag=True,
            help="Name the plugin instead of its path: for NCCL up to 2.20.",
        ),
        click.option(
            "--nccl",
            type=click.Choice(environment.NCCL_CHOICES),
            default="system",
            show_default=True,
            help="standin: also put the CPU stand-in for NCCL in the library path.",
        ),
        click.option(
            "--preload",
            is_flag=True,
            help="Also preload the shim, libr2ccl.so: `ps --comms` then shows communicators.",
        ),
        click.option(
            "--job",
            metavar="JOB",
            default="",
            callback=not_empty,
            help="Name of the job (R2CCL_JOB), of at most 63 bytes.",
        ),
    ):
        command = option(command)
    return command


@click.command(context_settings={"ignore_unknown_options": True})
@environment_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    job: str, preload: bool, nccl: str, by_name: bool, nics: str, command: tuple[str, ...]
) -> None:
    """Run CMD with everything set that makes NCCL use R2CCL. Ends with its exit code; 127 if it is
    not found, 126 where it cannot be run.

    \b
    Example:
      r2ccl-ctl run -- torchrun --nproc-per-node 8 train.py
    """
    job = job or environment.default_job(os.environ, command)
    added = environment.application_env(
        os.environ, nccl=nccl, by_name=by_name, job=job, nics=nics, preload=preload
    )
    warn(added)
    sys.stdout.flush()
    if not command[0]:
        raise R2UsageError("the command is empty: give the program's name after --")
    restore_signals()
    try:
        os.execvpe(command[0], list(command), {**os.environ, **added})
    except OSError as err:
        missing = isinstance(err, (FileNotFoundError, NotADirectoryError))
        if missing and not ("/" in command[0] and os.path.exists(command[0])):
            raise NotFound(f"'{command[0]}': no such program") from err
        why = "its interpreter is missing" if missing else err.strerror
        raise NotRunnable(f"'{command[0]}' cannot be run: {why}") from err


def warn(added: Mapping[str, str]) -> None:
    """Say what keeps a program with `added` in its environment from using R2CCL as it was meant. It
    is started all the same: a bad setting has its default."""
    complaints = settings_view.complaints(added)  # before the settings are read for anything else
    for warning in environment.warnings(os.environ) + complaints:
        click.echo(f"warning: {warning}", err=True)


def restore_signals() -> None:
    """Python ignores these; a program that is run in its place must not."""
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


@click.command("env")
@environment_options
@json_option
def env_(job: str, preload: bool, nccl: str, by_name: bool, nics: str, as_json: bool) -> None:
    """Print what `run` would set, for a shell or a job script.

    \b
    Example:
      eval "$(r2ccl-ctl env)"
    """
    variables = environment.application_env(
        os.environ, nccl=nccl, by_name=by_name, job=job, nics=nics, preload=preload
    )
    warn(variables)
    if as_json:
        print_json({"schema": 1, "env": variables})
    else:
        click.echo("\n".join(environment.shell_lines(variables)))


@click.command()
@click.option(
    "--older-than",
    default="10min",
    show_default=True,
    metavar="DURATION",
    help="Spare those of processes that were alive more recently.",
)
@click.option(
    "--all", "everything", is_flag=True, help="However old, but for damaged ones of less than 60s."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@click.pass_context
def gc(ctx: click.Context, older_than: str, everything: bool, dry_run: bool, as_json: bool) -> None:
    """Remove what processes that are gone left behind.

    These are their control segments, with their journals, and node segments that no process uses.
    Those of running processes are never removed. Damaged ones are kept for 60s at least, since a
    segment that is being set up looks damaged; with --json `spared` counts them.

    \b
    Example:
      r2ccl-ctl gc --older-than 1h
    """
    if everything and ctx.get_parameter_source("older_than") is ParameterSource.COMMANDLINE:
        raise R2UsageError(f"--all and --older-than {older_than} exclude each other: give one")
    seconds = 0.0 if everything else of_option("--older-than", parse_duration, older_than)
    done = sweeping.sweep(seconds, dry_run=dry_run)
    swept = done.removed
    nodes = nodeseg.sweep(seconds, dry_run=dry_run)
    if as_json:
        rows = [
            {
                "segment": node.name,
                "node": node.host,
                "age_s": round(age, 1),
                "bytes": nodeseg.HEADER_SIZE + nodeseg.ROWS * nodeseg.ROW_SIZE,
                "error": error,
            }
            for node, age, error in nodes
        ] + [
            {
                **process_dict(item.process),
                "age_s": round(item.age_s, 1),
                "bytes": item.bytes,
                "error": item.error,
            }
            for item in swept
        ]
        print_json({**document("removed", rows), "spared": done.spared})
    else:
        for item in swept:
            click.echo(
                f"{item.process.name}: {item.process.state}, {show_span(item.age_s)} ago"
                + (f": {item.error}" if item.error else "")
            )
        for node, age, error in nodes:
            click.echo(
                f"{node.name}: unused, {show_span(age)} ago" + (f": {error}" if error else "")
            )
        size = sum(item.bytes for item in swept if not item.error)
        count = sum(not item.error for item in swept) + sum(not error for _, _, error in nodes)
        verb = "would be removed" if dry_run else "removed"
        least = show_span(sweeping.YOUNG_S)
        spared = f"; {done.spared} spared: damaged, of less than {least}" if done.spared else ""
        click.echo(f"{count} {verb}, {show_bytes(size)}{spared}", err=True)
    if any(item.error for item in swept) or any(error for _, _, error in nodes):
        sys.exit(1)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    Example:
      source <(r2ccl-ctl completion bash)
      r2ccl-ctl completion fish > ~/.config/fish/completions/r2ccl-ctl.fish
    """
    made = get_completion_class(shell)
    if made is None:
        raise R2UsageError(f"no completion for '{shell}'")
    root = ctx.find_root().command
    click.echo(made(root, {}, "r2ccl-ctl", "_R2CCL_CTL_COMPLETE").source())
