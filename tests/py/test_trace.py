"""`trace`: spans and counters from made-up journals (rung 1), and from a job on loopback NICs (rung
3). Each keeps to the rules of the trace event format. That Perfetto shows them well was looked at
by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, Build, missing
from test_validate import record_of
from trace_rules import problems

from r2ccl_ctl.cli import trace_cmds
from r2ccl_ctl.control import Process
from r2ccl_ctl.demo.stage import sweep
from r2ccl_ctl.journal import Event
from r2ccl_ctl.lab import Lab, LabSpec
from r2ccl_ctl.trace import STAGES, Failover, Sample, document, failovers, rates

A = Process("a", Path("/a"), "running", 10, 10, 0, 1, host="ha", rank=0)
B = Process("b", Path("/b"), "running", 20, 20, 0, 1, host="hb", rank=1)
MS = 10**6


def event(process: Process, word: str, ms: float, nic: str = "eth1", size: int = 0) -> Event:
    peer = B if process is A else A
    path = word in ("path-down", "path-up", "fenced", "replay")
    return Event(process, 1, 0, int(ms * MS), word, nic, "eth9" if path else "", peer.host,
                 peer.pid, 1, size, 0, "reset")  # fmt: skip


def at_peer(word: str, ms: float) -> Event:
    return replace(event(B, word, ms, "eth9"), remote_nic="eth1")


LOSS = [
    event(A, "fault-injected", 100), event(A, "path-down", 103), at_peer("path-down", 104),
    event(A, "fenced", 105), event(A, "replay", 106, size=4096), event(A, "resume", 109, "eth0"),
]  # fmt: skip


def stages(one: Failover) -> dict[str, float]:
    return {word: ns / MS for word, ns in one.stages.items()}


def test_stages_of_a_failover() -> None:
    first, peer = failovers(LOSS[::-1])  # the order of the journals is no matter
    assert (first.begin_ns, first.end_ns, first.bytes) == (100 * MS, 109 * MS, 4096)
    assert stages(first) == {
        "detected": 103, "told": 104, "fenced": 105, "replayed": 106, "resumed": 109,
    }  # fmt: skip
    assert (peer.host, stages(peer)) == ("hb", {"detected": 104})


def test_who_is_told_is_the_later_one() -> None:
    _, peer = sorted(failovers(LOSS), key=lambda one: one.host)
    assert "told" not in peer.stages


def test_a_path_that_is_lost_twice() -> None:
    again = [replace(e, mono_ns=e.mono_ns + 5000 * MS) for e in LOSS]
    found = [f for f in failovers([*LOSS, event(A, "path-up", 2000), *again]) if f.host == "ha"]
    assert [f.begin_ns // MS for f in found] == [100, 5100]
    assert all(set(f.stages) == set(STAGES) for f in found)


def test_a_loss_without_a_fault() -> None:
    (one,) = failovers([event(A, "fault-injected", 1), event(A, "path-down", 3000)])
    assert one.begin_ns == 3000 * MS and stages(one) == {"detected": 3000}


def test_document() -> None:
    found = document(LOSS, [Sample(100 * MS, "hb", "sent by eth0", "Mbit/s", 8.0)], ["a note"])
    rows = found["traceEvents"]
    assert problems(json.dumps(found)) == []
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["ph"] == "M"}
    assert names == {(1, 0): "host ha", (2, 0): "host hb", (1, 10): "rank 0", (2, 20): "rank 1"}
    assert sum(r["ph"] == "i" for r in rows) == len(LOSS)
    (counter,) = [r for r in rows if r["ph"] == "C"]
    assert (counter["pid"], counter["ts"], counter["args"]) == (2, 0.0, {"Mbit/s": 8.0})
    assert found["otherData"]["notes"] == ["a note"]


def test_processes_with_one_pid_have_rows_of_their_own() -> None:
    """Containers that share a host's name count their pids from 1."""
    first, second = (replace(A, name=name, pid=1, rank=None) for name in ("c1", "c2"))
    lost = [replace(e, process=p) for p in (first, second) for e in LOSS if e.process is A]
    found = document(lost)
    assert not problems(json.dumps(found))
    rows = {e["tid"] for e in found["traceEvents"] if e["ph"] == "b"}
    named = [e for e in found["traceEvents"] if e["name"] == "thread_name"]
    assert rows == {1, 2} == {e["tid"] for e in named}
    assert [e["args"]["name"] for e in named] == ["pid 1", "pid 1"]


def test_a_process_of_another_version() -> None:
    """Records of validate keep processes; those of another version have other fields."""
    assert Process.from_dict({**A.as_dict(), "host_index": 1}) == A


def test_rates() -> None:
    rows = [(0, {"eth0": 0.0}), (10**9, {"eth0": 1e6}), (2 * 10**9, {"eth0": 1e6, "eth1": 5.0})]
    found = rates("h", rows, "Mbit/s", "sent by", 8e-6)
    assert [(s.ns, s.name, s.value) for s in found] == [
        (10**9, "sent by eth0", 8.0), (2 * 10**9, "sent by eth0", 0.0),
    ]  # fmt: skip


def test_counters_of_the_same_name_stay_apart() -> None:
    """Two jobs have a rank 0 on one host, and each two communicators that are called alike."""
    counters: trace_cmds.Counters = {}
    other = replace(A, name="c", pid=11)
    nics = [{"name": "eth0", "tx_bytes": 5}]
    comms = [{"name": "dp", "id": id_ * 16, "operations": 1, "bus_bytes": 9} for id_ in "ab"]
    for ns in range(4):
        for process in (A, other):
            trace_cmds._count(counters, ns, process, nics, comms)
    samples = trace_cmds._samples(counters)
    assert len({sample.name for sample in samples}) == 2 * (1 + 2 + 2)
    assert problems(json.dumps(document(LOSS, samples))) == []


