"""`validate`: its verdicts on made-up records (rung 1), and small runs in a lab (rung 4). It cannot
prove what a physical NIC does, nor that nccl-tests itself runs: r2ccl_perf prints its columns."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build, missing

from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.lab import Lab, LabSpec, known_labs, remove
from r2ccl_ctl.validate import agent, bed, judge, nccltests, picture, report, run
from r2ccl_ctl.validate.cases import ALL, CABLE, NAMES, Case, choose

BY_NAME = {case.name: case for case in ALL}

# nccl-tests' output, as its documentation shows it

GOOD = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 16 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid  34998 on      node1 device  0 [0x0f] Graphics Device
#
#                                                              out-of-place         in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
           8             2     float     sum      -1    36.63    0.00    0.00      0    36.69    0.00    0.00      0
node1:77:90 [0] NCCL INFO comm 0x55 rank 0 nranks 2
    33554432       8388608     float     sum      -1   1037.2   32.35   56.61      0   1042.9   32.17   56.30      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 28.2275
#
"""  # noqa: E501


def test_true_output() -> None:
    out = nccltests.parse(GOOD.splitlines())
    assert out.problems == [] and out.out_of_bounds == 0 and out.busbw == 28.2275
    assert [row.size for row in out.rows] == [8, 33554432]
    assert out.rows[1].wrong == 0 and out.rows[1].seconds == pytest.approx(0.00104005)


@pytest.mark.parametrize(
    ("what", "by", "word"),
    [
        ("# Out of bounds values : 0 OK\n", "", "0 times"),
        ("# Out of bounds values : 0 OK\n", "# Out of bounds values : 0 OK\n" * 2, "2 times"),
        ("0 OK", "0 FAILED", "contradicts"),
        ("0 OK", "3 OK", "contradicts"),
        ("# Avg bus bandwidth    : 28.2275\n", "", "Avg bus bandwidth"),
        ("28.2275", "nan", "Avg bus bandwidth"),
        ("   32.35   56.61      0   1042.9", "   32.35   56.", "columns"),
        ("56.30      0", "56.30      0  7", "columns"),
        ("1037.2", "10x7.2", "10x7.2"),
        ("56.61      0", "56.61     -1", "#wrong is -1"),
        ("56.61      0", "56.61    0.5", "#wrong is 0.5"),
        ("32.35   56.61", "nan   56.61", "cannot be"),
        ("    33554432       8388608     float", "    33554432       83886", "columns"),
        ("           2     float", "         2.5     float", "no whole line"),
    ],
)  # fmt: skip
def test_damaged_output_is_not_believed(what: str, by: str, word: str) -> None:
    assert GOOD.count(what) == 1
    out = nccltests.parse(GOOD.replace(what, by).splitlines())
    assert any(word in problem for problem in out.problems), out.problems


def test_what_newer_programs_add() -> None:
    """A verdict on the bandwidth, and NCCL's diagnostics from a node whose name begins with a
    digit."""
    more = "28.2275 OK\n#\n# Collective test concluded: all_reduce_perf"
    text = "7n:77 NCCL DIAG === NCCL Diagnostics ===\n" + GOOD.replace("28.2275", more)
    out = nccltests.parse(text.splitlines())
    assert out.problems == [] and out.busbw == 28.2275


def test_output_that_ends_early() -> None:
    lines = GOOD.splitlines()
    for count in range(len(lines) - 2):
        assert nccltests.parse(lines[:count]).problems
    assert nccltests.parse([]).problems


def test_wrong_values_and_unchecked_ones() -> None:
    out = nccltests.parse(GOOD.replace("56.61      0", "56.61   2e+3").splitlines())
    assert out.rows[1].wrong == 2000
    out = nccltests.parse(GOOD.replace("56.61      0", "56.61    N/A").splitlines())
    assert out.rows[1].wrong is None and out.problems == []


# The matrix


