"""Settings that change nothing say so, once in a job. Rung 3: launched ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build


def job(build: Build, ranks: int, nodes: int, *words: str, **env: str) -> list[str]:
    """What R2CCL says in a short job."""
    argv = [sys.executable, "-m", "r2ccl_ctl", "launch", "-n", str(ranks), "--emulate-nodes"]
    argv += [str(nodes), "--nccl", "standin", "--timeout", "60"]
    for name, value in env.items():
        argv += ["--env", f"{name}={value}"]
    argv += [
        "--",
        str(build.path / "r2ccl_perf"),
        "--op",
        "all_reduce",
        "-b",
        "4K",
        "-n",
        "1",
        *words,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if "NET/R2CCL" in line]


@pytest.mark.parametrize(
    ("name", "value"), [("R2CC_MODE", "4"), ("R2CCL_PLAN", "shadow"), ("R2CCL_DLSYM", "1")]
)
def test_without_the_shim(build: Build, name: str, value: str) -> None:
    said = [line for line in job(build, 2, 2, **{name: value}) if "without the shim" in line]
    assert len(said) == 1 and all(f"{name}={value}" in line for line in said), said


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("off", "R2CCL_ALLREDUCE=direct does nothing in R2CCL_MODE=off"),
        ("r2ccl-allreduce", "R2CCL_MODE=r2ccl-allreduce takes no schedule"),
    ],
)
def test_direct_beside_a_mode(build: Build, mode: str, what: str) -> None:
    env = {"LD_PRELOAD": str(build.path / "libr2ccl.so"), "R2CCL_ALLREDUCE": "direct"}
    lines = job(build, 3, 3, R2CCL_MODE=mode, **env)
    assert sum(what in line for line in lines) == 1, lines
    assert not any("without the shim" in line for line in lines), lines


def test_unknown_names_of_the_reference(build: Build) -> None:
    lines = job(build, 2, 2, R2CC_NONESUCH="1", NCCL_R2CC_NONESUCH="1")
    for name in (" R2CC_NONESUCH", "NCCL_R2CC_NONESUCH"):
        assert sum(f"{name} is not known" in line for line in lines) == 1, lines


def test_bad_values_are_named_once(build: Build, tmp_path: Path) -> None:
    """Rank 0 names those of the environment. Files may differ: one rank of each node names them."""
    lines = job(build, 4, 2, R2CCL_EAGER="lots", R2CCL_HARTBEAT="1s", R2CCL_FAULTS="nonsense")
    for what in ("R2CCL_EAGER=lots", "R2CCL_HARTBEAT is not", "R2CCL_FAULTS is not followed"):
        assert sum(what in line for line in lines) == 1, lines
    conf = tmp_path / "r2ccl.conf"
    conf.write_text("R2CCL_EAGER=many\n")
    lines = job(build, 4, 2, R2CCL_CONF=str(conf))
    assert sum("many" in line for line in lines) == 2, lines


def test_encryption_of_nccls_own_sockets(build: Build) -> None:
    """The call goes through, and it is said that R2CCL's data is not encrypted."""
    program = "import ctypes; print(ctypes.CDLL(None).ncclSetEncryption(None))"
    env = {**os.environ, "LD_PRELOAD": str(build.path / "libr2ccl.so"), "NCCL_DEBUG": ""}
    env["R2CCL_REAL_NCCL"] = str(build.path / "tests/noop/libnccl.so.2")
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd=ROOT, env=env)
    assert done.stdout == "0\n", done
    assert done.stderr.count("ncclSetEncryption encrypts NCCL's own sockets only") == 1, done
