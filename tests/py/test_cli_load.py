"""What r2ccl-ctl loads: of its commands the one that is asked for, of what takes long what that one
uses. An operator's completions and scripts call it often, and on machines that are busy.

Rung 1. It measures no time.
"""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT, run_process

from r2ccl_ctl.cli.main import SECTIONS, Later

LATERS = [later for _, section in SECTIONS for later in section]
NOBODY = "--job=there-is-no-such-job"
SLOW = {"matplotlib", "numpy", "pyroute2", "http", "asyncio", "r2ccl_ctl.lab", "r2ccl_ctl.demo"}
SLOW |= {"r2ccl_ctl.launch", "r2ccl_ctl.exporter", "concurrent"}


PROGRAM = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("LOADED " + " ".join(sys.modules)))
from r2ccl_ctl.__main__ import main
main()
"""


def loaded(
    *words: str, env: dict[str, str] | None = None, says: str = "", code: int = 0
) -> set[str]:
    """The modules that it has loaded when it ends."""
    done = run_process([sys.executable, "-c", PROGRAM, *words], cwd=ROOT, env=env, code=code)
    assert says in done.stdout, done
    names = done.stderr.partition("LOADED ")[2].split()
    assert "click" in names, done
    return set(names)


@pytest.mark.parametrize("words", [["--help"], ["--version"]], ids=" ".join)
def test_help_loads_no_command(words: list[str]) -> None:
    names = loaded(*words)
    assert not names & (SLOW | {"rich", "cffi", "r2ccl_ctl.control"})
    assert not [name for name in names if name.endswith("_cmds")]


@pytest.mark.parametrize(
    "words", [["ps", NOBODY], ["ps", "--json", NOBODY], ["gc", "--dry-run"]], ids=" ".join
)
def test_a_command_loads_what_it_uses(words: list[str]) -> None:
    names = loaded(*words)
    assert "r2ccl_ctl.control" in names
    assert not names & SLOW
    assert words[0] == "gc" or "rich" not in names
    assert len([name for name in names if name.endswith("_cmds")]) == 1


def test_an_error_loads_no_command() -> None:
    """Whether it is to be said in JSON is asked of a command where --json is among the words."""
    names = loaded("no-such-command", "status", code=2)
    assert not [name for name in names if name.endswith("_cmds")]
    loaded("no-such-command", "status", "--json", code=2, says='"exit_code"')


def test_completion_of_a_command_loads_none() -> None:
    env = {"_R2CCL_CTL_COMPLETE": "bash_complete", "COMP_WORDS": "r2ccl-ctl s", "COMP_CWORD": "1"}
    names = loaded(env=env, says="plain,status\nplain,set-weight\nplain,simulate\nplain,shim\n")
    assert not [name for name in names if name.endswith("_cmds")]


@pytest.mark.parametrize("later", LATERS, ids=lambda later: str(later.name))
def test_a_command_is_what_the_list_says(later: Later) -> None:
    command = later.load()
    assert command.name == later.name and not command.hidden
    for limit in (45, 80, 1000):
        assert later.get_short_help_str(limit) == command.get_short_help_str(limit)
