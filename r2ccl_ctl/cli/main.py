"""The entry point: `r2ccl-ctl`."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from r2ccl_ctl import __version__
from r2ccl_ctl.cli.common import (
    Failure,
    R2Group,
    drop_output,
    prepare_streams,
    print_json,
    refusal,
)
from r2ccl_ctl.errors import plain
from r2ccl_ctl.interrupts import ends_without_a_word


class Later(click.Command):
    """A command that is loaded when it is asked for. `summary` is the first sentence of its help,
    which lists show; `function` its name in `module` where that is not the command's own."""

    def __init__(self, name: str, module: str, summary: str, function: str = "") -> None:
        super().__init__(name, help=summary)
        self.module = f"r2ccl_ctl.cli.{module}"
        self.function = function or name.replace("-", "_")

    def load(self) -> click.Command:
        with ends_without_a_word():
            found = getattr(importlib.import_module(self.module), self.function)
        assert isinstance(found, click.Command)
        return found


SECTIONS = (
    (
        "Start",
        (
            Later("build", "setup_cmds", "Build the native parts of a checkout (`make native`)."),
            Later("run", "setup_cmds", "Run CMD with everything set that makes NCCL use R2CCL."),
            Later(
                "env",
                "setup_cmds",
                "Print what `run` would set, for a shell or a job script.",
                function="env_",
            ),
            Later(
                "launch",
                "launch_cmds",
                "Start ranks of CMD on this machine, or in the nodes of a lab.",
            ),
        ),
    ),
    (
        "Look",
        (
            Later(
                "doctor",
                "doctor_cmds",
                "Check hosts before a job: NICs, kernel settings, limits, NCCL, variables.",
            ),
            Later(
                "topo",
                "topo_cmds",
                "Show GPUs and NICs of this host, and which NICs serve each GPU.",
            ),
            Later("ps", "read_cmds", "List the processes that use R2CCL, or their communicators."),
            Later(
                "status",
                "read_cmds",
                "Show NICs, peers, paths and counters of running processes.",
            ),
            Later("top", "top_cmds", "Show jobs on one screen, the worst first, until Ctrl-C."),
            Later(
                "nics",
                "read_cmds",
                "List the NICs: state, weight, rates, injected faults, verdicts.",
            ),
            Later(
                "journal",
                "read_cmds",
                "Show what happened, when, and why: failures, replays, recoveries.",
            ),
            Later(
                "trace",
                "trace_cmds",
                "Write a trace of all ranks, for Perfetto or Chrome.",
            ),
            Later(
                "collectives",
                "collective_cmds",
                "See how long collectives take, and start or stop recording it.",
            ),
            Later("metrics", "metrics_cmds", "Print metrics for Prometheus, or serve them."),
        ),
    ),
    (
        "Steer",
        (
            Later(
                "drain-nic",
                "drain_cmds",
                "Move the traffic of running processes off NIC, losslessly.",
            ),
            Later(
                "undrain-nic", "drain_cmds", "Let running processes use NIC again after drain-nic."
            ),
            Later(
                "set-weight",
                "drain_cmds",
                "Limit the share of NIC in the traffic of running processes.",
            ),
            Later("fail-nic", "act_cmds", "Take NIC away from running processes."),
            Later("recover-nic", "act_cmds", "Give NIC back to running processes."),
            Later("faults", "fault_cmds", "Apply faults from a file of rules."),
            Later(
                "plan", "plan_cmds", "See, predict and steer what AllReduce runs as (R2CCL_PLAN)."
            ),
        ),
    ),
    (
        "Try out",
        (
            Later(
                "demo",
                "demo_cmds",
                "Take NICs away under a running AllReduce, and give them back.",
            ),
            Later(
                "validate",
                "validate_cmds",
                "Prove on your own nodes that NIC failures lose nothing and cost little.",
            ),
            Later(
                "simulate",
                "simulate_cmds",
                "Simulate AllReduce on large clusters that have lost NICs.",
            ),
            Later("lab", "lab_cmds", "Emulate nodes and NICs on this machine, and break links."),
        ),
    ),
    (
        "Tools",
        (
            Later("config", "config_cmds", "List, explain and check settings."),
            Later(
                "shim",
                "shim_cmds",
                "The LD_PRELOAD shim: where it is, what it reaches, one for a newer NCCL.",
            ),
            Later("gc", "setup_cmds", "Remove what processes that are gone left behind."),
            Later("completion", "setup_cmds", "Print the completion script for a shell."),
        ),
    ),
)


