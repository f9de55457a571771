"""r2ccl-ctl in an operator's hands: what is said when a word has no effect, a process is gone or
silent, or the environment keeps R2CCL out. Rung 3."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _cffi_backend
import pytest
from conftest import ROOT
from segment_bed import StartWriter, start_writer, until
from test_cli import call
from test_launch import SHOW_ENV, environments

from r2ccl_ctl import __version__, control, launch, paths
from r2ccl_ctl.cli import act_cmds, fault_cmds, plan_cmds, view
from r2ccl_ctl.cli.act_cmds import ask
from r2ccl_ctl.cli.main import main
from r2ccl_ctl.control import Command, Process
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.job import LaunchSpec
from r2ccl_ctl.lab import LabUsageError
from r2ccl_ctl.lab.spec import parse_rate
from r2ccl_ctl.rows import Peer
from r2ccl_ctl.segment import Segment

__all__ = ["start_writer"]


# launch


def ranks_env(monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[dict[str, str]]:
    monkeypatch.delenv("NCCL_NET_PLUGIN_REF_COUNT", raising=False)
    spec = LaunchSpec(argv=[sys.executable, "-c", SHOW_ENV], timeout=60.0, **more)
    with launch.start(spec, echo=False) as job:
        return environments(job)


def test_launch_keeps_the_plugin_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = _cffi_backend.__file__  # a shared library
    (env,) = ranks_env(monkeypatch, plugin=str(plugin), nccl="system")
    assert env["NCCL_NET_PLUGIN_REF_COUNT"] == "1"
    (env,) = ranks_env(monkeypatch, plugin="none", nccl="system")
    assert "NCCL_NET_PLUGIN_REF_COUNT" not in env
    more = {"NCCL_NET_PLUGIN_REF_COUNT": "0"}
    (env,) = ranks_env(monkeypatch, plugin=str(plugin), nccl="system", env=more)
    assert env["NCCL_NET_PLUGIN_REF_COUNT"] == "0", "--env has the last word"


def test_launch_keeps_the_callers_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_JOB", "mine")
    (env,) = ranks_env(monkeypatch, plugin="none", nccl="system")
    assert env["R2CCL_JOB"] == "mine"
    (env,) = ranks_env(monkeypatch, plugin="none", nccl="system", job="other")
    assert env["R2CCL_JOB"] == "other"


def test_launch_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NET", "R2CCL_MODE", "R2CC_MODE", "NCCL_NET_PLUGIN", "R2CCL_NICS"):
        monkeypatch.delenv(name, raising=False)
    words = ["launch", "--emulate-nodes", "2", "--", "true"]

    def said(*options: str) -> str:
        argv = [sys.executable, "-m", "r2ccl_ctl", words[0], *options, *words[1:]]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 0, done
        return done.stderr

    assert "warning" not in said()
    monkeypatch.setenv("NCCL_NET", "Socket")
    assert said().count("warning: NCCL_NET=Socket makes NCCL ignore R2CCL") == 1
    assert "warning" not in said("--plugin", "none"), "nobody wants R2CCL here"
    monkeypatch.delenv("NCCL_NET")
    assert "warning: R2CCL_MODE=off switches" in said("--env", "R2CCL_MODE=off")
    monkeypatch.setenv("R2CCL_NICS", "eth7")
    assert "warning: R2CCL_NICS=eth7 is replaced by 127.0.1.1" in said()
    assert "warning" not in said("--env", "R2CCL_NICS=127.0.0.1")


def test_launch_of_no_rank() -> None:
    assert "-n" in call("launch", "-n", "0", "--", "true", code=2).stderr


# Who is to blame


def waiting(direction: str = "tx", **more: Any) -> Peer:
    now = time.monotonic_ns()
    words: dict[str, Any] = {
        "state": "suspect", "waits_mono_ns": now - 18 * 10**9, "gives_up_mono_ns": now + 22 * 10**9
    }  # fmt: skip
    words.update(more)
    return Peer(
        index=0, process_id="aa", host="node1", pid=7, direction=direction, connections=1,
        cause="", since_real_ns=0, since_mono_ns=1, heard_mono_ns=1, **words,
    )  # fmt: skip


# Values


@pytest.mark.parametrize("rate", ["1kbit", "7999bit", "0.5kbit"])
def test_rates_that_the_shaper_cannot_do(rate: str) -> None:
    with pytest.raises(LabUsageError, match=rf"rate '{rate}' is below 8kbit"):
        parse_rate(rate)
    assert "is below 8kbit" in call("lab", "up", "--rate", rate, code=2).stderr


@pytest.mark.parametrize("option", ["--for", "--after"])
def test_nothing_is_no_value(option: str) -> None:
    stderr = call("fail-nic", "x", option, "", "--job", "none", code=2).stderr
    assert "'' is no " in stderr


# JSON


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("status --job nosuch --json", 1), ("status --json --interval x", 2),
        ("fail-nic x --json --for never", 2), ("nics --json --nosuch", 2),
        ("lab status --json --name nosuch", 2), ("shim check --json --pid 0", 2),
    ],
)  # fmt: skip
def test_errors_as_json(words: str, code: int) -> None:
    result = call(*words.split(), code=code)
    found = json.loads(result.stdout)
    assert found["schema"] == 1 and found["exit_code"] == code
    assert found["error"] and f"Error: {found['error']}" in result.stderr


def test_errors_of_those_that_asked_for_no_json() -> None:
    assert call("status", "--job", "nosuch", code=1).stdout == ""
    assert call("run", "--", "", "--json", code=2).stdout == "", "the word is the command's"


def test_what_was_not_taken_is_withdrawn(start_writer: StartWriter) -> None:
    """Who stops waiting leaves nothing behind that a process would do later."""
    writer = start_writer("--deaf")
    command = Command("fail-nic", nic="127.0.1.1", fault="blackhole", direction="both")
    path = writer.process.path
    with Segment(path) as segment:
        table = segment.tables["commands"]

        def states() -> list[bytes]:
            return [segment.read(table.offset + i * table.stride, 4) for i in range(table.rows)]

        before = states()
        posted = control.Posted(writer.process, command, Segment(path, write=True))
        with pytest.raises(KeyboardInterrupt), posted:
            posted.post(time.monotonic() + 5)
            assert states() != before
            raise KeyboardInterrupt
        assert states() == before


# Words without effect


def test_plan_where_nobody_plans(start_writer: StartWriter) -> None:
    plain, shadow = start_writer("--plan", "3"), start_writer("--plan", "2")
    for word in ("off", "on"):
        stderr = call("plan", word, "--pid", str(plain.pid), code=1).stderr
        assert "no communicator is followed here" in stderr
        done = call("plan", word, "--pid", str(shadow.pid), code=int(word == "on"))
        text = done.stderr if word == "on" else done.stdout
        assert "started with R2CCL_PLAN=shadow: nothing changes" in text


def test_plan_off_needs_one_process_of_each_job() -> None:
    def said(job: str, ok: bool) -> act_cmds.Said:
        process = Process("a", Path("a"), "running", 1, 1, 0, 0, host="h", job=job)
        return act_cmds.Said(process, ok, "" if ok else "no communicator is followed here")

    enough = plan_cmds.one_of_each_job
    assert enough([said("a", True), said("a", False), said("b", True)])
    assert not enough([said("a", True), said("b", False)])
    assert not enough([said("a", False)])


def test_communicators_of_nobody(start_writer: StartWriter) -> None:
    writer = start_writer()
    for words in (["ps", "--comms"], ["plan", "show"]):
        assert "no process with job nope uses R2CCL here" in call(*words, "--job", "nope").stderr
        stderr = call(*words, "--job", writer.job).stderr
        assert "no communicators are followed here" in stderr
    stderr = call("plan", "predict", "--job", "nope", code=1).stderr
    assert "no running process of R2CCL with job nope. There are: " in stderr


@pytest.mark.parametrize(
    ("mode", "word"),
    [({"R2CCL_MODE": "off"}, "R2CCL_MODE=off"), ({"NCCL_NET": "Socket"}, "Socket")],
)
def test_demo_of_nothing(mode: dict[str, str], word: str, tmp_path: Path) -> None:
    stderr = call("demo", "--output", str(tmp_path), env=mode, code=2).stderr
    assert word in stderr and "unset it" in stderr
    assert not list(tmp_path.iterdir())


def test_own_library_is_no_nccl(tmp_path: Path) -> None:
    own = paths.named_shim_path()
    words = ["shim", "build", "--nccl", str(own), "-o", str(tmp_path / "libnccl.so.2")]
    assert "R2CCL's own library" in call(*words, code=2).stderr


# Those that are gone


def test_running_ones_are_named_first(start_writer: StartWriter) -> None:
    dead = start_writer()
    dead.kill()
    alive = start_writer()
    stderr = call("status", "--pid", "1", code=1).stderr
    titles = stderr.partition("There are: ")[2]
    named, where = (titles.find(f"pid {one.pid} ") for one in (alive, dead))
    assert named >= 0 or "more: `r2ccl-ctl ps`" in titles, titles  # beside many others' processes
    assert where < 0 or 0 <= named < where, titles


# --watch


def on_a_pty(argv: list[str], script: Callable[[Callable[[str], None], int], None]) -> str:
    """Run on a terminal; `script(await_text, pid)` acts; the whole output, to the end."""
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40", "NO_COLOR": "1"}
    popen = subprocess.Popen(argv, stdin=theirs, stdout=theirs, cwd=ROOT, env=env)
    os.close(theirs)
    found = bytearray()

    def drain() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other side is closed
                return
            found.extend(data)

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        script(
            lambda text: until(lambda: text in found.decode(errors="replace"), text, 30), popen.pid
        )
        assert popen.wait(timeout=20) == 0
    finally:
        popen.kill()
        popen.wait()
        reader.join(10)
        os.close(ours)
    return found.decode(errors="replace")


@pytest.mark.parametrize("word", ["status", "nics"])
def test_watch_outlives_the_job(start_writer: StartWriter, word: str) -> None:
    writer = start_writer()
    argv = [sys.executable, "-m", "r2ccl_ctl", word, "--job", writer.job, "--watch"]
    argv += ["--interval", "100ms"]

    def script(await_text: Callable[[str], None], pid: int) -> None:
        await_text("127.0.1.1")
        writer.end()
        await_text(", waiting for more")
        os.kill(pid, signal.SIGINT)

    text = on_a_pty(argv, script)
    after = text.rpartition("\x1b[?1049l")[2]  # the other screen is left
    assert "127.0.1.1" in after and re.search(r"ended \d\d:\d\d:\d\d, waiting", after)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_faults_that_stand_are_named_when_it_is_stopped(
    start_writer: StartWriter, tmp_path: Path, number: signal.Signals
) -> None:
    writer = start_writer()
    rules = tmp_path / "rules"
    rules.write_text("127.0.1.1 blackhole\n127.0.2.1 error\n127.0.2.1 recover at=100ms\n"
                     "127.0.1.1 recover at=60s\n")  # fmt: skip
    argv = [sys.executable, "-m", "r2ccl_ctl", "faults", "apply", str(rules), "--job", writer.job]
    popen = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        until(lambda: [n.fault for n in writer.process.snapshot().nics][0] != "", "fault", 30)
        assert popen.stdout
        said, out = b"", popen.stdout.fileno()
        while b"recover" not in said and select.select([out], [], [], 30)[0]:
            said += os.read(out, 4096) or b"recover"
        time.sleep(1.0)
        popen.send_signal(number)
        _, stderr = popen.communicate(timeout=20)
    finally:
        popen.kill()
        popen.wait()
    assert popen.returncode == 128 + number, stderr
    assert "stopped after 3 of 4 rules" in stderr
    assert stderr.count("still in force") == 1 and " 127.0.1.1)" in stderr


def test_a_rule_under_way_stands(
    start_writer: StartWriter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped inside a rule that may have got through; and by a word that cannot be meant."""
    writer = start_writer()
    rules = tmp_path / "rules"
    rules.write_text("127.0.1.1 blackhole\nnosuch blackhole\n127.0.2.1 error\n")
    real = ask
    for error, code in ((KeyboardInterrupt(), 130), (R2UsageError("several jobs"), 2)):

        def interrupted(wanted: Any, nic: str, *more: Any, error: BaseException = error) -> Any:
            if nic == "127.0.2.1":
                raise error
            return real(wanted, nic, *more)

        monkeypatch.setattr(fault_cmds, "ask", interrupted)
        words = ["faults", "apply", str(rules), "--job", writer.job, "--json"]
        with pytest.raises(SystemExit) as stopped:
            main(words, prog_name="r2ccl-ctl")
        assert stopped.value.code == code
        stdout, stderr = capsys.readouterr()
        said = [json.loads(line) for line in stdout.splitlines()]
        end = said[2] if code == 130 else said[-2]  # an error has a line of its own after it
        assert end["stopped"] == ("interrupted" if code == 130 else "several jobs")
        assert [rule["nic"] for rule in end["standing"]] == ["127.0.1.1"]
        assert bool(end["under_way"]) == (code == 130)
        assert "stopped after 2 of 3 rules" in stderr
        again = f"(r2ccl-ctl recover-nic --job {writer.job}"
        assert f"still in force: 127.0.1.1 blackhole direction=both {again} 127.0.1.1)" in stderr
        under_way = (
            f"interrupted, may be in force: 127.0.2.1 error direction=both {again} 127.0.2.1)"
        )
        assert (under_way in stderr) == (code == 130), "where nobody can be meant none was asked"


