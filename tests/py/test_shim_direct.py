"""R2CCL_ALLREDUCE=direct over the stand-in: R2CCL carries AllReduce out itself.

Rung 3: nodes on loopback, every value checked after each iteration. What is shown is that all ranks
choose alike, that NICs may fail under it and that dead ranks end it; not how fast it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build
from plan_bed import RANKS, comms, preloaded, processes
from segment_bed import until

from r2ccl_ctl import control
from r2ccl_ctl.control import Command
from r2ccl_ctl.job import LaunchSpec
from r2ccl_ctl.launch import start

pytestmark = pytest.mark.slow

DIRECT = {"R2CCL_ALLREDUCE": "direct"}


def everywhere(name: str) -> bool:
    found = comms(name)
    return len(found) == RANKS and all(c.plan.startswith("direct") and c.planned > 3 for c in found)


def weighted(name: str, share: str) -> bool:
    """Whether the node that loses a NIC owns that share, as all ranks agreed."""
    found = comms(name)
    return (
        len(found) == RANKS
        and len({c.epoch for c in found}) == 1
        and found[1].plan.startswith("direct")
        and f"owns {share} %" in found[1].cause
    )


def test_weights_follow_what_nodes_have_left(build: Build) -> None:
    """The node that has lost a NIC of two owns nothing; it sends its contribution and hears all
    sums. When the NIC is back all own a quarter again."""
    name = "direct-weights"
    lost = Command("fail-nic", nic="127.0.1.2", fault="blackhole", direction="both")
    with preloaded(build, name, ("--duration", "90", "--check-every"), DIRECT) as running:
        until(lambda: everywhere(name), "AllReduce is direct on all ranks", 60)
        assert control.send_command(processes(name)[1], lost, timeout=10).ok
        until(lambda: weighted(name, "0.0"), "the node that lost a NIC owns nothing", 60)
        back = Command("recover-nic", nic="127.0.1.2")
        assert control.send_command(processes(name)[1], back, timeout=10).ok
        until(lambda: weighted(name, "25.0"), "equal weights again", 60)
        assert running.running


def worked(build: Build, *words: str, driver: str = "") -> str:
    """What three ranks of direct_worker.py say, which all end well."""
    spec = LaunchSpec(
        argv=(sys.executable, str(ROOT / "tests/py/direct_worker.py"), *words),
        ranks=3,
        emulate_nodes=3,
        nics=2,
        job=f"direct-{len(words)}",
        env={
            **DIRECT,
            "LD_PRELOAD": f"{build.path / 'libr2ccl.so'} {driver}",
            "R2CCL_REAL_NCCL": str(build.host_nccl / "libnccl.so.2"),
            "R2CCL_LOG": "info",
        },
    )
    running = start(spec, echo=False)
    try:
        code = running.wait(60)
        said = "".join(rank.output for rank in running.ranks)
    finally:
        running.kill()
    assert code == 0, said
    assert said.count("(direct)") == 3
    return said


def test_an_abort_from_another_thread(build: Build, tmp_path: Path) -> None:
    """Rank 1 aborts while it waits for rank 0, which does not come; rank 2 gets an error."""
    worked(build, str(tmp_path))


def test_streams_wait_for_an_abort(build: Build, tmp_path: Path) -> None:
    """With CUDA's driver the communicator has the error of a rank that has ended. No stream goes on
    with what is no sum, also where another rank was the first to notice."""
    driver = str(build.path / "tests/fakecuda/libcuda.so.1")
    assert worked(build, str(tmp_path), "dies", driver=driver).count("waited") == 2


def launched(build: Build, command: str, *words: str, preload: str = "") -> str:
    """What a job says that ends well."""
    argv = [sys.executable, "-m", "r2ccl_ctl", "launch", *words, "--timeout", "60"]
    argv += ["--env", f"LD_PRELOAD={build.path / 'libr2ccl.so'} {preload}"]
    argv += ["--env", "R2CCL_LOG=info"]
    script = command.replace("PERF", f"{build.perf} -b 1M -e 1M -n 3")
    done = subprocess.run(
        [*argv, "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_rank_with_another_setting(build: Build) -> None:
    """All take NCCL's own, and each says so once."""
    text = launched(
        build,
        'if [ "$RANK" = 1 ]; then export R2CCL_ALLREDUCE=stock; else '
        "export R2CCL_ALLREDUCE=direct; fi; exec PERF",
        *("-n", "3", "--emulate-nodes", "3", "--nics", "2"),
    )
    assert text.count("AllReduce is NCCL's own, although R2CCL_ALLREDUCE=direct") == 2
    assert "other R2CCL settings" in text
    assert "(direct)" not in text


