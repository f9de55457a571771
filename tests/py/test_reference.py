"""What users of the R2CC fork of NCCL bring along: R2CC_MODE and its failure model, which become
injected faults; and our own form, R2CCL_FAULTS. Rung 3: launched ranks, right values."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys

import pytest
from conftest import ROOT, Build

from r2ccl_ctl import control, journal

SIMULATED = re.compile(
    r"^\[(\d)\] .*failure of NIC (\S+) is simulated at (the start|operation \d+)"
)


def job(build: Build, **env: str) -> tuple[str, dict[int, list[str]]]:
    """Two nodes of three NICs: what is said, and the faults in each rank's journal."""
    name = f"test-{secrets.token_hex(4)}"
    argv = [sys.executable, "-m", "r2ccl_ctl", "launch", "-n", "2", "--emulate-nodes", "2"]
    argv += ["--nics", "3", "--nccl", "standin", "--timeout", "60", "--job", name]
    for variable, value in env.items():
        argv += ["--env", f"{variable}={value}"]
    argv += ["--", str(build.path / "r2ccl_perf"), "--op", "all_reduce", "-b", "1M", "-n", "30"]
    done = subprocess.run([*argv, "-c", "1"], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done
    assert "Out of bounds values : 0 OK" in done.stdout, done
    faults = {}
    for process in control.list_processes(dead=True):
        if process.job == name and process.rank is not None:
            events = journal.read_all(process)
            faults[process.rank] = [
                f"{event.nic} {event.cause}" for event in events if event.event == "fault-injected"
            ]
    return done.stdout + done.stderr, faults


@pytest.mark.parametrize(
    ("env", "lost"),
    [
        ({"R2CC_MODE": "1"}, {0: ["127.0.1.1"], 1: ["127.0.1.2"]}),
        ({"R2CC_MODE": "2"}, {0: ["127.0.3.1"], 1: []}),
        ({"R2CC_MODE": "3", "R2CC_FAILED_NIC_COUNT": "2"}, {0: ["127.0.2.1", "127.0.3.1"], 1: []}),
        (
            {"R2CC_MODE": "2", "R2CC_FAILED_NODE": "1", "R2CC_FAILED_HCA": "127.0.2.2 0"},
            {0: [], 1: ["127.0.1.2", "127.0.2.2"]},
        ),
        ({"R2CC_FAILED_NIC_COUNT": "3"}, {0: [], 1: []}),
        ({"R2CCL_MODE": "balance", "R2CC_MODE": "1"}, {0: [], 1: []}),
    ],
)
def test_declared_failures(build: Build, env: dict[str, str], lost: dict[int, list[str]]) -> None:
    said, faults = job(build, **env)
    assert faults == {rank: [f"{nic} error both" for nic in nics] for rank, nics in lost.items()}
    told = [match for line in said.splitlines() if (match := SIMULATED.match(line))]
    assert sorted((int(m[1]), m[2]) for m in told) == sorted(
        (rank, nic) for rank, nics in lost.items() for nic in nics
    )


def test_a_failure_at_an_operation(build: Build) -> None:
    said, faults = job(build, R2CC_DISCONNECTED_HCA="1", R2CC_DISCONNECTED_STEP="20")
    assert faults == {0: ["127.0.2.1 error both (armed)"], 1: ["127.0.2.2 error both (armed)"]}
    assert said.count("is simulated at operation 21") == 2, said


def test_own_rules(build: Build) -> None:
    """By operation, by byte and by time, for one node and one rank."""
    rules = "0 blackhole ops=9 for=300ms node=0; 2 error after=1M rank=1; 1 slow=1gbit at=20ms"
    said, faults = job(build, R2CCL_FAULTS=rules)
    assert faults[0][0] == "127.0.1.1 blackhole both (armed)" and len(faults[0]) <= 2, faults
    assert faults[1][0] == "127.0.3.2 error both (armed)" and len(faults[1]) <= 2, faults
    assert said.count("R2CCL_FAULTS injects faults") == 2, said


def test_what_has_no_counterpart_is_named(build: Build) -> None:
    said, _ = job(build, R2CC_AR_SCHEDULE="1", NCCL_R2CC_FAILOVER_TIMEOUT_MS="5000")
    assert said.count("R2CC_AR_SCHEDULE has no effect: ") == 1, said
    line = "NCCL_R2CC_FAILOVER_TIMEOUT_MS has no effect: R2CCL_HEARTBEAT says"
    assert said.count(line) == 1, said
