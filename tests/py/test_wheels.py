"""mk/wheels: a wheel for older systems, installed afresh and used without a compiler.

Rung 3. It cannot prove that the wheel runs with glibc 2.28 itself: only that it asks for no newer
symbol. Skipped where the package index has no ziglang."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
from conftest import ROOT, RunBounded

pytestmark = [pytest.mark.soak, pytest.mark.slow]


def test_wheel_works_without_a_compiler(
    tmp_path: Path, run_bounded: RunBounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = platform.machine()
    made = run_bounded([ROOT / "mk/wheels", machine], timeout=560, code=None)
    if made.code == 77:
        pytest.skip(made.stdout.strip().splitlines()[-1])
    assert made.code == 0, made.stdout + made.stderr
    (wheel,) = (ROOT / "dist").glob(f"r2ccl-*-py3-none-manylinux_2_28_{machine}.whl")
    run_bounded([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], timeout=60)
    python = tmp_path / "venv/bin/python"
    run_bounded(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", wheel], timeout=200
    )
    monkeypatch.delenv("R2CCL_BUILD_DIR", raising=False)
    env = {"PATH": str(python.parent)}  # neither gcc nor make
    short = ["--size", "4M", "--seconds-per-phase", "0.6"]
    words: list[str | Path] = [python.parent / "r2ccl-ctl", "demo", "--json", *short]
    report = json.loads(run_bounded(words, cwd=tmp_path, env=env, timeout=180).stdout)
    assert report["wrong"] == 0
    assert len(report["events"]) >= 4
