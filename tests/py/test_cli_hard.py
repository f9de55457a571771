"""r2ccl-ctl where things go wrong: values out of any range, output that nobody takes, objects that
are damaged or somebody else's, processes that end meanwhile. Never a traceback, always an exit
code, and a message that names the thing. Rung 3."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT, Finished, run_process
from segment_bed import StartWriter, start_writer
from test_cli import call, on_a_terminal

from r2ccl_ctl import control, drain, paths, unread
from r2ccl_ctl.cli import read_cmds

__all__ = ["start_writer"]

TOOL = f"{shlex.quote(sys.executable)} -m r2ccl_ctl"
HUGE = "9" * 400


def shell(script: str, *, code: int | None, env: Mapping[str, str] | None = None) -> Finished:
    """A shell command in which $TOOL is the tool; it must not end with a traceback."""
    found = run_process(
        ["bash", "-c", script], env={"TOOL": TOOL, **(env or {})}, cwd=ROOT, code=code
    )
    assert "Traceback" not in found.stdout + found.stderr, str(found)
    assert "Exception ignored" not in found.stderr, str(found)
    return found


# Values


@pytest.mark.parametrize(
    "words",
    [
        ["fail-nic", "x", "--for", HUGE], ["fail-nic", "x", "--for", "9000h"],
        ["fail-nic", "x", "--kind", f"loss={HUGE}"], ["fail-nic", "x", "--kind", "loss=0"],
        ["fail-nic", "x", "--kind", f"slow={HUGE}"], ["fail-nic", "x", "--after", HUGE],
        ["status", "--watch", "--interval", HUGE], ["gc", "--older-than", HUGE],
        ["drain-nic", "x", "--wait-timeout", HUGE],
        ["launch", "--timeout", "nan", "--", "true"], ["launch", "--timeout", "inf", "--", "true"],
        ["launch", "--timeout", "1e+300", "--", "true"], ["launch", "--grace", "inf", "--", "true"],
        ["launch", "--grace", "nan", "--", "true"], ["launch", "-n", "-1", "--", "true"],
        ["lab", "up", "--nics", "²"], ["run", "--", ""],
    ],
    ids=lambda words: " ".join(words)[:40],
)  # fmt: skip
def test_values_beyond_all_ranges(words: list[str]) -> None:
    result = call(*words, code=2)
    assert "Error: " in result.stderr
    bad = next(word for word in reversed(words) if word not in ("true", "--"))
    assert bad == "" or bad.rpartition("=")[2] in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["gc", "--older-than", "5parsecs"], ["metrics", "--keep", "x"],
        ["status", "--interval", "x"], ["drain-nic", "x", "--wait-timeout", "x"],
        ["fail-nic", "x", "--timeout", "-1"], ["fail-nic", "x", "--after", "-1"],
        ["fail-nic", "x", "--after", "99999999T"], ["fail-nic", "x", "--for", "0"],
        ["fail-nic", "x", "--kind", "slow=many"], ["fail-nic", "x", "--kind", "foo"],
        ["fail-nic", "x", "--kind", "slow=100Mbps"],
        ["demo", "--seconds-per-phase", "x"], ["demo", "--nic-rate", "x"], ["demo", "--size", "x"],
        ["shim", "lacks", "--nccl", "/nope"], ["shim", "lacks", "--nccl", "/etc/passwd"],
        ["shim", "build", "-o", "x", "--nccl", "/nope"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_errors_name_the_option(words: list[str]) -> None:
    said = call(*words, code=2).stderr
    assert f"Error: {words[-2]}: " in said and words[-1].rpartition("=")[2] in said


def test_ranks_beyond_all_measure() -> None:
    for words in (
        ["-n", "100000"],
        ["--per-node", "5000"],
        ["--emulate-nodes", "250", "-n", "4097"],
    ):
        said = call("launch", *words, "--", "true", code=2).stderr
        assert "ranks: give at most 4096" in said
    said = shell("ulimit -n 40; exec $TOOL launch -n 30 -- sleep 60", code=1).stderr
    assert said == (
        "Error: cannot start the ranks: Too many open files: each of 30 takes three here; "
        "raise `ulimit -n`\n"
    )


# Output


@pytest.mark.parametrize(
    "words",
    [
        "nics --job",
        "journal --json --job",
        "env",
        "--help",
    ],
)
def test_full_disk(start_writer: StartWriter, words: str) -> None:
    job = start_writer().job if words.endswith("--job") else ""  # others' may be damaged
    found = shell(f"exec $TOOL {words} {job} > /dev/full", code=1)
    assert found.stderr == "Error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", ["ps --json", "nics"])
def test_closed_output(start_writer: StartWriter, words: str) -> None:
    start_writer()
    shell(f"exec $TOOL {words} >&-", code=0)
    shell(f"exec $TOOL {words} >&- 2>&- <&-", code=0)


def test_reader_of_ranks_that_has_seen_enough() -> None:
    found = shell(
        "$TOOL launch -n 1 -- sh -c 'seq 300000; exit 5' | head -n 1; echo ${PIPESTATUS[0]}", code=0
    )
    assert found.stdout == "[0] 1\n5\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_locale(encoding: str) -> None:
    """Every line of a rank is shown, and JSON is JSON, whatever the locale can write."""
    env = {"PYTHONIOENCODING": encoding}
    lines = r"'one\na\377b\n\342\230\203\ntwo\n'"
    found = shell(f"exec $TOOL launch -n 1 -- printf {lines}", code=0, env=env)
    assert len(found.stdout.splitlines()) == 4
    found = shell("exec $TOOL env --json --job 'snow ☃'", code=0, env=env)
    assert json.loads(found.stdout)["env"]["R2CCL_JOB"] == "snow ☃"
    shell("exec $TOOL env --job 'snow ☃'", code=0, env=env)


def test_output_of_ranks_that_is_lost() -> None:
    found = shell("exec $TOOL launch -n 1 -- echo hello > /dev/full", code=0)
    assert found.stderr == "launch: output of rank 0 is lost: No space left on device\n"


# Terminals


def test_narrow_terminal(start_writer: StartWriter) -> None:
    """Nothing is cut: rows go on in the next line."""
    writer = start_writer()
    text = on_a_terminal("status", "--job", writer.job, env={"COLUMNS": "40", "NO_COLOR": "1"})
    assert "…" not in text
    assert "signals that this process lacks: tcp-info, netlink" in text.replace("\r\n", " ")
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 40


def test_watch_on_a_dumb_terminal(start_writer: StartWriter) -> None:
    words = ["status", "--job", start_writer().job, "--watch", "--interval", "100ms"]
    on_a_terminal(
        *words,
        env={"COLUMNS": "80", "TERM": "dumb"},
        enough=lambda text: text.count("signals that this process lacks") >= 2,
    )


# Objects


def test_ps_says_what_it_looked_for(start_writer: StartWriter) -> None:
    start_writer()
    assert "no process with job nosuch uses" in call("ps", "--job", "nosuch").stderr
    assert "no process with pid 1 uses" in call("ps", "--pid", "1").stderr
    assert "no process with pid 1, job '' uses" in call("ps", "--pid", "1", "--job", "").stderr


def test_processes_of_others(start_writer: StartWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = start_writer()
    monkeypatch.setattr(control, "describe", lambda path: None)
    monkeypatch.setattr(os, "access", lambda *words, **options: False)
    monkeypatch.setattr(control, "SHM", writer.path.parent)
    pid = str(writer.pid)
    name = re.escape(unread.user(os.geteuid()))
    assert re.search(f"pid {pid} belongs to {name}: use sudo", call("ps", "--pid", pid).stderr)
    assert re.search(r"\d+ process.* may not be read by you", call("ps").stderr)
    for words in (["status"], ["fail-nic", "x"], ["journal"]):
        stderr = call(*words, "--pid", pid, code=1).stderr
        assert re.search(f"pid {pid} belongs to {name}: use sudo", stderr), stderr


@pytest.mark.parametrize("size", [0, 1000, 5000])
def test_truncated(start_writer: StartWriter, size: int) -> None:
    writer = start_writer()
    writer.kill()
    os.truncate(writer.path, size)
    for words in (["journal"], ["journal", "--follow"], ["status"], ["nics", "--json"]):
        result = call(*words, "--pid", str(writer.pid), code=1)
        assert writer.path.name in result.stderr and "Error: " in result.stderr
    (row,) = json.loads(call("ps", "--all", "--json", "--pid", str(writer.pid)).stdout)["processes"]
    assert row["state"] == "damaged"


def test_truncated_while_it_is_followed(start_writer: StartWriter) -> None:
    writer = start_writer()
    wanted = control.Selection(job=writer.job)
    with read_cmds.Reader(wanted, dead=False) as reader:
        assert reader.batch()
        os.truncate(writer.path, 100)
        assert reader.batch() == [] and reader.batch() == []
        assert len(reader.damaged) == 1


def test_drain_of_a_process_that_dies(start_writer: StartWriter) -> None:
    writer = start_writer()
    process = writer.process
    assert not drain.look(process, "127.0.1.1").done
    writer.kill()
    assert drain.look(process, "127.0.1.1") == drain.Drained(process, True, "the process has ended")
    writer.path.unlink()
    assert drain.look(process, "127.0.1.1").done


# Programs


def test_run_leaves_signals_alone() -> None:
    """Python ignores SIGPIPE and SIGXFSZ; what it runs must not."""
    plain = shell("grep SigIgn /proc/self/status", code=0).stdout
    assert shell("exec $TOOL run -- grep SigIgn /proc/self/status", code=0).stdout == plain
    found = shell("exec $TOOL launch -n 1 -- grep SigIgn /proc/self/status", code=0)
    assert found.stdout == f"[0] {plain}"


def test_preload_of_a_path_with_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader cannot be told such a name: an error instead of a job without the shim."""
    folder = tmp_path / "a b"
    folder.mkdir()
    for name in (paths.PLUGIN, paths.SHIM):
        (folder / name).touch()
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(folder))
    assert f"export NCCL_NET_PLUGIN='{folder}/" in call("env").stdout
    for words in (["env", "--preload"], ["run", "--preload", "--", "true"]):
        assert "cannot be preloaded" in call(*words, code=1).stderr
    folder = folder.rename(tmp_path / "a:b")
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(folder))
    assert "cannot stand in LD_LIBRARY_PATH" in call("env", "--by-name", code=1).stderr


