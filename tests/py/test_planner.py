"""r2ccl-ctl plan predict: the shim's planner, asked without a job, against the bounds that it must
keep. Rung 1."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Build

from r2ccl_ctl import paths, planner
from r2ccl_ctl.cli import plan_cmds
from r2ccl_ctl.cli.main import main
from r2ccl_ctl.errors import R2Error, R2UsageError

GBIT = 125_000_000
MIB = 1 << 20


@pytest.fixture(autouse=True)
def built(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    if build.path.name in ("asan", "tsan"):
        pytest.skip("Python cannot load a library with a sanitizer in it")
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(build.path))


def call(*words: str) -> Any:
    return CliRunner().invoke(main, ["plan", *words])


def test_the_models_agree_with_the_bounds() -> None:
    """4 nodes with 2 NICs of 4 Gbit/s, one of which is lost: what the paper calls X = 1/2."""
    n, nic = 256 * MIB, 4 * GBIT
    found = planner.predict(planner.imagined(4, 2, nic, [(1, 0)]), n)
    assert found.chosen == "direct"
    assert found.bound == pytest.approx(n / nic)
    assert found.times["stock"] == pytest.approx(1.5 * n / nic, rel=0.01)
    assert 1 < found.times["direct"] / found.bound < 1.05
    # The authors' formula with 16 chunks: T1 as the ring's of a half, then 1 + 1/16 of the tail.
    assert found.times["r2ccl-allreduce"] == pytest.approx(
        (1.5 / 2 + (1 + 1 / 16) / 2) * n / nic, rel=0.02
    )
    assert found.weights[1] == 0 and sum(found.weights) == pytest.approx(1)
    assert found.from_bytes is not None and MIB <= found.from_bytes < n


@pytest.mark.parametrize("size", [MIB, 16 * MIB, 1 << 30])
@pytest.mark.parametrize("nodes", [3, 8, 64])
def test_never_below_the_bound(nodes: int, size: int) -> None:
    for lost in ([], [(0, 0)], [(0, 0), (2, 1)], [(0, 0), (0, 1), (2, 1)]):
        found = planner.predict(planner.imagined(nodes, 4, GBIT, lost), size)
        assert all(seconds >= found.bound for seconds in found.times.values()), found
        assert found.chosen == "stock" or found.times[found.chosen] < found.times["stock"]


def test_ranks_of_a_node_share_the_messages() -> None:
    """Fast NICs wait for cores: one rank of a node is too slow for direct, eight are not."""
    nodes = planner.imagined(4, 4, 100 * GBIT, [(1, 0)])
    one, eight = (planner.predict(nodes, 256 * MIB, per_node=ranks) for ranks in (1, 8))
    assert (one.chosen, eight.chosen) == ("stock", "direct")
    # Its steps within the node take 2 (8 - 1)/8 of the data at 200 GB/s.
    inside = 2 * 7 / 8 * 256 * MIB / 200e9
    assert 1 < (eight.times["direct"] - inside) / eight.bound < 1.05 and eight.bound == one.bound
    fast = planner.imagined(4, 8, 200 * GBIT, [(1, 0)])
    assert planner.predict(fast, 256 * MIB, per_node=8).chosen == "stock"  # they take too long
    assert eight.times["stock"] / one.times["stock"] == pytest.approx((31 / 32) / (3 / 4), rel=0.01)


def test_the_form_without_a_command() -> None:
    words = ("--nodes", "4", "--gpus", "8", "--nics", "2", "--rate", "100gbit", "--fail", "1:0")
    done = call(*words, "--size", "256M", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["chosen"], found["gpus"], len(found["nodes"])) == ("direct", 8, 4)
    assert found["nodes"][1]["share"] == 0.5
    text = call("predict", *words).output
    assert "direct: 1 of 4 nodes degraded, node 1 keeps 50 %" in text
    assert "node1: 50% of 200 Gbit/s left, owns 0.0%" in text and "r2ccl-allreduce" in text
    assert call("--help").exit_code == 0 and "predict" in call("--help").output


def test_two_nodes_and_healthy_ones() -> None:
    two = call("--nodes", "2", "--nics", "2", "--rate", "10gbit", "--fail", "0:1")
    assert "stock: on two nodes NCCL's ring is at the bound" in two.output
    healthy = call("--nodes", "4", "--rate", "10gbit")
    assert "stock: all 4 nodes are healthy" in healthy.output
    dead = call("--nodes", "4", "--rate", "10gbit", "--fail", "2:0")
    assert "stock: node 2 has no NIC left" in dead.output and dead.exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "4"), "give --nodes and --rate, or --job"),
        (("--nodes", "257", "--rate", "1gbit"), "--nodes 257: give 1 to 256"),
        (("--nodes", "x", "--rate", "1gbit"), "'x' is no whole number: give 1 or more"),
        (("--nodes", "4", "--rate", "1gbit", "--gpus", "0"), "0 is out of range: give 1 or more"),
        (("--nodes", "4", "--rate", "fast"), "--rate: 'fast' is no rate"),
        (("--nodes", "4", "--rate", "1gbit", "--fail", "4:0"), "there are nodes 0 to 3"),
        (("--nodes", "4", "--rate", "1gbit", "--fail", "1:1"), "a node has NICs 0 to 0"),
        (("--nodes", "4", "--rate", "1gbit", "--fail", "eth0"), "give NODE:NIC"),
        (("--nodes", "4", "--rate", "1gbit", "--size", "0"), "give 1 byte or more"),
        (("--job", "x", "--nodes", "4"), "--job has its own nodes"),
        (("--job", "x", "--gpus", "4"), "leave out --nodes, --gpus"),
    ],
)
def test_usage(words: tuple[str, ...], said: str) -> None:
    done = call(*words)
    assert done.exit_code != 0 and said in done.output, done.output


def process(host: str, states: list[str], nodes: int) -> Any:
    nics = [SimpleNamespace(speed_mbps=10_000, state=state) for state in states]
    comms = [SimpleNamespace(nodes=1, ranks=8), SimpleNamespace(nodes=nodes, ranks=2 * nodes)]
    snapshot = SimpleNamespace(nics=nics, comms=comms)
    return SimpleNamespace(host=host, snapshot=lambda: snapshot)


def test_the_nodes_of_a_job() -> None:
    """Of several processes of a node the worst counts; nodes elsewhere count as healthy."""
    found, per_node, remark = planner.of_job(
        [
            process("a", ["active", "active"], 4),
            process("a", ["active", "drained"], 4),
            process("b", ["active", "active"], 4),
        ]
    )
    assert [(node.name, node.share) for node in found[:2]] == [("a", 0.5), ("b", 1.0)]
    assert (len(found), per_node) == (4, 2) and remark.startswith("2 nodes are not on this host")
    with pytest.raises(R2Error, match="no process of the job"):
        planner.of_job([process("a", [], 4)])


def test_a_library_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planner._library.cache_clear()
    monkeypatch.setattr(paths, "shim_path", lambda: tmp_path / "libr2ccl.so")
    with pytest.raises(R2Error, match="build it again"):
        planner.predict(planner.imagined(4, 2, GBIT, []), MIB)
    planner._library.cache_clear()
    with pytest.raises(R2UsageError, match="257 nodes"):
        planner.predict([planner.Node("n", 1.0, 1.0)] * 257, MIB)


def test_why_a_process_shows_no_plan() -> None:
    def one(title: str, **facts: Any) -> Any:
        plain = {"title": title, "plan_stop": False, "comms": 1}
        return SimpleNamespace(**{**plain, **facts})

    found = [
        one("a", plan="auto", plan_stop=True),
        one("b", plan="off"),
        one("c", plan="shadow", comms=0),
        one("d", plan="auto"),
        one("e", plan="direct"),
    ]
    lines = plan_cmds._why_none(found)
    assert [line[-1] for line in lines] == ["a", "b", "c"]
    assert "plan off was said" in lines[0] and "without the shim" in lines[2]
