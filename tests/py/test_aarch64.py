"""Collectives as on an ARM server (aarch64), while NICs are taken away and given back.

Rung 3 under qemu's user mode (`make test-aarch64`): plugin, stand-ins and r2ccl_perf are compiled
for that processor; the tool is this machine's. It shows what the compiler and the assembler parts
do. It cannot prove how a real one orders memory, as the emulator runs on a processor that keeps
more order, nor anything about time.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from conftest import Build, RunBounded
from variant_bed import Variant, lose_nics

pytestmark = [pytest.mark.aarch64, pytest.mark.slow]


@pytest.fixture(scope="module")
def emulated(build: Build, tool: Path) -> Variant:
    emulator = os.environ.get("TEST_EMULATOR")
    if not emulator:
        pytest.skip("no TEST_EMULATOR, the command that runs the build's programs")
    return Variant(build.path, tool, dict(os.environ), runner=shlex.split(emulator))


@pytest.mark.parametrize("protocol", ["Simple", "LL", "LL128"])
def test_all_reduce(emulated: Variant, protocol: str, run_bounded: RunBounded) -> None:
    """Lines of LL and LL128 come whole, whatever instructions copy them."""
    perf = ["--op", "all_reduce", "-b", "8", "-e", "512K", "-f", "8", "-n", "5", "--timeout", "60"]
    finished = emulated.run(run_bounded, *perf, env={"NCCL_PROTO": protocol})
    assert finished.code == 0, finished
    assert "Out of bounds values : 0 OK" in finished.stdout, finished


def test_lost_nics(emulated: Variant, run_bounded: RunBounded, tmp_path: Path) -> None:
    assert "Out of bounds values : 0 OK" in lose_nics(emulated, run_bounded, tmp_path / "end")


def test_verify(emulated: Variant, run_bounded: RunBounded) -> None:
    """Checksums of chunks, by the processor's instructions for them."""
    finished = emulated.run(run_bounded, "-b", "1M", "-e", "1M", env={"R2CCL_VERIFY": "1"})
    assert finished.code == 0, finished
    assert "Out of bounds values : 0 OK" in finished.stdout, finished


def test_verbs(emulated: Variant, run_bounded: RunBounded) -> None:
    """Queue pairs over the stand-in for libibverbs."""
    perf = ["-b", "8", "-e", "1M", "-f", "32", "-n", "3", "--timeout", "100"]
    finished = emulated.run(run_bounded, *perf, env={**emulated.verbs(), "NCCL_DEBUG": "INFO"})
    assert finished.code == 0, finished
    assert "Out of bounds values : 0 OK" in finished.stdout, finished
    assert "RDMA device fv0" in finished.stdout + finished.stderr, finished


@pytest.mark.parametrize("how", ["linked", "rtld-local", "named"])
def test_preloaded_shim(emulated: Variant, build: Build, how: str, run_bounded: RunBounded) -> None:
    """Calls reach the wrappers through dlsym and past what the shim does not know."""
    env = {"R2CCL_NICS": "127.0.1.1,127.0.2.1", "NCCL_DEBUG": "INFO", "R2CCL_DLSYM": "1"}
    env |= {"LD_LIBRARY_PATH": str(build.host_nccl), "NCCL_SOCKET_IFNAME": "lo"}
    shim = build.path / ("nccl/libnccl.so.2" if how == "named" else "libr2ccl.so")
    programs = build.path / "tests/shim"
    words: list[str | Path] = [programs / "linked", "run"]
    if how == "rtld-local":
        words = [programs / "host", programs / "libjob.so", "run"]
    command = [*emulated.runner, "-E", f"LD_PRELOAD={shim}", *words]
    finished = run_bounded(command, env=env)
    assert finished.stdout == "ok\n", finished
    assert "Using network R2CCL, 2 devices" in finished.stderr, finished
