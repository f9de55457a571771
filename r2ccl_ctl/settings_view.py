"""The settings table, read out of the built plugin: the same that the job will read."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cffi

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2Error

_FUNCTION = "r2ccl_settings_json"
_NOTES = "r2ccl_settings_notes"

INTRODUCTION = (
    "Environment variables, read once by each process. Files may hold them too, as lines of "
    "NAME=VALUE: `~/.r2ccl.conf` (or the file that `R2CCL_CONF` names), then `/etc/r2ccl.conf`. "
    "A variable takes precedence over a file, and the user's file over the system's. "
    "`r2ccl-ctl config list` shows the values of a job that you start here. "
    "`r2ccl-ctl config list --markdown` makes this page.",
    "Sizes take K, M and G (powers of 1024), durations ns, us, ms, s, min and h. A plain number is "
    "in the unit named. For a bad value the log names the setting, the value and what is allowed; "
    "the job runs with the default. Rank 0 says so, and with a file one rank of each node; the "
    "others only with R2CCL_LOG=info.",
)


@dataclass(frozen=True)
class Setting:
    """A row of the table. source: default, environment, the alias that was set, or a file."""

    name: str
    type: str
    default: str
    unit: str
    allowed: str
    doc: str
    value: str
    source: str
    error: str
    foreign: bool
    choices: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def load(plugin: Path | None = None) -> list[Setting]:
    """The table with this process's environment applied."""
    path = plugin or paths.plugin_path()
    ffi = cffi.FFI()
    ffi.cdef(f"const char *{_FUNCTION}(void);")
    try:
        library = ffi.dlopen(str(path))
        text: Any = ffi.string(getattr(library, _FUNCTION)())
    except (OSError, AttributeError) as err:
        raise R2Error(f"the settings cannot be read from {path}: {err}; build it again") from err
    try:
        return [_setting(row) for row in json.loads(text.decode("utf-8"))]
    except (ValueError, KeyError, TypeError) as err:
        raise R2Error(
            f"{path} describes its settings in a way that this r2ccl-ctl does not know ({err}): "
            "use the r2ccl-ctl that came with it"
        ) from err


def from_file(name: str) -> tuple[str, str]:
    """What a file of settings says of it, and which file; empty texts where none does, or where
    this process's environment counts before it."""
    home = os.environ.get("HOME", "")
    files = (os.environ.get("R2CCL_CONF") or f"{home}/.r2ccl.conf", "/etc/r2ccl.conf")
    if not any(Path(file).is_file() for file in files):
        return "", ""  # the plugin need not be loaded to know
    try:
        found = {setting.name: setting for setting in load()}[name]
    except (R2Error, KeyError):
        return "", ""
    return (found.value, found.source) if found.source in files else ("", "")


def notes(plugin: Path | None = None) -> list[str]:
    """What the plugin says about names: R2CCL_* variables that are no settings, aliases."""
    ffi = cffi.FFI()
    ffi.cdef(f"const char *{_NOTES}(void);")
    try:
        library = ffi.dlopen(str(plugin or paths.plugin_path()))
        text: Any = ffi.string(getattr(library, _NOTES)())
    except (OSError, AttributeError):  # a plugin of before this function
        return []
    return [str(line) for line in text.decode("utf-8", errors="replace").splitlines()]


def complaints(added: Mapping[str, str]) -> list[str]:
    """What the plugin will say of this process's settings where `added` is set, too: values that it
    does not take, names that it does not know. To be asked before any other function of this
    module, since the plugin reads the environment once."""
    before = {name: os.environ.get(name) for name in added if name.startswith("R2CCL_")}
    os.environ.update({name: added[name] for name in before})
    try:
        return [setting.error for setting in load() if setting.error] + notes()
    except R2Error as err:
        return [str(err)]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _setting(row: dict[str, Any]) -> Setting:
    choices = row.get("choices") or ()
    if isinstance(choices, str):
        choices = choices.split("|")
    return Setting(
        name=row["name"],
        type=str(row["type"]).lower(),
        default=str(row["default"]),
        unit=row.get("unit") or "",
        allowed=row.get("allowed") or "",
        doc=row["doc"],
        value=str(row["value"]),
        source=row.get("source") or "default",
        error=row.get("error") or "",
        foreign=bool(row.get("foreign")),
        choices=tuple(str(choice) for choice in choices),
    )


def range_text(setting: Setting) -> str:
    """What a value may be, in short."""
    if setting.choices:
        return ", ".join(setting.choices)
    span = re.search(r"(\S+)\.\.([^\s,]+)", setting.allowed)
    return f"{span[1]} to {span[2]}" if span else setting.allowed or setting.type


def default_text(setting: Setting) -> str:
    """The default with its unit, where the text has none."""
    unit = f" {setting.unit}" if setting.default.isdigit() and setting.unit else ""
    return f"`{setting.default}`{unit}" if setting.default else "empty"


def markdown(settings: list[Setting]) -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        *(line for text in INTRODUCTION for line in (wrap(text), "")),
    ][:-1]
    for setting in settings:
        if setting.foreign:
            continue
        unit = f" {setting.unit}" if setting.unit and not setting.choices else ""
        plain = f" A plain number is in{unit}." if unit and setting.type == "duration" else ""
        lines += [
            "",
            f"## {setting.name}",
            "",
            wrap(f"Default: {default_text(setting)}. Allowed: {range_text(setting)}.{plain}"),
            "",
            wrap(setting.doc),
        ]
    lines += ["", "## Variables of others that R2CCL honours", ""]
    lines += [
        wrap(f"- `{setting.name}`: {setting.doc}", "  ") for setting in settings if setting.foreign
    ]
    lines += [
        "",
        "## Other names",
        "",
        wrap(
            "`R2CC_MODE` is read as `R2CCL_MODE`, with a note, and simulates a failure as the R2CC "
            "fork of NCCL does ([failures.md](failures.md#injected-faults))."
        ),
    ]
    return "\n".join(lines) + "\n"


def wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
