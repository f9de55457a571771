"""Rung 3: the stand-in for NCCL and r2ccl_perf, ranks as processes over loopback.

Most cases run over the stand-in's own Socket transport, so that a failure here is the stand-in's
and not the plugin's; badnet.c, the same transport with faults, proves that the harsh checks can
fail. The last cases run the product's plugin through every version of the net API. Not proven
here: real NCCL, GPUs, real links.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, Build, missing, run_process
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


@pytest.fixture(scope="session")
def badnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libnccl-net-badnet.so; its folder goes into LD_LIBRARY_PATH."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        missing("build", "no C compiler in PATH")
    library = tmp_path_factory.mktemp("badnet") / "libnccl-net-badnet.so"
    host = ROOT / "tests" / "hostnccl"
    sources = [
        ROOT / "tests/py/badnet.c",
        *(host / name for name in ("socketnet.c", "sockets.c", "util.c")),
    ]
    flags = "-std=gnu11 -O1 -Wall -Wextra -Werror -fPIC -shared -pthread".split()
    include = [f"-I{ROOT / 'net_plugin'}", f"-I{host}"]
    run_process([compiler, *flags, *include, "-o", library, *sources])
    return library


def bad_env(badnet: Path, fault: str = "", **extra: str) -> dict[str, str]:
    return {
        "LD_LIBRARY_PATH": f"{badnet.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "NCCL_NET_PLUGIN": "badnet",
        "BADNET_FAULT": fault,
        **extra,
    }


# ---- every operation, protocol and type is exact


@pytest.mark.parametrize("proto", PROTOS)
@pytest.mark.parametrize("op", OPS)
def test_operation_over_protocol(build: Build, tmp_path: Path, op: str, proto: str) -> None:
    args = f"--op {op} -b 4 -e 3000004 -f 61.7 -n 2 -r 1"
    good(perf(build, tmp_path, 2, args, {"NCCL_PROTO": proto}))


@pytest.mark.parametrize("op", OPS)
def test_operation_on_four_ranks(build: Build, tmp_path: Path, op: str) -> None:
    good(perf(build, tmp_path, 4, f"--op {op} -b 0 -e 2500000 -f 97 -n 2 -r 3 -d uint8"))


@pytest.mark.parametrize("dtype", TYPES)
def test_types_and_reductions(build: Build, tmp_path: Path, dtype: str) -> None:
    for redop in ("sum", "prod", "max", "min", "avg"):
        args = f"-d {dtype} -o {redop} -b 24 -e 90000 -f 61 -n 1"
        good(perf(build, tmp_path, 3, args, {"NCCL_MIN_NCHANNELS": "3"}))


def test_small_buffers_and_crossed_devices(build: Build, tmp_path: Path) -> None:
    """Many messages per operation, receive devices other than send devices, one GPU thread."""
    env = {
        "NCCL_BUFFSIZE": "32768",
        "NCCL_P2P_NET_CHUNKSIZE": "8192",
        "HOSTNCCL_CROSS_NIC": "1",
        "HOSTNCCL_GPU_THREADS": "1",
        "NCCL_PROTO": "Simple",
    }
    good(perf(build, tmp_path, 3, "-b 1000000 -e 1000000 -n 2 --check-every", env))
    good(perf(build, tmp_path, 3, "--op alltoall -b 1000000 -n 2 --check-every", env))


def test_asynchronous_calls(build: Build, tmp_path: Path) -> None:
    """Calls return at once, operations queue up as on a stream."""
    for op in OPS:
        args = f"--op {op} -b 8 -e 1000000 -f 91 -n 10"
        good(perf(build, tmp_path, 3, args, {"HOSTNCCL_ASYNC": "1"}))


def test_one_rank(build: Build, tmp_path: Path) -> None:
    for op in OPS:
        good(perf(build, tmp_path, 1, f"--op {op} -b 8 -e 100000 -f 50 -n 1"))


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


def test_torchrun_variables(build: Build, tmp_path: Path) -> None:
    host = f"127.{random.randrange(16, 250)}.7.7"
    processes = []
    for rank in range(2):
        env = environment(rank, 2, "", {})
        for name in ("R2CCL_RANK", "R2CCL_NRANKS", "R2CCL_RENDEZVOUS"):
            del env[name]
        env |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        env |= {"MASTER_ADDR": host, "MASTER_PORT": "29700"}
        command = [str(build.perf), "-b", "64", "-n", "1", "--timeout", "20"]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    assert [process.wait(timeout=LIMIT) for process in processes] == [0, 0]


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


LONELY_RANK = """
import ctypes, sys

