"""The scripts of tests/gpu without a GPU: parsers, schedules, job control, minimpi.

Rung 1 and 3 (pure functions; processes over loopback). What they cannot prove: that nccl-tests and
PyTorch run over the plugin; tests/gpu on a machine with GPUs does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
pytest.importorskip("pyroute2")

faults: Any = importlib.import_module("faults")
jobs: Any = importlib.import_module("jobs")
out: Any = importlib.import_module("nccl_output")
run_ddp: Any = importlib.import_module("run_ddp")
matrix: Any = importlib.import_module("run_matrix")
run_tests: Any = importlib.import_module("run_nccl_tests")
transports: Any = importlib.import_module("transports")

SAMPLE = """\
# nccl-tests version 2.19.6 nccl-headers=22809 nccl-library=22809
# Using devices
#  Rank  0 Group  0 Pid    111 on         n0 device  0 [0000:01:00] GPU
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time
           8             2     float     sum      -1    41.20    0.00    0.00       0    39.80    0.00    0.00       0
   268435456      67108864     float     sum      -1  1.2e+04   22.10   33.15       3  12145.0   22.10   33.15       0
        8192           512     float    none      -1    61.20    0.13    0.10       0    61.10    0.13    0.10     N/A
# Out of bounds values : 3 FAILED
# Avg bus bandwidth    : 22.1
#
n1: Test NCCL failure common.cu:401 'remote process exited or there was a network error / '
"""  # noqa: E501


class LocalBed:
    """Nodes that are only names: every rank runs right here; faults are written down."""

    nodes, nics = 2, 2
    master_addr, nic_prefix, oob = "127.0.0.1", "nic", "lo"

    def __init__(self) -> None:
        self.orders: list[tuple[str, int, int]] = []

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def fail(self, node: int, nic: int, kind: str) -> None:
        self.orders.append((kind, node, nic))

    def recover(self, node: int, nic: int) -> None:
        self.orders.append(("up", node, nic))


def script(tmp_path: Path, name: str, body: str) -> Path:
    path = tmp_path / name
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


def test_output_of_nccl_tests() -> None:
    got = out.parse_output(SAMPLE.splitlines())
    assert [r.size for r in got.rows] == [8, 268435456, 8192]
    assert got.rows[0].out_of_place.time_us == 41.2
    assert got.rows[1].out_of_place.time_us == 12000.0
    assert got.rows[1].in_place.busbw_gbs == 33.15
    assert got.rows[2].in_place.wrong is None and got.rows[2].checked
    assert got.wrong == 3 and got.out_of_bounds == 3 and got.avg_busbw_gbs == 22.1
    assert len(got.errors) == 1 and "remote process" in got.errors[0]
    row = out.parse_row("256 32 float none -1 45.1 0.01 0.01 0 N/A N/A N/A N/A")  # r2ccl_perf's
    assert row.in_place is None and row.out_of_place.wrong == 0


def test_what_nccl_says() -> None:
    text = """\
    n0:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
    n0:1:2 [0] NCCL INFO NET/Plugin: Loaded net plugin R2CCL (v10)
    n0:1:2 [0] NCCL INFO Using network R2CCL
    n0:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0
    n0:1:2 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/R2CCL/0
    n0:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
    n0:1:2 [0] NCCL INFO Channel 02/0 : 3[1] -> 0[0] [receive] via NET/R2CCL/0
    """
    facts = out.parse_debug(text.splitlines())
    assert facts.version == "2.28.9+cuda13.0" and facts.plugin_api == "v10"
    assert facts.network == "R2CCL" and facts.nnodes == 2
    assert facts.channels_via == {"NET/R2CCL/0": 2, "P2P/CUMEM": 1}


def test_schedules() -> None:
    events = faults.parse_schedule("0.2:carrier:n0:nic0,+15ms:silent-tx:n1:nic2,0.6:up:n0:nic0")
    assert [e.words() for e in events] == [
        "0.2:carrier:n0:nic0",
        "+15ms:silent-tx:n1:nic2",
        "0.6:up:n0:nic0",
    ]
    for bad in ("x", "0.2:melt:n0:nic0", "1.5:up:n0:nic0", "0.2:up:nic0"):
        with pytest.raises(faults.FaultError, match="event"):
            faults.parse_schedule(bad)


@pytest.mark.parametrize("nics", [2, 4])
@pytest.mark.parametrize("name", faults.SCENARIOS)
def test_scenarios_heal_and_leave_a_path(name: str, nics: int) -> None:
    if name == "two" and nics < 3:
        with pytest.raises(faults.FaultError, match="3 or more"):
            faults.scenario(name, nics)
        return
    down: set[tuple[int, int]] = set()
    last = 0.0
    for event in faults.scenario(name, nics):
        if event.at is not None:
            assert last <= event.at < 1.0, "a job meets the events in this order"
            last = event.at
        key = (event.node, event.nic)
        if event.action == "up":
            down.discard(key)
        else:
            down.add(key)
        rails_down = {nic for _, nic in down}
        assert name == "all" or len(rails_down) < nics, "one rail must stay whole"
    assert not down


def test_fault_thread_follows_progress() -> None:
    bed = LocalBed()
    thread = faults.FaultThread(bed, faults.scenario("row", 2))
    thread.start()
    thread.progress(0.5)
    deadline = time.monotonic() + 5
    while len(thread.done) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert bed.orders == [("carrier", 0, 0), ("up", 0, 0)]
    thread.progress(0.7)
    while len(thread.done) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert thread.stop() is False, "the last event never came"
    assert bed.orders[2:] == [("carrier", 0, 1), ("up", 0, 1)], "what is broken is healed"


def test_job_reports_codes_and_kills_what_hangs(tmp_path: Path) -> None:
    prog = script(
        tmp_path,
        "rank",
        """
        import os, sys, time
        rank = int(os.environ["RANK"])
        print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"], flush=True)
        sys.exit(3) if rank == 1 else time.sleep(60 if rank == 2 else 0)
    """,
    )
    job = jobs.Job(LocalBed(), jobs.Shape(2, 2), [str(prog)])
    job.start()
    ended = job.wait(5)
    assert ended.codes == [0, 3, None, 0]
    assert ended.timed_out and not ended.ok
    assert [t for _, t in ended.lines] == ["rank 0 of 4 0\n"]
    assert ended.logs[3] == "rank 3 of 4 1\n"
    for pid in ended.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_job_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    rank = script(tmp_path, "rank", "raise SystemExit(1)")
    job = jobs.Job(LocalBed(), jobs.Shape(2, 1), [str(rank)])
    job.start()
    began = time.monotonic()
    assert not run_ddp.wait_for_steps(job, 20, 300)
    assert time.monotonic() - began < 150
    assert job.wait(60).codes == [1, 1]


def cupy_of(tmp_path: Path, own_id: str) -> None:
    """A package as CuPy is one: cupy.cuda does not import nccl."""
    place = tmp_path / "cupy" / "cuda"
    place.mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text("")
    (place / "__init__.py").write_text("")
    (place / "nccl.py").write_text(f"available = True\ndef get_unique_id(): return {own_id}\n")


@pytest.mark.parametrize("own_id", ["bytes(range(128))", "tuple(range(-64, 64))"])
def test_ranks_of_cupy_meet_with_the_id_as_it_was_given(tmp_path: Path, own_id: str) -> None:
    cupy_of(tmp_path, own_id)
    body = "import cupy_app as a, os\nprint(repr(a.share_id(int(os.environ['RANK']), 3)))\n"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{GPU}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", body],
            env=env | {"RANK": str(r)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for r in range(3)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [text for text, _ in said] == [f"{eval(own_id)!r}\n"] * 3, said


FAKE_PERF = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        wrong = os.environ.get("FAKE_WRONG", "0")
        n = int(sys.argv[sys.argv.index("-N") + 1]) if "-N" in sys.argv else 1
        for _ in range(n):
            time.sleep(0.01)
            print("  1048576 262144 float sum -1 100.0 10.0 15.0", wrong, "99.0 10.0 15.0 0",
                  flush=True)
        print("# Out of bounds values :", wrong, flush=True)
"""


