"""Collectives over the verbs transport on soft-RoCE: exact while links and devices go and come back
and packets are lost; and what soft-RoCE promises that the transport is built on. All in one boot of
one guest, in a lane of CI. Rung 5: a real RDMA stack, its errors and events; it cannot prove what
HCAs and GPUDirect do, nor speed (an emulated CPU moves tens of megabytes a second)."""

from __future__ import annotations

import os
import warnings

import pytest

from tests.rdma import facts
from tests.rdma.ranks import RAILS, Bed, running
from tests.rdma.work import build_folder

SIZE = "1M" if os.environ.get("RDMA_SOAK") else "256K"
LONG = ("--op", "all_reduce", "-b", SIZE, "-e", SIZE, "--duration", "600")
VERIFY = {"R2CCL_VERIFY": "1"}

pytestmark = pytest.mark.core


@pytest.fixture(scope="module", autouse=True)
def plugin_speaks_verbs() -> None:
    plugin = build_folder() / "libnccl-net-r2ccl.so"
    if not plugin.exists() or b"ibv_get_device_list" not in plugin.read_bytes():
        pytest.skip(f"{plugin} was built without RDMA: the headers of libibverbs-dev were missing")


def packets(bed: Bed) -> list[int]:
    return [bed.rdma_packets(f"{node}{rail}") for node in bed.nodes for rail in range(RAILS)]


def test_promises(one: Bed) -> None:
    """What the transport is built on holds; other answers than recorded are a warning here."""
    seen = facts.ask(one.guest("a0"), *facts.PROMISES)
    broken = facts.broken(seen)
    assert not broken, "\n".join(broken)
    changed = facts.differences(facts.recorded(), seen)
    if changed:
        text = "soft-RoCE answers otherwise than recorded: " + "; ".join(changed)
        warnings.warn(text, stacklevel=1)


@pytest.mark.parametrize("op, verify", [("all_reduce", 1), ("alltoall", 0)])
def test_exact(one: Bed, op: str, verify: int) -> None:
    """Every size and protocol, every value right, and the bytes went over RDMA."""
    before = packets(one)
    words = ("--op", op, "-b", "8", "-e", "1M", "-f", "16", "-n", "2")
    with running(one, *words, env={"R2CCL_VERIFY": str(verify)}) as job:
        job.finish()
    sent = [now - then for now, then in zip(packets(one), before, strict=True)]
    assert min(sent) > 100, f"packets of a0, a1, b0, b1: {sent}\n{job.text()}"


def test_rails_in_turn(one: Bed) -> None:
    """Each rail goes down in the middle and comes back, and carries packets again."""
    with running(one, *LONG, env=VERIFY) as job:
        job.moving()
        for nic in ("a0", "b1"):
            one.down(nic)
            job.moving()
            one.up(nic)
            wanted = one.rdma_packets(nic) + 200
            job.until(f"{nic} carries data again", one.carries(nic, wanted))
        job.stop()


def test_one_rail_during_the_others_replay(one: Bed) -> None:
    """The second rail goes while what the first had under way is being sent again over it."""
    with running(one, *LONG) as job:
        job.moving()
        one.guest("a0").check("ip link set a0 down; ip link set b1 down")
        one.up("a0")
        job.moving()
        one.up("b1")
        job.moving()
        job.stop()


def test_loss(one: Bed) -> None:
    """One packet in a hundred is lost on one rail, in both directions."""
    for nic in ("a0", "b0"):
        one.netem(nic, "loss 1%")
    with running(one, *LONG, env=VERIFY) as job:
        job.moving(5)
        job.stop()


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
