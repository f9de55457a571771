"""Jobs of a build other than the usual one: with sanitizers, or for another processor."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT, Finished, RunBounded, kill_group

CHAOS = "seed=7,gpu=1,late_write=300,late_cqe=100,late_us=3000,error=2000"


@dataclass(frozen=True)
class Variant:
    """A build and its jobs of 2 emulated nodes x 2 ranks x 2 loopback NICs. `prefix` runs the tool
    and what it starts, `runner` the program alone."""

    build: Path
    tool: Path
    env: Mapping[str, str]
    prefix: Sequence[str] = field(default_factory=list)
    runner: Sequence[str] = field(default_factory=list)

    def command(self, job: str, perf: Sequence[str]) -> list[str]:
        launch = [str(self.tool), "launch", "-n", "4", "--emulate-nodes", "2", "--nics", "2"]
        launch += ["--nccl", "standin", "--job", job, "--timeout", "200", "--"]
        return [*self.prefix, *launch, *self.runner, str(self.build / "r2ccl_perf"), *perf]

    def run(
        self, run_bounded: RunBounded, *perf: str, env: Mapping[str, str] | None = None
    ) -> Finished:
        """One job, to its end, whatever that is."""
        command = self.command(job_name(), perf)
        return run_bounded(
            command, env={**self.env, **(env or {})}, timeout=240, cwd=ROOT, code=None
        )

    def pair(self, *words: str) -> list[str]:
        """Two engines that move messages (tests/stress/pair.c)."""
        return [*self.prefix, *self.runner, str(self.build / "stress" / "pair"), *words]

    def verbs(self) -> Mapping[str, str]:
        """The environment of NICs that are queue pairs of the stand-in for libibverbs: requests
        fail, writes land late and completions come late, and a "device" shows its memory after a
        read only."""
        library = self.build / "fakeverbs" / "libibverbs.so.1"
        if not library.exists():
            pytest.skip("no <infiniband/verbs.h> here (Debian: libibverbs-dev)")
        return {
            **self.env,
            "R2CCL_NICS": "127.0.1.1,127.0.2.1",
            "R2CCL_IBVERBS_LIB": str(library),
            "R2CCL_GPU_MEMORY": "direct",
            "R2_FAKEVERBS_CHAOS": CHAOS,
            "NCCL_IB_TIMEOUT": "14",
        }


def job_name() -> str:
    return f"variant-{uuid.uuid4().hex[:8]}"


def lose_nics(variant: Variant, run_bounded: RunBounded, end: Path) -> str:
    """A NIC is lost, comes back, the other is lost with its connections reset: the job saw both and
    no value was wrong. Returns what it printed. `end`: a file that is not there yet."""
    job = job_name()
    perf = ["-b", "1M", "-e", "1M", "--duration", "300", "--until", str(end)]
    steps = (
        ["fail-nic", "127.0.1.1"],
        ["recover-nic", "127.0.1.1"],
        ["fail-nic", "127.0.2.2", "--kind", "error"],
        ["recover-nic", "127.0.2.2"],
    )
    answers = []
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            variant.command(job, perf),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(variant.env),
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            wait_for_job(variant, job, process, run_bounded)
            for step in steps:
                words: list[str | Path] = [variant.tool, *step, "--job", job, "--timeout", "10s"]
                answers.append(run_bounded(words, timeout=60, code=None))
                time.sleep(2.5)
            end.touch()
            code = process.wait(timeout=200)
        finally:
            kill_group(process)
            out.seek(0)
            output = out.read().decode(errors="replace")
    assert code == 0, output[-12000:]
    assert [answer.code for answer in answers] == [0] * 4, answers
    return output


def wait_for_job(
    variant: Variant, job: str, process: subprocess.Popen[bytes], run_bounded: RunBounded
) -> None:
    """Until all 4 ranks show themselves to r2ccl-ctl."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the job ended early with {process.returncode}"
        listing = run_bounded(
            [variant.tool, "ps", "--job", job, "--json"], timeout=30, code=None
        ).stdout
        if listing and len(json.loads(listing).get("processes", [])) == 4:
            return
        time.sleep(0.2)
    pytest.fail(f"job {job} does not show 4 processes within 60 s: {listing}")
