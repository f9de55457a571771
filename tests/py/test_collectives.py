"""`r2ccl-ctl collectives`: times of collectives of a running job, and whose profiler NCCL takes.

Rung 3: the stand-in drives NCCL's profiler API. That NCCL itself does the same, and how true the
times are on GPUs, is for a run on real NCCL. test_colltimes has the times themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, Build, missing, run_process
from prometheus_client.parser import text_string_to_metric_families
from segment_bed import until
from test_cli import call
from test_hostnccl import Job, Ranks, good, plugin_env

from r2ccl_ctl import control, exporter
from r2ccl_ctl.control import Selection
from r2ccl_ctl.rows import Timing

BYTES = 300000
ARGS = f"--op all_reduce -b {BYTES} --duration 300 -z 1 -c 0 --timeout 60".split()


class Running:
    """A job of two ranks that repeats one AllReduce until `end`."""

    def __init__(self, build: Build, tmp: Path, **env: str) -> None:
        self.stop = tmp / "stop"
        self.lines = tmp / "lines"
        words = [*ARGS, "--until", str(self.stop), "--timeline", str(self.lines)]
        self.job = Job(build, tmp, 2, words, plugin_env(build, NCCL_DEBUG="INFO", **env))
        self.pid = self.job.processes[0].pid

    def snapshot(self) -> control.Snapshot:
        return control.find(self.pid).snapshot()

    def timing(self) -> Timing:
        (found,) = [t for t in self.snapshot().timings if t.up_to == 1 << 20]
        return found

    def count(self) -> int:
        return sum(sum(t.count) for t in self.snapshot().timings if t.up_to == 1 << 20)

    def windows(self) -> int:
        return self.lines.read_text().count("\n") if self.lines.exists() else 0

    def ready(self) -> None:
        until(lambda: self.windows() > 3, "the job runs", 60)

    def record(self, word: str, code: int = 0) -> str:
        done = call("collectives", word, "--pid", str(self.pid), code=code)
        return done.stdout + done.stderr

    def end(self) -> Ranks:
        self.stop.touch()
        return good(self.job.finish())


@contextmanager
def running(build: Build, tmp: Path, **env: str) -> Iterator[Running]:
    job = Running(build, tmp, **env)
    try:
        job.ready()
        yield job
    finally:
        job.stop.touch()
        ranks = job.job.finish()
    good(ranks)


def seconds_of(lines: Path, skip: int) -> list[float]:
    """Of each AllReduce, as r2ccl_perf measured it."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()[skip:]]
    return [row["time_us"] / 1e6 for row in rows]


def test_times_of_a_running_job(build: Build, tmp_path: Path) -> None:
    """None before it is asked for; then as many as there were, and they took as long as the caller
    saw; none after it is ended. The metrics have the same."""
    with running(build, tmp_path) as job:
        assert not job.snapshot().timings
        until(lambda: job.snapshot().process.recording == "off", "the segment says so")
        text = call("collectives", "show", "--pid", str(job.pid)).stderr
        assert "recording is off" in text
        before = job.windows()
        assert "are recorded" in job.record("on")
        started = job.windows()
        until(lambda: job.count() > 200, "collectives are recorded", 60)
        assert "no longer" in job.record("off")
        end = job.windows()
        until(lambda: job.snapshot().process.recording == "off", "the segment says so")
        until(lambda: job.windows() > end + 50, "the job goes on", 60)
        timing = job.timing()
        assert end - started - 50 <= sum(timing.count) <= job.windows() - before
        again = job.timing()
        assert again == timing
        assert (timing.op, timing.rank, timing.ranks) == ("all-reduce", 0, 2)
        assert timing.bus_bytes == BYTES // 4 * 4 * sum(timing.count)
        assert timing.ns <= timing.longest_ns * sum(timing.count)
        seen = seconds_of(job.lines, 0)[started:end]
        mean, theirs = timing.ns / sum(timing.count) / 1e9, statistics.mean(seen)
        assert 0.3 * theirs < mean < 1.1 * theirs
        assert 0 < timing.quantile(0.5) <= timing.quantile(0.95) <= timing.longest_ns / 1e9
        assert not job.snapshot().counters["timings_dropped"]
        shown = json.loads(call("collectives", "show", "--pid", str(job.pid), "--json").stdout)
        (row,) = [r for r in shown["collectives"] if r["up_to"] == 1 << 20]
        assert row["total"] == sum(timing.count)
        table = call("collectives", "show", "--pid", str(job.pid)).stdout
        assert f"{timing.comm[:8]}  0/2   all-reduce  1.0 MiB" in table
        page = exporter.page(Selection(pid=job.pid)).decode()
        (metric,) = [
            family
            for family in text_string_to_metric_families(page)
            if family.name == "r2ccl_collective_seconds"
        ]
        values = {
            sample.name + sample.labels.get("le", ""): sample.value
            for sample in metric.samples
            if sample.labels["up_to_bytes"] == str(1 << 20)
        }
        assert values["r2ccl_collective_seconds_count"] == sum(timing.count)
        assert values["r2ccl_collective_seconds_bucket+Inf"] == sum(timing.count)
        assert values["r2ccl_collective_seconds_sum"] == pytest.approx(timing.ns / 1e9)
        assert f'op="all-reduce",pid="{job.pid}",rank="",up_to_bytes="{1 << 20}"' in page