def test_rules_before_there_is_a_job(start_writer: StartWriter, tmp_path: Path) -> None:
    """Nobody is looked for before a rule was applied: those before the job are not."""
    rules = tmp_path / "rules"
    rules.write_text("127.0.1.1 blackhole\n127.0.1.1 error at=1s\n")
    stderr = call("faults", "apply", str(rules), "--job", "nope", code=1).stderr
    assert "2 of 2 rules were not applied" in stderr and "no target is left" not in stderr


def test_faults_stop_when_nobody_is_left(
    start_writer: StartWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends while the second rule is waited for."""
    writer = start_writer()
    rules = tmp_path / "rules"
    rules.write_text("127.0.1.1 blackhole\n127.0.1.1 recover at=300s\n")
    timer = threading.Timer(0.7, writer.kill)
    real = fault_cmds._wait

    def waits(*words: Any, looks: bool) -> bool:
        if looks:
            timer.start()
        return real(*words, looks=looks)

    monkeypatch.setattr(fault_cmds, "_wait", waits)
    begun = time.monotonic()
    done = call("faults", "apply", str(rules), "--job", writer.job, "--json", code=1)
    timer.join()
    assert "no target is left: stopped after 1 of 2 rules" in done.stderr
    end = json.loads(done.stdout.splitlines()[-1])
    assert (end["done"], end["ok"], end["stopped"]) == (1, False, "no target is left")
    assert time.monotonic() - begun < 150


def test_faults_as_json(start_writer: StartWriter, tmp_path: Path) -> None:
    """One line per rule with its answers, then what came of all of them; --check in such lines."""
    writer = start_writer()
    rules = tmp_path / "rules"
    rules.write_text("127.0.1.1 blackhole for=1h\neth9 error\n\n127.0.2.1 slow=1gbit direction=tx\n"
                     "127.0.2.1 recover at=100ms\n")  # fmt: skip
    words = ["faults", "apply", str(rules), "--job", writer.job, "--json"]
    checked = [json.loads(line) for line in call(*words, "--check", code=1).stdout.splitlines()]
    assert [(row["line"], row["ok"], row["at_s"]) for row in checked] == [
        (1, True, 0), (2, False, 0), (4, True, 0), (5, True, 0.1)]  # fmt: skip
    assert "no NIC 'eth9'" in checked[1]["error"]
    assert not [nic for nic in writer.process.snapshot().nics if nic.fault], "--check only looks"
    result = call(*words, code=1)
    *each, end = [json.loads(line) for line in result.stdout.splitlines()]
    assert {row["schema"] for row in (*each, end)} == {1}
    assert [(row["line"], row["nic"], row["kind"], row["ok"]) for row in each] == [
        (1, "127.0.1.1", "blackhole", True), (2, "eth9", "error", False),
        (4, "127.0.2.1", "slow=1gbit", True), (5, "127.0.2.1", "recover", True)]  # fmt: skip
    assert (each[0]["for"], each[2]["direction"], each[3]["at_s"]) == ("1h", "tx", 0.1)
    assert "no NIC 'eth9'" in each[1]["error"] and each[1]["answers"] == []
    (answer,) = each[0]["answers"]
    assert answer["ok"] and (answer["pid"], answer["nic"]) == (writer.pid, "127.0.1.1")
    assert (end["rules"], end["done"], end["failed"], end["ok"], end["stopped"]) == (
        4, 4, 1, False, "")  # fmt: skip
    (still,) = end["standing"]
    assert (still["line"], end["under_way"]) == (1, [])
    assert still["recover"] == f"r2ccl-ctl recover-nic --job {writer.job} 127.0.1.1"
    assert "1 of 4 rules were not applied" in result.stderr


# Small lies


@pytest.mark.parametrize("library", ["click", "cffi"])
def test_ctrl_c_while_the_tool_loads(tmp_path: Path, library: str) -> None:
    """Before the commands are there to handle it, or the one that is asked for: it ends the tool
    without a traceback. A library that is needed sends the signal while it is loaded."""
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    for ignore, code in (("", -signal.SIGINT), ("trap '' INT; ", 7)):
        script = f"{ignore}exec {sys.executable} -m r2ccl_ctl ps"
        if ignore:  # as under nohup: nobody ends it, so let the library end it
            (tmp_path / library / "__init__.py").write_text(
                "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nos._exit(7)\n"
            )
        run = subprocess.run(
            ["bash", "-c", script], capture_output=True, timeout=60, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert (run.returncode, run.stderr) == (code, b"")


@pytest.mark.parametrize(
    "words",
    [
        "fail-nic x --timeout 0", "recover-nic x --timeout 0ms", "plan off --timeout 0",
        "gc --all --older-than 5s", "config list --markdown --json",
        "config list --markdown --changed",
    ],
)  # fmt: skip
def test_options_that_make_no_sense(words: str) -> None:
    """No time for an answer, and options of which one would be ignored."""
    stderr = call(*words.split(), code=2).stderr
    assert re.search(r"Error: .*--(timeout|all|markdown)\b.*: ", stderr), stderr


def test_nics_of_those_that_stand_or_are_silent(start_writer: StartWriter) -> None:
    writer = start_writer("--deaf")
    snapshot = replace(writer.process.snapshot(), peers=[waiting()])
    silent = replace(
        snapshot, process=replace(writer.process, alive_mono_ns=time.monotonic_ns() - 7 * 10**9)
    )
    standing, quiet = (
        [line.plain for line in view.standing_lines(one)] for one in (snapshot, silent)
    )
    title = f"node-a pid {writer.pid} (job {writer.job})"
    assert len(standing) == 1 and re.fullmatch(
        rf"{re.escape(title)}: stalled: no path to node1:7 for \d+s of 40s: .* silent", standing[0]
    )
    assert re.fullmatch(rf"{re.escape(title)}: silent for \d+s", quiet[0]) and quiet[1:] == standing
    assert view.standing_lines(replace(snapshot, peers=[])) == []
    until(lambda: writer.process.silent_s > 0, "the writer is called silent")
    text = call("nics", "--job", writer.job).stdout
    assert re.search(rf"^{re.escape(title)}: silent for \d+s$", text, re.MULTILINE), text
    rows = json.loads(call("nics", "--job", writer.job, "--json").stdout)["nics"]
    assert all(row["silent_s"] > 3 and row["stands"] == "" for row in rows) and rows


def test_versions_of_plugins_are_known(start_writer: StartWriter) -> None:
    writer = start_writer()
    (row,) = json.loads(call("ps", "--job", writer.job, "--json").stdout)["processes"]
    assert row["plugin_version"] == __version__
