"""The entry point: `r2ccl-ctl`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from r2ccl_ctl import __version__
from r2ccl_ctl.cli.act_cmds import fail_nic, recover_nic
from r2ccl_ctl.cli.common import R2Group, drop_output, prepare_streams, print_json
from r2ccl_ctl.cli.demo_cmds import demo
from r2ccl_ctl.cli.drain_cmds import drain_nic, set_weight, undrain_nic
from r2ccl_ctl.cli.fault_cmds import faults
from r2ccl_ctl.cli.lab_cmds import lab
from r2ccl_ctl.cli.launch_cmds import launch
from r2ccl_ctl.cli.metrics_cmds import metrics
from r2ccl_ctl.cli.plan_cmds import plan
from r2ccl_ctl.cli.read_cmds import journal, nics, ps, status
from r2ccl_ctl.cli.setup_cmds import build, completion, config, env_, gc, run
from r2ccl_ctl.cli.shim_cmds import shim
from r2ccl_ctl.control import SCHEMA

SECTIONS = (
    ("Start", (build, run, env_, launch)),
    ("Look", (ps, status, nics, journal, metrics)),
    ("Steer", (drain_nic, undrain_nic, set_weight, fail_nic, recover_nic, faults, plan)),
    ("Try out", (demo, lab)),
    ("Tools", (config, shim, gc, completion)),
)


class Main(R2Group):
    """Lists the commands by purpose."""

    _words: Sequence[str] = ()

    def main(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:
        prepare_streams()
        self._words = list(sys.argv[1:] if args is None else args)
        return super().main(args, *more, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as err:
            if asks_for_json(self, self._words):
                error = {"error": err.format_message(), "exit_code": err.exit_code}
                try:
                    print_json({"schema": SCHEMA, **error}, line=True)
                except OSError:  # the error is said on stderr all the same
                    drop_output()
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS:
            with formatter.section(title):
                formatter.write_dl(
                    [(command.name or "", command.get_short_help_str(80)) for command in commands]
                )


def asks_for_json(command: click.Command, words: Sequence[str]) -> bool:
    """--json stands among the words of a command that has it."""
    rest = list(words)
    while isinstance(command, click.Group):
        named = [
            (i, command.commands[word]) for i, word in enumerate(rest) if word in command.commands
        ]
        if not named:
            return False
        rest, command = rest[named[0][0] + 1 :], named[0][1]
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
