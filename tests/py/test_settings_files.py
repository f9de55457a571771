"""Settings from files, as the built plugin reads them. Rung 2. It cannot prove what is in
/etc/r2ccl.conf: this test does not write there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_cli import load_settings, plugin

pytestmark = pytest.mark.usefixtures("build")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    load_settings()
    return tmp_path


def ask(home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("R2CC")}
    known = {"HOME": str(home), "R2CCL_BUILD_DIR": str(plugin().parent)}
    return subprocess.run(
        [sys.executable, "-m", "r2ccl_ctl", *words],
        cwd=ROOT,
        env={**bare, **known, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def changed(home: Path, **env: str) -> tuple[dict[str, tuple[str, str]], str]:
    """NAME -> (value, source) of what has no default; and the warnings."""
    done = ask(home, "config", "list", "--changed", "--json", **env)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["settings"]
    return {row["name"]: (row["value"], row["source"]) for row in rows}, done.stderr


def test_the_users_file(home: Path) -> None:
    file = home / ".r2ccl.conf"
    file.write_text("# mine\n\n R2CCL_CHUNK = 256K \nR2CCL_CHUNK=64K\nR2CCL_VERIFY=1\n")
    found, warnings = changed(home)
    assert found == {
        "R2CCL_CHUNK": ("256K", str(file)),
        "R2CCL_VERIFY": ("1", str(file)),
    }
    assert (
        warnings
        == f"warning: {file}, line 4: an earlier line sets the same; this line is not read\n"
    )
    assert f"256K, from: {file}" in ask(home, "config", "explain", "chunk").stdout


def test_the_environment_counts_before_a_file(home: Path) -> None:
    (home / ".r2ccl.conf").write_text("R2CCL_CHUNK=256K\nR2CCL_MODE=migrate\n")
    found, _ = changed(home, R2CCL_CHUNK="128K", R2CC_MODE="2")
    assert found["R2CCL_CHUNK"] == ("128K", "environment")
    assert found["R2CCL_MODE"] == ("balance", "R2CC_MODE")


def test_a_named_file_is_read_instead(home: Path) -> None:
    (home / ".r2ccl.conf").write_text("R2CCL_CHUNK=256K\n")
    (home / "job.conf").write_text("R2CCL_VERIFY=1\n")
    named = str(home / "job.conf")
    assert changed(home, R2CCL_CONF=named)[0] == {"R2CCL_VERIFY": ("1", named)}
    found, warnings = changed(home, R2CCL_CONF=str(home / "absent"))
    absent = home / "absent"
    assert found == {} and f"R2CCL_CONF={absent}: No such file" in warnings
    found, warnings = changed(home, R2CCL_CONF="/dev/zero")
    assert found == {} and "/dev/zero: this is no file of settings" in warnings


def test_bad_lines_are_named(home: Path) -> None:
    file = home / ".r2ccl.conf"
    file.write_text("R2CCL_CHUNCK=1M\nNCCL_DEBUG=INFO\nnonsense\nR2CCL_EAGER=1T\n")
    warnings = changed(home)[1]
    assert "did you mean R2CCL_CHUNK?" in warnings
    assert f"{file}, line 2: write R2CCL_NAME=VALUE" in warnings and "line 3" in warnings
    assert "R2CCL_EAGER=1T is not valid" in warnings


def test_a_file_of_another_kind_has_few_warnings(home: Path) -> None:
    file = home / ".r2ccl.conf"
    file.write_text("key: value\n" * 200)
    lines = changed(home)[1].splitlines()
    assert len(lines) == 4 and lines[3] == f"warning: {file}: 197 more lines are not read"


def test_other_commands_see_the_same(home: Path) -> None:
    (home / ".r2ccl.conf").write_text("R2CCL_NICS=no-such-nic\n")
    done = ask(home, "doctor", "--json")
    evidence = [one["evidence"] for one in json.loads(done.stdout)["findings"]]
    assert any(text.startswith("R2CCL_NICS: no-such-nic does not exist") for text in evidence)
    assert done.returncode == 2


def test_off_in_a_file_is_told_as_in_the_environment(home: Path) -> None:
    file = home / ".r2ccl.conf"
    file.write_text("R2CCL_MODE=off\n")
    told = f"R2CCL_MODE=off in {file} switches R2CCL off: take it out"
    assert told in ask(home, "run", "--", "true").stderr
    done = ask(home, "config", "check")
    assert told in done.stdout and done.returncode == 2
    assert told not in ask(home, "config", "check", R2CCL_MODE="auto").stdout
    named = os.path.relpath(file, ROOT)  # a path that does not begin with /
    done = ask(home, "config", "check", R2CCL_CONF=named)
    assert f"R2CCL_MODE=off in {named} switches" in done.stdout and done.returncode == 2


def test_one_value_and_one_source_whoever_is_asked(home: Path) -> None:
    """`config list` has the column SOURCE, `explain` the words; a mode says what the plan is."""
    file = home / ".r2ccl.conf"
    file.write_text("R2CCL_PLAN=shadow\nR2CCL_NICS=no-such-nic\n")
    for env, plan, source in (
        ({}, "shadow", str(file)),
        ({"R2CC_MODE": "3"}, "shadow", str(file)),
        ({"R2CCL_MODE": "migrate"}, "off", "R2CCL_MODE"),
        ({"R2CCL_PLAN": "auto"}, "auto", "environment"),
    ):
        rows = ask(home, "config", "list", **env).stdout.splitlines()
        (row,) = [line.split() for line in rows if line.startswith("R2CCL_PLAN ")]
        assert row[1] == plan and source in row
        said = ask(home, "config", "explain", "plan", **env).stdout
        assert said.startswith(f"R2CCL_PLAN = {plan}, from: {source}\n")
    file.write_text("")
    assert changed(home, R2CC_MODE="2")[0]["R2CCL_PLAN"] == ("off", "R2CCL_MODE")
