"""What the shell is told when a word of r2ccl-ctl is to be completed, with the words that bash has.
Rung 3; labs are only remembered here, not made: that needs rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_process
from segment_bed import StartWriter, start_writer
from test_cli import call

from r2ccl_ctl.lab import LabSpec
from r2ccl_ctl.lab.state import LabState, Store

__all__ = ["start_writer"]

LABS = ("mine", "r2lab")
NICS = ["nic0", "nic1", "mgmt0"]


def complete(words: str) -> list[str]:
    """What `r2ccl-ctl WORDS` may go on with, the last word (maybe empty) being the one to complete;
    nothing else is said."""
    env = {"COMP_WORDS": f"r2ccl-ctl {words}", "COMP_CWORD": str(len(words.split(" ")))}
    env["_R2CCL_CTL_COMPLETE"] = "bash_complete"
    done = run_process([sys.executable, "-m", "r2ccl_ctl"], cwd=ROOT, env=env)
    assert done.stderr == "", done
    return [line.removeprefix("plain,") for line in done.stdout.split()]


@pytest.fixture
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two labs, of three nodes with one NIC or two."""
    monkeypatch.setenv("R2CCL_LAB_DIR", str(tmp_path))
    monkeypatch.delenv("R2CCL_LAB", raising=False)
    for name in LABS:
        Store(name).save(LabState.fresh(LabSpec(nodes=3, nics=(1, 2, 2), name=name)))
    return tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_labs_of_another_user(labs: Path) -> None:
    """Commands refuse its folder, which holds whatever that user likes."""
    assert complete("lab fail-link --name mine ") == ["n0", "n1", "n2"]
    os.chown(labs, 65534, -1)
    assert complete("lab fail-link --name mine ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script(shell: str) -> None:
    text = call("completion", shell).stdout
    assert "_R2CCL_CTL_COMPLETE" in text and "r2ccl-ctl" in text
    found = shutil.which(shell)
    if found is None:
        return
    subprocess.run([found, "-n"], input=text.encode(), timeout=20, check=True)


def test_nics(start_writer: StartWriter) -> None:
    start_writer("--nics", "5")
    assert "127.0.5.1" in complete("fail-nic 127.0.5")


def test_processes(start_writer: StartWriter) -> None:
    writer = start_writer()
    for option, word in (("--job", writer.job), ("--pid", str(writer.pid)), ("--node", "node-a")):
        assert word in complete(f"status {option} {word[:-1]}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("status --name ", ["mine", "r2lab"]),
        ("down --name m", ["mine"]),
        ("exec ", ["n0", "n1", "n2"]),
        ("exec n1 ", []),
        ("fail-link --name mine n", ["n0", "n1", "n2"]),
        ("fail-link --name other ", []),
        ("fail-link n1 ", NICS),
        ("fail-link n7 ", []),
        ("recover-link n0 ", ["nic0", "mgmt0"]),
        ("recover-link n1 n", NICS[:2]),
        ("rate n2 nic1", ["nic1"]),
        ("rate n2 nic1 ", []),
        ("cut-pair n1 ", ["n0", "n2"]),
        ("cut-pair n1 n2 ", NICS),
        ("cut-pair n1 n0 ", ["nic0", "mgmt0"]),
    ],
)
def test_labs(labs: Path, words: str, expected: list[str]) -> None:
    assert complete(f"lab {words}") == expected


def test_lab_of_the_environment(labs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_LAB", "mine")
    Store("r2lab").remove()
    assert complete("lab fail-link n0 n") == ["nic0"]


def test_labs_that_cannot_be_read(labs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is not completed is all that a user sees of it."""
    state = (labs / "mine.json").read_text()
    for damaged in ("", "[]", "[" * 100_000, state.replace('"nics": [', '"nics": [7,'), "\0"):
        (labs / "mine.json").write_text(damaged)
        assert complete("lab fail-link --name mine ") == [], damaged[:20]
    for name in ("\\ud800", "$(reboot)", "-f", "a b", "é", ""):
        (labs / "mine.json").write_text(state.replace('"nic0"', f'"{name}"'))
        assert complete("lab fail-link --name mine n1 ") == ["nic1", "mgmt0"], name
    (labs / "mine.json").unlink()
    os.mkfifo(labs / "mine.json")
    assert complete("lab fail-link --name mine ") == []
    said = call("lab", "status", "--name", "mine", code=1).stderr
    assert f"{labs / 'mine.json'} is no file: remove it" in said
    (labs / "mine.json").unlink()
    (labs / "mine.json").mkdir()
    assert complete("lab fail-link --name mine ") == []
    assert complete("lab fail-link --name ../mine ") == []
    (labs / "\udcff.json").touch()
    assert complete("lab status --name ") == list(LABS)
    monkeypatch.setenv("R2CCL_LAB_DIR", str(labs / "r2lab.json"))
    assert complete("lab status --name ") == []
    assert complete("lab fail-link ") == []
