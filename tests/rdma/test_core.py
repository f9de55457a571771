"""Collectives over the verbs transport on soft-RoCE: exact while links and devices go and come back
and packets are lost; and what soft-RoCE promises that the transport is built on. All in one boot of
one guest, in a lane of CI. Rung 5: a real RDMA stack, its errors and events; it cannot prove what
HCAs and GPUDirect do, nor speed (an emulated CPU moves tens of megabytes a second)."""

from __future__ import annotations

import warnings

import pytest

from tests.rdma import facts, scenes
from tests.rdma.ranks import Bed, running
from tests.rdma.scenes import LONG, VERIFY
from tests.rdma.work import Work, build_folder

pytestmark = pytest.mark.core


@pytest.fixture(scope="module", autouse=True)
def plugin_speaks_verbs() -> None:
    plugin = build_folder() / "libnccl-net-r2ccl.so"
    if not plugin.exists() or b"ibv_get_device_list" not in plugin.read_bytes():
        pytest.skip(f"{plugin} was built without RDMA: the headers of libibverbs-dev were missing")


def test_promises(one: Bed, work: Work) -> None:
    """What the transport is built on holds; other answers than recorded are a warning here."""
    seen = facts.ask(one.guest("a0"), *facts.PROMISES)
    broken = facts.broken(seen)
    assert not broken, "\n".join(broken)
    changed = facts.differences(facts.recorded(), seen)
    if changed:
        warnings.warn(facts.advice(changed, facts.versions(work)), stacklevel=1)


@pytest.mark.parametrize("op, verify", [("all_reduce", 1), ("alltoall", 0)])
def test_exact(one: Bed, op: str, verify: int) -> None:
    scenes.exact(one, op, verify)


def test_rails_in_turn(one: Bed) -> None:
    scenes.rails_in_turn(one)


def test_one_rail_during_the_others_replay(one: Bed) -> None:
    scenes.one_rail_during_the_others_replay(one)


def test_loss(one: Bed) -> None:
    scenes.loss(one)


def test_one_bulk_queue_pair(one: Bed) -> None:
    scenes.one_bulk_queue_pair(one)


def test_stopped_rank(one: Bed) -> None:
    scenes.stopped_rank(one)


def test_mixed_nodes(one: Bed) -> None:
    """Each node has one NIC with RDMA and one that is Ethernet alone: queue pairs and sockets carry
    side by side. All RDMA goes: sockets carry on both NICs, and RDMA has its bytes back when
    packets pass again. The Ethernet-only NIC goes in the middle and comes back."""
    for nic in ("a1", "b1"):
        one.remove_device(nic)
        assert one.removals[-1].wait().code == 0, one.removals[-1].text()
    with running(one, *LONG, env=VERIFY) as job:
        job.moving(1)
        job.until("a1, without RDMA, carries", one.sends("a1", 1_000_000))
        job.until("a0's queue pairs carry", one.carries("a0", one.rdma_packets("a0") + 200))
        for nic in ("a0", "b0"):
            one.rdma_off(nic)
        job.moving(2)
        job.until("sockets carry on a0", one.sends("a0", 1_000_000))
        for nic in ("a0", "b0"):
            one.rdma_on(nic)
        wanted = one.rdma_packets("a0") + 200
        job.until("a0's queue pairs carry again", one.carries("a0", wanted))
        one.down("b1")
        job.moving(2)
        one.up("b1")
        job.until("a1 carries again", one.sends("a1", 1_000_000))
        job.stop()


def test_device_removed_and_back(one: Bed) -> None:
    """The driver's device of one NIC goes in the middle of a collective. Soft-RoCE tells nobody and
    waits until the last process has let go of it: the job does, runs on over the other rail, and
    takes the device again when it is back."""
    with running(one, *LONG, env=VERIFY) as job:
        job.moving()
        one.remove_device("b0")
        job.moving()
        job.until("the job lets go of the device", lambda: one.removals[-1].code is not None, 30)
        assert one.removals[-1].code == 0, one.removals[-1].text()
        job.moving()
        one.add_device("b0")
        job.until("b0 carries data again", one.carries("b0", 200))
        job.moving()
        job.stop()
