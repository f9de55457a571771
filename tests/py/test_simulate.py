"""r2ccl-ctl simulate: the executor's schedules in SimGrid, against published points, lower bounds
and figures of another simulator. Rung 1; it cannot prove what packets, incast or CPUs cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Build

from r2ccl_ctl import baselines, paths, simulate
from r2ccl_ctl.cli.main import main
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.simulate import Cluster

B, GIB, LATENCY = 50e9, 1 << 30, 5e-6


@pytest.fixture(autouse=True)
def built(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(build.path))


@pytest.fixture
def simgrid(built: None) -> None:
    try:
        simulate.program()
    except R2Error as err:
        pytest.skip(str(err))


def call(*words: str) -> Any:
    return CliRunner().invoke(main, ["simulate", *words])


def ports(p: int, left: float, slow: int = 1) -> list[tuple[float, float]]:
    return [(B * left, B * left)] * slow + [(B, B)] * (p - slow)


def ratio(kind: str, p: int, left: float, slow: int = 1, **more: Any) -> float:
    healthy = 2 * (p - 1) / p * GIB / B
    return simulate.allreduce(kind, GIB, ports(p, left, slow), LATENCY, **more).seconds / healthy


# What an event simulation with serial ports gave for 1 GiB, 50 GB/s, 5 us and 64 rounds: nodes,
# what is left of one, ring, direct.
TABLE = (
    (4, 0.90, 1.111, 1.030),
    (4, 0.75, 1.333, 1.075),
    (4, 0.50, 2.000, 1.354),
    (4, 0.33, 3.030, 2.041),
    (8, 0.90, 1.111, 1.015),
    (8, 0.75, 1.333, 1.038),
    (8, 0.50, 2.000, 1.158),
    (8, 0.33, 3.030, 1.748),
    (16, 0.90, 1.112, 1.008),
    (16, 0.50, 2.000, 1.082),
    (16, 0.33, 3.030, 1.631),
)


@pytest.mark.parametrize(("p", "left", "ring", "direct"), TABLE)
def test_the_known_table_within_two_percent(
    simgrid: None, p: int, left: float, ring: float, direct: float
) -> None:
    assert ratio("direct", p, left, rounds=64) == pytest.approx(direct, rel=0.02)
    if p < 16:
        assert ratio("ring", p, left, rounds=64) == pytest.approx(ring, rel=0.02)


@pytest.mark.parametrize(
    ("p", "left", "direct"), [(64, 0.90, 1.003), (64, 0.75, 1.009), (64, 0.50, 1.030)]
)
def test_the_known_table_on_many_nodes(simgrid: None, p: int, left: float, direct: float) -> None:
    """With groups of equal nodes."""
    assert ratio("direct", p, left, rounds=64) == pytest.approx(direct, rel=0.02)


@pytest.mark.parametrize("slow", [3, 7])
def test_groups_of_equal_nodes_take_the_time_of_the_nodes(simgrid: None, slow: int) -> None:
    """Messages of a group count for each of its nodes: else 7 nodes beside one are 16 % off."""
    every = ratio("direct", 8, 0.875, slow, fold=False, rounds=4)
    assert ratio("direct", 8, 0.875, slow, rounds=4) == pytest.approx(every, rel=0.005)


def test_r2ccl_allreduce_takes_about_what_its_authors_measured(simgrid: None) -> None:
    """Six nodes, a third of one lost, 16 chunks of the tail. Ports share fairly here, which the two
    rings side by side pay for with up to 3 %."""
    healthy = 2 * 5 / 6 * GIB / B
    took = simulate.allreduce("r2ccl", GIB, ports(6, 2 / 3), 0, rounds=64)
    assert took.seconds / healthy == pytest.approx(1.329, rel=0.03)


@pytest.mark.parametrize("nodes", [3, 8, 1024])
def test_nothing_beats_the_bound(simgrid: None, nodes: int) -> None:
    cluster = Cluster(nodes, 8, B)
    for pattern in simulate.random_patterns(cluster, 4, 1, seed=3):
        found = [simulate.time_of(kind, cluster, GIB, pattern) for kind in simulate.SCHEDULES]
        assert all(one.seconds >= one.bound for one in found), found
        assert found[1].seconds < 1.1 * max(found[1].bound, simulate.within_node(cluster, GIB)), (
            found
        )
    engine = simulate.time_of("ring", cluster, GIB).engine
    assert engine == ("simgrid" if nodes <= simulate.RING_MOST else "model")


def test_patterns_come_from_the_seed_and_leave_each_node_a_nic() -> None:
    cluster = Cluster(4, 2, B)
    one = simulate.random_patterns(cluster, 3, 50, seed=1)
    assert one == simulate.random_patterns(cluster, 3, 50, seed=1)
    assert one != simulate.random_patterns(cluster, 3, 50, seed=2)
    for pattern in one:
        assert len(pattern) == 3 and len({node for node, _ in pattern}) == 3
    with pytest.raises(R2UsageError, match="has no NIC left"):
        simulate.random_patterns(cluster, 5, 1, seed=1)


def test_patterns_of_a_file() -> None:
    cluster = Cluster(4, 2, B)
    found = simulate.read_patterns("# two\n3:0 2:1 3:0\n\n0:0 # one\n", cluster)
    assert found == [frozenset({(3, 0), (2, 1)}), frozenset({(0, 0)})]
    for text, wrong in {
        "3-0": "line 1: '3-0' is no NODE:NIC",
        "0:0\n4:0": "line 2: 4:0 does not exist: there are nodes 0 to 3 with NICs 0 to 1",
        "1:0 1:1": "line 1: a node has no NIC left",
        "# nothing": "names no NIC",
    }.items():
        with pytest.raises(R2UsageError) as err:
            simulate.read_patterns(text, cluster)
        assert wrong in str(err.value)


def test_percentiles() -> None:
    values = [float(i) for i in range(1, 21)]
    assert simulate.median(values) == 10 and simulate.percentile(values, 0.95) == 19
    assert simulate.median([7.0]) == simulate.percentile([7.0], 0.95) == 7


def test_bridge_nodes_part_those_that_lost_different_rails() -> None:
    cluster = Cluster(6, 4, B)
    rails = simulate.rails_left(cluster, frozenset({(0, 0), (1, 1), (2, 0), (3, 2)}))
    assert min(simulate.shared(range(6), rails)) == 2
    order = simulate.bridged(rails)
    assert sorted(order) == list(range(6))
    # Three groups, two bridges: one edge between two groups is left.
    assert sorted(simulate.shared(order, rails))[:2] == [2, 3]
    rails = simulate.rails_left(cluster, frozenset({(0, 0), (1, 1)}))
    assert min(simulate.shared(simulate.bridged(rails), rails)) == 3
    assert simulate.bridged(simulate.rails_left(cluster, frozenset())) == list(range(6))


def test_bridges_save_what_the_worst_edge_says(simgrid: None) -> None:
    """Two neighbours lost different rails of four: 2 of 4 shared, with a bridge 3 of 4."""
    cluster = Cluster(4, 4, B)
    found = simulate.rails_of(cluster, GIB, 2, [frozenset({(0, 0), (1, 1)})], lambda: None)
    assert found.plain_median == pytest.approx(2, rel=0.03)
    assert found.bridged_median == pytest.approx(4 / 3, rel=0.03)
    assert found.helped == 1 and found.gain_median == pytest.approx(1 / 3, abs=0.02)


def test_neighbours_without_a_common_rail_stop_the_plain_ring(
    simgrid: None, tmp_path: Path
) -> None:
    words = ("--nodes", "3", "--nics", "2", "--rails", "--json", "--file")
    lost = tmp_path / "lost"
    lost.write_text("0:0 1:1\n", encoding="utf-8")
    found = call(*words, str(lost))
    assert found.exit_code == 0, found.output
    (rails,) = json.loads(found.stdout)["rails"]
    assert rails["plain_median"] is None  # three nodes: each is the neighbour of all others


def test_other_approaches_are_worse_in_the_order_that_their_models_say(simgrid: None) -> None:
    found = {one.name: one for one in baselines.approaches(Cluster(8, 8, B), "7B")}
    direct = found["R2CCL, direct"]
    assert direct.factor == 1 and direct.kind == "simulated"
    order = [direct, found["R2CCL, balance"], found["one backup NIC (migrate)"]]
    assert [one.lost_s for one in order] == sorted(one.lost_s for one in order)
    assert found["AdapCC"].kind == found["DejaVu (serving)"].kind == "model"
    assert found["checkpoint and restart"].stop_s == 68 * 60
    assert all(one.assumes and one.factor >= 1 for one in found.values())


def test_what_a_model_needs() -> None:
    with pytest.raises(R2UsageError, match="24 nodes or more"):
        baselines.approaches(Cluster(16, 8, B), "175B")
    with pytest.raises(R2UsageError, match="two NICs"):
        baselines.approaches(Cluster(8, 1, B), "7B")


def test_the_table_and_the_picture(simgrid: None, tmp_path: Path) -> None:
    picture = tmp_path / "simulated.png"
    found = call("--nodes", "4", "--lost", "1,2", "--patterns", "3", "--model", "7B",
                 "--plot", str(picture))  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "Simulated, not measured" in found.stdout and "Models, not measurements" in found.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_the_program_one_line_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "native_dir", lambda: tmp_path)
    found = call()
    assert found.exit_code == 1 and "libsimgrid-dev" in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("--nodes", "1"), "--nodes 1: give 2 to 1024"),
        (("--nodes", "8;9"), "--nodes: '8;9' is no list of numbers"),
        (("--lost", "1,3-2"), "--lost: '3-2' names no number: give the lower one first"),
        (("--nics", "0"), "0 is out of range: give 1 or more"),
        (("--patterns", "0"), "0 is out of range: give 1 or more"),
        (("--size", "1K"), "--size 1K: give 1M or more"),
        (("--rate", "fast"), "--rate: 'fast' is no rate"),
    ],
)
def test_refusals(words: tuple[str, ...], wrong: str) -> None:
    found = call(*words)
    assert found.exit_code == 2 and wrong in found.stderr


@pytest.mark.parametrize(
    ("text", "wrong"), [(b"x\n", ": line 1: 'x' is no NODE:NIC"), (b"\xff", " is no text")]
)
def test_a_wrong_file_of_patterns_is_named(tmp_path: Path, text: bytes, wrong: str) -> None:
    (tmp_path / "lost").write_bytes(text)
    found = call("--file", str(tmp_path / "lost"))
    assert found.exit_code == 2 and f"--file {tmp_path / 'lost'}{wrong}" in found.stderr
