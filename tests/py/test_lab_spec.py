"""Names, addresses, rates and rule sets of a lab, without a lab. Rung 1: it cannot prove that a
kernel accepts any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from r2ccl_ctl.lab import (
    LabError,
    LabSpec,
    LabUsageError,
    parse_counts,
    parse_rate,
)
from r2ccl_ctl.lab.spec import VARIANTS, netns_pattern
from r2ccl_ctl.lab.state import Cut, LabState, Store


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