def fake_setup(tmp_path: Path, **env: str) -> Any:
    script(tmp_path, "all_reduce_perf", FAKE_PERF)
    return run_tests.Setup(LocalBed(), jobs.Shape(2, 1), tmp_path, None, 20.0, env)


def fault_options(**more: Any) -> argparse.Namespace:
    argv = ["faults", "--variants", "sockets", "--scenarios", "one,row", "--cycles", "30"]
    opts = run_tests.parse_args(argv)
    vars(opts).update(more)
    return opts  # type: ignore[no-any-return]


def test_faults_pass_and_fail(tmp_path: Path) -> None:
    setup = fake_setup(tmp_path)
    result = run_tests.faults(setup, fault_options())
    assert result["ok"] and len(result["runs"]) == 2
    assert len(setup.bed.orders) == 6
    bad = run_tests.faults(fake_setup(tmp_path, FAKE_WRONG="1"), fault_options())
    assert not bad["ok"] and bad["runs"][0]["wrong"] == 30
    short = run_tests.faults(setup, fault_options(cycles=60, scenarios=["0.9:carrier:n0:nic0"]))
    assert short["ok"]


def test_bench_medians_and_ratio(tmp_path: Path) -> None:
    opts = run_tests.parse_args(["bench", "--variants", "sockets,sockets-2x4", "--reps", "2"])
    result = run_tests.bench(fake_setup(tmp_path), opts)
    assert result["ok"] and len(result["runs"]) == 4
    row = result["medians"][0]
    assert row["variants"]["sockets"] == {"time_us": 100.0, "busbw_gbs": 15.0, "runs": 2}

    def run(variant: str, size: int, us: float, bus: float, ours: bool = False) -> dict[str, Any]:
        half = {"time_us": us, "busbw_gbs": bus}
        return {
            "ok": True,
            "ours": ours,
            "op": "all_reduce",
            "proto": "auto",
            "variant": variant,
            "rows": [{"size": size, "out_of_place": half}],
        }

    table = run_tests.medians(
        [
            run("r2ccl", 8, 30, 0),
            run("sockets", 8, 40, 0),
            run("fastsocket", 8, 60, 0),
            run("threads", 8, 1, 0, ours=True),  # another setting of ours is no baseline
            run("r2ccl", 8 << 20, 1, 30),
            run("sockets", 8 << 20, 1, 20),
            run("fastsocket", 8 << 20, 1, 24),
        ]
    )
    assert [(r["best_other"], r["ratio"]) for r in table] == [
        ("sockets", 0.75),
        ("fastsocket", 1.25),
    ]
    assert any("0.75 (time)" in line for line in run_tests.format_table(table))


