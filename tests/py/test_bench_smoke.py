"""The benchmarks' harness: it runs, its figures are figures, and it refuses impossible ones.

Rungs 1, 3 and 4. What it cannot show: speed. Nothing here judges how fast anything is.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build, RunBounded

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import completion
import cost
import figures
import instructions
import resume
import rig
import unshaped

RUN = ROOT / "tests" / "bench" / "run.py"


def test_ratio_and_verdict() -> None:
    row = figures.Row("x", 97.0, "GB/s", baseline=100.0, target=0.95)
    assert row.ratio == pytest.approx(0.97)
    assert row.met is True
    assert figures.Row("x", 94.0, "GB/s", baseline=100.0, target=0.95).met is False
    late = figures.Row("x", 21.0, "ms", target=20.0, judged="value", at_least=False)
    assert late.met is False
    assert figures.Row("x", 1.0, "").met is None


def test_instructions_by_file() -> None:
    """What a function cost itself counts for its file and for files inlined into it; what it called
    does not, though a file may be named there for the first time; nor does what the stand-in's
    library has of such files."""
    text = """events: Ir
ob=(1) /x/libnccl-net-r2ccl.so
fl=(1) net_plugin/a.c
fn=(1) a
0 10
fi=(2) net_plugin/b.h
0 5
fe=(1)
cob=(2) /x/fakeverbs/libibverbs.so.1
cfi=(3) net_plugin/c.c
cfn=(2) c
calls=2 0
0 700
+0 1
fl=(3)
fn=(2)
0 600
* 100
ob=(2)
fl=(1)
fn=(3) in the stand-in
0 10000
"""
    found = instructions.count(text.splitlines())
    assert found == {"net_plugin/a.c": 11, "net_plugin/b.h": 5, "net_plugin/c.c": 700}


def test_a_row_without_a_number_is_a_problem() -> None:
    assert figures.Row("x", math.nan, "s").problems()
    assert figures.Row("x", 1.0, "s", baseline=0.0).problems()
    assert not figures.Row("x", 1.0, "s", baseline=2.0).problems()


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 50), (0.95, 95), (1.0, 100), (0.001, 1), (0.951, 96)]
)
def test_percentile_is_the_nearest_rank(share: float, value: int) -> None:
    assert figures.percentile(list(range(100, 0, -1)), share) == value


def test_faster_than_the_wire_is_refused() -> None:
    bound = figures.payload_bound(1e9, 9000)
    assert 0.99 < bound / 125e6 < 0.994
    figures.check_bound("at the bound", int(bound), 1.0, bound, 0)
    figures.check_bound("with credit", int(bound) + 250_000, 1.0, bound, 250_000)
    with pytest.raises(figures.MeasurementWrong, match="the shapers need"):
        figures.check_bound("beyond", int(bound * 1.01), 1.0, bound, 250_000)


def test_stall_is_the_gap_that_overlaps() -> None:
    times = [0, 10, 20, 120, 130, 400]
    assert resume.stall(times, 25, 40) == 100
    assert resume.stall(times, 11, 12) == 10
    assert resume.stall(times, 125, 500) == 270
    assert resume.stall([], 1, 2) == 0
    assert resume.stall_before(times, 125, 135) == 10  # the next fault's begins at 130
    assert resume.stall_before(times, 125, 390) == 260
    assert resume.stall_before(times, 25, 125) == 100
    assert resume.stall_before(times, 25, 1000) == 600
    assert resume.stall_before([], 1, 2) == 0
    assert resume.calm_gap(times, 5, 125) == 100
    assert resume.calm_gap(times, 5, 115) == 10
    assert resume.calm_gap(times, 21, 30) == 0


def test_wrong_words_are_no_figure() -> None:
    row = {"bytes": 8, "seconds": 1.0, "cpu_send_s": 0.1, "cpu_recv_s": 0.1, "wrong": 1}
    with pytest.raises(figures.MeasurementWrong):
        rig.parse_iteration(row)


def test_programs_on_loopback(build: Build, run_bounded: RunBounded) -> None:
    """Bytes and CPU seconds of both programs, on two loopback NICs (rung 3)."""
    bed = rig.Bed(2)
    for found in (
        rig.raw(bed, [0, 1], "--bytes", "8M", "--iters", "2", "--streams", "2", "--threads", "2"),
        rig.raw(bed, [1], "--seconds", "1", "--iters", "1"),
        rig.plugin(bed, "--bytes", "8M", "--iters", "2", "--conns", "2"),
    ):
        assert all(one.bytes >= 8 << 20 and one.seconds > 0 and one.cpu_send > 0 for one in found)
    assert len(found) == 2


def test_a_side_that_fails_is_reported(build: Build) -> None:
    bed = rig.Bed(2)
    with pytest.raises(rig.BenchError, match="not enough|cannot bind|2 NICs|1 at the sender"):
        tool, at = rig.program("rawsock"), bed.meeting()
        receiver = [tool, "--listen", at, *bed.nic_options(1, [0, 1])]
        sender = [tool, "--dial", at, *bed.nic_options(0, [0])]
        with rig.Sides(bed, receiver, sender, limit=30) as sides:
            list(sides.iterations())


@pytest.mark.parametrize(
    ("program", "option"),
    [("rawsock", "--bytes"), ("msgs", "--bytes"), ("hop", "--size"), ("crowd", "--conns")],
)
def test_wrong_usage_is_code_2(
    build: Build, run_bounded: RunBounded, program: str, option: str
) -> None:
    tool = rig.program(program)
    done = run_bounded([tool, "--dial", "127.0.0.1:1", option, "12Q"], code=2)
    assert f"{option} '12Q'" in done.stderr
    assert "--dial" in run_bounded([tool], code=2).stderr


def test_cost_of_the_shim(build: Build, run_bounded: RunBounded, tmp_path: Path) -> None:
    """The program runs with and without the shim (rung 3); says nothing about speed."""
    out = tmp_path / "bench.json"
    run_bounded([sys.executable, RUN, "--smoke", "--only", "shim_cost", "--json", out])
    (section,) = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert not section["errors"]
    cases = {row["name"].split(", one operation")[0] for row in section["rows"]}
    assert len(cases) == 5 and "the shim, 2 ranks that have met" in cases
    assert len(section["rows"]) == len(cases) * 4  # single and group, median and p99


def test_streams_of_a_path() -> None:
    """The plugin's gauge of sockets has a listener per NIC and a control socket per path in it."""
    assert unshaped.streams_of(2 + 2 * (1 + 1), 2, 2) == 1
    assert unshaped.streams_of(2 + 3 * (1 + 4), 2, 3) == 4
    assert unshaped.streams_of(2 + 3 * (1 + 4) - 1, 2, 3) == 0  # one is still being made
    assert unshaped.streams_of(2 + 2, 2, 2) == 0
    assert unshaped.streams_of(2, 2, 0) == 0


