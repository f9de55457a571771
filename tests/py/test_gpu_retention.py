"""tests/gpu/run_retention.py without a GPU: its summary, its options, and once all of it on the
stand-in. Rungs 1 and 4. It cannot prove what real NCCL keeps."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, Build

GPU = ROOT / "tests" / "gpu"
sys.path.insert(0, str(GPU))
nccl_output: Any = importlib.import_module("nccl_output")
run_retention: Any = importlib.import_module("run_retention")

HEALTHY = """
     4194304 1048576 float sum -1 3000.0 1.40 1.40 0 3000.0 1.40 1.40 0
     8388608 2097152 float sum -1 8000.0 1.05 1.05 0 8100.0 1.04 1.04 0
"""


def rows(text: str) -> Any:
    return nccl_output.parse_output(text.splitlines()).rows


def test_shares_are_of_the_sizes_after_the_loss() -> None:
    cells: Any = {}
    run_retention.add(cells, "all_reduce", 8, False, 8 << 20, rows(HEALTHY))
    for lost in ("9090.0", "10000.0", "9200.0"):
        text = HEALTHY.replace("8000.0", lost)
        run_retention.add(cells, "all_reduce", 8, True, 8 << 20, rows(text))
    run_retention.add(cells, "broadcast", 2, False, 8 << 20, rows(HEALTHY))
    (found,) = run_retention.summary(cells, {8: 8 * 130_000_000, 2: 1}, 2)
    assert (found["op"], found["nics"], found["size"], found["runs"]) == (
        "all_reduce",
        8,
        8 << 20,
        3,
    )
    assert found["share"] == pytest.approx(8000 / 9200, abs=0.001)
    assert found["of_left"] == pytest.approx(8000 / 9200 * 8 / 7, abs=0.001)
    assert found["healthy_gbs"] == pytest.approx(1.0486, abs=0.001)
    (line,) = run_retention.markdown([found])[2:]
    assert "0.870 (paper's 0.85 to 0.89: met)" in line and "all_reduce | 8 | 8 |" in line
    assert "missed" in run_retention.markdown([found | {"share": 0.84}])[2]
    (line,) = run_retention.markdown([found | {"share": 1.2, "of_left": 1.37}])[2:]
    assert "no figure" in line and "met" not in line
    assert found["used"] == pytest.approx(1.0486e9 / (8 * 130e6), abs=0.001)
    (line,) = run_retention.markdown([found | {"used": 0.6}])[2:]
    assert "no figure" in line


@pytest.mark.parametrize(
    "words",
    [
        ["--ops", "all_reduce,gather"],
        ["--nics", "1,2"],
        ["--nics", "two"],
        ["--min", "8"],
        ["--min", "0M"],
        ["--min", "8M", "--max", "4M"],
        ["--factor", "1"],
        ["--nodes", "1"],
    ],
)
def test_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_retention.parse_args(words)
    assert ended.value.code == 2


def test_rates() -> None:
    each = run_retention.rates_of([8, 4], "1gbit,2gbit")
    assert each == {8: 1_000_000_000, 4: 2_000_000_000}
    assert run_retention.rates_of([8, 4], "100mbit") == {8: 100_000_000, 4: 100_000_000}
    for text in ("1gbit,2gbit,3gbit", "none"):
        with pytest.raises(ValueError, match=text):
            run_retention.rates_of([8, 4], text)


def test_a_nic_goes_while_nccl_tests_warms_up() -> None:
    heading = "#   out-of-place    in-place"
    row = HEALTHY.splitlines()[1]
    for words, when in (([], heading), (["--standin"], row)):
        setup = run_retention.Setup(run_retention.parse_args(words), None, 1, 0.0)
        assert [setup.lose_at(text) for text in ("# nccl-tests", heading, row)] == [
            False,
            when == heading,
            when == row,
        ]


def test_nccl_tests_find_their_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "all_reduce_perf").touch()
    plugin = tmp_path / "plugin.so"
    plugin.touch()
    for name, value in (("NCCL_TESTS", tmp_path), ("R2CCL_PLUGIN", plugin), ("NCCL_LIB", "/nccl")):
        monkeypatch.setenv(name, str(value))
    bed = SimpleNamespace(nic_prefix="nic", oob="mgmt0")
    setup = run_retention.Setup(run_retention.parse_args([]), None, 8 << 20, 0.0)
    job = setup.job(bed, "all_reduce", None)
    assert job.env["LD_LIBRARY_PATH"].split(":")[:2] == ["/nccl", str(tmp_path)]
    assert job.argv[:3] == [str(tmp_path / "all_reduce_perf"), "-b", str(2 << 20)]
    with pytest.raises(ValueError, match="broadcast_perf does not exist"):
        setup.job(bed, "broadcast", None)


def test_rows_before_the_loss_do_not_count() -> None:
    assert run_retention.rows_after([5.0, 6.0], 4.9, False)
    assert not run_retention.rows_after([5.0, 6.0], 5.1, False)
    assert not run_retention.rows_after([5.0], 0.0, True)
    assert run_retention.rows_after([5.0], 5.1, True)  # its first row is where the NIC goes


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job takes 10 s of 50: the first operations of both labs, then no more."""
    now, ran = 0.0, []

    def run_one(_setup: Any, bed: Any, op: str, lost: bool, _cells: Any) -> bool:
        nonlocal now
        now += 10
        ran.append((bed, op, lost))
        return True

    monkeypatch.setattr(run_retention, "run_one", run_one)
    monkeypatch.setattr(run_retention.time, "monotonic", lambda: now)
    monkeypatch.setattr(
        run_retention, "lab_bed", lambda _n, nics, rate: contextlib.nullcontext((nics, rate))
    )
    opts = run_retention.parse_args(["--ops", "all_reduce,broadcast", "--reps", "2"])
    assert run_retention.run_all(run_retention.Setup(opts, None, 1, 50.0), {4: 1, 2: 3}, {})
    jobs = [((4, 1), "all_reduce"), ((4, 1), "broadcast"), ((2, 3), "all_reduce")]
    assert ran == [(*job, lost) for job in jobs for lost in (False, True)]


@pytest.mark.lab
def test_all_of_it_on_the_stand_in(lab_rights: None, build: Build, tmp_path: Path) -> None:
    if build.path.name != "build":
        pytest.skip("of the build folder build/ alone")
    out = tmp_path / "retention.json"
    done = subprocess.run(
        [sys.executable, str(GPU / "run_retention.py"), "--standin", "--rate", "100mbit"]
        + ["--nics", "2", "--ops", "all_gather", "--min", "4M", "--max", "4M", "--reps", "1"]
        + ["--json", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"R2CCL_PLUGIN": str(build.path / "libnccl-net-r2ccl.so")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    (row,) = found["rows"]
    assert found["standin"] and found["gpus"] == 0
    # One run beside other tests: that it lost half of its NICs is sure, how fast it was is not.
    assert 0.1 < row["share"] < 0.7 and row["of_left"] == pytest.approx(2 * row["share"], abs=0.01)
