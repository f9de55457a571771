"""`make test-verbs`: tests that know nothing of RDMA do run over queue pairs, and a run that does
not has failed. Rung 3, over the stand-in for libibverbs."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import ROOT, Build, Finished, RunBounded
from verbs_bed import library

FLOWS = "tests/py/test_failover.py::test_healthy[100000-2-0]"
NO_ENGINE = "tests/py/test_docs.py::test_settings_table_is_readable"


def suite(run_bounded: RunBounded, folder: Path, test: str, code: int) -> Finished:
    words: list[str | Path] = ["-m", "pytest", "-p", "no:cacheprovider", test]
    words += ["--basetemp", folder / "t"]
    env = {"TEST_VERBS": "1"}
    return run_bounded([sys.executable, *words], cwd=ROOT, env=env, code=code, timeout=100.0)


def test_goes_over_queue_pairs(build: Build, run_bounded: RunBounded, tmp_path: Path) -> None:
    library(build.path)
    done = suite(run_bounded, tmp_path, FLOWS, 0)
    assert "1 of 1 tests that had devices" in done.stdout, str(done)


def test_or_has_failed(build: Build, run_bounded: RunBounded, tmp_path: Path) -> None:
    library(build.path)
    done = suite(run_bounded, tmp_path, NO_ENGINE, 1)
    assert "1 passed" in done.stdout and "this was no run over verbs" in done.stdout, str(done)
