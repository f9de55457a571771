"""Collectives end to end under the sanitizers, while NICs are taken away and given back.

Rung 3: plugin, stand-in and r2ccl_perf are built with ASan+UBSan, and with TSan; 2 emulated nodes
of 2 ranks with 2 loopback NICs each. It cannot prove that timing is kept: they are slow.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import ROOT, RunBounded, kill_group

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


class Sanitized:
    """One sanitizer's build, and jobs of it."""

    def __init__(self, san: str, tool: Path) -> None:
        self.build = ROOT / "build" / san
        self.tool = tool
        self.env = {**os.environ, **OPTIONS[san], "R2CCL_BUILD_DIR": str(self.build)}
        # TSan of older compilers cannot live with much address space randomisation.
        self.prefix = ["setarch", platform.machine(), "-R"] if san == "tsan" else []

    def command(self, job: str, perf: Sequence[str]) -> list[str]:
        launch = [str(self.tool), "launch", "-n", "4", "--emulate-nodes", "2", "--nics", "2"]
        launch += ["--nccl", "standin", "--job", job, "--timeout", "200", "--"]
        return [*self.prefix, *launch, str(self.build / "r2ccl_perf"), *perf]


@pytest.fixture(scope="module", params=["asan", "tsan"])
def sanitized(
    request: pytest.FixtureRequest, tool: Path, run_bounded: RunBounded
) -> Iterator[Sanitized]:
    san: str = request.param
    run_bounded(["make", "artefacts", f"SAN={san}"], cwd=ROOT, timeout=500)
    yield Sanitized(san, tool)


def assert_quiet(output: str) -> None:
    found = [line for line in output.splitlines() if any(text in line for text in COMPLAINTS)]
    assert not found, f"{found[0]}\n{output[-12000:]}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation(sanitized: Sanitized, operation: str, run_bounded: RunBounded) -> None:
    perf = ["--op", operation, "-b", "8", "-e", "1M", "-f", "32", "-n", "2", "--timeout", "60"]
    job = f"san-{uuid.uuid4().hex[:8]}"
    finished = run_bounded(
        sanitized.command(job, perf), env=sanitized.env, timeout=240, cwd=ROOT, code=None
    )
    assert_quiet(finished.stdout + finished.stderr)
    assert finished.code == 0, finished


def test_lost_nics(sanitized: Sanitized, run_bounded: RunBounded, tmp_path: Path) -> None:
    """A NIC is lost, comes back, the other is lost with its connections reset: no complaint, no
    wrong value, and the job saw both."""
    job = f"san-{uuid.uuid4().hex[:8]}"
    end = tmp_path / "end"
    perf = ["-b", "1M", "-e", "1M", "--duration", "300", "--until", str(end)]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            sanitized.command(job, perf),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=sanitized.env,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            wait_for_job(sanitized, job, process, run_bounded)
            steps = (
                ["fail-nic", "127.0.1.1"],
                ["recover-nic", "127.0.1.1"],
                ["fail-nic", "127.0.2.2", "--kind", "error"],
                ["recover-nic", "127.0.2.2"],
            )
            answers = []
            for step in steps:
                words: list[str | Path] = [sanitized.tool, *step, "--job", job, "--timeout", "10s"]
                answers.append(run_bounded(words, timeout=60, code=None))
                time.sleep(2.5)
            end.touch()
            code = process.wait(timeout=200)
        finally:
            kill_group(process)
            out.seek(0)
            output = out.read().decode(errors="replace")
    assert_quiet(output)
    assert code == 0, output[-12000:]
    assert [answer.code for answer in answers] == [0] * 4, answers


@pytest.mark.parametrize("memory", ["--register", "--device"])
def test_verbs(sanitized: Sanitized, memory: str, run_bounded: RunBounded) -> None:
    """Queue pairs over the stand-in for libibverbs, which fails requests, lets writes land late and
    completions come late, and shows memory of the "device" after a read only: no complaint, no
    wrong byte."""
    library = sanitized.build / "fakeverbs" / "libibverbs.so.1"
    if not library.exists():
        pytest.skip("no <infiniband/verbs.h> here (Debian: libibverbs-dev)")
    pair = sanitized.build / "stress" / "pair"
    run_bounded(["make", f"SAN={sanitized.build.name}", str(pair.relative_to(ROOT))], timeout=300)
    words = [memory, "--size", "300001", "--random-sizes", "--conns", "2", "--count", "150"]
    env = {
        **sanitized.env,
        "R2CCL_NICS": "127.0.1.1,127.0.2.1",
        "R2CCL_IBVERBS_LIB": str(library),
        "R2CCL_GPU_MEMORY": "direct",
        "R2_FAKEVERBS_CHAOS": "seed=7,gpu=1,late_write=300,late_cqe=100,late_us=3000,error=2000",
        "NCCL_IB_TIMEOUT": "14",
    }
    command = [*sanitized.prefix, str(pair), *words, "--stall", "60"]
    finished = run_bounded(command, env=env, timeout=200, cwd=ROOT, code=None)
    assert_quiet(finished.stdout + finished.stderr)
    assert finished.code == 0, finished


def wait_for_job(
    sanitized: Sanitized, job: str, process: subprocess.Popen[bytes], run_bounded: RunBounded
) -> None:
    """Until all 4 ranks show themselves to r2ccl-ctl."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the job ended early with {process.returncode}"
        listing = run_bounded(
            [sanitized.tool, "ps", "--job", job, "--json"], timeout=30, code=None
        ).stdout
        if listing and len(json.loads(listing).get("processes", [])) == 4:
            return
        time.sleep(0.2)
    pytest.fail(f"job {job} does not show 4 processes within 60 s: {listing}")