def trace(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "r2ccl_ctl", "trace", *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)


def test_of_a_job(build: Build, tmp_path: Path) -> None:
    """Two emulated nodes lose a NIC; the trace has the span, and counters while it ran."""
    job = f"trace-{os.getpid()}"
    command = [
        sys.executable, "-m", "r2ccl_ctl", "launch", "--emulate-nodes", "2", "--nics", "2",
        "--job", job, "--env", "R2CCL_FAULTS=127.0.1.1 blackhole at=2s", "--timeout", "60",
        "--env", f"LD_PRELOAD={build.plugin.parent / 'libr2ccl.so'}",
        "--", str(build.plugin.parent / "r2ccl_perf"), "-b", "4M", "--duration", "20",
        "--until", str(tmp_path / "until"), "--timeline", str(tmp_path / "timeline"),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as popen:
        try:
            while not (tmp_path / "timeline").exists() or not (tmp_path / "timeline").read_text():
                assert popen.poll() is None
            done = trace("--job", job, "--for", "4s", "-o", str(tmp_path / "t.json"))
        finally:
            (tmp_path / "until").touch()
            popen.wait(60)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "t.json").read_text()
    assert problems(text) == []
    rows = json.loads(text)["traceEvents"]
    spans = {row["name"].split(" to ")[0] for row in rows if row["ph"] == "b"}
    assert any(name.endswith(": failover 127.0.1.1") for name in spans) and "resumed" in spans, (
        spans
    )
    counters = [row for row in rows if row["ph"] == "C"]
    assert any(row["args"].get("Mbit/s", 0) > 0 for row in counters)
    assert any(row["args"].get("per second", 0) > 0 for row in counters), "no communicator"
    assert any(row["args"].get("GB/s", 0) > 0 for row in counters), "no bus bandwidth"
    sweep(job)


@pytest.mark.lab
def test_of_two_hosts(build: Build, tmp_path: Path, lab_rights: None) -> None:
    """Hosts are nodes of a lab, reached by a stand-in for ssh."""
    if os.geteuid() != 0:
        missing("lab", "a lab from a program needs root")
    name, env = f"trace-{os.getpid()}", {**os.environ, "PYTHONPATH": str(ROOT)}
    tool = [sys.executable, "-m", "r2ccl_ctl"]
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {" ".join(tool)} lab exec --name {name} "$1" -- sh -c "$2"\n')
    ssh.chmod(0o755)
    perf = [str(build.plugin.parent / "r2ccl_perf"), "-b", "1M", "--duration", "60", "--until"]
    command = [*tool, "launch", "--lab", name, "--job", name, "-n", "2", "--timeout", "90",
               "--env", "R2CCL_FAULTS=nic0 blackhole at=1s", "--", *perf,
               str(tmp_path / "until"), "--timeline", str(tmp_path / "timeline")]  # fmt: skip
    with Lab.up(LabSpec(nodes=2, nics=(2,), rates=(200_000_000,), name=name)):
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as popen:
            try:
                while not (tmp_path / "timeline").exists():
                    assert popen.poll() is None
                done = trace("--hosts", "n0,n1", "--via", str(ssh), "--job", name, "--for", "3s",
                             "-o", str(tmp_path / "t.json"))  # fmt: skip
            finally:
                (tmp_path / "until").touch()
                popen.wait(60)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "t.json").read_text()
    assert problems(text) == []
    found = json.loads(text)
    rows = found["traceEvents"]
    assert {row["pid"] for row in rows if row["ph"] == "b"} == {1, 2}
    assert [note[:14] for note in found["otherData"]["notes"]] == [
        "n0: its clock ",
        "n1: its clock ",
    ]
    assert any(row["ph"] == "C" and row["pid"] == 2 for row in rows)
    sweep(name)


def test_of_a_case_of_validate(tmp_path: Path) -> None:
    record = tmp_path / "one.json"
    record.write_text(json.dumps(record_of("one")))
    done = trace("--record", str(record), "-o", str(tmp_path / "t.json"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "t.json").read_text()
    assert problems(text) == []
    units = {word for row in json.loads(text)["traceEvents"] if row["ph"] == "C"
             for word in row["args"]}  # fmt: skip
    assert units == {"Mbit/s", "bus GB/s"}
    piped = trace("--record", str(record), "-o", "-")
    assert (
        json.loads(piped.stdout) == json.loads(text)
        and "6 events of 1 process, 1 failover" in piped.stderr
    )


def test_usage(tmp_path: Path) -> None:
    wrong = tmp_path / "x.json"
    wrong.write_text('{"a": 1}')
    done = trace("--record", str(wrong), "-o", str(tmp_path / "t"))
    assert done.returncode == 2
    assert "no file of DIR/cases of `validate`: it has no 'processes'" in done.stderr
    done = trace("--record", str(wrong), "--job", "x")
    assert done.returncode == 2 and "leave out --job" in done.stderr
    assert trace("--job", "nobody-has-it").returncode == 1


@pytest.mark.parametrize("word", STAGES)
def test_every_stage_is_named_in_the_help(word: str) -> None:
    from r2ccl_ctl.cli.trace_cmds import trace as command

    assert word in (command.help or "")
