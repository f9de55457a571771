"""The scripts of tests/gpu that can run on the stand-in do, and the matrix' rows can be started.

Rungs 1 and 4. They cannot prove anything about real NCCL: tests/gpu on a machine with GPUs does.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build

GPU = ROOT / "tests" / "gpu"
sys.path.insert(0, str(GPU))
pytest.importorskip("pyroute2")

run_ddp: Any = importlib.import_module("run_ddp")
run_tests: Any = importlib.import_module("run_nccl_tests")
matrix: Any = importlib.import_module("run_matrix")


def test_rows_of_the_matrix_can_be_run() -> None:
    """Their scripts take their arguments, and a row that hangs is ended."""
    for row in matrix.ROWS:
        script = run_ddp if row.script == "run_ddp.py" else run_tests
        argv = row.argv("python3", Path("/x.json"))
        assert script.parser().parse_args(argv[2:]).json == "/x.json"
    assert [r.name for r in matrix.chosen(["jax", "ddp"])] == ["jax", "ddp"]
    assert matrix.chosen([]) == list(matrix.ROWS)
    with pytest.raises(ValueError, match="choose from"):
        matrix.chosen(["windows"])


def on_the_stand_in(build: Build, out: Path, script: str, *words: str) -> dict[str, Any]:
    """What the script has found."""
    if build.path != ROOT / "build":
        pytest.skip("the scripts run what is in build/")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("R2CCL_", "NCCL_"))}
    done = subprocess.run(
        [sys.executable, str(GPU / script), *words, "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
        env=clean | {"GPU_COUNT": "0", "NCCL_LIB": str(build.host_nccl)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.lab
@pytest.mark.slow
def test_allreduce(lab_rights: None, build: Build, tmp_path: Path) -> None:
    words = "--standin --rate 100mbit --min 1M --max 1M --states healthy,half --turns 1 --cycles 2"
    words += " --budget 240 --env R2CCL_MODE=optimal"
    found = on_the_stand_in(build, tmp_path / "found.json", "run_allreduce.py", *words.split())
    assert found["ok"] and found["wrong"] == 0
    assert [row["state"] for row in found["rows"]] == ["healthy", "half"]
    (change,) = found["changes"]
    assert 0 <= change["decided_s"] <= change["made_s"] <= change["taken_s"]


@pytest.mark.lab
def test_retention(lab_rights: None, build: Build, tmp_path: Path) -> None:
    words = "--standin --rate 100mbit --nics 2 --ops all_gather --min 4M --max 4M --reps 1"
    found = on_the_stand_in(build, tmp_path / "found.json", "run_retention.py", *words.split())
    (row,) = found["rows"]
    assert (row["op"], row["nics"], row["runs"]) == ("all_gather", 2, 1)
