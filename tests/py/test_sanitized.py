"""Collectives end to end under the sanitizers, while NICs are taken away and given back.

Rung 3: plugin, stand-in and r2ccl_perf are built with ASan+UBSan, and with TSan; 2 emulated nodes
of 2 ranks with 2 loopback NICs each. It cannot prove that timing is kept: they are slow.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from conftest import ROOT, RunBounded
from variant_bed import Variant, lose_nics

pytestmark = [pytest.mark.san, pytest.mark.slow]

OPTIONS = {
    "asan": {
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    },
    "tsan": {
        "TSAN_OPTIONS": "exitcode=66:second_deadlock_stack=1:history_size=4:print_suppressions=0:"
        f"suppressions={ROOT / 'mk' / 'tsan.supp'}"
    },
}
COMPLAINTS = (
    "ERROR: AddressSanitizer",
    "ERROR: LeakSanitizer",
    "runtime error:",
    "WARNING: Thread",
)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv", "broadcast")


@pytest.fixture(scope="module", params=["asan", "tsan"])
def sanitized(request: pytest.FixtureRequest, tool: Path, run_bounded: RunBounded) -> Variant:
    san: str = request.param
    run_bounded(["make", "artefacts", f"SAN={san}"], cwd=ROOT, timeout=500)
    folder = ROOT / "build" / san
    # TSan of older compilers cannot live with much address space randomisation.
    prefix = ["setarch", platform.machine(), "-R"] if san == "tsan" else []
    return Variant(
        folder, tool, {**os.environ, **OPTIONS[san], "R2CCL_BUILD_DIR": str(folder)}, prefix
    )


def assert_quiet(output: str) -> None:
    found = [line for line in output.splitlines() if any(text in line for text in COMPLAINTS)]
    assert not found, f"{found[0]}\n{output[-12000:]}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(sanitized: Variant, operation: str, run_bounded: RunBounded) -> None:
    perf = ["--op", operation, "-b", "8", "-e", "1M", "-f", "32", "-n", "2", "--timeout", "60"]
    finished = sanitized.run(run_bounded, *perf)
    assert_quiet(finished.stdout + finished.stderr)
    assert finished.code == 0, finished


def test_lost_nics(sanitized: Variant, run_bounded: RunBounded, tmp_path: Path) -> None:
    """No complaint and no wrong value."""
    assert_quiet(lose_nics(sanitized, run_bounded, tmp_path / "end"))


@pytest.mark.parametrize("memory", ["--register", "--device"])
def test_verbs(sanitized: Variant, memory: str, run_bounded: RunBounded) -> None:
    """Queue pairs over the stand-in for libibverbs: no complaint, no wrong byte."""
    env = sanitized.verbs()
    san = sanitized.build.name
    run_bounded(["make", f"SAN={san}", f"build/{san}/stress/pair"], timeout=300)
    words = [memory, "--size", "300001", "--random-sizes", "--conns", "2", "--count", "150"]
    command = sanitized.pair(*words, "--stall", "60")
    finished = run_bounded(command, env=env, timeout=200, cwd=ROOT, code=None)
    assert_quiet(finished.stdout + finished.stderr)
    assert finished.code == 0, finished


def test_direct(sanitized: Variant, run_bounded: RunBounded) -> None:
    """AllReduces by R2CCL while NICs fail at every rank: no complaint, no wrong bit."""
    san = sanitized.build.name
    run_bounded(["make", f"SAN={san}", f"build/{san}/stress/direct"], timeout=300)
    program = str(sanitized.build / "stress/direct")
    words = ["--seconds", "8", "--seed", "57", "--ranks", "3", "--comms", "2"]
    command = [*sanitized.prefix, *sanitized.runner, program, *words]
    finished = run_bounded(command, env=sanitized.env, timeout=200, cwd=ROOT, code=None)
    assert_quiet(finished.stdout + finished.stderr)
    assert finished.code == 0, finished
