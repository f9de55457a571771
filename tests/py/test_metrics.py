"""r2ccl-ctl metrics: what Prometheus reads of running, failing and ended jobs. Rung 3: real control
segments, the parser of prometheus_client, real HTTP on loopback. No Prometheus scrapes here."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, Build
from failover_bed import loopback, running_pair
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from segment_bed import StartWriter, start_writer, until
from test_cli import call
from test_health import LONG

from r2ccl_ctl import control, exporter
from r2ccl_ctl.control import Selection
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.journal import read_all
from r2ccl_ctl.rows import Comm

__all__ = ["start_writer"]

NIC = "127.0.1.1"


def parsed(text: str) -> dict[str, Metric]:
    """Metric -> its series. No series may come twice: Prometheus refuses such a page."""
    found = {metric.name: metric for metric in text_string_to_metric_families(text)}
    for metric in found.values():
        keys = [(s.name, tuple(sorted(s.labels.items()))) for s in metric.samples]
        assert len(keys) == len(set(keys)), metric.name
    return found


def value(page: dict[str, Metric], name: str, **labels: str) -> float:
    """The one series of this name that has these labels."""
    (found,) = [
        sample.value
        for sample in page[re.sub("_(total|count)$", "", name)].samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found)


def of_job(job: str, keep_s: float = 300.0) -> dict[str, Metric]:
    return parsed(exporter.page(Selection(job=job), keep_s).decode())


# The page


def test_every_metric_is_typed_and_explained(start_writer: StartWriter) -> None:
    """Also where no process is: a rule finds its metrics, and a scrape does not fail."""
    job = start_writer().job
    full, empty = of_job(job), of_job("nobody")
    assert full.keys() == empty.keys()
    for name, metric in full.items():
        assert re.fullmatch(r"r2ccl_[a-z0-9_]+", name) and metric.documentation.endswith(".")
        assert metric.type in ("counter", "gauge", "histogram")
        assert all(s.name.endswith("_total") == (metric.type == "counter") for s in metric.samples)
    assert [m.name for m in empty.values() if m.samples] == [
        "r2ccl_up", "r2ccl_processes", "r2ccl_segments_unreadable",
    ]  # fmt: skip
    assert value(empty, "r2ccl_up") == 1 and value(empty, "r2ccl_processes") == 0


def test_a_process_and_its_nics(start_writer: StartWriter) -> None:
    writer = start_writer("--rank", "3")
    page = of_job(writer.job)
    who = {"job_name": writer.job, "node": "node-a", "rank": "3", "pid": str(writer.pid)}
    assert value(page, "r2ccl_process_running", **who) == 1
    assert value(page, "r2ccl_process_info", mode="auto", **who) == 1
    assert value(page, "r2ccl_paths_up", **who) == 2
    assert 0 <= time.time() - value(page, "r2ccl_process_start_time_seconds", **who) < 600
    nic = {**who, "nic": NIC}
    assert value(page, "r2ccl_nic_state", state="healthy", **nic) == 1
    assert value(page, "r2ccl_nic_state", state="failed", **nic) == 0
    assert value(page, "r2ccl_nic_link_up", **nic) == 1
    assert value(page, "r2ccl_nic_weight_ratio", **nic) == 1
    assert value(page, "r2ccl_nic_speed_bytes", **nic) == 10_000 * 125_000
    assert "job" not in page["r2ccl_process_running"].samples[0].labels


def test_bytes_in_flight_of_a_nic_are_its_paths(build: Build) -> None:
    with running_pair(build.path, "--size", "1M", "--outstanding", 8, nics="127.0.1.1") as pair:
        pair.tx.fail("127.0.1.1", "slow", rate=2_000_000)
        pair.moving(2)
        seen = 0

        def in_flight() -> bool:
            nonlocal seen
            snapshot = pair.tx.snapshot()
            seen = next(nic.inflight_bytes for nic in snapshot.nics if nic.name == "lo")
            assert seen == sum(path.inflight_bytes for path in snapshot.paths)
            return seen > 0

        until(in_flight, "something is in flight")
        pair.tx.recover("127.0.1.1")
        pair.finish()


def test_counters_are_those_of_the_segment(start_writer: StartWriter) -> None:
    """Every number of a counter's table is there in the segment: none is taken for 0 because of a
    name that does not exist."""
    snapshot = start_writer("--deaf").process.snapshot()
    assert set(exporter.COUNTERS) <= set(snapshot.counters)
    assert set(exporter.GAUGES) <= set(snapshot.gauges)
    assert set(exporter.NIC_COUNTERS) <= set(vars(snapshot.nics[0]))
    assert {f.name for f in Comm.__dataclass_fields__.values()} >= set(exporter.COMM_COUNTERS)


def test_two_rows_of_one_name_are_one_series(start_writer: StartWriter) -> None:
    snapshot = start_writer().process.snapshot()
    families = exporter.Families()
    for nic in snapshot.nics:
        exporter.add_nic(families, snapshot, replace(nic, name="eth0", tx_bytes=5))
    (metric,) = [m for m in families.metrics() if m.name == "r2ccl_nic_transmit_bytes"]
    assert [sample.value for sample in metric.samples] == [10]


# Failures, and the end


def test_failures_are_counted(build: Build) -> None:
    """A real engine loses a NIC in the middle of its messages: the counters rise, and are those of
    the segment just before and just after."""

    def at(name: str, **labels: str) -> float:
        page = parsed(exporter.page(Selection(pid=pair.tx.segment.pid)).decode())
        return value(page, name, **labels)

    def waited() -> int:
        events = read_all(control.find(pair.tx.segment.pid))
        return sum(one.event == "resume" and one.cause != "was idle" for one in events)

    with running_pair(build.path, *LONG, nics=loopback(2)) as pair:
        pair.moving()
        before = at("r2ccl_sent_bytes_total")
        assert at("r2ccl_nic_failures_total", nic=NIC) == 0
        pair.tx.fail(NIC, "blackhole")
        until(lambda: at("r2ccl_nic_failures_total", nic=NIC) >= 1, "the failure is counted", 60)
        assert at("r2ccl_path_failures_total") > 0
        assert at("r2ccl_nic_path_failures_total", nic=NIC) > 0
        assert at("r2ccl_nic_state", nic=NIC, state="healthy") == 0
        assert at("r2ccl_nic_fault_injected", nic=NIC) == 1
        until(lambda: at("r2ccl_sent_bytes_total") > before, "bytes are counted", 60)
        for key, (name, _) in exporter.COUNTERS.items():
            low = pair.tx.counter(key)
            shown = at(f"r2ccl_{name}_total")
            assert low <= shown <= pair.tx.counter(key), name
        until(lambda: at("r2ccl_resume_seconds_count") >= 1, "traffic has resumed", 60)
        assert at("r2ccl_failover_seconds_count") == at("r2ccl_failovers_total") >= 1
        until(lambda: at("r2ccl_resume_seconds_count") == waited(), "as the journal says")
        pair.finish()


def test_times_are_histograms(start_writer: StartWriter) -> None:
    """Buckets include the smaller ones; the sum is in seconds. Two processes of one name add up."""
    snapshot = start_writer().process.snapshot()
    times = {"us": 2_500_000, "count": [0, 2, *[0] * 8, 1]}
    snapshot = replace(snapshot, times={"failover": times, "resume": snapshot.times["resume"]})
    families = exporter.Families()
    for _ in range(2):
        exporter.add_process(families, snapshot)
    found = {metric.name: metric for metric in families.metrics()}
    buckets = {
        sample.labels.get("le", sample.name): sample.value
        for sample in found["r2ccl_failover_seconds"].samples
    }
    assert buckets["0.001"] == 0 and buckets["0.003"] == buckets["30.0"] == 4
    assert buckets["+Inf"] == buckets["r2ccl_failover_seconds_count"] == 6
    assert buckets["r2ccl_failover_seconds_sum"] == 5
    assert {sample.value for sample in found["r2ccl_resume_seconds"].samples} == {0}


@pytest.mark.parametrize("how", ["end", "kill"])
def test_the_last_values_stay_for_a_while(start_writer: StartWriter, how: str) -> None:
    """Of a process that has ended: its counters as they were, its gauges gone or 0."""
    writer = start_writer()
    until(lambda: value(of_job(writer.job), "r2ccl_sent_bytes_total") > 0, "bytes are sent")
    before = value(of_job(writer.job), "r2ccl_sent_bytes_total")
    getattr(writer, how)()
    page = of_job(writer.job)
    assert value(page, "r2ccl_process_running") == 0 and value(page, "r2ccl_processes") == 0
    assert value(page, "r2ccl_sent_bytes_total") >= before
    assert value(page, "r2ccl_nic_transmit_bytes_total", nic=NIC) > 0
    assert page["r2ccl_nic_state"].samples == [], "nothing is known about the NIC any more"
    assert of_job(writer.job, keep_s=0)["r2ccl_sent_bytes"].samples == []
    late = time.time_ns() + 400 * 10**9
    found = exporter.collect(Selection(job=writer.job), now_ns=lambda: late)
    assert all(metric.samples == [] for metric in found if metric.name == "r2ccl_sent_bytes")


def test_scrapes_while_processes_come_and_go(start_writer: StartWriter) -> None:
    """Never an error, never a page that cannot be read, never a counter that falls."""
    stop = threading.Event()
    problems: list[BaseException] = []
    seen: dict[str, float] = {}
    pages = 0

    def scrape() -> None:
        nonlocal pages
        try:
            while not stop.is_set():
                for sample in of_job(job)["r2ccl_sent_bytes"].samples:
                    pid = sample.labels["pid"]
                    assert sample.value >= seen.get(pid, 0)
                    seen[pid] = sample.value
                pages += 1
        except BaseException as err:
            problems.append(err)

    first = start_writer()
    job = first.job
    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for _ in range(4):
            writer = start_writer()
            pid = str(writer.pid)
            until(lambda pid=pid: pid in seen or problems, "it is seen", 30)  # type: ignore[misc]
            writer.kill()
            writer.path.unlink()
        os.truncate(first.path, 4096)
        was = pages
        until(lambda: pages >= was + 2 or problems, "scrapes go on", 30)
    finally:
        stop.set()
        thread.join(timeout=60)
    assert not problems, problems
    assert len(seen) == 5
    assert value(of_job(job), "r2ccl_up") == 1


# Where it goes


def test_output_replaces_the_file(start_writer: StartWriter, tmp_path: Path) -> None:
    job = start_writer().job
    out = tmp_path / "r2ccl.prom"
    out.write_text("old")
    call("metrics", "--job", job, "--output", str(out))
    assert value(parsed(out.read_text()), "r2ccl_processes") == 1
    assert stat.S_IMODE(out.stat().st_mode) & 0o444 == 0o444, "node_exporter is another user"
    assert list(tmp_path.iterdir()) == [out]
    assert parsed(call("metrics", "--job", job).stdout).keys() == parsed(out.read_text()).keys()


def test_output_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "no/such/r2ccl.prom"
    stderr = call("metrics", "--output", str(absent), code=2).stderr
    assert f"--output '{absent}': there is no folder '{absent.parent}'; make it first" in stderr
    out = tmp_path / "r2ccl.prom"
    out.write_text("old")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(R2Error, match="No space left"):
        exporter.write_atomically(out, b"new")
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_output_to_what_is_no_file(tmp_path: Path) -> None:
    """A device, for instance, which root could replace by a file for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(R2UsageError, match="is no regular file"):
        exporter.write_atomically(pipe, b"new")
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and list(tmp_path.iterdir()) == [pipe]


