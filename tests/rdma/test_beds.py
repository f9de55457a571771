"""The beds themselves, with the tools of rdma-core alone. Rung 5: if these fail, nothing that the
project's own tests say about RDMA means anything."""

from __future__ import annotations

import pytest

from tests.rdma.ranks import RAILS, Bed


def pingpong(bed: Bed, rail: int) -> None:
    size, rounds = 65536, 50
    words = f"-g 1 -n {rounds} -s {size} -p {18000 + rail}"
    before = bed.rdma_packets(f"a{rail}")
    server = bed.nodes["b"].start(f"ibv_rc_pingpong -d rxe_b{rail} {words}", 90)
    # The tool says nothing before it is connected to.
    bed.nodes["b"].check(
        f"for i in $(seq 200); do netstat -ltn | grep -q :{18000 + rail} && exit 0; sleep 0.1; done"
        "; exit 1",
        60,
    )
    address = "127.0.0.1" if bed.name == "one" else f"10.{rail + 1}.0.2"
    client = bed.nodes["a"].run(f"ibv_rc_pingpong -d rxe_a{rail} {words} {address}", 90)
    for done in (client, server.wait()):
        assert done.code == 0, done.out
        assert f"{2 * size * rounds} bytes in" in done.out, done.out
    sent = bed.rdma_packets(f"a{rail}") - before
    assert sent >= size * rounds // 4096, f"only {sent} packets went over the wire"


@pytest.mark.parametrize("rail", range(RAILS))
def test_pingpong_in_one_guest(one: Bed, rail: int) -> None:
    pingpong(one, rail)


@pytest.mark.parametrize("rail", range(RAILS))
def test_pingpong_between_guests(two: Bed, rail: int) -> None:
    pingpong(two, rail)


def test_carrier(two: Bed) -> None:
    """A cable that is pulled is seen where it is pulled, a NIC that is taken down where it is."""
    guest = two.nodes["a"]
    state = "cat /sys/class/infiniband/rxe_a0/ports/1/state"
    guest.set_link(0, False)
    guest.check(f"for i in $(seq 100); do {state} | grep -q DOWN && exit; sleep 0.1; done; exit 1")
    assert "ACTIVE" in two.nodes["b"].check(state.replace("a0", "b0"))
    guest.set_link(0, True)
    guest.check(
        f"for i in $(seq 100); do {state} | grep -q ACTIVE && exit; sleep 0.1; done; exit 1"
    )