def test_choice_of_cases() -> None:
    def names(*wanted: str, tests: bool = False, lab: bool = True) -> list[str]:
        return [case.name for case in choose(wanted, nccl_tests=tests, lab=lab)]

    assert names() == [n for n in NAMES if not n.startswith("nccl-tests")]
    assert CABLE not in names(lab=False) and names(CABLE, lab=False) == [CABLE]
    assert names(tests=True) == list(NAMES)
    assert names("drain", "none") == ["none", "drain"]
    with pytest.raises(R2UsageError, match="choose from"):
        names("nothing")
    with pytest.raises(R2UsageError, match="all_reduce_perf"):
        names("nccl-tests-one")


def test_what_a_case_needs() -> None:
    setup = run.Setup("ssh", ("a", "b"), 1, 1 << 20, 1.0, ("eth1", "eth0"))
    fit, skipped = run.plan(setup, list(ALL), 2)
    assert [c.name for c in ALL if c not in fit] == ["two"] == list(skipped)
    fit, _ = run.plan(setup, list(ALL), 1)
    assert all(not case.steps for case in fit)


def test_counters(tmp_path: Path) -> None:
    for name, value in (("net/eth0/statistics/tx_bytes", 7), ("net/eth0/statistics/rx_bytes", 8),
                        ("infiniband/mlx5_0/ports/1/counters/port_xmit_data", 5),
                        ("infiniband/mlx5_0/ports/1/counters/port_rcv_data", 6)):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    found = agent.counters(["eth0", "gone"], [("mlx5_0", 1)], tmp_path)
    assert found == {"eth0": [7, 8], "mlx5_0:1": [20, 24]}


# Verdicts: a record that passes, and what must turn it over

S = 10**9
PROCESS = {
    "path": "/x", "state": "ended", "pid": 1, "local_pid": None, "uid": 0, "pidns": 1,
    "plugin_version": "1", "nccl_version": "2.27.3", "net_api": 10, "mode": "auto", "rank": 0,
}  # fmt: skip


def event(word: str, at: float, process: str = "p0", nic: str = "eth1", **more: Any) -> Any:
    row = {
        "process": process, "number": 1, "real_ns": 0, "mono_ns": int(at * S), "event": word,
        "nic": nic, "remote_nic": "", "peer_host": "b", "peer_pid": 2, "generation": 1, "bytes": 0,
        "duration_us": 0, "cause": "", "lost": 0,
    }  # fmt: skip
    return {**row, **more}


def sent(at: float, begin: float, end: float) -> int:
    """Bytes of a NIC at 1 MB/s that is away in between."""
    return int(1e6 * (at - max(0.0, min(at, end) - begin)))


