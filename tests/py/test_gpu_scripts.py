"""The rows of tests/gpu/run_matrix.py can be started. Rung 1. It cannot prove anything about real
NCCL: tests/gpu on a machine with GPUs does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

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
