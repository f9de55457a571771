"""What r2ccl-ctl refuses, what it leaves out, and how it says so: names of jobs that no process can
bear, what may not be read, numbers that mean nothing. Rung 3."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import ROOT
from rich.console import Console
from rich.segment import Segment
from rich.text import Text
from segment_bed import StartWriter, start_writer
from test_cli import built, call, call_json, nobody

from r2ccl_ctl import control, jobname, launch, paths, pids, unread
from r2ccl_ctl import env as environment
from r2ccl_ctl.cli import common, setup_cmds
from r2ccl_ctl.cli.common import folded
from r2ccl_ctl.cli.main import main
from r2ccl_ctl.control import Command, Selection, select
from r2ccl_ctl.errors import R2Error, plain
from r2ccl_ctl.job import LaunchSpec
from r2ccl_ctl.segment import layout

__all__ = ["built", "nobody", "start_writer"]

# Names of jobs

LONG = "ü" * 31 + "ab"  # 64 bytes


def test_room_for_a_jobs_name() -> None:
    fields = dict(layout().ffi.typeof("struct r2_seg_process").fields)
    assert layout().ffi.sizeof(fields["job"].type) == jobname.MOST + 1


@pytest.mark.parametrize(
    "words", ["run --job {} -- true", "env --job {}", "launch --job {} -- true"]
)
def test_a_jobs_name_that_is_too_long(
    built: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Two of them with the same start would be one job to fail-nic."""
    monkeypatch.setattr(os, "execvpe", lambda *words: pytest.fail("it was started"))
    says = f"--job '{LONG}': a name of 64 bytes in UTF-8, and a job's has at most 63"
    assert says in call(*words.format(LONG).split(), code=2).stderr


@pytest.mark.parametrize(
    "words", ["run --job", "env --job", "launch --job", "run --nics", "env --nics"]
)
def test_an_empty_name_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """As a shell makes it of a variable that is not set."""
    monkeypatch.setattr(os, "execvpe", lambda *words: pytest.fail("it was started"))
    command, option = words.split()
    rest = [] if command == "env" else ["--", "true"]
    says = f"{option} is empty: give a value, or leave it out"
    assert says in call(command, option, "", *rest, code=2).stderr


def test_a_job_named_after_a_long_program() -> None:
    for program in ("p" * 200, "ü" * 100):
        name = environment.default_job({}, [f"/bin/{program}"])
        assert 60 <= len(name.encode()) <= jobname.MOST and "\ufffd" not in name, name
        assert name.startswith(program[0]) and name[-5] == "-"


@pytest.mark.parametrize("name", ["x" * 63 + "-a", "ü" * 40, "a" + "ü" * 40, "tab\there"])
def test_a_schedulers_name_is_found_in_full(start_writer: StartWriter, name: str) -> None:
    """The process has its start only."""
    writer = start_writer(job=name)
    found = select(Selection(job=name))
    assert [process.pid for process in found] == [writer.pid]
    assert len(found[0].job.encode()) <= jobname.MOST + 2


# What may not be read


