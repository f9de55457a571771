"""Rung 3: r2ccl_perf on the stand-in for NCCL, ranks as processes over loopback; the plugin through
every version of the net API. Not proven here: real NCCL, GPUs, real links. test_hostnccl.c has the
stand-in itself.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Build, missing, run_process
from segment_bed import until

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "alltoall", "sendrecv")
PROTOS = ("LL", "LL128", "Simple")
TYPES = ("int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 f8e4m3 f8e5m2").split()
LIMIT = 60.0
PROMISED = re.compile(r"# Out of bounds values : (\d+) (OK|FAILED)")


@dataclass(frozen=True)
class Ranks:
    """All ranks of one run have ended."""

    codes: tuple[int, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"exit codes {self.codes}"]
        for rank, (out, err) in enumerate(zip(self.stdout, self.stderr, strict=True)):
            parts.append(f"--- rank {rank} stdout\n{out[-3000:]}\n--- stderr\n{err[-3000:]}")
        return "\n".join(parts)

    @property
    def wrong(self) -> int:
        found = PROMISED.search(self.stdout[0])
        assert found, f"no summary: {self}"
        return int(found.group(1))


def environment(rank: int, ranks: int, place: str, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "R2CCL_RANK": str(rank),
        "R2CCL_NRANKS": str(ranks),
        "R2CCL_RENDEZVOUS": place,
        "HOSTNCCL_BOOTSTRAP_ADDR": "127.0.0.1",
        "HOSTNCCL_SOCKET_ADDRS": "127.0.1.1,127.0.2.1",
        "HOSTNCCL_HARSH": "full",
        "NCCL_NET_PLUGIN": "none",
        **extra,
    }


class Job:
    """The ranks of one r2ccl_perf, running; always ended by `finish`. own: for rank 1 alone."""

    def __init__(
        self,
        build: Build,
        tmp: Path,
        ranks: int,
        args: Sequence[str],
        env: Mapping[str, str],
        own: Mapping[str, str] | None = None,
    ) -> None:
        host = f"127.{random.randrange(16, 250)}.{random.randrange(250)}.{random.randrange(1, 250)}"
        self.files = [(tmp / f"out{rank}", tmp / f"err{rank}") for rank in range(ranks)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, (out, err) in enumerate(self.files):
            extra = own if own and rank == 1 else {}
            with out.open("wb") as out_file, err.open("wb") as err_file:
                self.processes.append(
                    subprocess.Popen(
                        [str(build.perf), *args],
                        stdin=subprocess.DEVNULL,
                        stdout=out_file,
                        stderr=err_file,
                        env=environment(rank, ranks, f"{host}:29600", {**env, **extra}),
                    )
                )

    def finish(self, limit: float = LIMIT) -> Ranks:
        end = time.monotonic() + limit
        hung = False
        for process in self.processes:
            try:
                process.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung = True
                process.kill()
                process.wait(timeout=20)
        result = Ranks(
            tuple(process.returncode for process in self.processes),
            tuple(out.read_text(errors="replace") for out, _ in self.files),
            tuple(err.read_text(errors="replace") for _, err in self.files),
        )
        assert not hung, f"still running after {limit:.0f} s: {result}"
        return result


def perf(
    build: Build, tmp: Path, ranks: int, args: str, env: Mapping[str, str] | None = None
) -> Ranks:
    """Run r2ccl_perf to its end; a hung iteration ends with exit code 3 after 20 s."""
    words = args.split()
    if "--timeout" not in words:
        words += ["--timeout", "20"]
    return Job(build, tmp, ranks, words, env or {}).finish()


def good(result: Ranks) -> Ranks:
    assert set(result.codes) == {0}, str(result)
    assert result.wrong == 0, str(result)
    return result


# ---- what r2ccl_perf writes


def test_json(build: Build, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    good(perf(build, tmp_path, 2, f"-b 1K -e 64K -f 8 -n 3 --json {file}"))
    data = json.loads(file.read_text())
    assert data["schema"] == "r2ccl_perf/1"
    assert data["standin"] is True
    assert data["ranks"] == 2
    assert data["wrong"] == 0
    assert [row["size"] for row in data["results"]] == [1024, 8192, 65536]
    for row in data["results"]:
        for half in (row["out_of_place"], row["in_place"]):
            assert half["wrong"] == 0
            want = row["size"] / half["time_us"] / 1e3
            assert half["algbw_gbs"] == pytest.approx(want, rel=0.05, abs=1e-6)  # six digits
            assert half["busbw_gbs"] == pytest.approx(half["algbw_gbs"], rel=0.01)  # 2(n-1)/n = 1


def test_duration_and_timeline(build: Build, tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    began = time.monotonic()
    good(perf(build, tmp_path, 2, f"-b 256K --duration 1 --window 2 --timeline {file}"))
    assert 1.0 <= time.monotonic() - began < 20
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) >= 2
    assert all(row["wrong"] == 0 and row["algbw"] > 0 for row in rows)
    assert [row["iteration"] for row in rows] == [2 * (i + 1) for i in range(len(rows))]
    assert rows[-1]["t"] >= 1.0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--op nothing", "all_reduce"),
        ("-b 12parsecs", "size"),
        ("-d quad", "float"),
        ("-b 64 -e 8", "less than"),
        ("--root 5", "ranks"),
        ("stray", "no option"),
        ("--nccl /nowhere/libnccl.so", "/nowhere/libnccl.so"),
    ],
)
def test_usage_errors(build: Build, args: str, says: str) -> None:
    done = run_process([build.perf, *args.split()], code=2, timeout=20)
    assert says in done.stderr, str(done)
    assert "Traceback" not in done.stderr


def test_ranks_without_rendezvous(build: Build) -> None:
    env = {"R2CCL_RANK": "0", "R2CCL_NRANKS": "2"}
    done = run_process([build.perf], env=env, code=2, timeout=20)
    assert "R2CCL_RENDEZVOUS" in done.stderr


# NCCL's AllReduce, and then one value of the result is another.
WRONG = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int ncclAllReduce(void *send, float *recv, size_t n, int type, int op, void *comm, void *stream)
{
    int (*real)(void *, float *, size_t, int, int, void *, void *) = dlsym(RTLD_NEXT, __func__);
    int result = real(send, recv, n, type, op, comm, stream);

    recv[n / 2] += 1;
    return result;
}
"""