def record_of(case: str) -> dict[str, Any]:
    """Eth1 of host a fails at 5 s and is given back at 15 s."""
    setup = run.Setup("ssh", ("a", "b"), 1, 1 << 20, 5.0, ("eth1", "eth2"))
    more = {"addr": "10.0.0.1", "prefixlen": 24, "speed_mbps": 1000, "mtu": 1500, "numa": None}
    more |= {"pci_path": "", "rdma": "", "rdma_port": 0}
    nics = [{"name": n, "ifname": n, **more} for n in ("eth0", "eth1", "eth2")]
    hosts = [
        {"name": n, "host": n, "offset_ns": 0, "error_ns": 1000, "nics": nics, "gpus": [],
         "hindrances": [], "system": "", "kernel": "", "machine": "", "cores": 1, "version": "1"}
        for n in "ab"
    ]  # fmt: skip
    samples = [
        [int(t / 10 * S), {"eth0": [int(t * 1e5), 0], "eth1": [sent(t / 10, 5, 15), 0],
                           "eth2": [int(t * 1e5), 0]}]
        for t in range(201)
    ]  # fmt: skip
    windows = [
        {"begin_ns": int(t / 2 * S), "end_ns": int((t / 2 + 0.5) * S), "iteration": t,
         "seconds": 0.3 if 10 <= t < 30 else 0.2, "bytes": 1 << 20, "wrong": 0}
        for t in range(40)
    ]  # fmt: skip
    fault = {"one": "error", "blackhole": "blackhole", "slow": "slow"}.get(case, "")
    verbs = ("drain", "undrain") if case == "drain" else ("fail", "recover")
    steps = [
        {"verb": verb, "fault": fault, "nic": "eth1", "at": at, "rate": 0, "returning": False,
         "asked_ns": int(t * S), "done_ns": int((t + 0.01) * S), "answers": []}
        for verb, at, t in ((verbs[0], 1, 5), (verbs[1], 3, 15))
    ]  # fmt: skip
    return {
        "schema": run.SCHEMA, "inputs": {"setup": vars(setup), "case": BY_NAME[case].as_dict()},
        "complete": True, "hosts": hosts, "windows": windows, "samples": [samples, []],
        "processes": {n: {**PROCESS, "name": n, "host": h} for n, h in (("p0", "a"), ("p1", "b"))},
        "events": [
            event("fault-injected", 5.001, cause=fault), event("path-down", 5.01),
            event("replay", 5.02, bytes=65536), event("resume", 5.03, nic="eth0"),
            event("fault-cleared", 15.001), event("path-up", 15.5),
        ],
        "steps": steps, "problems": [], "codes": {"0": 0, "1": 0}, "words": {}, "output": "",
        "began_ns": 0,
    }  # fmt: skip


def judged(record: dict[str, Any], case: str = "one") -> judge.Result:
    return judge.judge(BY_NAME[case], record)


def test_a_record_that_passes() -> None:
    found = judged(record_of("one"))
    assert (found.status, found.reasons) == ("passed", [])
    assert found.figures["share"] == pytest.approx(2 / 3, abs=0.01)
    assert found.figures["resume_ms"] == pytest.approx(29, abs=1)
    row = next(r for r in found.nics if r["nic"] == "eth1")
    assert row["before"] == pytest.approx(1e6) and row["failed"] == 0