def test_when_the_others_were_told_of_a_killed_rank() -> None:
    def event(pid: int, word: str, at: float) -> dict[str, Any]:
        return {"pid": pid, "event": word, "mono_ns": int(at * 1e9)}

    events = [
        event(1, "connection-failed", 9.0),  # before
        event(1, "path-down", 10.1),
        event(1, "peer-gone", 10.6),
        event(1, "error", 10.65),
        event(2, "error", 10.7),  # by another's word
        event(3, "peer-gone", 10.75),  # the plugin alone
        event(3, "peer-gone", 10.8),
        event(9, "peer-gone", 10.1),  # another job's
    ]
    assert run_tests.kill_times(events, [1, 2, 3, 4], 10.0) == {
        "others_knew_after_s": [0.6, None, 0.75, None],
        "others_told_after_s": [0.65, 0.7, 0.75, None],
    }


def test_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env = transports.transport_env(transports.parse_variant("sockets-2x4"))
    assert env["NCCL_NVLS_ENABLE"] == "0" and env["NCCL_SOCKET_NTHREADS"] == "2"
    own = transports.parse_variant("mine=r2ccl:R2CCL_LANES=4:NCCL_MIN_NCHANNELS=8")
    assert own.settings == {"R2CCL_LANES": "4", "NCCL_MIN_NCHANNELS": "8"}
    with pytest.raises(transports.TransportError, match="not known"):
        transports.parse_variant("telepathy")
    (tmp_path / "libr2ccl.so").touch()
    monkeypatch.setenv("R2CCL_PLUGIN", str(tmp_path / "plugin.so"))
    alone = transports.transport_env(transports.parse_variant("preload"))
    assert alone["LD_PRELOAD"] == str(tmp_path / "libr2ccl.so")
    assert "NCCL_NET" not in alone and "NCCL_NET_PLUGIN" not in alone
    monkeypatch.setenv("R2CCL_PLUGIN", str(tmp_path / "none.so"))
    with pytest.raises(transports.TransportError, match="does not exist"):
        transports.transport_env(own)