@pytest.fixture
def others(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of segments that are another user's: this process's, and one of a process that is
    gone."""
    for pid, start in ((os.getpid(), pids.start_ticks(os.getpid())), (os.getpid(), 1)):
        (nobody / f"r2ccl.0.{pids.own_pidns()}.{pid}.{start}").touch()
    monkeypatch.setattr(os, "access", lambda *words, **options: False)
    return nobody


@pytest.mark.parametrize("words", [["ps"], ["ps", "--comms"], ["ps", "--all"]])
def test_what_may_not_be_read_is_said_in_json(others: Path, words: list[str]) -> None:
    mine = {"pid": os.getpid(), "uid": os.geteuid()}
    assert call_json(*words)["unreadable"] == [mine]
    assert call_json(*words, "--pid", str(os.getpid()))["unreadable"] == [mine]
    assert call_json(*words, "--pid", "1")["unreadable"] == []


def test_dead_segments_of_others_are_no_processes(others: Path) -> None:
    assert "1 process of " in call("ps").stderr
    assert list(control.unreadable()) == [os.getpid()]
    for path in others.glob(f"*.{pids.start_ticks(os.getpid())}"):
        path.unlink()
    assert "may not be read" not in call("ps").stderr and control.unreadable() == {}
    name = unread.user(os.geteuid())
    stderr = call("ps", "--pid", str(os.getpid())).stderr
    assert f"pid {os.getpid()} belongs to {name}: use sudo" in stderr, "its journal may be there"


def test_whether_a_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = pids.start_ticks(os.getpid())
    assert not pids.is_gone(os.getpid(), ticks) and pids.is_gone(os.getpid(), ticks + 1)
    monkeypatch.setattr(pids, "start_ticks", lambda pid: -1)  # /proc hides it
    assert not pids.is_gone(os.getpid(), ticks)
    assert pids.is_gone(2**22 + 1, ticks)


# Files that cannot be written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["--json", "--duration 0.1 --timeline"])
def test_a_report_that_cannot_be_written(words: str) -> None:
    argv = [
        str(paths.perf_path()),
        "--op",
        "all_reduce",
        "-b",
        "4K",
        "-n",
        "1",
        "-w",
        "0",
        *words.split(),
    ]
    said = subprocess.run([*argv, "/dev/full"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 2, said
    assert "r2ccl_perf: cannot write /dev/full: No space left on device" in said.stderr
    folder = subprocess.run([*argv, "/"], capture_output=True, text=True, timeout=60)
    assert folder.returncode == 2 and "cannot write /: Is a directory" in folder.stderr


# Faults from a file


def test_faults_that_are_over_do_not_stand(start_writer: StartWriter, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text(
        "127.0.1.1 blackhole for=1ms\n"
        "127.0.2.1 blackhole for=50ms after=1T\n"  # nobody knows when that begins
        "127.0.3.1 blackhole for=1h\n127.0.3.1 recover at=200ms\n"
    )
    words = ["faults", "apply", str(rules), "--job", start_writer("--nics", "3").job, "--json"]
    end = json.loads(call(*words).stdout.splitlines()[-1])
    assert end["done"] == 4 and [rule["nic"] for rule in end["standing"]] == ["127.0.2.1"]


# Numbers that mean nothing


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("launch --per-node 0 -- true", "0 is out of range: give 1 or more"),
        ("launch --per-node -3 -- true", "-3 is out of range: give 1 or more"),
        ("launch -n 2 --emulate-nodes 2 --nics 17 -- true", "--nics 17: give 1 to 16, the most"),
        ("fail-nic x --kind slow=0", "rate '0' is out of range: give more than 0, for example"),
        ("fail-nic x --kind slow=0bit", "rate '0bit' is out of range: give more than 0, for"),
    ],
)
def test_numbers_out_of_range(built: Path, words: str, says: str) -> None:
    assert says in call(*words.split(), code=2).stderr


def test_the_most_nics_are_the_plugins() -> None:
    text = (ROOT / "net_plugin" / "topology" / "nics.h").read_text()
    assert re.search(rf"R2_MAX_NICS (= )?{launch.NICS_MAX}\b", text)
    assert launch.local_bed(LaunchSpec(argv=["true"], nics=launch.NICS_MAX)).nics[0]


# Words


def test_the_title_is_said_once(start_writer: StartWriter) -> None:
    writer = start_writer()
    process = writer.process
    writer.kill()
    (answer,) = control.send_commands(
        [(process, Command("ping")), (writer.process, Command("ping"))]
    )[1:]
    assert answer.text == "it has died: it can take no commands"


@pytest.mark.parametrize(
    "words",
    [
        ["fail-nic", "a\x1b[31m\nb"],
        ["status", "--job", "a\x1b[31m\nb"],
        ["ps", "--job", "a\x1b[31m\nb"],
        ["config", "a\x1b[31m"],
        ["fail-nic", "x", "--kind", "a\x1b[31m"],
        ["status", "--pid", "a\x1b[31m"],
    ],
)
def test_own_words_do_not_steer_the_terminal(start_writer: StartWriter, words: list[str]) -> None:
    more = ["--job", start_writer().job] if words[0] == "fail-nic" else []
    said = CliRunner().invoke(main, [*words, *more]).stderr
    assert said and "\x1b" not in said and "a\ufffd[31m" in said.replace("\\x1b", "\ufffd"), said
    assert "\nb" not in said


def test_bytes_that_are_no_text_stay() -> None:
    assert plain("\udcff é\ta\n", keep="\n") == "\udcff é\ufffda\n"


# What gc spares


def test_young_damaged_segments_are_spared_with_a_word(nobody: Path) -> None:
    name = f"r2ccl.0.{pids.own_pidns()}.{os.getpid()}.1"
    (nobody / name).write_bytes(b"x" * 4096)
    said = call("gc", "--all").stderr
    assert said == "0 removed, 0 B; 1 spared: damaged, of less than 60s\n"
    found = call_json("gc", "--all")
    assert (found["removed"], found["spared"]) == ([], 1)
    assert "spared" not in call("gc").stderr, "those are too young for that anyway"


# Exit codes


@pytest.mark.parametrize(
    ("program", "code"), [("/nonexistent", 127), ("no-such-program", 127), ("/", 126)]
)
def test_run_of_what_cannot_run(
    built: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: int
) -> None:
    monkeypatch.setattr(setup_cmds, "restore_signals", lambda: None)
    assert f"Error: '{program}'" in call("run", "--", program, code=code).stderr


def test_run_of_a_script_without_its_interpreter(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup_cmds, "restore_signals", lambda: None)
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], "/dev/null"]))
    assert "no such program" in call("run", "--", "no-such-program", code=127).stderr
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    said = call("run", "--", str(script), code=126).stderr
    assert f"'{script}' cannot be run: its interpreter is missing" in said


def test_a_job_that_is_inherited_is_no_longer_than_others(built: Path) -> None:
    for words in (["env"], ["run", "--", "true"]):
        said = call(*words, code=2, env={"R2CCL_JOB": "j" * 64}).stderr
        assert f"R2CCL_JOB '{'j' * 64}': a name of 64 bytes" in said
    said = call("launch", "--env", f"R2CCL_JOB={'j' * 64}", "--", "true", code=2).stderr
    assert "a name of 64 bytes" in said


def unread_output(*words: str) -> subprocess.CompletedProcess[str]:
    """A command whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "r2ccl_ctl", *words]
    try:
        return subprocess.run(
            argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "words",
    ["--help", "ps --help", "ps", "ps --json", "journal --all", "metrics", "gc --dry-run --json"],
)
def test_a_reader_that_has_seen_enough(start_writer: StartWriter, words: str) -> None:
    start_writer()
    done = unread_output(*words.split())
    assert (done.returncode, done.stderr) == (0, ""), done


