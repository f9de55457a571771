"""AllReduces and communicators that stay with NCCL under R2CCL_ALLREDUCE=direct, over the stand-in:
all ranks decide alike, every value is right, and one line of each rank names what and why.

Rung 3. The driver is one in memory where a test needs CUDA.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, Build

from r2ccl_ctl.job import LaunchSpec
from r2ccl_ctl.launch import start

pytestmark = pytest.mark.slow

NODES = 3
KEEPS = "NCCL keeps what plans do not cover: "
STOCK = "AllReduce is NCCL's own, although R2CCL_ALLREDUCE=direct: "


def run(
    build: Build,
    argv: tuple[str, ...],
    nodes: int = NODES,
    driver: bool = False,
    ranks: int = NODES,
    **env: str,
) -> list[str]:
    """What each rank says in a job that ends well."""
    fake = f" {build.path}/tests/fakecuda/libcuda.so.1" if driver else ""
    spec = LaunchSpec(
        argv=argv,
        ranks=ranks,
        emulate_nodes=nodes,
        nics=2,
        env={
            "R2CCL_ALLREDUCE": "direct",
            "LD_PRELOAD": f"{build.path}/libr2ccl.so{fake}",
            "R2CCL_REAL_NCCL": str(build.host_nccl / "libnccl.so.2"),
            "R2CCL_LOG": "info",
            **env,
        },
    )
    running = start(spec, echo=False)
    try:
        code = running.wait(60)
        said = [rank.output for rank in running.ranks]
    finally:
        running.kill()
    assert code == 0, "".join(said)
    return said


def work(
    build: Build, folder: Path, kind: str, driver: bool = False, nodes: int = NODES
) -> list[str]:
    argv = (sys.executable, str(ROOT / "tests/py/left_out_worker.py"), str(folder), kind)
    said = run(build, argv, nodes, driver)
    assert all("is through" in text for text in said)
    return said


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("grouped", "calls within ncclGroupStart and ncclGroupEnd"),
        ("pair", "calls within ncclGroupStart and ncclGroupEnd"),
        ("premul", "reductions that the application made (PreMulSum)"),
        ("configured", "calls of ncclAllReduceConfig"),
        ("unknown", "an element type that R2CCL does not know"),
        ("captured", "calls captured into a CUDA graph"),
    ],
)
def test_calls_that_nccl_keeps(build: Build, tmp_path: Path, kind: str, what: str) -> None:
    for text in work(build, tmp_path, kind, driver=kind == "captured"):
        assert text.count("(direct)") == 1, "plain calls are R2CCL's"
        assert text.count(KEEPS) == 1
        assert text.count(KEEPS + what) == 1


@pytest.mark.parametrize(("ranks", "nodes"), [(NODES, NODES), (4, 2)], ids=["each", "sliced"])
def test_unequal_counts(build: Build, tmp_path: Path, ranks: int, nodes: int) -> None:
    """A wrong program ends with an error that says what is wrong with it. With two ranks a node the
    slices of both counts are equal."""
    argv = (sys.executable, str(ROOT / "tests/py/left_out_worker.py"), str(tmp_path), "unequal")
    said = run(build, argv, nodes=nodes, ranks=ranks)
    results = [text.split("result ")[1][0] for text in said]
    assert set(results) <= {"5", "6"} and "5" in results, said
    assert any("do not give the same AllReduce" in text for text in said)


@pytest.mark.parametrize(
    ("kind", "left", "driver"),
    [("limit", "262140 bytes", True), ("parted", "calls in a group", False)],
    ids=["size, driver", "group, host"],
)
def test_a_call_that_r2ccl_has_at_one_rank_and_nccl_at_another(
    build: Build, tmp_path: Path, kind: str, left: str, driver: bool
) -> None:
    """Both would wait for ever."""
    worker = (sys.executable, str(ROOT / "tests/py/left_out_worker.py"), str(tmp_path), kind)
    began = time.monotonic()
    said = run(build, worker, driver=driver)
    assert 10 < time.monotonic() - began < 40
    what = (
        "operation 1 is not the same AllReduce on all ranks: 262144 bytes on rank 0 use R2CCL, "
        f"{left} on rank 2 use NCCL"
    )
    assert [text.count(what) for text in said] == [1, 0, 0]
    assert all("result 6" in text for text in said), said


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_dies_before_it_votes(build: Build, tmp_path: Path, dead: int) -> None:
    """The others learn of it in seconds. Rank 0 may die before it has told one of the others where
    all are: that one takes NCCL's own."""
    script = f'if [ "$RANK" = {dead} ]; then R2_FAKECUDA_DIES=1 "$0" "$@"; else exec "$0" "$@"; fi'
    worker = (sys.executable, str(ROOT / "tests/py/left_out_worker.py"), str(tmp_path), "unequal")
    argv = ("sh", "-c", f"{script}; exit 0", *worker)
    began = time.monotonic()
    said = run(build, argv, driver=True)
    assert time.monotonic() - began < 40
    del said[dead]
    for text in said:
        failed = f"has failed at rank {dead} (ncclRemoteError)" in text and "result 6" in text
        alone = dead == 0 and "the process that made the unique id has ended" in text
        assert failed or alone, text


def perf(build: Build, *words: str) -> tuple[str, ...]:
    return (str(build.perf), "-b", "1M", "-e", "1M", "-n", "3", *words)


def test_a_communicator_that_does_not_block(build: Build, tmp_path: Path) -> None:
    for text in work(build, tmp_path, "nonblocking"):
        assert "(direct)" not in text
        assert text.count("it is non-blocking (blocking=0 or NCCL_COMM_BLOCKING=0)") == 1


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_process_with_several_ranks(build: Build, tmp_path: Path, nodes: int) -> None:
    for text in work(build, tmp_path, "several", nodes=nodes):
        assert "(direct)" not in text
        assert text.count(STOCK + "a process has several ranks") == 2


def test_one_node(build: Build) -> None:
    for text in run(build, perf(build), nodes=1):
        assert text.count(STOCK + "all ranks are on one node") == 1


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("R2_FAKECUDA_NO_WAITS", "CUDA's driver has no stream waits"),
        ("R2_FAKECUDA_FULL", "no memory for the window (64 MiB at most, with a GPU pinned)"),
    ],
)
def test_a_driver_that_cannot(build: Build, variable: str, why: str) -> None:
    """One rank has it; all take NCCL's own and say whose fault it is."""
    script = f'if [ "$RANK" = 1 ]; then export {variable}=1; fi; exec "$0" "$@"'
    for text in run(build, ("sh", "-c", script, *perf(build)), driver=True):
        assert text.count(f"{STOCK}rank 1: {why}") == 1
        assert "(direct)" not in text
