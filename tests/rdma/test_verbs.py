"""Collectives over the verbs transport on soft-RoCE, what takes minutes (the rest: test_core.py):
sockets as the last resort, two guests, seeded random failures. Rung 5: a real RDMA stack, its
errors and events; it cannot prove what HCAs and GPUDirect do, nor speed (an emulated CPU moves tens
of megabytes a second)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.rdma import scenes
from tests.rdma.ranks import RAILS, Bed, running
from tests.rdma.work import build_folder

HOURS = 2 * 3600.0  # of schedules at most; other jobs are told to end within minutes
LONG = ("--op", "all_reduce", "-b", "1M", "-e", "1M", "--duration", f"{HOURS:.0f}")


@pytest.fixture(scope="module", autouse=True)
def plugin_speaks_verbs() -> None:
    plugin = build_folder() / "libnccl-net-r2ccl.so"
    if not plugin.exists() or b"ibv_get_device_list" not in plugin.read_bytes():
        pytest.skip(f"{plugin} was built without RDMA: the headers of libibverbs-dev were missing")


soak = pytest.mark.skipif(
    not os.environ.get("RDMA_SOAK"), reason="of the soak lane: RDMA_SOAK=1 runs it"
)


@soak
def test_sockets_take_over_and_give_back(one: Bed) -> None:
    """RoCE packets vanish on all rails, everything else passes: the last resort are sockets. When
    they pass again, RDMA has the bytes back."""
    nics = [f"{node}{rail}" for node in one.nodes for rail in range(RAILS)]
    with running(one, *LONG) as job:
        job.moving()
        for nic in nics:
            one.rdma_off(nic)
        job.moving()
        for nic in nics:
            one.rdma_on(nic)
        wanted = one.rdma_packets("a0") + 200
        job.until("RDMA carries data again", one.carries("a0", wanted))
        job.stop()


@soak
@pytest.mark.parametrize("op, verify", [("all_reduce", 1), ("alltoall", 0)])
def test_exact_between_guests(two: Bed, op: str, verify: int) -> None:
    scenes.exact(two, op, verify)


@soak
@pytest.mark.parametrize(
    "scene",
    [
        scenes.rails_in_turn,
        scenes.one_rail_during_the_others_replay,
        scenes.loss,
        scenes.stopped_rank,
    ],
)
def test_between_guests(two: Bed, scene: Callable[[Bed], None]) -> None:
    scene(two)


@soak
def test_silent_peer_nic(two: Bed) -> None:
    """Between two guests: b0 goes down, a0 keeps its carrier and hears nothing."""
    with running(two, *LONG) as job:
        job.moving()
        two.down("b0")
        job.moving()
        two.up("b0")
        job.moving()
        job.stop()


def strike(bed: Bed, chance: random.Random) -> str:
    """One schedule: one to three faults on either rail, some at once, some in turn, and mended
    again in any order. Now and then both rails are away together. Returns what was done."""
    story: list[str] = []
    mend: list[Callable[[], None]] = []
    for _ in range(chance.randint(1, 3)):
        nic = f"{chance.choice('ab')}{chance.randrange(RAILS)}"
        what = chance.choice(("down", "loss 5%", "loss 30%", "loss 100%"))
        story.append(f"{nic} {what}")
        if what == "down":
            bed.down(nic)
            mend.append(partial(bed.up, nic))
        else:
            bed.netem(nic, what)
            mend.append(partial(bed.clean, nic))
        if chance.random() < 0.6:
            pause = chance.uniform(0, 1.5)
            story.append(f"{pause:.2f} s")
            time.sleep(pause)
        if chance.random() < 0.3 and mend:
            mend.pop(chance.randrange(len(mend)))()
            story.append("one mended")
    chance.shuffle(mend)
    for one in mend:
        one()
    return ", ".join(story)


@soak
def test_random_failures(one: Bed) -> None:
    """Seeded schedules (RDMA_SEED; RDMA_SCHEDULES of them, 200 in the soak lane): zero wrong, and
    the job goes on after each."""
    seed = int(os.environ.get("RDMA_SEED") or random.SystemRandom().randrange(2**32))
    chance = random.Random(seed)
    count = int(os.environ.get("RDMA_SCHEDULES") or 5)
    verify = str(chance.randrange(2))
    with running(one, *LONG, seconds=HOURS, env={"R2CCL_VERIFY": verify}) as job:
        job.moving(1)
        for number in range(count):
            print(f"seed {seed}, schedule {number}: {strike(one, chance)}", flush=True)
            job.moving(2)
        job.stop()
