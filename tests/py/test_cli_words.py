"""How r2ccl-ctl says things: units as operators give them, the order of rows, what an option takes.
Rung 3, and pure functions."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from segment_bed import StartWriter, start_writer
from test_cli import call, nobody

from r2ccl_ctl import env as environment
from r2ccl_ctl.cli import view
from r2ccl_ctl.cli.main import main
from r2ccl_ctl.control import Process
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.faults import read_rules
from r2ccl_ctl.hang import Seen
from r2ccl_ctl.order import in_order

__all__ = ["nobody", "start_writer"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("status --pid abc", "'abc' is no whole number: give 1 or more"),
        ("status --pid 1.5", "'1.5' is no whole number: give 1 or more"),
        ("journal -n many", "'many' is no whole number: give 0 or more"),
        ("set-weight x half", "'half' is no whole number: give 0 to 100"),
        ("launch -n two -- true", "'two' is no whole number: give 1 or more"),
        ("launch --timeout soon -- true", "'soon' is no number: give more than 0"),
        ("launch --grace soon -- true", "'soon' is no number: give 0 or more"),
        ("lab fail-link n0 nic0 --loss much", "'much' is no number: give more than 0, up to 100"),
        ("lab fail-link n0 nic0 --loss 0", "0 is out of range: give more than 0, up to 100"),
    ],
)
def test_no_number(words: str, says: str) -> None:
    """The range is said, which click's own words leave out."""
    assert says in call(*words.split(), code=2).stderr


@pytest.mark.parametrize(
    ("state", "points", "left", "shown"),
    [
        ("damped", 3400, 75, "3400, reuse in 75s"),
        ("damped", 3400, 0, "3400"),  # about to be taken again
        ("damped", 3400, -5, "3400"),
        ("healthy", 1200, 75, "1200"),
        ("healthy", 0, 0, "-"),
    ],
)
def test_damped_until(
    start_writer: StartWriter, state: str, points: int, left: int, shown: str
) -> None:
    """NICs and paths that are left alone: with which penalty, and until when."""
    snapshot = start_writer().process.snapshot()
    words: dict[str, Any] = {
        "state": state,
        "penalty": points,
        "reuse_mono_ns": snapshot.mono_ns + left * 10**9 if left else 0,
    }
    nic, path = replace(snapshot.nics[0], **words), replace(snapshot.paths[0], **words)
    assert view.penalty(nic, snapshot.mono_ns) == view.penalty(path, snapshot.mono_ns) == shown
    console = Console(width=400, color_system=None)
    for one in (replace(snapshot, nics=[nic], paths=[]), replace(snapshot, nics=[], paths=[path])):
        with console.capture() as got:
            console.print(view.status_view([(one, {})], Seen([one]), details=True))
        assert re.search(rf" {re.escape(shown)}( |$)", got.get(), re.MULTILINE), got.get()


def test_processes_stand_by_job_and_rank(seed: int) -> None:
    def process(name: str, job: str, rank: int | None, created: int) -> Process:
        return Process(
            name, Path(name), "running", 1, 1, 0, 0, job=job, rank=rank, created_real_ns=created
        )

    wanted = [
        process("a", "", None, 5),
        process("b", "old", 0, 12),
        process("c", "old", 1, 10),
        process("d", "old", 10, 11),
        process("e", "", None, 11),
        process("f", "new", None, 14),
        process("g", "new", 0, 13),
        process("h", "", 0, 15),
        process("i", "", 0, 15),
    ]
    shuffled = random.Random(seed).sample(wanted, len(wanted))
    assert [one.name for one in in_order(shuffled)] == [one.name for one in wanted]


def test_rules_from_standard_input(
    start_writer: StartWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["faults", "apply", "-", "--check", "--job", start_writer().job]
    done = CliRunner().invoke(main, words, input="127.0.1.1 blackhole for=1s\n")
    assert done.exit_code == 0 and "blackhole" in done.output, done.output
    done = CliRunner().invoke(main, words, input="127.0.1.1 nonsense\n")
    assert done.exit_code == 2 and "standard input" in done.output, done.output
    done = CliRunner().invoke(main, words, input=b"\xff\n")
    assert done.exit_code == 2 and "standard input is no text in UTF-8" in done.output
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)  # as Python has it of a process without descriptor 0
        with pytest.raises(R2UsageError, match="standard input is closed"):
            read_rules(Path("-"))


