"""Names, addresses, rates and rule sets of a lab, without a lab. Rung 1: it cannot prove that a
kernel accepts any of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from r2ccl_ctl.lab import (
    LabError,
    LabSpec,
    LabUsageError,
    format_rate,
    nft,
    parse_counts,
    parse_rate,
)
from r2ccl_ctl.lab.spec import VARIANTS, host_limit, netns_pattern, tbf_burst, tbf_limit
from r2ccl_ctl.lab.state import Cut, LabState, NicState, Store


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("1gbit", 10**9),
        ("2.5Gbit/s", 2_500_000_000),
        ("500mbit", 5 * 10**8),
        ("none", None),
        (" 64kbit ", 64000),
        ("8000bit", 8000),
        ("10Mbps", None),
    ],
)
def test_rates(text: str, bps: int | None) -> None:
    if text == "10Mbps":  # bits or bytes? tc says bytes, people mean bits: refused
        with pytest.raises(LabUsageError, match="10Mbps"):
            parse_rate(text)
    else:
        assert parse_rate(text) == bps


@pytest.mark.parametrize("text", ["", "fast", "-1gbit", "0gbit", "1", "40gbit", "1gbyte", "nan"])
def test_bad_rates_say_what_is_wrong(text: str) -> None:
    with pytest.raises(LabUsageError) as caught:
        parse_rate(text)
    assert f"'{text}'" in str(caught.value)


@pytest.mark.parametrize("bps", [None, 8000, 10**6, 25 * 10**8, 10**10])
def test_rate_words_round_trip(bps: int | None) -> None:
    assert parse_rate(format_rate(bps)) == bps


def test_shaper_stays_within_its_bounds() -> None:
    """Burst and queue small enough for bandwidth claims, burst no smaller than a GSO packet."""
    for bps in (10**6, 10**8, 10**9, 5 * 10**9, 34 * 10**9):
        assert 64 * 1024 < tbf_burst(bps) <= 256 * 1024
        assert tbf_burst(bps) <= tbf_limit(bps) <= 1024 * 1024
        assert tbf_limit(bps) <= host_limit(bps) <= 16 * 1024 * 1024


@pytest.mark.parametrize("text", ["", "0", "2,x", "-1", "2,,3"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(LabUsageError):
        parse_counts(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": 0},
        {"nodes": 201},
        {"nics": (1, 2, 3)},
        {"nics": (65,)},
        {"rates": (1, 2, 3)},
        {"variant": "ring"},
        {"mtu": 100},
        {"name": "Lab"},
        {"name": "x-n1"},
        {"name": "x-fab"},
        {"name": "../x"},
        {"name": ""},
    ],
)
def test_bad_specs(wrong: dict[str, object]) -> None:
    with pytest.raises(LabUsageError):
        LabSpec(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
def test_addresses_are_unique(variant: str) -> None:
    spec = LabSpec(nodes=200, nics=(64,), variant=variant)
    places = [(n, r) for n in range(spec.nodes) for r in range(spec.rails)]
    assert len({spec.nic_address(n, r) for n, r in places}) == len(places)
    assert len({spec.nic_address6(n, r) for n, r in places}) == len(places)


def test_routes_of_variants() -> None:
    routed = LabSpec(nics=(3,), variant="routed").node_routes(1)
    assert [r.destination for r in routed] == ["10.1.0.0/24", "10.3.0.0/24"]
    assert {r.gateway for r in routed} == {"10.2.0.254"}
    default = LabSpec(nics=(2,), variant="default-route")
    assert [r.destination for r in default.node_routes(0)] == ["default"]
    assert default.node_routes(1) == []
    assert LabSpec().node_routes(0) == []


def test_names_of_labs_do_not_overlap() -> None:
    assert netns_pattern("a").fullmatch("a-n12") and netns_pattern("a").fullmatch("a-fab")
    for other in ("a-b-n1", "aa-n1", "a-n", "a-n1x", "b-fab"):
        assert not netns_pattern("a").fullmatch(other)


def test_state_survives_its_file(tmp_path: Path) -> None:
    state = LabState.fresh(LabSpec(nodes=3, nics=(2, 1, 4), rates=(10**9, None, 5, 6)))
    state.nics[0]["nic1"].loss_rx = 12.5
    state.nics[2]["nic3"].link = "carrier"
    state.cuts.add(Cut("nic0", 0, 2))
    store = Store("x", tmp_path)
    with store.lock():
        store.save(state)
        again = store.load()
    assert again == state and again.spec.nic_counts == (2, 1, 4)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1}'])
def test_a_spoilt_state_file_is_an_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    store = Store("x", tmp_path)
    store.json_path.write_text(text)
    with pytest.raises(LabError, match="lab down --name x"):
        store.load()


def test_faults_in_words() -> None:
    assert NicState().faults() == []
    assert NicState(link="admin").faults() == ["admin-down"]
    assert NicState(loss_tx=100, loss_rx=100).faults() == ["silent-both"]
    assert NicState(loss_tx=100, loss_rx=2.5).faults() == ["silent-tx", "loss-rx=2.5%"]


def messages(data: bytes) -> list[int]:
    """Types of the netlink messages in a batch; the lengths must add up."""
    kinds, at = [], 0
    while at < len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        assert size >= 20 and size % 4 == 0
        kinds.append(kind)
        at += size
    assert at == len(data)
    return kinds


def test_rule_batches() -> None:
    """No drops: the table goes. Some: it is made anew, one chain per hook, one rule per drop."""
    begin, end, base = nft.BATCH_BEGIN, nft.BATCH_END, nft.SUBSYS
    data, last = nft.batch([])
    assert messages(data) == [begin, base | nft.NEWTABLE, base | nft.DELTABLE, end] and last == 2
    drops = [nft.Drop(4, None), nft.Drop(5, None, 10.0), nft.Drop(4, 5)]
    assert [d.hook for d in drops] == ["prerouting", "prerouting", "forward"]
    data, last = nft.batch(drops)
    kinds = [kind & 0xFF for kind in messages(data)]
    assert (
        kinds[1:-1]
        == [nft.NEWTABLE, nft.DELTABLE, nft.NEWTABLE] + [nft.NEWCHAIN] * 2 + [nft.NEWRULE] * 3
    )
    assert last == 8 and b"numgen" in data and data.count(b"immediate") == 3


def test_state_json_is_plain(tmp_path: Path) -> None:
    store = Store("x", tmp_path)
    with store.lock():
        store.save(LabState.fresh(LabSpec()))
    data = json.loads(store.json_path.read_text())
    assert data["schema"] == 1 and data["phase"] == "building"
    assert [sorted(t) for t in data["nics"]] == [["mgmt0", "nic0", "nic1"]] * 2