def test_a_wrong_value_is_found(build: Build, tmp_path: Path) -> None:
    """What every test with r2ccl_perf rests on."""
    compiler = shutil.which("gcc") or missing("build", "no gcc in PATH")
    (tmp_path / "wrong.c").write_text(WRONG)
    library = tmp_path / "wrong.so"
    run_process([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "wrong.c", "-ldl"])
    result = perf(build, tmp_path, 2, "-b 4K -n 1 -w 0", {"LD_PRELOAD": str(library)})
    assert set(result.codes) == {1} and result.wrong > 0, str(result)


# ---- failures end, in bounded time, and say why


def under_way(build: Build, tmp: Path, ranks: int, args: str) -> Job:
    """A job whose first operations are done: all ranks are connected. It runs until it is ended."""
    rows = tmp / "timeline"
    words = [*args.split(), "--duration", "3600", "--timeline", str(rows)]
    job = Job(build, tmp, ranks, words, {})
    try:
        until(lambda: rows.exists() and rows.read_bytes(), "the first operations", LIMIT)
    except BaseException:
        for process in job.processes:
            process.kill()
            process.wait(timeout=20)
        raise
    return job


def test_killed_rank(build: Build, tmp_path: Path) -> None:
    job = under_way(build, tmp_path, 3, "-b 4M --timeout 20")
    job.processes[2].kill()
    began = time.monotonic()
    result = job.finish(limit=15)
    assert time.monotonic() - began < 10
    assert result.codes[:2] == (2, 2), str(result)
    assert "NCCL error" in result.stderr[0] + result.stderr[1]


def test_stopped_rank_times_out(build: Build, tmp_path: Path) -> None:
    job = under_way(build, tmp_path, 2, "-b 4M --timeout 4")
    job.processes[1].send_signal(signal.SIGSTOP)
    try:
        job.processes[0].wait(timeout=20)
    finally:
        job.processes[1].kill()
    result = job.finish(limit=5)
    assert result.codes[0] == 3, str(result)
    assert "did not finish within 4 s" in result.stderr[0]


# ---- the product's plugin under the stand-in

PLUGIN_NICS = "127.0.1.1,127.0.2.1,127.0.3.1"


def plugin_env(build: Build, **extra: str) -> dict[str, str]:
    return {"NCCL_NET_PLUGIN": str(build.plugin), "R2CCL_NICS": PLUGIN_NICS, **extra}


@pytest.mark.parametrize("version", range(6, 13))
def test_plugin_versions(build: Build, tmp_path: Path, version: int) -> None:
    """Each with one of NCCL's protocols, which know nothing of versions."""
    env = plugin_env(
        build,
        NCCL_PROTO=PROTOS[version % len(PROTOS)],
        HOSTNCCL_NET_VERSION=str(version),
        NCCL_DEBUG="INFO",
    )
    result = good(perf(build, tmp_path, 2, "-b 8 -e 3000000 -f 399 -n 2", env))
    assert "Using network R2CCL, 3 devices" in result.stderr[0], str(result)


def test_types_and_reductions(build: Build, tmp_path: Path) -> None:
    redops = itertools.cycle(("sum", "prod", "max", "min", "avg"))
    for dtype in TYPES:
        args = f"-d {dtype} -o {next(redops)} -b 24 -e 90000 -f 61 -n 1"
        good(perf(build, tmp_path, 3, args, plugin_env(build)))


@pytest.mark.parametrize("op", OPS)
def test_plugin_operations(build: Build, tmp_path: Path, op: str) -> None:
    """Calls return at once, as on a stream; NICs receive other channels than they send."""
    args = f"--op {op} -b 4 -e 4000004 -f 61.7 -n 2 -r 1 --check-every"
    env = plugin_env(build, HOSTNCCL_ASYNC="1", HOSTNCCL_CROSS_NIC="1")
    good(perf(build, tmp_path, 3, args, env))


def test_plugin_under_threads(build: Build) -> None:
    """Splits, aborts, forks, many generations of communicators in one process."""
    program = build.path / "tests" / "unit" / "test_hostnccl"
    if not program.is_file():
        missing("build", f"{program}: not there; run `make native`")
    run_process([program, "-t", "60"], env=plugin_env(build), timeout=180)
