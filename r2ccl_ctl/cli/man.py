"""Man pages, made from the commands themselves: python -m r2ccl_ctl.cli.man FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from r2ccl_ctl import __version__
from r2ccl_ctl.cli.docs import argument, help_text, metavar, walk


def pages(main: click.Group) -> dict[str, str]:
    """File name -> text: one page for the tool, one for each command."""
    commands = [("r2ccl-ctl", main), *walk(main, "r2ccl-ctl")]
    return {f"{name.replace(' ', '-')}.1": page(name, command) for name, command in commands}


def page(name: str, command: click.Command) -> str:
    title = name.replace(" ", "-")
    text = help_text(command)
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    words = ["[OPTIONS]"] if options else []
    words += [argument(a) for a in arguments]
    words += ["COMMAND"] if isinstance(command, click.Group) else []
    summary = " ".join(text.split("\n\n")[0].split()).rstrip(".:")
    lines = [
        f'.TH "{title.upper()}" 1 "" "R2CCL {__version__}" "R2CCL"',
        ".SH NAME",
        f"{literal(title)} \\- {literal(summary)}",
        ".SH SYNOPSIS",
        f"\\fB{literal(name)}\\fR {literal(' '.join(words))}".rstrip(),
        ".SH DESCRIPTION",
        *body(text),
    ]
    if options:
        lines.append(".SH OPTIONS")
    for option in options:
        lines += [".TP", heading(option), *plain(explained(option))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for below, child in walk(command, name):
            first = " ".join(help_text(child).split("\n\n")[0].split())
            lines += [".TP", f"\\fB{literal(below.replace(' ', '-'))}\\fR(1)", *plain(first)]
    return "\n".join(lines) + "\n"


def heading(option: click.Option) -> str:
    names = ", ".join(f"\\fB{literal(n)}\\fR" for n in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag or option.count else f" \\fI{literal(metavar(option))}\\fR"
    return names + value


def explained(option: click.Option) -> str:
    text = option.help or ""
    if option.show_default and option.default not in (None, "", False, ()):
        text += f" Default: {option.default}."
    return text


def body(text: str) -> list[str]:
    """Paragraphs; what follows a \\b mark keeps its lines."""
    lines: list[str] = []
    for block in text.split("\n\n"):
        lines.append(".PP")
        if block.startswith("\b\n"):
            lines += [".nf", *plain(block[2:]), ".fi"]
        else:
            lines += plain(block)
    return lines


def plain(text: str) -> list[str]:
    """Lines of text: none is taken for a request."""
    return [
        f"\\&{line}" if line.startswith((".", "'")) else line for line in literal(text).split("\n")
    ]


def literal(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def write(main: click.Group, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages(main).items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    from r2ccl_ctl.cli.main import main

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m r2ccl_ctl.cli.man FOLDER")
    write(main, Path(sys.argv[1]))
