"""The queries of docs/monitoring.md and the alert rules of docs/examples in Prometheus' own hands
(promtool), with the series of a real page. Rung 3; no Prometheus scrapes here.
Skipped where there is no promtool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from segment_bed import StartWriter, start_writer

from r2ccl_ctl import exporter
from r2ccl_ctl.control import Selection

__all__ = ["start_writer"]

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="no promtool in PATH (Debian: prometheus)")
ALERTS = {  # what is wrong: metric, labels that choose the series, its values, one each 15 s
    "NicLost": ("r2ccl_nic_state", 'state="failed"', "1x40"),
    "NicFlaps": ("r2ccl_nic_failures_total", "nic=", "0+1x40"),
    "JobStalled": ("r2ccl_peers_without_path", "", "1x40"),
    "WrongData": ("r2ccl_wrong_chunks_total", "", "0+1x40"),
    "RankSilent": ("r2ccl_process_silent_seconds", "", "0+15x40"),
    "FaultLeftBehind": ("r2ccl_nic_fault_injected", "", "1x400"),
    "ExporterBlind": ("r2ccl_up", "", "0x200"),
}
AFTER = {"FaultLeftBehind": "90m", "ExporterBlind": "30m"}


def block(title: str) -> str:
    """The indented block under a heading of the document."""
    text = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {title}\n\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    assert found, title
    return textwrap.dedent(found[1])


def promtool(*words: str | Path) -> str:
    done = subprocess.run(
        [str(PROMTOOL), *map(str, words)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def page(start_writer: StartWriter, tmp_path: Path) -> list[str]:
    """The series of a page, without their values."""
    writer = start_writer()
    text = exporter.page(Selection(), directory=writer.path.parent).decode()
    return [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]


@pytest.fixture
def firing(page: list[str], tmp_path: Path) -> Callable[..., None]:
    """Whether an alert fires when the series of one metric have these values, all others 0 or 1."""
    rules = ROOT / "docs/examples/alerts.yml"

    def check(name: str, wrong: bool) -> None:
        metric, label, values = ALERTS[name]
        chosen = [s for s in page if s.split("{")[0] == metric and label in s]
        assert chosen, f"no series {metric} {label} on the page"
        rest = [s for s in page if s not in chosen]
        well = {s: "1x400" if s == "r2ccl_up" or 'state="healthy"' in s else "0x400" for s in page}
        series = {s: well[s] for s in rest} | {s: values if wrong else well[s] for s in chosen}
        expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}} == 1) > bool 0'
        samples = [{"labels": "{}", "value": 1}] if wrong else []
        query = {"expr": expr, "eval_time": AFTER.get(name, "5m"), "exp_samples": samples}
        case: dict[str, Any] = {"interval": "15s", "promql_expr_test": [query]}
        case["input_series"] = [{"series": s, "values": v} for s, v in series.items()]
        test = tmp_path / "test.yml"  # JSON is YAML
        test.write_text(json.dumps({"rule_files": [str(rules)], "tests": [case]}))
        promtool("test", "rules", test)

    return check


@pytest.mark.parametrize("name", ALERTS)
def test_the_alert_fires(firing: Callable[..., None], name: str) -> None:
    firing(name, wrong=True)
    firing(name, wrong=False)


def test_every_alert_is_tested() -> None:
    text = (ROOT / "docs/examples/alerts.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"alert: (\w+)", text)) == set(ALERTS)


def test_the_configuration_is_one() -> None:
    said = promtool("check", "config", ROOT / "docs/examples/prometheus.yml")
    assert "7 rules found" in said and "valid prometheus config file syntax" in said


def test_the_questions_are_promql(tmp_path: Path) -> None:
    """Also those of the dashboard."""
    queries = [line for line in block("Questions").splitlines() if line and line[0] != "#"]
    assert len(queries) == 6
    board = json.loads((ROOT / "docs/examples/grafana.json").read_text(encoding="utf-8"))
    queries += [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = [{"record": f"q{n}", "expr": query} for n, query in enumerate(queries)]
    file = tmp_path / "questions.yml"
    file.write_text(json.dumps({"groups": [{"name": "questions", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_the_page_is_one_that_prometheus_reads(start_writer: StartWriter) -> None:
    text = exporter.page(Selection(), directory=start_writer().path.parent)
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    assert done.returncode in (0, 3), done.stderr.decode()  # 3: matters of style
    assert b"error" not in done.stderr.lower(), done.stderr.decode()
