"""The shim over the stand-in under the sanitizers: a plan is taken and given back, communicators
come and go, are split and shrunk, and are aborted from another thread.

Rung 3: shim, plugin, stand-in and r2ccl_perf are built with ASan+UBSan, and with TSan; 4 emulated
nodes of a rank each, as processes, with 2 loopback NICs each. Every value is checked. It cannot
prove that timing is kept: they are slow. Where ranks are Python's, whose own code no sanitizer
sees, ASan does not look for leaks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, RunBounded, kill_group
from plan_bed import RANKS, comms, digests, end_at, lose, meets, regain, runs, sized
from segment_bed import until
from test_sanitized import assert_quiet, sanitized
from variant_bed import Variant

__all__ = ["sanitized"]
pytestmark = pytest.mark.slow

PYTHON = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1"}


@pytest.fixture(scope="module")
def runtime(sanitized: Variant, run_bounded: RunBounded) -> str:
    """The sanitizer's library, which must come before the shim."""
    san = sanitized.build.name
    found = run_bounded(["gcc", f"-print-file-name=lib{san}.so"], timeout=20).stdout.strip()
    assert Path(found).is_absolute(), f"gcc has no lib{san}.so: {found}"
    return found


@contextmanager
def running(
    bed: Variant, first: str, job: str, words: Sequence[str], more: dict[str, str]
) -> Iterator[None]:
    """Ranks of `words` while the block does something to them; then they end by themselves, in
    order, and no sanitizer has complained."""
    launch = [str(bed.tool), "launch", "-n", str(RANKS), "--emulate-nodes", str(RANKS)]
    launch += ["--nics", "2", "--nccl", "standin", "--job", job, "--timeout", "240", "--", "env"]
    launch += [f"LD_PRELOAD={first}:{bed.build / 'libr2ccl.so'}"]
    launch += [f"R2CCL_REAL_NCCL={bed.build / 'hostnccl' / 'libnccl.so.2'}"]
    launch += ["R2CCL_MODE=optimal", "R2CCL_PLAN_HOLD=1"]
    failed: BaseException | None = None
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [*bed.prefix, *launch, *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**bed.env, **more},
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            yield
            process.wait(timeout=150)
        except (Exception, pytest.fail.Exception) as err:
            failed = err
        finally:
            kill_group(process)
            out.seek(0)
            output = out.read().decode(errors="replace")
    assert_quiet(output)
    assert failed is None, f"{failed}\n{output[-12000:]}"
    assert process.returncode == 0, output[-12000:]


def worker(name: str, *words: str | Path) -> list[str]:
    return [sys.executable, str(ROOT / "tests/py" / name), *map(str, words)]


@pytest.mark.san
def test_plan_taken_and_given_back(
    sanitized: Variant,
    runtime: str,
    tmp_path: Path,
) -> None:
    job, end = f"san-{uuid.uuid4().hex[:8]}", tmp_path / "end"
    perf = [str(sanitized.build / "r2ccl_perf"), "-b", "2M", "--check-every"]
    with running(sanitized, runtime, job, [*perf, "--duration", "300", "--until", str(end)], {}):
        until(lambda: meets(job, RANKS), "the ranks have met", 60)
        lose(job)
        until(lambda: runs(job, RANKS, "direct"), "all ranks run a plan", 60)
        planned = comms(job)[0].operations
        until(lambda: comms(job)[0].operations > planned + 3, "operations in the plan", 60)
        regain(job)
        until(lambda: runs(job, RANKS, ""), "all ranks are back", 60)
        back = comms(job)[0].operations
        until(lambda: comms(job)[0].operations > back + 3, "operations after it", 60)
        end.touch()


@pytest.mark.soak
def test_shrink_under_a_plan(
    sanitized: Variant,
    runtime: str,
    tmp_path: Path,
) -> None:
    """The last rank leaves while the plan holds; the others go on without it."""
    job = f"san-{uuid.uuid4().hex[:8]}"
    words = worker("shrink_worker.py", tmp_path)
    with running(sanitized, runtime, job, words, PYTHON):
        until(lambda: meets(job, RANKS), "the ranks have met", 60)
        lose(job)
        until(lambda: runs(job, RANKS, "direct"), "all ranks run a plan", 60)
        end_at(tmp_path, "shrink", 20)  # operations are slow
        fewer = RANKS - 1
        until(lambda: len(sized(job, fewer)) == fewer, "they shrink", 120)
        until(lambda: all(c.operations > 5 for c in sized(job, fewer)), "its operations", 120)
        end_at(tmp_path, "stop", 20)
    found = [digests(tmp_path, rank, RANKS - 1) for rank in range(RANKS - 1)]
    assert len(found[0]) > 5 and all(lines == found[0] for lines in found)


@pytest.mark.san
def test_generations_and_an_abort(
    sanitized: Variant,
    runtime: str,
    tmp_path: Path,
) -> None:
    """Communicators one after the other, each split; the last one is aborted by a thread while
    the ranks' own are inside an operation that one of them does not come to."""
    job = f"san-{uuid.uuid4().hex[:8]}"
    words = worker("generations_worker.py", tmp_path, "4")
    with running(sanitized, runtime, job, words, PYTHON):
        pass
    codes = [(tmp_path / f"aborted.{rank}").read_text() for rank in range(RANKS - 1)]
    assert "0" not in codes, "an operation that was aborted counted as done"
