"""The man pages: one for each command, and man's own formatter finds nothing wrong in them.

No rung: text only."""

from __future__ import annotations

import shutil
import subprocess

import click
import pytest

from r2ccl_ctl.cli import man
from r2ccl_ctl.cli.docs import walk
from r2ccl_ctl.cli.main import main


def test_every_command_and_option_has_its_place() -> None:
    pages = man.pages(main)
    for name, command in walk(main, "r2ccl-ctl"):
        text = pages[f"{name.replace(' ', '-')}.1"]
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert man.literal(param.opts[0]) in text, (name, param.opts)
        assert f"\\fB{man.literal(name.replace(' ', '-'))}\\fR(1)" in pages["r2ccl-ctl.1"]


def test_a_line_is_never_a_request() -> None:
    assert man.plain(".SH x\n'y\na-b\\c") == ["\\&.SH x", "\\&'y", "a\\-b\\ec"]


def test_groff_takes_them() -> None:
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("no `groff` in PATH (package groff-base)")
    done = subprocess.run(
        [groff, "-man", "-Tascii", "-ww"],
        input="".join(man.pages(main).values()),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("(1)\n") >= len(man.pages(main))
