"""The settings table, read out of the built plugin: the same that the job will read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cffi

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2Error

_FUNCTION = "r2ccl_settings_json"


@dataclass(frozen=True)
class Setting:
    """A row of the table. source: default, environment, or the alias that was set."""

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


def _setting(row: dict[str, Any]) -> Setting:
    choices = row.get("choices") or ()
    if isinstance(choices, str):
        choices = choices.split("|")
    return Setting(
        name=row["name"], type=str(row["type"]).lower(), default=str(row["default"]),
        unit=row.get("unit") or "", allowed=row.get("allowed") or "", doc=row["doc"],
        value=str(row["value"]), source=row.get("source") or "default",
        error=row.get("error") or "", foreign=bool(row.get("foreign")),
        choices=tuple(str(choice) for choice in choices),
    )


def range_text(setting: Setting) -> str:
    """What a value may be, for people."""
    if setting.choices:
        return ", ".join(setting.choices)
    return setting.allowed.replace("..", " to ") if ".." in setting.allowed else setting.type


def markdown(settings: list[Setting]) -> str:
    """The body of docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Environment variables, read once by each process. `r2ccl-ctl config list` shows them with",
        "the values that hold here; this page is what `r2ccl-ctl config list --markdown` prints.",
        "",
        "Sizes take K, M and G (powers of 1024); durations take ns, us, ms, s, min and h; a plain",
        "number is in the unit named. A bad value stops the plugin with a message that names the",
        "setting, the value and what is allowed.",
        "",
    ]
    own = [setting for setting in settings if not setting.foreign]
    for setting in own:
        default = f"`{setting.default}`" if setting.default else "empty"
        unit = f" {setting.unit}" if setting.unit and setting.default else ""
        lines += [f"## {setting.name}", "", f"Default: {default}{unit}. "
                  f"Values: {_values(setting)}.", "", setting.doc, ""]
    lines += ["## Variables of NCCL that R2CCL honours", ""]
    lines += [f"- `{setting.name}`: {setting.doc}" for setting in settings if setting.foreign]
    lines += ["", "## Other names", "", "`R2CC_MODE` is read as `R2CCL_MODE`, with a note."]
    return "\n".join(lines) + "\n"


def _values(setting: Setting) -> str:
    kind = setting.type
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if ".." in setting.allowed:
        low, high = setting.allowed.split("..", 1)
        return f"{kind}, {low} to {high}"
    return {"bool": "0 or 1", "string": "text", "ports": "LOW-HIGH, or one port",
            "cpus": "a list such as 0-3,8"}.get(kind, kind)
