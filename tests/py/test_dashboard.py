"""The Grafana dashboard asks only for metrics that the exporter prints, and its panels are whole.

Rung 3. No Grafana opens it here."""

from __future__ import annotations

import json
import re

from conftest import ROOT
from segment_bed import StartWriter, start_writer

from r2ccl_ctl import exporter
from r2ccl_ctl.control import Selection

__all__ = ["start_writer"]


def test_queries_name_metrics_that_exist(start_writer: StartWriter) -> None:
    writer = start_writer()
    page = exporter.page(Selection(), directory=writer.path.parent).decode()
    printed = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if line[:1] != "#"}
    board = json.loads((ROOT / "docs/examples/grafana.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 8
    for panel in panels:
        for target in panel["targets"]:
            names = set(re.findall(r"\br2ccl_\w+", target["expr"]))
            assert names and names <= printed, (panel["title"], names - printed)