# What they say is all they do, or is said when it is done: nobody needs to know that a reader, such
# as head(1), left before the end. Of the others it may be what was left undone.
ONLY_SAY = {
    command.name
    for title, commands in SECTIONS
    if title in ("Look", "Tools")
    for command in commands
}


class Main(R2Group):
    """Lists the commands by purpose, and loads the one that is asked for."""

    _words: Sequence[str] = ()

    def main(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        prepare_streams()
        self._words = list(sys.argv[1:] if args is None else args)
        return super().main(args, *more, **kwargs)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """--help and --version write before there is a context to run in."""
        if os.environ.get("NO_COLOR"):  # rich honours it by itself, click does not
            extra["color"] = False
        try:
            return super().make_context(info_name, args, parent, **extra)
        except OSError as err:
            if err.errno == errno.EPIPE:
                drop_output()
                raise click.exceptions.Exit(0) from err
            raise Failure(refusal(err)) from err

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as raised:
            vars(raised)["message"] = plain(raised.message, keep="\n")
            err = with_hint(raised, self._words)
            if asks_for_json(self, self._words):
                from r2ccl_ctl.control import SCHEMA

                error = {"error": err.format_message(), "exit_code": err.exit_code}
                try:
                    print_json({"schema": SCHEMA, **error}, line=True)
                except OSError:  # the error is said on stderr all the same
                    drop_output()
            raise err from raised.__cause__
        except OSError as gone:  # R2Group lets only EPIPE through: the reader has seen enough
            drop_output()
            raise click.exceptions.Exit(0 if ctx.invoked_subcommand in ONLY_SAY else 1) from gone

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if isinstance(found, Later):
            found = self.commands[cmd_name] = found.load()
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As a group does it, without loading the commands for their first sentences."""
        found = [
            CompletionItem(name, help=command.get_short_help_str())
            for name, command in self.commands.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS:
            with formatter.section(title):
                formatter.write_dl(
                    [(command.name or "", command.get_short_help_str(80)) for command in commands]
                )


def with_hint(err: click.ClickException, words: Sequence[str]) -> click.ClickException:
    """The error, with what helps where a number below 0 was taken for an option: of -50, click
    names -5."""
    if not isinstance(err, click.NoSuchOption) or not err.option_name[1:2].isdigit():
        return err
    value = next((word for word in words if word.startswith(err.option_name)), err.option_name)
    hint = f"if it is meant as a value, put -- before it: `-- {value}`"
    return click.UsageError(f"No such option '{value}': {hint}", err.ctx)


def asks_for_json(command: click.Command, words: Sequence[str]) -> bool:
    """--json stands among the words of a command that has it."""
    if "--json" not in words:  # the usual error loads no command to be told so
        return False
    rest = list(words)
    while isinstance(command, click.Group):
        at = next((i for i, word in enumerate(rest) if word in command.commands), None)
        found = None if at is None else command.get_command(click.Context(command), rest[at])
        if at is None or found is None:
            return False
        rest, command = rest[at + 1 :], found
    rest = rest[: rest.index("--")] if "--" in rest else rest
    return "--json" in rest and any("--json" in option.opts for option in command.params)


@click.group(cls=Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="r2ccl-ctl")
def main() -> None:
    """See and steer jobs that run NCCL over R2CCL.

    \b
    Example:
      r2ccl-ctl run -- torchrun --nproc-per-node 8 train.py
      r2ccl-ctl status --watch
    """


for _title, _commands in SECTIONS:
    for _command in _commands:
        main.add_command(_command)