def test_a_reader_that_leaves_faults_behind(start_writer: StartWriter, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("127.0.1.1 blackhole\n127.0.2.1 blackhole\n")
    done = unread_output("faults", "apply", str(rules), "--job", start_writer().job)
    assert done.returncode == 1 and "stopped after 1 of 2 rules" in done.stderr, done
    assert "still in force: 127.0.1.1 blackhole" in done.stderr


# Narrow terminals


def lines_of(text: str, width: int) -> list[str]:
    return ["".join(s.text for s in part) for part in folded([Segment(text)], width)]


def test_lines_are_folded_between_words() -> None:
    assert lines_of("peer node1 -> 127.0.1.2  up  ", 16) == ["peer node1 ->", "127.0.1.2  up"]
    assert lines_of("aaaa     bbbb", 6) == ["aaaa", "bbbb"]
    assert lines_of("aaaa bb", 4) == ["aaaa", "bb"]
    assert lines_of("abcdefgh ij", 4) == ["abcd", "efgh", "ij"]
    assert lines_of("  abcdefgh", 4) == ["  ab", "cdef", "gh"]
    assert lines_of("世界世界 世", 6) == ["世界世", "界 世"]
    assert lines_of("世界世界 世", 5) == ["世界", "世界", "世"]  # no half of one
    assert lines_of("a世", 1) == ["a", "世"]
    assert lines_of("", 4) == [""] and lines_of("fits", 4) == ["fits"]


def test_a_line_of_the_journal_stays_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal wraps it: no end of a line gets into what is copied."""
    line = "peer " + "node1 -> 127.0.1.2 " * 9 + "end"
    monkeypatch.setattr(common, "console", lambda: Console(width=80, force_terminal=True))
    common.show(Text(line))
    assert capsys.readouterr().out == f"{line}\n"


def test_tabs_of_tools_stay_in_errors() -> None:
    assert str(R2Error("one\ttwo\nthree\x1b[31m")) == "one\ttwo\nthree\ufffd[31m"
