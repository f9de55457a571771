"""A real Prometheus (Debian: prometheus) scrapes the exporter and evaluates docs/examples: series
of two processes arrive, and an alert fires. Rung 3, on loopback. It cannot prove other versions."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from segment_bed import StartWriter, start_writer, until
from test_cli import call

__all__ = ["start_writer"]

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus in PATH")
EXAMPLES = ROOT / "docs/examples"
WAIT_S = 60


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(argv: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        popen = subprocess.Popen(argv, stdout=out, stderr=out, cwd=ROOT)
    try:
        yield
    finally:
        popen.terminate()
        try:
            popen.wait(timeout=20)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


@pytest.fixture
def ask(start_writer: StartWriter, tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """A query of a Prometheus whose configuration is the example's, with our ports and faster."""
    exporter, server = free_port(), free_port()
    text = (EXAMPLES / "prometheus.yml").read_text(encoding="utf-8")
    text, targets = re.subn(r"targets: \[.*\]", f'targets: ["127.0.0.1:{exporter}"]', text)
    text, interval = re.subn(r"scrape_interval: 15s", "scrape_interval: 1s", text)
    assert targets == interval == 1
    (tmp_path / "prometheus.yml").write_text(text)
    rules = (EXAMPLES / "alerts.yml").read_text(encoding="utf-8")
    # The example's groups look every 15 s; here the alert is to fire while the test waits.
    (tmp_path / "alerts.yml").write_text(re.sub(r"(interval|for): \d+\w", r"\1: 1s", rules))
    metrics = [sys.executable, "-m", "r2ccl_ctl", "metrics", "--listen", f"127.0.0.1:{exporter}"]
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             f"--web.listen-address=127.0.0.1:{server}"]  # fmt: skip

    def query(expr: str) -> list[Any]:
        url = f"http://127.0.0.1:{server}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)
        except OSError:  # it is not up yet
            return []
        assert found["status"] == "success"
        return list(found["data"]["result"])

    with (
        running(metrics, tmp_path / "metrics.log"),
        running([str(PROMETHEUS), *words], tmp_path / "prometheus.log"),
    ):
        yield query


def test_series_arrive_and_an_alert_fires(
    ask: Callable[..., list[Any]], start_writer: StartWriter
) -> None:
    writers = [start_writer("--rank", str(rank)) for rank in range(2)]
    job = writers[0].job
    series = f'r2ccl_nic_transmit_bytes_total{{job_name="{job}"}}'
    until(lambda: len(ask(series)) == 4, "two NICs of two ranks", WAIT_S)
    labels = [found["metric"] for found in ask(series)]
    assert {one["rank"] for one in labels} == {"0", "1"}
    assert {one["job"] for one in labels} == {"r2ccl"}
    assert ask('up{job="r2ccl"}')[0]["value"][1] == "1"
    rate = f'rate(r2ccl_nic_transmit_bytes_total{{job_name="{job}"}}[30s]) > 0'
    until(lambda: ask(rate), "a rate", WAIT_S)
    firing = 'ALERTS{alertname="FaultLeftBehind",alertstate="firing"}'
    node = labels[0]["node"]
    call("fail-nic", "127.0.1.1", "--pid", str(writers[0].pid))
    until(lambda: any(one["metric"]["nic"] == "127.0.1.1" and one["metric"]["node"] == node
                      for one in ask(firing)), "the alert", WAIT_S)  # fmt: skip
    # A histogram: 21 ms lie between two of its bounds.
    resume = f'histogram_quantile(1, r2ccl_resume_seconds_bucket{{job_name="{job}",rank="0"}})'
    assert [one["value"][1] for one in ask(resume)] == ["0.03"]
