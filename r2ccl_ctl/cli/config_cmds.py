"""config: the settings, their values and where these come from."""

from __future__ import annotations

import difflib
import os
import sys

import click

from r2ccl_ctl import settings_view
from r2ccl_ctl.cli.common import R2Group, add_row, json_option, of_a_check, print_json, show, table
from r2ccl_ctl.cli.doctor_cmds import show_findings
from r2ccl_ctl.cli.view import document
from r2ccl_ctl.doctor import local
from r2ccl_ctl.doctor.finding import exit_code
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.settings_view import Setting


@click.group(cls=R2Group)
def config() -> None:
    """List, explain and check settings.

    \b
    Example:
      r2ccl-ctl config list --changed
    """


@config.command("list")
@click.option("--changed", is_flag=True, help="Only what does not have its default.")
@click.option("--markdown", is_flag=True, help="As the text of docs/settings.md.")
@json_option
def config_list(changed: bool, markdown: bool, as_json: bool) -> None:
    """List all settings: value, default, source of the value.

    The table comes out of the built plugin; the values are those that a job started from this
    shell would have. SOURCE is where the value comes from: the environment, an alias in it, or a
    file: the one that R2CCL_CONF names, else ~/.r2ccl.conf, then /etc/r2ccl.conf. A line of a file
    is NAME=VALUE.

    \b
    Example:
      R2CCL_VERIFY=1 r2ccl-ctl config list --changed
    """
    if markdown and (changed or as_json):
        other = "--json" if as_json else "--changed"
        raise R2UsageError(f"--markdown is the whole page: give it without {other}")
    settings = settings_view.load()
    if markdown:
        click.echo(settings_view.markdown(settings), nl=False)
        return
    if changed:
        settings = [s for s in settings if s.source != "default" or s.error]
    if as_json:
        print_json({"schema": 1, "settings": [setting.as_dict() for setting in settings]})
    else:
        found = table("SETTING", "VALUE", "DEFAULT", "UNIT", "SOURCE", "ALLOWED")
        for setting in settings:
            add_row(
                found,
                setting.name,
                setting.value or "-",
                setting.default or "-",
                setting.unit or "-",
                setting.source,
                settings_view.range_text(setting),
            )
        show(found)
    for line in [setting.error for setting in settings if setting.error] + settings_view.notes():
        click.echo(f"warning: {line}", err=True)


@config.command("explain")
@click.argument("name", shell_complete=lambda ctx, param, text: _complete(text))
@json_option
def config_explain(name: str, as_json: bool) -> None:
    """Explain the setting NAME, and show its value here.

    NAME may be written without R2CCL_, and in small letters.

    \b
    Example:
      r2ccl-ctl config explain R2CCL_CHUNK
      r2ccl-ctl config explain chunk
    """
    setting = _find(name, settings_view.load())
    if as_json:
        print_json({"schema": 1, "settings": [setting.as_dict()]})
        return
    unit = f" {setting.unit}" if setting.unit and setting.value.isdigit() else ""
    click.echo(f"{setting.name} = {setting.value or '(empty)'}{unit}, from: {setting.source}")
    click.echo(f"default: {settings_view.default_text(setting).replace('`', '')}")
    click.echo(f"allowed: {settings_view.range_text(setting)}\n")
    click.echo(settings_view.wrap(setting.doc))
    if setting.error:
        click.echo(f"warning: {setting.error}", err=True)


def _find(name: str, settings: list[Setting]) -> Setting:
    upper = name.upper()
    by_name = {setting.name: setting for setting in settings}
    upper = {"R2CC_MODE": "R2CCL_MODE"}.get(upper, upper)
    for wanted in (upper, f"R2CCL_{upper}"):
        if wanted in by_name:
            return by_name[wanted]
    near = difflib.get_close_matches(upper, by_name, 1, 0.6) or difflib.get_close_matches(
        f"R2CCL_{upper}", by_name, 1, 0.6
    )
    hint = f"did you mean {near[0]}?" if near else "`r2ccl-ctl config list` shows all"
    raise R2UsageError(f"'{name}' is no setting: {hint}")


def _complete(text: str) -> list[str]:
    return [s.name for s in settings_view.load() if s.name.startswith(text.upper())]


@config.command("check")
@json_option
@of_a_check()
def config_check(as_json: bool) -> None:
    """Check the variables of this shell for mistakes.

    It finds misspelt names, bad values and contradictions. It looks at NCCL's variables too, as far
    as an NCCL is found from here. Ends with 0 without a problem, 1 with warnings, 2 if NCCL would
    ignore R2CCL.

    \b
    Example:
      r2ccl-ctl config check
    """
    found = local.check_variables(os.environ, local.nccl_names(local.find_nccl(os.environ)))
    if as_json:
        print_json(document("findings", [one.as_dict() for one in found]))
    else:
        show_findings(found)
    sys.exit(exit_code(found))
