"""docs/cli.md, made from the commands themselves: python -m r2ccl_ctl.cli.docs > docs/cli.md"""

from __future__ import annotations

import inspect
import re

import click

HEAD = """\
# r2ccl-ctl

This page is made from the commands themselves: `python -m r2ccl_ctl.cli.docs > docs/cli.md`.
Every command explains itself with `--help`.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage. The
checks `doctor`, `config check`, `status --check` and `validate` end with 0 to 3 as their texts say;
3 is also "could not be checked". `run`, `launch` and `lab exec` end with the code of what they ran.
Commands that read take `--json`, but
for `top`, `trace` (it writes JSON by itself) and `metrics` (Prometheus' format). Every JSON
document has a `schema` number (1), also that of an error (`error`, `exit_code`). Times are
RFC 3339 in UTC beside nanoseconds.
`NO_COLOR` is honoured. Completion: `source <(r2ccl-ctl completion bash)`, also for zsh and fish.
"""


def markdown(main: click.Group) -> str:
    """The whole page."""
    lines = [HEAD, "| command | |", "|---|---|"]
    for name, command in walk(main, "r2ccl-ctl"):
        if not isinstance(command, click.Group):
            lines.append(f"| [`{name}`](#{anchor(name)}) | {first_sentence(command)} |")
    for name, command in walk(main, "r2ccl-ctl"):
        lines += ["", f"## {name}", "", *section(name, command)]
    return "\n".join(lines) + "\n"


def walk(group: click.Group, prefix: str) -> list[tuple[str, click.Command]]:
    """Every command that users see, with its full name, groups before what is in them."""
    found: list[tuple[str, click.Command]] = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        found.append((f"{prefix} {name}", command))
        if isinstance(command, click.Group):
            found += walk(command, f"{prefix} {name}")
    return found


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def first_sentence(command: click.Command) -> str:
    text = " ".join(help_text(command).split("\n\n")[0].split())
    return escape(re.split(r"(?<=[.])\s", text)[0])


def help_text(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").replace("\f", "")


def section(name: str, command: click.Command) -> list[str]:
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    words = [name, *(["[OPTIONS]"] if options else []), *(argument(a) for a in arguments)]
    if isinstance(command, click.Group):
        words.append("COMMAND")
    lines = ["```", " ".join(words), "```", "", *paragraphs(help_text(command))]
    if options:
        lines += ["", "| option | |", "|---|---|", *(option_row(option) for option in options)]
    return lines


def argument(param: click.Argument) -> str:
    name = (param.metavar or param.name or "").upper()
    name = f"{name}..." if param.nargs == -1 else name
    return name if param.required else f"[{name}]"


def paragraphs(text: str) -> list[str]:
    """The help as Markdown; what follows a \\b mark is code."""
    lines: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("\b\n"):
            first, *rest = block[2:].split("\n")
            code = first.endswith(":") and rest
            body = rest if code else [first, *rest]
            lines += ["", first if code else "", "", "```sh", *(s.strip() for s in body), "```"]
        else:
            lines += ["", *block.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n").split("\n")


def option_row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag or option.count else f" `{metavar(option)}`"
    text = escape(option.help or "")
    if option.show_default and option.default not in (None, "", False, ()):
        text += f" Default: `{option.default}`."
    if option.multiple and "repeat" not in text:
        text += " Repeatable."
    return f"| {names}{escape(value)} | {text} |"


def metavar(option: click.Option) -> str:
    if option.metavar:
        return option.metavar
    if isinstance(option.type, click.Choice):
        return "|".join(str(choice) for choice in option.type.choices)
    return option.type.name.upper().split(" ")[0]


def escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    from r2ccl_ctl.cli.main import main

    click.echo(markdown(main), nl=False)
