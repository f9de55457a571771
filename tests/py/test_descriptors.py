"""Few file descriptors: 16 ranks with 4 NICs each send to all others. Where the hard limit allows,
the soft one is raised; else every peer has one path, and the limit is named once. Rung 3."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys

import pytest
from conftest import ROOT, Build

from r2ccl_ctl import control, journal

RANKS = 16


def alltoall(build: Build, soft: int, hard: int, job: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "r2ccl_ctl", "launch", "-n", str(RANKS), "--job", job]
    argv += ["--emulate-nodes", str(RANKS), "--nics", "4", "--nccl", "standin", "--timeout", "90"]
    argv += ["--env", "NCCL_DEBUG=WARN", "--env", "R2CCL_NO_PATH_TIMEOUT=40s", "--", "sh", "-c"]
    argv += [f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$0" --op alltoall -b 64K -n 3 -w 0 -c 1']
    argv += [str(build.path / "r2ccl_perf")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize(("hard", "told"), [(4096, 0), (128, RANKS)])
def test_few_descriptors(build: Build, hard: int, told: int) -> None:
    job = f"test-{secrets.token_hex(4)}"
    done = alltoall(build, 128, hard, job)
    assert done.returncode == 0, done
    lines = re.findall(r"^\[\d+\] .*NET/R2CCL.*$", done.stdout + done.stderr, re.MULTILINE)
    assert len(lines) <= told, lines
    named = [line for line in lines if f"few file descriptors left (ulimit -n {hard})" in line]
    assert len(named) == len(lines) and (named or not told), lines
    ended = [one for one in control.list_processes(dead=True) if one.job == job]
    for process in ended:
        if told and process.warning:
            assert f"ulimit -n {hard}" in process.warning
            assert "warning" in [event.event for event in journal.read_all(process)]
    assert any(process.warning for process in ended) == bool(told), ended
