"""The shim over the stand-in under the sanitizers, while a plan is taken and given back.

Rung 3: shim, plugin, stand-in and r2ccl_perf are built with ASan+UBSan, and with TSan; 4 emulated
nodes of a rank each, as processes, with 2 loopback NICs each. One node loses a NIC, all switch to
the tree, the NIC comes back, all switch back; every value is checked after every operation. It
cannot prove that timing is kept: they are slow. Split, shrink and abort are not in it.
"""

from __future__ import annotations

import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest
from conftest import ROOT, RunBounded, kill_group
from plan_bed import RANKS, comms, lose, meets, regain, runs
from segment_bed import until
from test_sanitized import Sanitized, assert_quiet, sanitized

__all__ = ["sanitized"]
pytestmark = [pytest.mark.san, pytest.mark.slow]


def runtime(san: str, run_bounded: RunBounded) -> str:
    """The sanitizer's library, which must come before the shim."""
    found = run_bounded(["gcc", f"-print-file-name=lib{san}.so"], timeout=20).stdout.strip()
    assert Path(found).is_absolute(), f"gcc has no lib{san}.so: {found}"
    return found


def command(bed: Sanitized, job: str, end: Path, first: str) -> list[str]:
    launch = [str(bed.tool), "launch", "-n", str(RANKS), "--emulate-nodes", str(RANKS)]
    launch += ["--nics", "2", "--nccl", "standin", "--job", job, "--timeout", "200", "--", "env"]
    launch += [f"LD_PRELOAD={first}:{bed.build / 'libr2ccl.so'}"]
    launch += ["R2CCL_PLAN=on", "R2CCL_PLAN_HOLD=1", "R2CCL_PLAN_WITHDRAW=0"]
    perf = [str(bed.build / "r2ccl_perf"), "-b", "2M", "--check-every"]
    return [*bed.prefix, *launch, *perf, "--duration", "150", "--until", str(end)]


def switch_and_back(job: str) -> None:
    until(lambda: meets(job, RANKS), "the ranks have met", 60)
    lose(job)
    until(lambda: runs(job, RANKS, "tree"), "all ranks run a plan", 60)
    planned = comms(job)[0].operations
    until(lambda: comms(job)[0].operations > planned + 3, "operations in the plan", 60)
    regain(job)
    until(lambda: runs(job, RANKS, ""), "all ranks are back", 60)
    back = comms(job)[0].operations
    until(lambda: comms(job)[0].operations > back + 3, "operations after it", 60)


def test_plan_taken_and_given_back(
    sanitized: Sanitized,  # noqa: F811
    run_bounded: RunBounded,
    tmp_path: Path,
) -> None:
    job, end = f"san-{uuid.uuid4().hex[:8]}", tmp_path / "end"
    words = command(sanitized, job, end, runtime(sanitized.build.name, run_bounded))
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            words,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=sanitized.env,
            cwd=ROOT,
            start_new_session=True,
        )
        failed: BaseException | None = None
        try:
            switch_and_back(job)
            end.touch()
            process.wait(timeout=100)
        except (Exception, pytest.fail.Exception) as err:
            failed = err
        finally:
            kill_group(process)
            out.seek(0)
            output = out.read().decode(errors="replace")
    assert_quiet(output)
    assert failed is None, f"{failed}\n{output[-12000:]}"
    assert process.returncode == 0, output[-12000:]
