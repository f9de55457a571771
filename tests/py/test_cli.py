"""r2ccl-ctl as its users call it, against a C program with a control segment. Rung 3. It cannot
prove that a NIC really fails: the engine's and the lab's tests do."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from conftest import ROOT, Build, missing
from segment_bed import StartWriter, Writer, follow, program, read_line, start_writer

from r2ccl_ctl import control, env, paths, settings_view
from r2ccl_ctl.cli import act_cmds, docs
from r2ccl_ctl.cli.main import SECTIONS, Later, main
from r2ccl_ctl.control import Answer
from r2ccl_ctl.segment import layout

__all__ = ["start_writer"]


def call(*words: str, code: int = 0, env: dict[str, str] | None = None) -> Result:
    """Run a command in this process."""
    result = CliRunner().invoke(main, list(words), env=env)
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    if result.exception is not None:
        assert isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def call_json(*words: str) -> dict[str, Any]:
    found = json.loads(call(*words, "--json").stdout)
    assert isinstance(found, dict)
    assert found["schema"] == 1
    return found


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing runs."""
    monkeypatch.setattr(control, "SHM", tmp_path)
    return tmp_path


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build folder with files of the right names."""
    folder = tmp_path / "built"
    (folder / "hostnccl").mkdir(parents=True)
    for name in (paths.PLUGIN, paths.STANDIN, paths.PERF):
        (folder / name).write_text("")
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(folder))
    return folder


# Looking


def test_ps(start_writer: StartWriter) -> None:
    writer = start_writer("--rank", "5")
    text = call("ps", "--job", writer.job).stdout
    assert text.splitlines()[0].split()[:5] == ["NODE", "PID", "JOB", "RANK", "STATE"]
    assert text.splitlines()[1].split()[:5] == [
        "node-a", str(writer.pid), writer.job, "5", "running",
    ]  # fmt: skip
    (row,) = call_json("ps", "--job", writer.job)["processes"]
    assert (row["node"], row["pid"], row["rank"], row["state"]) == (
        "node-a", writer.pid, 5, "running",
    )  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", row["started"])


def test_ps_shows_the_dead_only_when_asked(start_writer: StartWriter) -> None:
    writer = start_writer()
    writer.kill()
    assert call_json("ps", "--job", writer.job)["processes"] == []
    (row,) = call_json("ps", "--all", "--job", writer.job)["processes"]
    assert row["state"] == "died"


def test_nobody_is_there(nobody: Path) -> None:
    result = call("ps")
    assert result.stdout == ""
    assert "no process uses R2CCL here" in result.stderr
    assert call_json("ps")["processes"] == []
    for words in (["status"], ["nics"], ["journal"], ["fail-nic", "eth0"], ["recover-nic", "eth0"]):
        result = call(*words, code=1)
        assert result.stdout == ""
        assert "no running process of R2CCL" in result.stderr
        assert "r2ccl-ctl run -- CMD" in result.stderr


def test_status(start_writer: StartWriter) -> None:
    writer = start_writer()
    text = call("status", "--job", writer.job).stdout
    assert f"node-a  pid {writer.pid}  job {writer.job}" in text
    assert "signals that this process lacks: " in text
    (row,) = call_json("status", "--job", writer.job)["processes"]
    assert sorted(row["missing_signals"]) == ["netlink", "tcp-info"]
    nic = row["nics"][0]
    assert (nic["name"], nic["state"], nic["link"]) == ("127.0.1.1", "healthy", "up")
    assert nic["tx_rate"] > 1_000_000, "a rate is measured even by one call"
    assert row["paths"][0]["peer_host"] == row["peers"][0]["host"] == "node-b"
    assert row["counters"]["bytes_sent"] > 0
    assert row["gauges"]["threads"] == 2


def test_status_lists_odd_paths_and_with_details_all(start_writer: StartWriter) -> None:
    writer = start_writer()
    assert "REMOTE NIC" not in call("status", "--pid", str(writer.pid)).stdout
    details = call("status", "--pid", str(writer.pid), "--details").stdout
    assert details.count("127.0.9.1") == 2
    call("fail-nic", "127.0.2.1", "--pid", str(writer.pid))
    text = call("status", "--pid", str(writer.pid)).stdout
    assert text.count("127.0.9.1") == 1
    assert "3 heartbeats unanswered" in text


def test_status_after_death(start_writer: StartWriter) -> None:
    writer = start_writer()
    call("fail-nic", "127.0.2.1", "--pid", str(writer.pid))
    writer.kill()
    text = call("status", "--pid", str(writer.pid)).stdout
    assert "died" in text and "blackhole both" in text
    call("status", "--job", writer.job, code=1)


def test_nics(start_writer: StartWriter) -> None:
    writers = [start_writer("--rank", "0"), start_writer("--rank", "1", "--nics", "1")]
    rows = call_json("nics", "--job", writers[0].job)["nics"]
    assert [(row["pid"], row["name"]) for row in rows] == [
        (writers[0].pid, "127.0.1.1"), (writers[0].pid, "127.0.2.1"),
        (writers[1].pid, "127.0.1.1"),
    ]  # fmt: skip
    first, *_ = call("nics", "--job", writers[0].job).stdout.split("\n\n")
    assert len(first.splitlines()) == 4


def test_output_for_programs_is_plain(start_writer: StartWriter) -> None:
    writer = start_writer()
    for words in (["ps"], ["nics"], ["status", "-d"], ["journal"]):
        text = call(*words, "--job", writer.job).stdout
        assert "\x1b" not in text
        assert not [line for line in text.splitlines() if line != line.rstrip()]


# Taking NICs away


def test_fail_and_recover(start_writer: StartWriter) -> None:
    writer = start_writer("--rank", "1")
    job = ["--job", writer.job]
    text = call("fail-nic", "127.0.2.1", *job).stdout
    assert text == (
        f"node-a pid {writer.pid} (job {writer.job}, rank 1): 127.0.2.1: blackhole both"
        " (blackhole, until recover-nic)\n"
    )
    nic = call_json("nics", *job)["nics"][1]
    assert (nic["state"], nic["fault"], nic["failures"]) == ("failed", "blackhole both", 1)
    assert "already" in call("fail-nic", "127.0.2.1", *job).stdout
    assert "has no fault any more" in call("recover-nic", "127.0.2.1", *job).stdout
    assert call_json("nics", *job)["nics"][1]["state"] == "healthy"
    call("recover-nic", "127.0.2.1", *job)


def test_recover_nic_says_what_stays_drained(
    start_writer: StartWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start_writer()
    agreed = [("127.0.2.1", Answer(writer.process, True, "no fault was injected on 127.0.2.1"))]
    monkeypatch.setattr(act_cmds, "ask", lambda *words: agreed)
    words = ["recover-nic", "127.0.2.1", "--job", writer.job]
    assert "drained" not in call(*words).stdout
    with writer.rows() as segment:
        table, offset = segment.tables["nics"], layout().offset("r2_seg_nic", "state")
        drained = {word: n for n, word in layout().enum("r2_seg_nic_state", "R2_SEG_NIC_").items()}
        segment.write(table.offset + table.stride + offset, struct.pack("=I", drained["drained"]))
    assert call(*words).stdout.endswith(" 127.0.2.1; it stays drained until undrain-nic\n")


def test_fault_options_arrive(start_writer: StartWriter) -> None:
    writer = start_writer()
    job = ["--job", writer.job]
    words = ["--kind", "slow=80mbit", "--direction", "rx", "--after", "64K", "--for", "90s"]
    (answer,) = call_json("fail-nic", "127.0.1.1", *job, *words)["answers"]
    assert answer["ok"]
    assert answer["text"] == "127.0.1.1: slow rx 10000000 B/s after 65536 B for 90000 ms"
    (answer,) = call_json("fail-nic", "127.0.2.1", *job, "--kind", "loss=0.5%")["answers"]
    assert answer["text"] == "127.0.2.1: loss both 5000 ppm"


def test_all_ranks_of_a_job(start_writer: StartWriter) -> None:
    one, two = start_writer("--rank", "0"), start_writer("--rank", "1", "--nics", "4")
    answers = call_json("fail-nic", "127.0.2.1", "--job", one.job)["answers"]
    assert [(answer["pid"], answer["ok"]) for answer in answers] == [
        (one.pid, True), (two.pid, True),
    ]  # fmt: skip
    answers = call_json("fail-nic", "127.0.4.1", "--job", one.job)["answers"]
    assert [answer["pid"] for answer in answers] == [two.pid], "only one has this NIC"


def test_several_jobs_need_a_word(start_writer: StartWriter) -> None:
    one, two = start_writer(), start_writer(job="test-second-job")
    result = call("fail-nic", "127.0.2.1", code=2)
    assert one.job in result.stderr and two.job in result.stderr and "--all" in result.stderr
    assert {writer.process.snapshot().nics[1].state for writer in (one, two)} == {"healthy"}


def test_unknown_nic(start_writer: StartWriter) -> None:
    writer = start_writer()
    result = call("fail-nic", "eth9", "--pid", str(writer.pid), code=1)
    assert result.stderr == "Error: no NIC 'eth9'. NICs: 127.0.1.1, 127.0.2.1\n"


def test_unknown_process(start_writer: StartWriter) -> None:
    writer = start_writer()
    result = call("fail-nic", "eth9", "--pid", "1", "--job", writer.job, code=1)
    assert "no running process of R2CCL with pid 1" in result.stderr
    assert "There are: " in result.stderr


def test_no_answer(start_writer: StartWriter) -> None:
    deaf, awake = start_writer("--deaf"), start_writer()
    result = call("fail-nic", "127.0.1.1", "--job", deaf.job, "--timeout", "300ms", code=1)
    assert f"Error: node-a pid {deaf.pid} " in result.stderr
    assert "no answer in time" in result.stderr
    assert f"node-a pid {awake.pid} " in result.stdout


# Journal


def test_journal(start_writer: StartWriter) -> None:
    writer = start_writer()
    call("fail-nic", "127.0.1.1", "--job", writer.job)
    events = json_lines(call("journal", "--job", writer.job, "--json").stdout)
    assert [event["event"] for event in events][3:] == [
        "fault-injected", "nic-down", "replay", "resume",
    ]  # fmt: skip
    assert {event["schema"] for event in events} == {1}
    assert events[5]["bytes"] == 1 << 20
    text = call("journal", "--job", writer.job, "--last", "2").stdout
    assert re.search(r"replay +127\.0\.1\.1 -> 127\.0\.9\.1, peer node-b:4711, .*1\.0 MiB", text)
    assert len(text.splitlines()) == 2 and "21.0 ms" in text
    assert call("journal", "--job", writer.job, "--last", "0").stdout == ""


def test_journal_after_death(start_writer: StartWriter) -> None:
    writer = start_writer()
    writer.end()
    text = call("journal", "--pid", str(writer.pid)).stdout
    assert text.splitlines()[-1].endswith("ended")
    assert "ended" in call("journal", "--all", "--job", writer.job).stdout
    call("journal", "--job", writer.job, code=1)


def test_journal_in_order_of_time(start_writer: StartWriter) -> None:
    writers = [start_writer() for _ in range(3)]
    for nic in ("127.0.1.1", "127.0.2.1"):
        call("fail-nic", nic, "--job", writers[0].job)
    events = json_lines(call("journal", "--job", writers[0].job, "--json").stdout)
    assert {event["pid"] for event in events} == {writer.pid for writer in writers}
    times = [event["real_ns"] for event in events]
    assert times == sorted(times)


def test_journal_follows(start_writer: StartWriter) -> None:
    """Also a process that starts later; ends when the chosen process does."""
    first = start_writer()
    everyone = follow("journal", "--job", first.job, "--follow", "--json")
    one = follow("journal", "--pid", str(first.pid), "--follow", "--last", "1", "--json")
    try:
        for _ in range(3):
            assert json.loads(read_line(everyone))["pid"] == first.pid
        assert json.loads(read_line(one))["event"] == "path-up"  # it follows, before the end comes
        second = start_writer()
        assert json.loads(read_line(everyone))["pid"] == second.pid
        first.end()
        assert json.loads(read_line(one))["event"] == "ended"
        assert one.wait(timeout=15) == 0
        everyone.send_signal(signal.SIGINT)
        assert everyone.wait(timeout=15) == 0
    finally:
        for popen in (everyone, one):
            popen.kill()
            popen.wait()


def test_journal_waits_for_the_first_process(start_writer: StartWriter) -> None:
    name = f"later{os.getpid()}"
    early = follow("journal", "--job", name, "--follow", "--json")
    try:
        time.sleep(1)
        assert early.poll() is None
        writer = start_writer(job=name)
        assert json.loads(read_line(early))["pid"] == writer.pid
    finally:
        early.kill()
        early.wait()


def test_watch(start_writer: StartWriter) -> None:
    writer = start_writer()
    popen = follow("status", "--job", writer.job, "--watch", "--json", "--interval", "100ms")
    try:
        looks = [json.loads(read_line(popen)) for _ in range(3)]
        bytes_sent = [look["processes"][0]["counters"]["bytes_sent"] for look in looks]
        assert bytes_sent == sorted(set(bytes_sent))
        popen.send_signal(signal.SIGINT)
        assert popen.wait(timeout=15) == 0
    finally:
        popen.kill()
        popen.wait()


def on_a_terminal(
    *words: str, env: dict[str, str], enough: Callable[[str], bool] | None = None
) -> str:
    """What a command writes to a terminal until it ends, or until that is `enough`."""
    ours, theirs = os.openpty()
    popen = subprocess.Popen(
        [sys.executable, "-m", "r2ccl_ctl", *words],
        stdin=theirs, stdout=theirs, cwd=ROOT, env={**os.environ, "TERM": "xterm", **env},
    )  # fmt: skip
    os.close(theirs)
    found = b""
    end = time.monotonic() + 30
    try:
        while enough is None or not enough(found.decode(errors="replace")):
            assert time.monotonic() < end, f"not within 30 s: {found!r}"
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    found += os.read(ours, 65536)
                except OSError:  # the other side is closed
                    break
    finally:
        popen.kill()
        popen.wait()
        os.close(ours)
    return found.decode()


def test_colours_on_a_terminal(start_writer: StartWriter) -> None:
    words = ["nics", "--job", start_writer().job]
    text = on_a_terminal(*words, env={"COLUMNS": "200"})
    assert "healthy" in text and "\x1b[32m" in text
    text = on_a_terminal(*words, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert "healthy" in text and "\x1b[32m" not in text


def test_findings_on_a_terminal(build: Build) -> None:
    """click colours them, and does not know NO_COLOR."""
    env = {"R2CCL_CHUNCK": "1", "R2CCL_BUILD_DIR": str(build.plugin.parent)}
    assert "\x1b[33mwarning" in on_a_terminal("config", "check", env=env)
    text = on_a_terminal("config", "check", env={**env, "NO_COLOR": "1"})
    assert "warning" in text and "\x1b" not in text


# Around a job


def test_env(built: Path) -> None:
    lines = call("env", "--job", "a b").stdout.splitlines()
    assert lines == [
        f"export NCCL_NET_PLUGIN={built}/libnccl-net-r2ccl.so",
        "export NCCL_NET_PLUGIN_REF_COUNT=1",
        "export R2CCL_JOB='a b'",
    ]
    found = call_json("env", "--nccl", "standin", "--by-name")["env"]
    assert found["NCCL_NET_PLUGIN"] == "r2ccl"
    assert found["LD_LIBRARY_PATH"].split(":")[:2] == [f"{built}/hostnccl", str(built)]
    assert "NCCL_NVLS_ENABLE" not in found


def test_env_in_a_shell(built: Path) -> None:
    text = call("env", "--job", "it's").stdout
    run = subprocess.run(
        ["bash", "-euc", f'{text}\necho "$R2CCL_JOB"'], capture_output=True, timeout=20, check=True
    )
    assert run.stdout.decode() == "it's\n"


def test_env_warns(built: Path) -> None:
    result = call("env", env={"NCCL_NET": "IB", "R2CCL_MODE": "off"})
    assert "NCCL_NET=IB makes NCCL ignore R2CCL" in result.stderr
    assert "R2CCL_MODE=off switches R2CCL off" in result.stderr
    assert "IB" not in result.stdout


def test_library_path_keeps_what_was_there() -> None:
    assert env.prepend(["/a"], "/b:/a::/c") == "/a:/b:/c"
    assert env.prepend(["/a"], "") == "/a"


def test_run(built: Path) -> None:
    command = [sys.executable, "-m", "r2ccl_ctl", "run", "--nics", "127.0.1.1", "--"]
    script = 'echo "$NCCL_NET_PLUGIN $R2CCL_NICS $R2CCL_JOB $*"; exit 7'
    run = subprocess.run(
        [*command, "sh", "-c", script, "x", "--json", "-h"],
        capture_output=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 7
    plugin, nics, job, *rest = run.stdout.decode().split()
    assert (plugin, nics, rest) == (f"{built}/{paths.PLUGIN}", "127.0.1.1", ["--json", "-h"])
    assert re.fullmatch(r"sh-[0-9a-f]{4}", job)


def test_run_keeps_the_callers_job(built: Path) -> None:
    assert env.default_job({"R2CCL_JOB": "mine"}, ["x"]) == ""
    assert env.default_job({"SLURM_JOB_ID": "17"}, ["x"]) == ""
    assert env.default_job({}, ["/usr/bin/python3"]).startswith("python3-")


def test_not_built(tmp_path: Path) -> None:
    for words in (["env"], ["run", "--", "true"], ["config", "list"]):
        result = call(*words, code=1, env={"R2CCL_BUILD_DIR": str(tmp_path)})
        assert f"is not at {tmp_path}/libnccl-net-r2ccl.so" in result.stderr
        assert "R2CCL_BUILD_DIR" in result.stderr


def test_build_of_an_installation(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "checkout", lambda: None)
    assert (
        f"already built: this installation has its native parts in {built}" in call("build").stdout
    )
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(tmp_path / "nothing"))
    call("build", code=1)


def test_build_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "checkout", lambda: tmp_path)
    assert "make native ended with code 2" in call("build", code=1).stderr
    (tmp_path / "Makefile").write_text("native:\n\ttouch made\n")
    call("build")
    assert (tmp_path / "made").exists()


def test_gc(start_writer: StartWriter, nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = start_writer_outside(start_writer, monkeypatch)
    (nobody / writer.path.name).write_bytes(writer.path.read_bytes())
    result = call("gc")
    assert (result.stdout, result.stderr) == ("", "0 removed, 0 B\n")
    result = call("gc", "--all", "--dry-run")
    assert writer.path.name in result.stdout and "1 would be removed" in result.stderr
    assert (nobody / writer.path.name).exists()
    (row,) = call_json("gc", "--all")["removed"]
    assert (row["segment"], row["state"]) == (writer.path.name, "ended")
    assert list(nobody.iterdir()) == []
    call("gc", "--older-than", "x", code=2)


def start_writer_outside(start: StartWriter, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """A writer that has ended, while the tool looks elsewhere."""
    elsewhere = control.SHM
    monkeypatch.setattr(control, "SHM", Path("/dev/shm"))
    writer = start()
    writer.end()
    monkeypatch.setattr(control, "SHM", elsewhere)
    return writer


def plugin() -> Path:
    path = program().parents[1] / paths.PLUGIN
    if not path.is_file():
        missing("build", f"{path}: not there; run `make native`")
    return path


def load_settings() -> list[settings_view.Setting]:
    """The table of the build under test; sanitizers cannot be loaded into Python."""
    path = plugin()
    if path.parent.name in ("asan", "tsan"):
        pytest.skip("a build with sanitizers cannot be loaded into Python")
    return settings_view.load(path)


def test_config_list(monkeypatch: pytest.MonkeyPatch) -> None:
    load_settings()
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(plugin().parent))
    words = [sys.executable, "-m", "r2ccl_ctl", "config", "list"]
    run = subprocess.run(
        [*words, "--json", "--changed"], capture_output=True, timeout=60, check=True, cwd=ROOT,
        env={**os.environ, "R2CCL_VERIFY": "yes", "R2CC_MODE": "2", "R2CCL_EAGER": "1T"},
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(run.stdout)["settings"]}
    assert rows["R2CCL_VERIFY"]["value"] == "1"
    assert rows["R2CCL_VERIFY"]["source"] == "environment"
    assert (rows["R2CCL_MODE"]["value"], rows["R2CCL_MODE"]["source"]) == ("balance", "R2CC_MODE")
    assert (rows["R2CCL_PLAN"]["value"], rows["R2CCL_PLAN"]["source"]) == ("off", "R2CCL_MODE")
    assert set(rows) == {"R2CCL_VERIFY", "R2CCL_MODE", "R2CCL_EAGER", "R2CCL_PLAN"}
    assert b"warning: R2CCL_EAGER=1T is not valid" in run.stderr
    table = subprocess.run(words, capture_output=True, timeout=60, check=True, cwd=ROOT).stdout
    assert table.decode().split()[0] == "SETTING"
    assert re.search(r"R2CCL_NO_PATH_TIMEOUT +60s ", table.decode())
    assert re.search(r"R2CCL_DAMP +10min +10min ", table.decode())


def test_config_of_what_is_no_plugin(built: Path) -> None:
    result = call("config", "list", code=1)
    assert "the settings cannot be read from" in result.stderr


# The whole tool


def commands() -> list[tuple[str, click.Command]]:
    return docs.walk(main, "r2ccl-ctl")


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_help_has_an_example(name: str) -> None:
    text = call(*name.split()[1:], "--help").stdout
    assert "Example:" in text, f"{name} --help shows no example"
    example = text.partition("Example:")[2]
    assert re.search(rf"^ +.*{re.escape(name)}\b", example, re.MULTILINE), "one of another command"


def test_every_command_is_listed_once() -> None:
    listed = [command.name for _, section in SECTIONS for command in section]
    assert sorted(str(name) for name in listed) == sorted(main.commands)


LATERS = [later for _, section in SECTIONS for later in section]


@pytest.mark.parametrize("later", LATERS, ids=lambda later: str(later.name))
def test_a_command_is_what_the_list_says(later: Later) -> None:
    command = later.load()
    assert command.name == later.name and not command.hidden
    for limit in (45, 80, 1000):
        assert later.get_short_help_str(limit) == command.get_short_help_str(limit)


def test_examples_parse() -> None:
    """The examples of the help texts use options that exist."""
    for name, command in commands():
        for line in re.findall(r"^\s*(r2ccl-ctl .*)$", docs.help_text(command), re.MULTILINE):
            words = shlex.split(line.split(" > ")[0])[1:]
            current: click.Command = main
            while isinstance(current, click.Group):
                found = current.get_command(click.Context(current), words.pop(0))
                assert found is not None, f"{name}: {line}"
                current = found
            current.make_context(line, words)


def test_cli_page_is_current() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert page == docs.markdown(main), "run: python -m r2ccl_ctl.cli.docs > docs/cli.md"


def test_settings_page_is_current() -> None:
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    now = settings_view.markdown(load_settings())
    assert page == now, "run: r2ccl-ctl config list --markdown > docs/settings.md"