def test_output_for_others_to_read(tmp_path: Path) -> None:
    """A new file can be read whatever the umask; an old one keeps its mode, a link what it is."""
    out, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(out)
    before = os.umask(0o077)
    try:
        exporter.write_atomically(link, b"one")
        assert link.is_symlink() and out.read_text() == "one"
        assert stat.S_IMODE(out.stat().st_mode) == 0o644
        out.chmod(0o640)
        exporter.write_atomically(out, b"two")
        assert out.read_text() == "two" and stat.S_IMODE(out.stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_the_same_labels_once_more(start_writer: StartWriter) -> None:
    """After a container's restart, the pid is the same: the one that runs counts, or the newest.
    Two that run, in containers that share the host's name, both do."""
    process = start_writer().process
    old = replace(process, state="ended", created_real_ns=1, name="old")
    newer = replace(old, created_real_ns=2, name="newer")
    other = replace(process, name="other")
    for there, names in (
        ([process, old], [process.name]),
        ([newer, old], ["newer"]),
        ([process, old, other], [process.name, "other"]),
    ):
        found = exporter.wanted_processes(there, Selection(), 0)
        assert [one.name for one in found] == names


@pytest.fixture
def served(start_writer: StartWriter) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """(the tool, its address, the job)"""
    job = start_writer().job
    popen = subprocess.Popen(
        [sys.executable, "-m", "r2ccl_ctl", "metrics", "--job", job, "--listen", "0"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert popen.stderr is not None
        line = popen.stderr.readline()
        match = re.fullmatch(
            r"metrics at (http://127\.0\.0\.1:\d+/metrics) \(Ctrl-C ends\)\n", line
        )
        assert match, line
        yield popen, match[1], job
    finally:
        popen.kill()
        popen.wait(timeout=30)


def test_listen(served: tuple[subprocess.Popen[str], str, str]) -> None:
    popen, url, job = served
    for _ in range(2):
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            page = parsed(answer.read().decode())
        assert value(page, "r2ccl_process_running", job_name=job) == 1
    popen.send_signal(signal.SIGINT)
    assert popen.wait(timeout=30) == 0
    assert popen.stderr is not None and popen.stderr.read() == ""


def test_other_addresses(served: tuple[subprocess.Popen[str], str, str]) -> None:
    """The root says where the metrics are; whatever else is asked for is not there."""
    base = served[1].removesuffix("/metrics")
    with urllib.request.urlopen(base, timeout=30) as answer:
        assert answer.read() == b"R2CCL: metrics are at /metrics\n"
    for path in ("/foo", "/metrics/", "/metric", "/favicon.ico"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(base + path, timeout=30)
        assert refused.value.code == 404 and b"metrics are at /metrics" in refused.value.read()
        refused.value.close()


def test_a_port_that_is_taken(served: tuple[subprocess.Popen[str], str, str]) -> None:
    port = served[1].rpartition(":")[2].removesuffix("/metrics")
    stderr = call("metrics", "--listen", port, code=1).stderr
    assert f"127.0.0.1 port {port} cannot be had: Address already in use" in stderr


@pytest.mark.parametrize(
    "words",
    ["--listen x", "--listen 70000", "--listen ::1:9435", "--listen nosuch.invalid:9435",
     "--listen -1", "--listen 0..0:9435", "--listen 9435 --output x", "--keep never"],
)  # fmt: skip
def test_wrong_usage(words: str) -> None:
    assert "Error: " in call("metrics", *words.split(), code=2).stderr


def test_addresses_to_listen_on() -> None:
    assert exporter.parse_listen("9435") == ("127.0.0.1", 9435), "this machine only"
    assert exporter.parse_listen(":9435") == ("127.0.0.1", 9435)
    assert exporter.parse_listen("0.0.0.0:1") == ("0.0.0.0", 1)
    assert exporter.parse_listen("[::1]:9435") == ("::1", 9435)
    with pytest.raises(R2UsageError, match="brackets"):
        exporter.parse_listen("::1:9435")


def test_segments_that_cannot_be_listed(tmp_path: Path) -> None:
    """The page says so; it is no error of HTTP, which would look like an exporter that is down."""
    (tmp_path / "file").write_text("")
    text = exporter.page(Selection(), directory=tmp_path / "file").decode()
    page = parsed(text)
    assert value(page, "r2ccl_up") == 0 and len(page) == 1


def test_segments_that_cannot_be_read(start_writer: StartWriter, tmp_path: Path) -> None:
    writer = start_writer()
    copy = tmp_path / writer.path.name
    copy.write_bytes(writer.path.read_bytes()[:4096])
    page = parsed(exporter.page(Selection(), directory=tmp_path).decode())
    assert control.list_processes(dead=True, directory=tmp_path)[0].state == "damaged"
    assert value(page, "r2ccl_segments_unreadable") == 1 and value(page, "r2ccl_up") == 1


# The document


def test_the_document_names_every_metric_and_no_other() -> None:
    text = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    named = {
        re.sub("_(total|bucket)$", "", name) for name in re.findall(r"\br2ccl_[a-z0-9_]+\b", text)
    }
    there = set(of_job("nobody"))
    named -= {"r2ccl_perf", "r2ccl_ctl"}
    assert named == there, f"not documented: {there - named}; do not exist: {named - there}"