def spoil(record: dict[str, Any], how: str) -> None:
    rows = record["samples"][0]
    if how == "wrong value":
        record["windows"][20]["wrong"] = 1
    elif how == "rank died":
        record["problems"] = ["rank 1 ended with 2"]
    elif how == "nobody noticed":
        record["events"] = [e for e in record["events"] if e["event"] != "path-down"]
    elif how == "did not resume":
        record["events"] = [e for e in record["events"] if e["event"] != "resume"]
    elif how == "did not return":
        record["events"] = [e for e in record["events"] if e["event"] != "path-up"]
    elif how == "another NIC":  # the journals say eth1, the kernel says that eth1 went on
        for ns, row in rows:
            row["eth1"] = [ns // 1000, 0]
    elif how == "stays silent":
        for _, row in rows:
            row["eth1"] = [min(row["eth1"][0], int(5e6)), 0]
    elif how == "carried nothing":
        for _, row in rows:
            row["eth1"] = [0, 0]
    elif how == "no counters":
        record["samples"] = [[], []]
    elif how == "no segment":
        del record["processes"]["p1"]
        record["events"] = [e for e in record["events"] if e["process"] != "p1"]
    elif how == "not checked":
        record["windows"][3]["wrong"] = -1
    elif how == "interrupted":
        record["complete"] = False
    elif how == "slow":
        for window in record["windows"][10:30]:
            window["seconds"] = 0.6
    elif how == "too few":
        record["windows"] = record["windows"][:9] + record["windows"][31:]
    elif how == "innocent":
        record["events"].append(event("path-down", 8, nic="eth2", process="p1"))


@pytest.mark.parametrize(
    ("how", "status", "word"),
    [
        ("wrong value", "failed", "1 values are wrong"),
        ("rank died", "failed", "rank 1 ended"),
        ("nobody noticed", "failed", "no rank noticed"),
        ("did not resume", "failed", "did not resume"),
        ("did not return", "failed", "no path of it again"),
        ("another NIC", "failed", "it was not that NIC"),
        ("stays silent", "failed", "carried nothing again"),
        ("carried nothing", "unknown", "shows nothing"),
        ("no counters", "unknown", "counters"),
        ("no segment", "unknown", "control segment"),
        ("not checked", "unknown", "not checked"),
        ("interrupted", "unknown", "did not run to its end"),
        ("too few", "unknown", "too few collectives"),
        ("slow", "slow", "of the bandwidth is left"),
        ("innocent", "slow", "other NICs"),
    ],
)
def test_what_turns_a_verdict_over(how: str, status: str, word: str) -> None:
    record = record_of("one")
    spoil(record, how)
    found = judged(record)
    assert found.status == status, found.reasons
    assert any(word in reason for reason in found.reasons), found.reasons


def test_what_did_not_begin_has_one_reason() -> None:
    record = record_of("one")
    record |= {"windows": [], "processes": {}, "complete": False, "problems": ["a trial failed"]}
    found = judged(record)
    assert (found.status, found.reasons) == ("unknown", ["a trial failed"])


def test_ranks_that_mpi_does_not_join() -> None:
    one = "# nThread 1 nGpus 1 minBytes 8 maxBytes 16 step: 2(factor) warmup iters: 1\n"
    assert nccltests.starts(GOOD.splitlines()) == 1 == nccltests.starts([one])
    assert nccltests.starts(["# nccl-tests version 2.19.8\n", one, "#\n", one]) == 2


def test_a_drain_loses_no_path() -> None:
    record = record_of("drain")
    record["events"] = [event("operator", 5.001), event("nic-drained", 5.1)]
    assert judged(record, "drain").status == "passed", judged(record, "drain").reasons
    record["events"].append(event("replay", 5.05, bytes=1))
    assert judged(record, "drain").status == "failed"
    record["events"] = [event("operator", 5.001)]
    assert "not drained" in judged(record, "drain").reasons[0]


def test_a_slow_nic_is_given_less() -> None:
    record = record_of("slow")
    assert judged(record, "slow").status == "passed", judged(record, "slow").reasons
    spoil(record, "another NIC")
    assert judged(record, "slow").status == "failed"


def test_without_r2ccl_it_must_be_absent() -> None:
    record = record_of("one")
    record["steps"], record["events"] = [], []
    assert judged(record, "reference").status == "unknown"
    record["processes"] = {}
    assert judged(record, "reference").status == "passed"


def test_verdict_and_reference() -> None:
    def result(name: str, status: str, busbw: float = 1.0) -> judge.Result:
        return judge.Result(name, "", status, figures={"busbw_gbs": busbw}, proves="failover")

    def word(*statuses: str) -> str:
        return judge.verdict([result("x", status) for status in statuses])

    assert word("passed", "skipped") == "passed" and word("skipped") == "unknown" == word()
    assert word("passed", "slow", "unknown", "failed") == "failed"
    assert word("slow", "unknown") == "unknown" and word("slow", "passed") == "slow"
    assert judge.verdict([judge.Result("none", "")]) == "unknown", "no NIC has failed"
    pair = {"reference": result("reference", "passed", 2.0), "none": result("none", "passed", 1.0)}
    judge.beside_reference(pair)
    assert pair["none"].status == "slow" and "50%" in pair["none"].reasons[0]


def all_of_report(records: dict[str, Any]) -> tuple[Any, list[judge.Result]]:
    chosen = [BY_NAME[name] for name in records]
    setup = run.Setup(**records[chosen[0].name]["inputs"]["setup"])
    results = report.results_of(chosen, records, {})
    return report.document(setup, results, records), results


def test_report_is_one_file() -> None:
    """No external part, and what comes from hosts is no markup."""
    pytest.importorskip("jinja2", reason="report.html needs jinja2")
    record = record_of("one")
    record["events"][1]["cause"] = "<script>alert(1)</script>"
    doc, results = all_of_report({"one": record})
    page = report.html(doc, results, {"one": record}, "r2ccl-ctl validate")
    assert "<script" not in page and "&lt;script&gt;" in page
    links = re.findall(r"""\b(?:src|href)\s*=\s*["']?([^"'\s>]*)""", page)
    assert links and all(link.startswith("#") for link in links)
    assert not re.search(r"@import|url\((?!#)", page)
    assert "<svg" in page and "passed" in page and "1 Mbit/s" not in page.split("<svg")[0]


def test_markdown_and_json() -> None:
    record = record_of("one")
    spoil(record, "another NIC")
    doc, results = all_of_report({"one": record})
    text = report.markdown(doc, results)
    assert text.startswith("# R2CCL validation: failed") and "| eth1 | 8 Mbit/s |" in text
    assert (doc["verdict"], doc["exit_code"]) == ("failed", 2)
    assert json.loads(json.dumps(doc))["cases"][0]["status"] == "failed"


def test_a_file_of_the_report_is_replaced_as_a_whole(tmp_path: Path) -> None:
    report.write(tmp_path, "report.md", "old")
    (tmp_path / ".report.md.new").mkdir()  # what is written first cannot be written
    with pytest.raises(R2Error, match="report.md"):
        report.write(tmp_path, "report.md", "new")
    assert (tmp_path / "report.md").read_text() == "old"
    (tmp_path / ".report.md.new").rmdir()
    report.write(tmp_path, "report.md", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


def test_what_keeps_it_from_running_is_no_verdict() -> None:
    """1 and 2 say something about R2CCL."""
    done = subprocess.run(
        [sys.executable, "-m", "r2ccl_ctl", "validate", "--hosts", "a,b", "--via", "false",
         "--case", "none"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3
    assert (
        "Error: a: the helper gave no answer: it ended with code 1; try `false a true`"
        in done.stderr
    )


def test_rates_of_the_picture() -> None:
    times, rates = picture.nic_rates(record_of("one"), 0, 20 * S)
    away = [r for t, r in zip(times, rates["eth1"], strict=True) if 6 < t < 14]
    assert max(away) == 0 and rates["eth0"][3] == pytest.approx(1e6)


# Runs in a lab


@pytest.fixture
def lab_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab_rights: None, build: Build
) -> Path:
    """Labs of this test are remembered apart from others'."""
    assert build.plugin.is_file()
    monkeypatch.setenv("R2CCL_LAB_DIR", str(tmp_path / "labs"))
    for name in list(os.environ):
        if name.startswith(("NCCL_", "R2CC_")):
            monkeypatch.delenv(name)
    return tmp_path


SMALL = ("--size", "1M", "--seconds", "1")


def validate(folder: Path, *args: str, timeout: float = 240, **env: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, "-m", "r2ccl_ctl", "validate", "--output", str(folder), "--json", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def statuses(doc: Any) -> dict[str, str]:
    return {case["name"]: case["status"] for case in doc["cases"]}


@pytest.mark.lab
@pytest.mark.slow
def test_run_and_resume(lab_dir: Path) -> None:
    """What is finished is not run again."""
    out = lab_dir / "out"
    code, doc, said = validate(out, *SMALL, "--case", "none")
    found = statuses(doc)
    assert code == doc["exit_code"] in (0, 1, 3), (doc["cases"], said)  # slow on a busy machine
    assert found["none"] in ("passed", "slow"), doc["cases"]
    assert (out / "report.md").read_text().startswith("# R2CCL validation")
    record = (out / "cases/none.json").read_bytes()
    code, doc, said = validate(out, *SMALL, "--case", "none")
    assert "1 cases are finished from before" in said and statuses(doc) == found
    assert record == (out / "cases/none.json").read_bytes()


def broken(build: Build, folder: Path, script: str) -> str:
    """A build whose r2ccl_perf is that script; $TIMELINE is where its rows go."""
    folder.mkdir()
    for name in os.listdir(build.plugin.parent):
        (folder / name).symlink_to(build.plugin.parent / name)
    (folder / "r2ccl_perf").unlink()
    text = '#!/bin/sh\nwhile [ "$1" != --timeline ]; do shift; done\nTIMELINE=$2\n'
    text += '[ "$R2CCL_RANK" = 0 ] || exec sleep 100\n'
    (folder / "r2ccl_perf").write_text(text + script)
    (folder / "r2ccl_perf").chmod(0o755)
    return str(folder)


ROW = """\
i=0
while [ $i -lt {count} ]; do
    ns=$(cut -d. -f1 /proc/uptime)000000000
    row='"time_us": 9, "size": 8, "wrong": {wrong}'
    echo '{{"monotonic_ns": '$ns', "iteration": '$i", $row}}" >> "$TIMELINE"
    i=$((i + 1)); sleep 0.1
done
{then}
"""


@pytest.mark.lab
@pytest.mark.parametrize(
    ("row", "then", "word"),
    [(3, "sleep 100", "values are wrong"), (0, "exit 5", "rank 0 ended with 5")],
)
def test_a_case_that_fails_is_said_to(
    lab_dir: Path, build: Build, row: int, then: str, word: str
) -> None:
    folder = broken(build, lab_dir / "build", ROW.format(count=5, wrong=row, then=then))
    code, doc, said = validate(
        lab_dir / "out", *SMALL, "--case", "reference", R2CCL_BUILD_DIR=folder
    )
    assert (code, doc["verdict"]) == (2, "failed"), said
    assert any(word in reason for reason in doc["cases"][0]["reasons"]), doc["cases"]


def namespaces(folder: Path) -> set[str]:
    shared = Path("/run/netns")
    found = {p.name for p in shared.iterdir()} if shared.is_dir() else set()
    return {n for n in found if n.startswith("validate-")} | {p.name for p in folder.glob("*.json")}


def with_mark(mark: str) -> list[str]:
    """Command lines of the processes that were started with this word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().decode().replace("\0", " "))
            except OSError:
                continue
    return found


def until(holds: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.lab
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_leaves_nothing(lab_dir: Path, number: signal.Signals) -> None:
    mark = f"R2T_MARK={lab_dir.name}-{os.getpid()}"
    name, value = mark.split("=")
    before = namespaces(lab_dir / "labs")
    popen = subprocess.Popen(
        [sys.executable, "-m", "r2ccl_ctl", "validate", "--output", str(lab_dir / "out"),
         "--seconds", "30", "--case", "one"],
        env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert until(lambda: any("r2ccl_perf" in line for line in with_mark(mark)), 60)
        assert namespaces(lab_dir / "labs") - before
        popen.send_signal(number)
        _, said = popen.communicate(timeout=60)
    finally:
        popen.kill()
        popen.wait()
    assert popen.returncode == 128 + number and "interrupted" in said, said
    assert until(lambda: not with_mark(mark), 5), with_mark(mark)
    assert namespaces(lab_dir / "labs") <= before
    assert not (lab_dir / "out/cases/one.json").exists()


@pytest.mark.lab
def test_the_lab_of_one_that_was_killed(lab_dir: Path) -> None:
    if os.geteuid() != 0:
        missing("lab", "a lab from a program needs root")
    gone, ours = "validate-4999999", f"validate-{os.getpid()}"  # above all pids, and alive
    for name in (gone, ours):
        Lab.up(LabSpec(nodes=2, nics=(1,), name=name)).close()
    try:
        bed.sweep()
        assert known_labs() == [ours]
    finally:
        remove(ours)


@pytest.fixture
def two_hosts(lab_dir: Path) -> Iterator[Path]:
    """A stand-in for ssh to n0 and n1 of a lab; the script's path."""
    if os.geteuid() != 0:
        missing("lab", "a lab from a program needs root")
    with Lab.up(LabSpec(nodes=2, nics=(3,), rates=(200_000_000,), name="val-hosts")):
        script = lab_dir / "ssh"
        script.write_text(
            f'#!/bin/sh\nexec {sys.executable} -m r2ccl_ctl lab exec --name val-hosts "$1" '
            '-- sh -c "$2"\n'
        )
        script.chmod(0o755)
        yield script


@pytest.mark.lab
@pytest.mark.slow
def test_real_hosts(two_hosts: Path) -> None:
    """As a stranger types it; the cable is cut by the lab."""
    code, doc, said = validate(
        two_hosts.parent / "out", *SMALL, "--hosts", "n0,n1", "--via", str(two_hosts),
        "--case", "blackhole", "--nic", "nic2", NCCL_SOCKET_IFNAME="nic",
    )  # fmt: skip
    assert code in (0, 1), (doc["cases"], said)
    assert doc["cases"][0]["figures"]["detect_ms"] > 0
    nic2 = next(row for row in doc["cases"][0]["nics"] if row["nic"] == "nic2")
    assert nic2["counters"] == ["nic2"] and nic2["failed"] < 0.05 * nic2["before"]
    steps = doc["cases"][0]["steps"]
    assert [(s["verb"], s["nic"]) for s in steps] == [("fail", "nic2"), ("recover", "nic2")]
    assert [host["name"] for host in doc["hosts"]] == ["n0", "n1"]
    assert all(0 < host["error_ns"] < 1e9 for host in doc["hosts"])


@pytest.mark.lab
@pytest.mark.slow
def test_with_mpirun(lab_dir: Path, build: Build) -> None:
    """A program with nccl-tests' columns, started and read as nccl-tests is."""
    if shutil.which("mpirun") is None or os.geteuid() != 0:
        pytest.skip("nccl-tests in a lab needs root and mpirun (Debian: openmpi-bin)")
    program = lab_dir / "tests" / "all_reduce_perf"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {build.plugin.parent}/r2ccl_perf --op all_reduce "$@"\n')
    program.chmod(0o755)
    code, doc, said = validate(
        lab_dir / "out", *SMALL, "--nccl-tests", str(program.parent), "--case", "nccl-tests-one"
    )
    assert code in (0, 1), (doc["cases"], said)
    assert doc["cases"][0]["figures"]["out_of_bounds"] == 0


def test_usage() -> None:
    def error(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "r2ccl_ctl", "validate", *args],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "two or more" in error("--hosts", "a")
    assert "choose from" in error("--case", "x")
    assert "--size" in error("--size", "1")
    assert "--seconds" in error("--seconds", "0.1")
    assert "all_reduce_perf" in error("--nccl-tests", "/nowhere")
    assert "leave it or --json out" in error("--dry-run", "--json")


def test_dry_run_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "r2ccl_ctl", "validate", "--hosts", "a,b", "--dry-run",
         "--via", "false", "--case", "one"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "one NIC fails" in done.stdout and "r2ccl_ctl.validate.agent" in done.stdout


def test_what_is_finished(build: Build, tmp_path: Path) -> None:
    """A case that ran to its end with the same inputs; no record that a crash has cut off."""
    assert build.plugin.is_file()
    setup = run.Setup("lab", ("n0", "n1"), 1, 1 << 20, 1.0, ("nic1",))
    one: Case = BY_NAME["one"]
    first = run.inputs(setup, one)
    assert first == json.loads(json.dumps(first)) == run.inputs(copy.deepcopy(setup), one)
    assert first != run.inputs(setup, BY_NAME["two"])
    record = {"schema": run.SCHEMA, "complete": True, "inputs": first}
    run.save(tmp_path, one, record)
    assert run.finished(tmp_path, setup, one) == record
    assert run.finished(tmp_path, replace(setup, size=2 << 20), one) is None
    run.save(tmp_path, one, {**record, "complete": False})
    assert run.finished(tmp_path, setup, one) is None
    run.record_path(tmp_path, one).write_text("{")
    assert run.finished(tmp_path, setup, one) is None
