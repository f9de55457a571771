"""RCCL (AMD) loads net plugins by the same API, and by names of its own. Shown with the stand-in
for NCCL under RCCL's name; it has never run on AMD hardware. Rung 3."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build

from r2ccl_ctl import control


def job(build: Build, library: Path, *words: str, **env: str) -> tuple[str, str]:
    """Two ranks with that library, and what `launch` says of plugins taken away."""
    name = f"test-{secrets.token_hex(4)}"
    argv = [sys.executable, "-m", "r2ccl_ctl", "launch", "-n", "2", "--emulate-nodes", "2"]
    argv += ["--nics", "2", "--nccl", "standin", "--timeout", "60", "--job", name]
    for variable, value in {**env, "R2CCL_PERF_NCCL": str(library), "NCCL_DEBUG": "INFO"}.items():
        argv += ["--env", f"{variable}={value}"]
    argv += ["--", "env", *words, str(build.path / "r2ccl_perf"), "--op", "all_reduce", "-b", "1M"]
    done = subprocess.run(
        [*argv, "-n", "2", "-c", "1"], capture_output=True, text=True, timeout=90, cwd=ROOT
    )
    assert done.returncode == 0, done
    assert "Out of bounds values : 0 OK" in done.stdout, done
    return done.stdout + done.stderr, name


@pytest.fixture
def library(build: Build, tmp_path: Path) -> Path:
    """The stand-in, by RCCL's name."""
    return Path(shutil.copy(build.path / "hostnccl/libnccl.so.2", tmp_path / "librccl.so.1"))


@pytest.mark.parametrize("named", [[], ["NCCL_NET_PLUGIN=librccl-net.so"]])
def test_plugin_by_name(build: Build, library: Path, named: list[str]) -> None:
    words = ["-u", "NCCL_NET_PLUGIN", *named, f"LD_LIBRARY_PATH={build.path}"]
    said, _ = job(build, library, *words)
    assert said.count("of librccl-net.so, network R2CCL") == 2, said


def test_shim_finds_it(build: Build, library: Path) -> None:
    words = ["-u", "NCCL_NET_PLUGIN", "-u", "LD_LIBRARY_PATH"]
    words.append(f"LD_PRELOAD={build.path / 'libr2ccl.so'}")
    said, name = job(build, library, *words)
    assert said.count("of librccl-net.so, network R2CCL") == 2, said
    ended = [one for one in control.list_processes(dead=True) if one.job == name]
    assert len(ended) == 2, ended