def test_another_network_in_nccls_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has the last word, then the user's file, then the system's."""
    system, own = tmp_path / "system", tmp_path / ".nccl.conf"
    monkeypatch.setattr(environment, "SYSTEM_CONF", system)
    base = {"HOME": str(tmp_path)}
    assert environment.warnings(base) == []
    system.write_text("NCCL_DEBUG=INFO\nNCCL_NET=Socket\nNCCL_NET=R2CCL\n")
    says = "NCCL_NET=Socket in {} makes NCCL ignore R2CCL: take it out"
    assert environment.warnings(base) == [says.format(system)]
    own.write_text("#NCCL_NET=IB\nNCCL_NET=r2ccl\n")
    assert environment.warnings(base) == []
    other = tmp_path / "other"
    other.write_text("NCCL_NET=Socket\n")
    named = {**base, "NCCL_CONF_FILE": str(other)}
    assert environment.warnings(named) == [says.format(other)]
    assert environment.warnings({**named, "NCCL_NET": "R2CCL"}) == []
    system.unlink()
    own.write_text("NCCL_NET=Socket\n")
    monkeypatch.chdir(tmp_path)
    assert environment.warnings({}) == []  # no HOME: the file here is nobody's
    assert environment.warnings({"HOME": ""}) == []


# Words without effect, and those that are gone


@pytest.mark.parametrize(
    ("words", "option", "other"),
    [
        ("status --interval 2s", "--interval", "--watch"),
        ("nics --json --interval 2s", "--interval", "--watch"),
        ("drain-nic x --wait-timeout 5s", "--wait-timeout", "--wait"),
    ],
)
def test_an_option_that_says_nothing_alone(words: str, option: str, other: str) -> None:
    stderr = call(*words.split(), code=2).stderr
    assert f"Error: {option} has no effect without {other}: add that, or leave it out" in stderr


@pytest.mark.parametrize("number", ["-5", "-50"])
def test_a_negative_number_is_no_option(number: str) -> None:
    result = call("set-weight", "x", number, "--json", code=2)
    says = f"No such option '{number}': if it is meant as a value, put -- before it: `-- {number}`"
    assert f"Error: {says}" in result.stderr and "Usage: " in result.stderr
    assert json.loads(result.stdout)["error"] == says
    stderr = call("set-weight", "x", "--", number, code=2).stderr
    assert f"{number} is out of range: give 0 to 100" in stderr
    assert "meant as a value" not in call("status", "-z", code=2).stderr


GONE = [
    ("status", "--pid shows one, as it was at its end"),
    ("nics", "--pid shows one, as it was at its end"),
    ("journal", "--all shows what happened to them"),
]


@pytest.mark.parametrize(("command", "remedy"), GONE)
def test_that_no_process_runs_is_said_too(
    start_writer: StartWriter, nobody: Path, command: str, remedy: str
) -> None:
    writer = start_writer()
    writer.kill()
    shutil.move(f"/dev/shm/{writer.path.name}", nobody)
    says = f"Error: no process of R2CCL runs here; 1 process is gone (pid {writer.pid}): {remedy}"
    assert says in call(command, code=1).stderr


@pytest.mark.parametrize(("command", "remedy"), GONE)
def test_a_job_that_has_ended(start_writer: StartWriter, command: str, remedy: str) -> None:
    """What is left of it can be had: how, is said first."""
    writer = start_writer()
    job = ["--job", writer.job]
    assert "gone" not in call(command, *job).stderr
    writer.kill()
    stderr = call(command, *job, code=1).stderr
    says = f"Error: 1 process with job {writer.job} is gone (pid {writer.pid}): {remedy}"
    assert says in stderr and "Start one with" not in stderr
    for _ in range(4):
        start_writer().kill()
    says = (
        rf"Error: 5 processes with job {writer.job} are gone \(pids (\d+, ){{3}}\d+ and 1 more\): "
    )
    assert re.search(says, call(command, *job, code=1).stderr)
    assert "gone" not in call(command, "--job", "nosuch", code=1).stderr
    call(command, *(["--all", *job] if command == "journal" else ["--pid", str(writer.pid)]))
