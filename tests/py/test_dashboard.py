"""The dashboard asks only for metrics that the exporter prints; systemd takes the unit file.

Rung 3. No Grafana opens it here."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, RunBounded
from segment_bed import StartWriter, start_writer

from r2ccl_ctl import exporter
from r2ccl_ctl.control import Selection

__all__ = ["start_writer"]


def test_queries_name_metrics_that_exist(start_writer: StartWriter) -> None:
    writer = start_writer()
    page = exporter.page(Selection(), directory=writer.path.parent).decode()
    printed = {re.split(r"[{ ]", line.removeprefix("# TYPE "))[0] for line in page.splitlines()}
    board = json.loads((ROOT / "docs/examples/grafana.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 8
    for panel in panels:
        for target in panel["targets"]:
            names = set(re.findall(r"\br2ccl_\w+", target["expr"]))
            assert names and names <= printed, (panel["title"], names - printed)


def test_systemd_takes_the_unit(tmp_path: Path, run_bounded: RunBounded, tool: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no `systemd-analyze` in PATH (package systemd)")
    text = (ROOT / "docs/examples/r2ccl-metrics.service").read_text(encoding="utf-8")
    unit = tmp_path / "r2ccl-metrics.service"
    assert "/usr/bin/r2ccl-ctl" in text
    unit.write_text(text.replace("/usr/bin/r2ccl-ctl", str(tool)), encoding="utf-8")
    done = run_bounded([analyze, "verify", "--man=no", unit])
    assert unit.name not in done.stderr, done.stderr