def test_several_ranks_on_a_node(build: Build) -> None:
    text = launched(
        build,
        "R2CCL_ALLREDUCE=direct exec PERF",
        *("-n", "4", "--emulate-nodes", "2", "--nics", "2"),
    )
    assert text.count("(direct)") == 4
    assert text.count("Out of bounds values : 0 OK") == 1


def test_a_rank_of_a_node_is_killed(build: Build) -> None:
    """Its neighbour waits for it in NCCL's ReduceScatter, the others in the exchange."""
    running = start(
        LaunchSpec(
            argv=(str(build.perf), "-b", "2M", "--duration", "60"),
            ranks=4,
            emulate_nodes=2,
            nics=2,
            job="direct-node-kill",
            env={**DIRECT, "LD_PRELOAD": str(build.path / "libr2ccl.so")},
        ),
        echo=False,
    )
    try:
        until(lambda: everywhere("direct-node-kill"), "AllReduce is direct on all ranks", 60)
        os.kill(processes("direct-node-kill")[3].pid, signal.SIGKILL)
        until(lambda: not running.running, "the others end", 20)
        others = [rank.output for rank in running.ranks if rank.code != 137]
    finally:
        running.kill()
    assert len(others) == 3 and any("NCCL error 6" in output for output in others), others


def test_unequal_nodes(build: Build) -> None:
    text = launched(
        build,
        'if [ "$RANK" = 3 ]; then export NCCL_HOSTID=another; fi; R2CCL_ALLREDUCE=direct exec PERF',
        *("-n", "4", "--emulate-nodes", "2", "--nics", "2"),
    )
    assert text.count("nodes have unequal numbers of ranks") == 4


def test_types_and_reductions(build: Build) -> None:
    text = launched(
        build,
        "export R2CCL_ALLREDUCE=direct; PERF -d bfloat16 -o avg && PERF -d f8e4m3 -o max && "
        "PERF -d int64 -o prod && PERF -d uint8 -o min",
        *("-n", "3", "--emulate-nodes", "3", "--nics", "1"),
    )
    assert text.count("(direct)") == 12
    assert text.count("Out of bounds values : 0 OK") == 4


def test_slices_of_nodes_with_two_ranks(build: Build) -> None:
    """Counts that two do not divide, and means: of whole numbers they are NCCL's."""
    text = launched(
        build,
        "export R2CCL_ALLREDUCE=direct; PERF -b 1000004 -e 1000004 -d float -o avg && "
        "PERF -d int32 -o avg && PERF -b 1000002 -e 1000002 -d bfloat16 -o prod",
        *("-n", "6", "--emulate-nodes", "3", "--nics", "1"),
    )
    assert text.count("(direct)") == 18
    assert text.count("do not cover: means of whole numbers on nodes with several ranks") == 6
    assert text.count("Out of bounds values : 0 OK") == 3


def test_copies_through_a_driver(build: Build) -> None:
    """A driver in memory (tests/shim/fakecuda.c) in place of CUDA's: copies and gates, all in one
    queue, and it ends the process when the progress thread calls it. It cannot prove what a GPU
    does with them."""
    text = launched(
        build,
        "export R2CCL_ALLREDUCE=direct; PERF -d float && PERF -d bfloat16",
        *("-n", "3", "--emulate-nodes", "3", "--nics", "2"),
        preload=str(build.path / "tests/fakecuda/libcuda.so.1"),
    )
    assert text.count("(direct)") == 6
    assert text.count("Out of bounds values : 0 OK") == 2


def test_no_pinned_memory(build: Build) -> None:
    """The rank that gets none votes no, and all take NCCL's own."""
    text = launched(
        build,
        'if [ "$RANK" = 1 ]; then export R2_FAKECUDA_FULL=1; fi; R2CCL_ALLREDUCE=direct exec PERF',
        *("-n", "3", "--emulate-nodes", "3", "--nics", "1"),
        preload=str(build.path / "tests/fakecuda/libcuda.so.1"),
    )
    assert text.count("rank 1: no memory for the window") == 3
    assert "(direct)" not in text
    assert text.count("Out of bounds values : 0 OK") == 1