@pytest.mark.parametrize("words", ["env", "run -- echo export started"])
def test_bad_settings_are_said_before_the_start(words: str) -> None:
    """As `config list` says them; the program is started, and decides."""
    if not paths.plugin_path().is_file() or paths.plugin_path().parent.name in ("asan", "tsan"):
        pytest.skip("no plugin that this process can load")
    command, _, rest = words.partition(" ")
    bad = {"R2CCL_CHUNK": "77T", "R2CCL_CHUNKK": "1M", "R2CCL_NICS": "x" * 2000}
    said = shell(f"$TOOL {words}", code=0, env=bad)
    assert "warning: R2CCL_CHUNK=77T is not valid: allowed is 4K..16M" in said.stderr
    assert "R2CCL_CHUNKK is not a setting of R2CCL; did you mean R2CCL_CHUNK?" in said.stderr
    assert "warning: R2CCL_NICS=xxx" in said.stderr and said.stderr.count("warning: ") == 3
    assert said.stdout.startswith("export ")
    said = shell(f"$TOOL {command} --nics 127.0.1.1 {rest}", code=0, env=bad)
    assert "R2CCL_NICS" not in said.stderr, "what is set here is what holds"
    said = shell(f"$TOOL {command} --nics {'y' * 2000} {rest}", code=0)
    assert "warning: R2CCL_NICS=yyy" in said.stderr
    assert shell(f"$TOOL {words}", code=0).stderr == ""