class Id(ctypes.Structure):
    _fields_ = [("b", ctypes.c_char * 128)]

nccl = ctypes.CDLL(sys.argv[1])
comm, unique = ctypes.c_void_p(), Id()
assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
sys.exit(nccl.ncclCommInitRank(ctypes.byref(comm), 2, unique, 0))
"""


def test_missing_rank(build: Build) -> None:
    """Rank 1 never comes: ncclCommInitRank says so after HOSTNCCL_BOOTSTRAP_TIMEOUT."""
    env = environment(0, 2, "", {"HOSTNCCL_BOOTSTRAP_TIMEOUT": "2"})
    library = build.host_nccl / "libnccl.so.2"
    began = time.monotonic()
    remote_error = 6
    run_process([sys.executable, "-c", LONELY_RANK, library], env=env, code=remote_error)
    assert 2 <= time.monotonic() - began < 15


def test_connection_that_is_never_made(build: Build, tmp_path: Path, badnet: Path) -> None:
    """The steps under way are given up after HOSTNCCL_BOOTSTRAP_TIMEOUT."""
    env = bad_env(badnet, "never_accept", HOSTNCCL_BOOTSTRAP_TIMEOUT="12")
    began = time.monotonic()
    result = perf(build, tmp_path, 2, "-b 64 -n 1 --timeout 60", env)
    assert time.monotonic() - began >= 12
    assert result.codes == (2, 2), str(result)
    assert "connections were not made in time" in result.stderr[0] + result.stderr[1], str(result)


def test_connection_that_fails(build: Build, tmp_path: Path, badnet: Path) -> None:
    """The accept beside it, which nobody will answer, is not waited for."""
    env = bad_env(badnet, "fail_connect", HOSTNCCL_BOOTSTRAP_TIMEOUT="600")
    result = perf(build, tmp_path, 2, "-b 64 -n 1", env)
    assert result.codes == (2, 2), str(result)
    assert "connect, device" in result.stderr[0] + result.stderr[1], str(result)


# ---- the loader


@pytest.mark.parametrize("version", range(6, 13))
def test_every_api_version(build: Build, tmp_path: Path, badnet: Path, version: int) -> None:
    env = bad_env(badnet, NCCL_DEBUG="INFO", HOSTNCCL_NET_VERSION=str(version))
    for proto in PROTOS:
        env["NCCL_PROTO"] = proto
        result = good(perf(build, tmp_path, 2, "-b 8 -e 300000 -f 99 -n 2", env))
        assert f"using ncclNetPlugin_v{version} " in result.stderr[0], str(result)
        assert "Using network Badnet, 2 devices" in result.stderr[1], str(result)


@pytest.mark.parametrize("fault", ["no_devices", "init_error"])
def test_unusable_plugin_falls_back(build: Build, tmp_path: Path, badnet: Path, fault: str) -> None:
    result = good(perf(build, tmp_path, 2, "-b 64 -n 1", bad_env(badnet, fault, NCCL_DEBUG="INFO")))
    assert "Using network Socket" in result.stderr[0], str(result)


def test_a_name_that_is_empty(build: Build, tmp_path: Path, badnet: Path) -> None:
    """None to NCCL 2.27 and later; not set to the NCCL before."""
    (tmp_path / "libnccl-net.so").symlink_to(badnet)
    for version, network in ((9, "Badnet"), (10, "Socket"), (12, "Socket")):
        env = bad_env(badnet, NCCL_DEBUG="INFO", NCCL_NET_PLUGIN="")
        env["HOSTNCCL_NET_VERSION"] = str(version)
        env["LD_LIBRARY_PATH"] = f"{tmp_path}:{env['LD_LIBRARY_PATH']}"
        result = good(perf(build, tmp_path, 2, "-b 64 -n 1", env))
        assert f"Using network {network}," in result.stderr[0], f"v{version}: {result}"


def test_names_and_lists(build: Build, tmp_path: Path, badnet: Path) -> None:
    cases = {
        "nowhere": "Socket",  # nothing of that name
        "nowhere,badnet": "Badnet",
        f"{badnet}": "Badnet",
        "NONE": "Socket",
    }
    for plugin, network in cases.items():
        env = bad_env(badnet, NCCL_DEBUG="INFO", NCCL_NET_PLUGIN=plugin)
        result = good(perf(build, tmp_path, 2, "-b 64 -n 1", env))
        assert f"Using network {network}," in result.stderr[0], f"{plugin}: {result}"
    env = bad_env(badnet, NCCL_DEBUG="INFO", NCCL_NET="socket")
    result = good(perf(build, tmp_path, 2, "-b 64 -n 1", env))
    assert "Using network Socket" in result.stderr[0], str(result)
    result = perf(build, tmp_path, 2, "-b 64 -n 1", bad_env(badnet, NCCL_NET="IB"))
    assert set(result.codes) == {2}, str(result)
    assert "NCCL_NET=IB" in result.stderr[0], str(result)


# ---- the harsh caller finds what is wrong (each of these must fail)


def test_legal_refusals_are_retried(build: Build, tmp_path: Path, badnet: Path) -> None:
    for proto in PROTOS:
        env = bad_env(badnet, "shy", NCCL_PROTO=proto)
        good(perf(build, tmp_path, 2, "-b 8 -e 900000 -f 99 -n 2", env))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("early_done", "no valid flag"),
        ("late_write", "was written after its message was done"),
        ("short_size", "another size than was sent"),
        ("no_request", "did not write request"),
        ("no_done", "did not write done"),
        ("profiler", "profiler without a handle"),
        ("fail_send", "isend to rank"),
        ("fail_recv", "irecv from rank"),
    ],
)
def test_contract_breach_is_found(
    build: Build, tmp_path: Path, badnet: Path, fault: str, says: str
) -> None:
    env = bad_env(badnet, fault, NCCL_PROTO="LL")
    result = perf(build, tmp_path, 2, "-b 100 -e 100000 -f 10 -n 4 --timeout 10", env)
    assert 2 in result.codes and 0 not in result.codes, str(result)
    assert any(says in text for text in result.stderr), str(result)


def test_wrong_values_are_found(build: Build, tmp_path: Path, badnet: Path) -> None:
    """LL128 lines whose flag comes before the data: read early, as a GPU does."""
    env = bad_env(badnet, "flag_first", NCCL_PROTO="LL128")
    result = perf(build, tmp_path, 2, "-b 400000 -n 2", env)
    assert set(result.codes) == {1}, str(result)
    assert result.wrong > 0
    env = bad_env(badnet, "late_write", NCCL_PROTO="Simple", HOSTNCCL_HARSH="off")
    result = perf(build, tmp_path, 2, "-b 400000 -n 4 --check-every", env)
    assert result.codes[0] == 1, str(result)


# ---- the product's plugin under the stand-in

PLUGIN_NICS = "127.0.1.1,127.0.2.1,127.0.3.1"


def plugin_env(build: Build, **extra: str) -> dict[str, str]:
    return {"NCCL_NET_PLUGIN": str(build.plugin), "R2CCL_NICS": PLUGIN_NICS, **extra}


@pytest.mark.parametrize("version", range(6, 13))
def test_plugin_versions(build: Build, tmp_path: Path, version: int) -> None:
    for proto in PROTOS:
        env = plugin_env(
            build, NCCL_PROTO=proto, HOSTNCCL_NET_VERSION=str(version), NCCL_DEBUG="INFO"
        )
        result = good(perf(build, tmp_path, 2, "-b 8 -e 3000000 -f 399 -n 2", env))
        assert "Using network R2CCL, 3 devices" in result.stderr[0], str(result)


@pytest.mark.parametrize("op", OPS)
def test_plugin_operations(build: Build, tmp_path: Path, op: str) -> None:
    args = f"--op {op} -b 4 -e 4000004 -f 61.7 -n 2 -r 1 --check-every"
    good(perf(build, tmp_path, 3, args, plugin_env(build)))


def test_plugin_under_threads(build: Build) -> None:
    """Splits, aborts, forks, many generations of communicators in one process."""
    program = build.path / "tests" / "unit" / "test_hostnccl"
    if not program.is_file():
        missing("build", f"{program}: not there; run `make native`")
    run_process([program, "-t", "60"], env=plugin_env(build), timeout=180)
