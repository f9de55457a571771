"""tests/gpu/run_allreduce.py without a GPU: its arithmetic, and once all of it on the stand-in.

Rung 1 and 4. What it cannot prove: that a plan is faster on real NCCL.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Build

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
pytest.importorskip("pyroute2")

figures: Any = importlib.import_module("allreduce_figures")
raw_rates: Any = importlib.import_module("raw_rates")
run_allreduce: Any = importlib.import_module("run_allreduce")


def test_models() -> None:
    """4 nodes with 2 NICs of 1 Gbit/s."""
    healthy, one, two, three = figures.states(["healthy", "half", "two", "three"], 4, 2)
    nic = 1e9 / 8 * figures.PAYLOAD
    n = 10**9
    assert one.bandwidths(4, 2, 10**9) == [2 * nic, nic, 2 * nic, 2 * nic]
    times = [
        [model(n, state.bandwidths(4, 2, 10**9)) / (n / (2 * nic)) for state in (healthy, one, two)]
        for model in (figures.ring, figures.lower)
    ]
    assert times[0] == pytest.approx([1.5, 3, 3])
    assert times[1] == pytest.approx([1.5, 2, 2])
    assert sum(three.bandwidths(4, 2, 10**9)) == 5 * nic


def test_models_by_what_raw_tcp_carried() -> None:
    """The second NIC is the slower one, and the one that is lost."""
    healthy, half = figures.states(["healthy", "half"], 4, 2)
    assert half.of_nics(4, [3e8, 1e8]) == [4e8, 3e8, 4e8, 4e8]
    bed = figures.Bed(4, 2, 4 * 10**9, (3e8, 1e8), 3.2e8)
    times = {"half": {4 * 10**8: [4.5]}}
    (row,) = figures.table(bed, [half], {"half": {4 * 10**8: [5.0]}}, times, {})
    assert (row["raw_ring_model_ms"], row["raw_lower_ms"]) == (2000.0, 1600.0)
    assert (row["ring_of_raw"], row["of_raw_lower"]) == (2.5, 2.812)
    assert row["of_both_lower"] == 2.25, "0.8 of it both ways at once"
    assert row["of_lower"] > row["of_raw_lower"], "the nominal rate is higher"
    bare = figures.Bed(4, 2, 4 * 10**9)
    (without,) = figures.table(bare, [healthy], {"healthy": {4 * 10**8: [5.0]}}, {}, {})
    assert not [key for key in without if "raw" in key]
    lines = figures.markdown([row, without], [])
    assert len({line.count("|") for line in lines[:4]}) == 1


def test_raw_rates_of_several_turns() -> None:
    found = [raw_rates.Raw((1.0, 5.0), 4.0), raw_rates.Raw((3.0, 1.0), 6.0)]
    assert raw_rates.middle(found) == raw_rates.Raw((2.0, 3.0), 5.0)


@pytest.mark.parametrize(
    ("names", "nodes", "nics", "said"),
    [
        (["most"], 4, 2, "choose from"),
        (["three"], 3, 2, "takes 4 nodes"),
        (["half"], 4, 1, "use 2 or more"),
    ],
)
def test_states_that_cannot_be(names: list[str], nodes: int, nics: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        figures.states(names, nodes, nics)


def window(begin: float, seconds: float, size: int = 4) -> Any:
    return figures.Window(begin + seconds, size, seconds, 0)


def test_stalls_are_laid_to_what_caused_them() -> None:
    change = figures.Change("half", lost=10.0, taken=13.0)
    found = [
        window(9.0, 0.5),  # before
        window(9.9, 0.4),  # the loss came in the middle of it
        window(11.0, 0.3),
        window(12.0, 0.5),  # while communicators were made
        window(12.8, 0.9),  # the first under the plan
        window(13.8, 0.2),
        window(14.2, 5.0),  # later: not the switch's
    ]
    assert figures.stalls(found, change, {4: 0.3}, {4: 0.2}) == {
        "loss": 0.1,
        "making": 0.2,
        "switch": 0.7,
    }
    assert figures.stalls(found, figures.Change("half", lost=10.0), {}, {}) == {}


def test_only_operations_that_began_in_the_state_count() -> None:
    found = [window(0, 1), window(1, 2), window(3, 3), window(6, 4, size=8), window(10, 5)]
    assert figures.by_size(found, 1.0, 1) == {4: [3, 5], 8: [4]}


@pytest.mark.parametrize("words", [["--min", "64"], ["--factor", "1"], ["--env", "X"]])
def test_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_allreduce.parse_args(words)
    assert ended.value.code == 2


def run_on_the_stand_in(build: Build, out: Path, *words: str) -> Any:
    if build.path != GPU.parents[1] / "build":
        pytest.skip("the script runs what is in build/")
    done = subprocess.run(
        [sys.executable, str(GPU / "run_allreduce.py"), "--standin", "--rate", "100mbit", *words,
         "--turns", "1", "--cycles", "2", "--budget", "150",
         "--env", "R2CCL_MODE=optimal", "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith(("R2CCL_", "NCCL_"))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.lab
@pytest.mark.slow
def test_all_of_it_on_the_stand_in(lab_rights: None, build: Build, tmp_path: Path) -> None:
    words = "--min 1M --max 2M --states healthy,half".split()
    found = run_on_the_stand_in(build, tmp_path / "allreduce.json", *words)
    assert found["ok"] and found["wrong"] == 0 and found["operations"] > 20
    assert [(r["state"], r["size"], r["plan"]) for r in found["rows"]] == [
        ("healthy", 1 << 20, ""),
        ("healthy", 2 << 20, ""),
        ("half", 1 << 20, "direct, weighted"),
        ("half", 2 << 20, "direct, weighted"),
    ]
    # What the shapers let through bounds the ring from below, whoever measures.
    assert all(r["ring_ms"] > 0.9 * r["ring_model_ms"] for r in found["rows"])
    assert len(found["raw"]["single"]) == 2
    assert all(0.8 < 8 * rate / 1e8 <= figures.PAYLOAD * 1.02 for rate in found["raw"]["single"])
    assert all(r["of_raw_lower"] > 0 for r in found["rows"])
    (change,) = found["changes"]
    assert 0 <= change["decided_s"] <= change["made_s"] <= change["taken_s"] < 60