def test_launch_of_what_cannot_run(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch(mode=0o644)
    assert "a folder" in call("launch", "--", str(tmp_path), code=2).stderr
    assert "not executable" in call("launch", "--", str(plain), code=2).stderr
    assert "'./no-such': no such file" in call("launch", "--", "./no-such", code=2).stderr
    assert "no such program in PATH" in call("launch", "--", "no-such", code=2).stderr
    result = call("launch", "--nccl", str(tmp_path), "--", "true", code=2)
    assert f"no libnccl.so.2 in {tmp_path}" in result.stderr


def test_launch_under_nohup() -> None:
    popen = subprocess.Popen(
        ["nohup", sys.executable, "-m", "r2ccl_ctl", "launch", "-n", "1", "--", "sh", "-c",
         "echo here; sleep 2; exit 3"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert popen.stdout is not None and popen.stdout.readline() == b"[0] here\n"
        popen.send_signal(signal.SIGHUP)
        assert popen.wait(timeout=30) == 3
    finally:
        popen.kill()
        popen.wait()


def test_shim_tools_where_they_may_not_write(tmp_path: Path) -> None:
    nccl = ROOT / os.environ.get("R2CCL_BUILD_DIR", "build") / paths.STANDIN
    if not nccl.is_file():
        pytest.skip(f"{nccl}: not there; run `make native`")
    words = ["shim", "build", "--nccl", str(nccl), "-o"]
    for output in ("/proc/1/x/libnccl.so.2", str(tmp_path)):
        assert f"--output '{output}'" in call(*words, output, code=2).stderr
    slip = tmp_path / "no" / "such"
    said = call(*words, str(slip / "libnccl.so.2"), code=2).stderr
    assert f"there is no folder '{slip}'" in said and not slip.parent.exists()


# Labs


def test_lab_state_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_LAB_DIR", str(tmp_path))
    file = tmp_path / "r2lab.json"
    file.mkdir()
    assert f"{file} is no file: remove it" in call("lab", "status", code=1).stderr
    file.rmdir()
    file.write_text(
        '{"schema": 1, "phase": "up", "created": 1e300, "holder": null, "nics": [], "cuts": [],'
        '"spec": {"nics": [1], "rates": [null]}}'
    )
    assert f"{file} cannot be read" in call("lab", "status", code=1).stderr


def test_error_of_the_system_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was not thought of."""

    def refused(**options: object) -> list[control.Process]:
        raise PermissionError(13, "Permission denied", "/some/where")

    monkeypatch.setattr(read_cmds, "list_processes", refused)
    assert call("ps", code=1).stderr == "Error: /some/where: Permission denied\n"


# Settings


def test_what_keeps_a_job_from_using_r2ccl_is_said() -> None:
    """NCCL without NCCL_DEBUG hides warnings: a job that runs without R2CCL's NICs, or with other
    settings than it was given, says so on stderr all the same. Every bad setting, once in a job."""
    launch = (
        "exec $TOOL launch -n 2 --emulate-nodes 2 --nccl standin --env R2CCL_NICS=eth99 "
        "--env R2CCL_EAGER=lots --env R2CCL_CHUNK=-1 --env R2CCL_HARTBEAT=3 {} "
        "-- r2ccl_perf --op all_reduce -b 4K -n 1 -w 0"
    )
    lines = (
        "WARN NET/R2CCL: no NICs: R2CCL_NICS: eth99 does not exist",
        "WARN NET/R2CCL: R2CCL_EAGER=lots is not valid: allowed is 0..32K bytes",
        "WARN NET/R2CCL: R2CCL_CHUNK=-1 is not valid: allowed is 4K..16M bytes",
        "WARN NET/R2CCL: R2CCL_HARTBEAT is not a setting of R2CCL; did you mean R2CCL_HEARTBEAT?",
    )
    found = shell(launch.format(""), code=0)
    assert found.stderr.count(f"[1] {lines[0]}") == 1, str(found)  # NICs are each node's own
    for line in lines:
        assert found.stderr.count(f"[0] {line}") == 1, str(found)
        assert found.stderr.count(line) == 1 + (line == lines[0]), str(found)
    assert "NET/R2CCL" not in shell(launch.format("--env R2CCL_LOG=none"), code=0).stderr
    found = shell(launch.format("--env NCCL_DEBUG=WARN"), code=0)
    assert found.stderr.count("eth99 does not exist") == 2, str(found)
