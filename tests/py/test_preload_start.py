"""Programs that have nothing to do with NCCL start under the preloaded shim as they do without it.

Rung 3. It cannot prove it for other systems' shells and interpreters."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from conftest import Build, RunBounded

SETUID = ("su", "mount", "passwd")  # each knows --version or --help without a terminal


def test_shell_and_python(build: Build, run_bounded: RunBounded) -> None:
    env = {**os.environ, "LD_PRELOAD": str(build.path / "libr2ccl.so")}
    done = run_bounded(["sh", "-c", "echo out | cat"], env=env)
    assert (done.stdout, done.stderr) == ("out\n", "")
    done = run_bounded([sys.executable, "-c", "import ctypes, socket; print(6 * 7)"], env=env)
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_setuid_program(build: Build, run_bounded: RunBounded) -> None:
    """The loader ignores a preload with a slash for such a program, and the program runs."""
    found = [Path(path) for name in SETUID if (path := shutil.which(name))]
    program = next((path for path in found if path.stat().st_mode & stat.S_ISUID), None)
    if program is None:
        pytest.skip(f"no setuid program among {', '.join(SETUID)}")
    words: list[str | Path] = [program, "--help"]
    if os.getuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("root without `setpriv` (package util-linux) cannot become another user")
        words = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", *words]
    library = build.path / "libr2ccl.so"
    plain = run_bounded(words)
    done = run_bounded(["env", f"LD_PRELOAD={library}", *words])
    assert done.stdout == plain.stdout