def test_a_foreign_profiler_wins(build: Build, tmp_path: Path) -> None:
    """NCCL takes the user's own; it gets all events, and R2CCL says that it cannot record."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        missing("build", "no C compiler in PATH")
    library, log = tmp_path / "libnccl-profiler-own.so", tmp_path / "log"
    flags = ["-std=gnu11", "-fPIC", "-shared", f"-I{ROOT / 'net_plugin'}"]
    source = ROOT / "tests" / "py" / "foreign_profiler.c"
    run_process([compiler, *flags, "-o", library, source])
    env = {"NCCL_PROFILER_PLUGIN": str(library), "FOREIGN_PROFILER_LOG": str(log)}
    with running(build, tmp_path, **env) as job:
        assert "no other profiler" in job.record("on", code=1)
        assert job.snapshot().process.recording == "cannot"
        assert "cannot record" in call("collectives", "show", "--pid", str(job.pid)).stderr
    lines = log.read_text().split()
    assert lines.count("init") == 2
    assert lines.count("AllReduce") > 6
    assert not job.snapshot().timings


@pytest.mark.parametrize("env", [{"HOSTNCCL_NET_VERSION": "10"}, {"NCCL_PROFILER_PLUGIN": "none"}])
def test_nccl_that_takes_no_profiler(build: Build, tmp_path: Path, env: dict[str, str]) -> None:
    """NCCL before 2.28 does not look into the net plugin's library, nor does one that is told not
    to: the job runs as before."""
    with running(build, tmp_path, **env) as job:
        assert "2.28" in job.record("on", code=1)
        assert job.snapshot().process.recording == "cannot"
        assert not job.snapshot().timings


@pytest.mark.parametrize("version", [11, 12])
def test_every_operation(build: Build, tmp_path: Path, version: int) -> None:
    """Recording from the start on: each kind of collective has its row, and sends have none."""
    env = plugin_env(build, HOSTNCCL_NET_VERSION=str(version))
    for op, word in (
        ("all_gather", "all-gather"),
        ("reduce_scatter", "reduce-scatter"),
        ("broadcast", "broadcast"),
        ("reduce", "reduce"),
        ("sendrecv", ""),
    ):
        folder = tmp_path / op
        folder.mkdir()
        stop = folder / "stop"
        words = f"--op {op} -b 65536 --duration 60 -c 0 --timeout 60 --until {stop}".split()
        job = Job(build, folder, 2, words, env)
        pid = job.processes[0].pid
        until(lambda pid=pid: _is_there(pid), "the job runs", 60)  # type: ignore[misc]
        call("collectives", "on", "--pid", str(pid))
        if word:
            until(lambda pid=pid, word=word: word in _ops(pid), f"{op} is recorded", 60)  # type: ignore[misc]
        stop.touch()
        good(job.finish())
        assert _ops(pid) <= {word, "all-reduce"}  # r2ccl_perf itself makes some AllReduces


def _is_there(pid: int) -> bool:
    found = [p for p in control.list_processes() if p.pid == pid]
    return bool(found) and found[0].recording == "off"


def _ops(pid: int) -> set[str]:
    return {timing.op for timing in control.find(pid).snapshot().timings}