def test_ddp_curves_are_compared_bitwise() -> None:
    def ended(loss: float, digest: str) -> Any:
        lines = [
            (0.0, f'{{"event": "step", "step": 1, "loss": "{loss.hex()}"}}\n'),
            (
                0.1,
                f'{{"event": "end", "rank": 0, "steps": 1, "losses": "{digest}", '
                '"weights": "w", "seconds": 1.5}\n',
            ),
        ]
        return jobs.Ended([0], [1], lines, [""], 0.0, 1.0, False, [1.0])

    one = run_ddp.read_curve(ended(0.5, "d"))
    assert one.losses == [(0.5).hex()] and one.seconds == 1.5
    assert one.differences(run_ddp.read_curve(ended(0.5, "d"))) == []
    found = one.differences(run_ddp.read_curve(ended(0.5000000000000001, "e")))
    assert "loss of step 1" in found[0] and "digests" in found[1]


MINIMPI_PROGRAM = r"""
#include "mpi.h"
#include <stdio.h>
int main(int argc, char **argv)
{
    int rank, size, all[8] = {0}, got[8] = {0}, one;
    long low;
    double sum;
    MPI_Comm comm;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    all[rank] = rank * 10;
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, sizeof(int), MPI_BYTE, MPI_COMM_WORLD);
    MPI_Comm_split(MPI_COMM_WORLD, 0, rank, &comm);
    one = rank == 2 ? 77 : 0;
    MPI_Bcast(&one, 1, MPI_INT, 2, comm);
    low = 100 - rank;
    MPI_Allreduce(MPI_IN_PLACE, &low, 1, MPI_LONG, MPI_MIN, comm);
    sum = rank + 0.5;
    MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_DOUBLE, MPI_SUM, comm);
    MPI_Gather(&rank, 4, MPI_BYTE, got, 4, MPI_BYTE, 0, comm);
    MPI_Barrier(comm);
    if (argc > 1 && rank == 1)
        return 9;
    MPI_Barrier(comm);
    printf("%d/%d all %d,%d,%d,%d bcast %d low %ld sum %g got %d\n", rank, size, all[0], all[1],
           all[2], all[3], one, low, sum, rank ? -1 : got[3]);
    MPI_Comm_free(&comm);
    MPI_Finalize();
    return 0;
}
"""


@pytest.fixture(scope="module")
def minimpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    where = tmp_path_factory.mktemp("minimpi")
    (where / "main.c").write_text(MINIMPI_PROGRAM)
    subprocess.run(
        [
            "gcc",
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-g",
            "-I",
            str(GPU / "minimpi"),
            "-o",
            str(where / "prog"),
            str(where / "main.c"),
            str(GPU / "minimpi" / "minimpi.c"),
        ],
        check=True,
        timeout=60,
    )
    return where / "prog"


def free_port() -> str:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def test_minimpi_collectives(minimpi: Path) -> None:
    job = jobs.Job(LocalBed(), jobs.Shape(2, 2), [str(minimpi)], {"MASTER_PORT": free_port()})
    job.start()
    ended = job.wait(20)
    assert ended.ok, ended.tail()
    same = "all 0,10,20,30 bcast 77 low 97 sum 8 got"
    assert ended.lines[0][1] == f"0/4 {same} 3\n"
    assert ended.logs[3] == f"3/4 {same} -1\n"


def test_minimpi_ends_when_a_rank_is_lost(minimpi: Path) -> None:
    job = jobs.Job(
        LocalBed(), jobs.Shape(2, 2), [str(minimpi), "die"], {"MASTER_PORT": free_port()}
    )
    job.start()
    ended = job.wait(20)
    assert ended.codes == [1, 9, 1, 1]
    assert "closed its connection" in ended.logs[0]


def test_rows_of_the_matrix_can_be_run() -> None:
    """Their scripts take their arguments, and a row that hangs is ended."""
    for row in matrix.ROWS:
        script = run_ddp if row.script == "run_ddp.py" else run_tests
        argv = row.argv("python3", Path("/x.json"))
        assert script.parser().parse_args(argv[2:]).json == "/x.json"
    assert [r.name for r in matrix.chosen(["jax", "ddp"])] == ["jax", "ddp"]
    assert matrix.chosen([]) == list(matrix.ROWS)
    with pytest.raises(ValueError, match="choose from"):
        matrix.chosen(["windows"])
