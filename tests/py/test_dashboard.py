"""The dashboard asks only for metrics that the exporter prints; systemd takes the unit file.

Rung 3. Grafana's own model of a dashboard reads it; no Grafana opens it here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_grafanas_model_keeps_all_of_it() -> None:
    """The model is generated from Grafana's schema: it drops what Grafana does not know."""
    sdk = "grafana_foundation_sdk"
    model = pytest.importorskip(f"{sdk}.models.dashboard", reason="no grafana-foundation-sdk")
    from grafana_foundation_sdk.cog import encoder, plugins

    plugins.register_default_plugins()
    board = json.loads((ROOT / "docs/examples/grafana.json").read_text(encoding="utf-8"))

    def lost(board: Any) -> list[str]:
        kept = encoder.JSONEncoder().encode(model.Dashboard.from_json(board))
        return list(differences(board, json.loads(kept), ""))

    assert lost(board) == []
    board["panels"][0]["targets"][0]["query"] = board["panels"][0]["targets"][0].pop("expr")
    assert lost(board) == ["/panels/0/targets/0/query"]


def differences(ours: Any, kept: Any, place: str) -> Iterator[str]:
    """Where something of ours is not kept. What the model adds is no matter."""
    if isinstance(ours, list) and isinstance(kept, list) and len(ours) == len(kept):
        ours, kept = dict(enumerate(ours)), dict(enumerate(kept))
    if not isinstance(ours, dict) or not isinstance(kept, dict):
        if ours != kept:
            yield place
        return
    for key, value in ours.items():
        yield from differences(value, kept.get(key), f"{place}/{key}")


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