def test_raw_tcp_with_as_many_threads(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin with three I/O threads stands beside raw TCP with as many as it used, and as many
    streams, and beside one of each (rung 3)."""
    asked = []

    def raw(*words: object, **more: object) -> list[rig.Iteration]:
        asked.append(" ".join(map(str, words[2:])))
        return rig.raw(*words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(unshaped, "raw", raw)
    section = figures.Section("unshaped", "")
    unshaped._measure(section, rig.Bed(2), "loopback", rig.Options(smoke=True, verbose=False))
    name = unshaped.VARIANTS[-1].name
    threads, streams = section.details["loopback: threads and streams"][name]
    assert streams == 3 and 1 <= threads <= 3
    assert any(f"--threads {threads} --streams 3" in words for words in asked)
    assert any("--threads 1 --streams 1" in words for words in asked)
    rows = {row.name: row for row in section.rows}
    for what in ("throughput", "bytes per CPU second"):
        like = rows[f"loopback, {name}: {what}"]
        assert like.baseline_name == str(unshaped.Shape(threads, streams)) and like.ratio
        one = rows[f"loopback, {name}, beside one thread: {what}"]
        assert one.baseline_name == "raw TCP, 1 thread, 1 stream a NIC" and one.target is None
        assert f"loopback, 2 connections: {what}" in rows


@pytest.mark.lab
def test_a_part_that_does_not_exist(
    build: Build, lab_rights: None, run_bounded: RunBounded, tmp_path: Path
) -> None:
    words = ["--only", "shaped", "--part", "8 x 1", "--json", str(tmp_path / "bench.json")]
    done = run_bounded([sys.executable, str(RUN), *words], code=1)
    assert "--part 8 x 1: shaped has 1 x 1 Gbit/s, 2 x 1 Gbit/s, " in done.stdout


@pytest.mark.lab
def test_cost_with_an_nccl_of_a_folder(
    build: Build, lab_rights: None, run_bounded: RunBounded, tmp_path: Path
) -> None:
    """`--nccl DIR` measures with the libnccl.so.2 of DIR, which says what it is: here the stand-in
    (rung 4; real NCCL is rung 6)."""
    folder, out = tmp_path / "nccl", tmp_path / "bench.json"
    folder.mkdir()
    (folder / "libnccl.so.2").symlink_to(build.path / "hostnccl" / "libnccl.so.2")
    words = ["--smoke", "--only", "cost", "--part", "unshaped", "--json", str(out)]
    command = [sys.executable, str(RUN), *words, "--nccl", str(folder)]
    done = run_bounded(command, timeout=120)
    (section,) = json.loads(out.read_text(encoding="utf-8"))["sections"]
    assert not section["errors"]
    rows = {row["name"]: row for row in section["rows"]}
    assert set(rows) == {
        "unshaped, all_reduce: bus bandwidth",
        "unshaped, all_reduce: CPU seconds per GB",
        *(f"unshaped, all_reduce of {size} B: time" for size in (8, 256, 8192, 262144)),
    }
    assert all(row["ratio"] > 0 for row in rows.values())
    assert {row["baseline_name"] for row in rows.values()} == {"stand-in's sockets"}
    assert "GPUs: " in done.stdout
    (folder / "libnccl.so.2").unlink()
    (folder / "libnccl.so.2").write_text("no library")
    done = run_bounded(command, timeout=120, code=1)
    assert "cannot load NCCL" in done.stdout and str(folder) in done.stdout


def test_cost_names_the_baseline_by_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real NCCL's rows do not say stand-in; it is told which transport to take, and to leave
    multicast alone; few GPUs without MPS are named."""
    asked = []
    threads = []

    def perf(argv: object, *, env: dict[str, str], nccl: str, **more: object) -> list[rig.Perf]:
        asked.append((env["NCCL_NET"], env["NCCL_NVLS_ENABLE"], nccl, more["sockets"]))
        threads.append(env.get("R2CCL_IO_THREADS"))
        return [rig.Perf(8, 1e-6, 1e9, 1e-6, standin=False)]

    monkeypatch.setattr(cost, "perf", perf)
    (case,) = (case for case in cost.CASES if case.threads)
    both = cost.Both(case)
    both.run(rig.Bed(2), [], rig.Options(smoke=True, verbose=False, nccl="/opt/nccl"))
    assert both.baseline == "NCCL's sockets"
    assert asked == [("R2CCL", "0", "/opt/nccl", False), ("Socket", "0", "/opt/nccl", True)]
    assert threads == [str(case.threads), None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
    assert "shared without MPS" in cost._gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cost._gpus() == "GPUs: 2."


def test_cost_without_that_nccl(build: Build, run_bounded: RunBounded, tmp_path: Path) -> None:
    words = ["--smoke", "--only", "cost", "--json", f"{tmp_path}/bench.json"]
    done = run_bounded([sys.executable, str(RUN), *words, "--nccl", str(tmp_path)], code=2)
    assert f"{tmp_path} holds no libnccl.so.2" in done.stderr


@pytest.fixture
def verbs(build: Build) -> None:
    """The stand-in for libibverbs."""
    if not completion.fakeverbs().is_file():
        pytest.skip("no <infiniband/verbs.h> here (Debian: libibverbs-dev)")


def test_completion_errors(
    build: Build, verbs: None, run_bounded: RunBounded, tmp_path: Path
) -> None:
    """A few completion errors at either node are known at both, and traffic resumes (rung 3)."""
    out = tmp_path / "bench.json"
    words = ["--smoke", "--only", "resume", "--part", "completion"]
    run_bounded([sys.executable, RUN, *words, "--json", out])
    (section,) = json.loads(out.read_text(encoding="utf-8"))["sections"]
    rows = {row["name"]: row for row in section["rows"]}
    assert not section["errors"]
    for what in ("known at the NIC's node", "known at the other node", "traffic resumed"):
        for word in ("median", "p95", "max"):
            assert rows[f"completion error: {what}, {word}"]["value"] > 0
    assert rows["completion error: traffic resumed, median"]["samples"] == len(completion.CODES)
    assert set(section["details"]["completion error: bytes over"]) == {"verbs"}


def test_an_error_that_shows_nowhere(
    build: Build, verbs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of which nobody hears is no figure: the benchmark fails."""
    monkeypatch.setattr(completion, "CODES", (0,))  # which is success
    monkeypatch.setattr(resume, "GIVE_UP_S", 1.0)
    section = figures.Section("resume", "")
    with pytest.raises(rig.BenchError, match="known at nodes \\[\\]"):
        completion.run(rig.Options(smoke=True, verbose=False), section, math.inf)


def test_a_wrong_value_is_an_error(
    build: Build, verbs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes arrive with a changed byte once the first path has failed; test chunks do, too, so it
    does not come back."""
    ask = completion.ask

    def damaging(pid: int, command: str) -> str:
        ask(pid, "chaos damage=1000000")
        return ask(pid, command)

    monkeypatch.setattr(completion, "ask", damaging)
    monkeypatch.setattr(resume, "GIVE_UP_S", 1.0)
    section = figures.Section("resume", "")
    with pytest.raises(rig.BenchError):
        completion.run(rig.Options(smoke=True, verbose=False), section, math.inf)
    assert any("wrong words" in error for error in section.errors), section.errors


@pytest.mark.soak
@pytest.mark.lab
def test_smoke(build: Build, lab_rights: None, run_bounded: RunBounded, tmp_path: Path) -> None:
    """Every benchmark prints its ratios, and the JSON says how and where they were taken."""
    out, tables = tmp_path / "bench.json", tmp_path / "bench.md"
    done = run_bounded(
        [sys.executable, RUN, "--smoke", "--json", out, "--markdown", tables], timeout=500
    )
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["schema"] == figures.SCHEMA
    assert report["smoke"] is True
    for key in ("date", "hardware", "command", "load"):
        assert report[key], key
    assert [section["name"] for section in report["sections"]] == [
        "shaped",
        "unshaped",
        "resume",
        "known",
        "locate",
        "cost",
        "hop",
        "crowd",
        "growth",
        "grey",
        "flap",
        "ramp",
        "heartbeat",
        "overhead",
        "shim_cost",
        "storm",
        "tree",
        "direct",
        "instructions",
        "adds",
    ]
    for section in report["sections"]:
        assert section["skipped"] or section["rows"], section["name"]
        assert not section["errors"]
        assert all(row["met"] is None for row in section["rows"]), "smoke judges no speed"
        assert section["title"] in done.stdout
        assert section["skipped"] or section["title"] in tables.read_text(encoding="utf-8")
    ratios = [row["ratio"] for s in report["sections"] for row in s["rows"] if row["ratio"]]
    assert len(ratios) > 10
