"""What happens to a job on either bed: each asserts that every value was right (Ranks.iterations),
that what it did had its effect, and that the job went on."""

from __future__ import annotations

import os
import time

from tests.rdma.ranks import RAILS, Bed, count_of, running

SIZE = "1M" if os.environ.get("RDMA_SOAK") else "256K"
LONG = ("--op", "all_reduce", "-b", SIZE, "-e", SIZE, "--duration", "600")
VERIFY = {"R2CCL_VERIFY": "1"}
STOPPED_SECONDS = 6


def packets(bed: Bed) -> list[int]:
    return [bed.rdma_packets(f"{node}{rail}") for node in bed.nodes for rail in range(RAILS)]


def exact(bed: Bed, op: str, verify: int) -> None:
    """Every size and protocol, every value right, and the bytes went over RDMA."""
    before = packets(bed)
    words = ("--op", op, "-b", "8", "-e", "1M", "-f", "16", "-n", "2")
    with running(bed, *words, env={"R2CCL_VERIFY": str(verify)}) as job:
        job.finish()
    sent = [now - then for now, then in zip(packets(bed), before, strict=True)]
    assert min(sent) > 100, f"packets of a0, a1, b0, b1: {sent}\n{job.text()}"


def rails_in_turn(bed: Bed) -> None:
    """Each rail goes down in the middle and comes back, and carries packets again."""
    with running(bed, *LONG, env=VERIFY) as job:
        job.moving()
        for nic in ("a0", "b1"):
            bed.down(nic)
            job.moving()
            bed.up(nic)
            wanted = bed.rdma_packets(nic) + 200
            job.until(f"{nic} carries data again", bed.carries(nic, wanted))
        job.stop()


def one_rail_during_the_others_replay(bed: Bed) -> None:
    """The second rail goes when a journal says that what the first had under way is being sent
    again over it. The guest itself waits for that word: the replay does not last."""
    second = "b1" if bed.name == "one" else "a1"
    with running(bed, *LONG, env=VERIFY) as job:
        job.moving()
        bed.guest("a0").check(
            f"{count_of('replay')}before=$(count); ip link set a0 down; tries=0\n"
            "until [ $(count) -gt $before ]; do tries=$((tries + 1))\n"
            f"[ $tries -lt 1000 ] || exit 9; done; ip link set {second} down",
            120,
        )
        bed.up("a0")
        job.moving()
        bed.up(second)
        job.moving()
        job.stop()


def loss(bed: Bed) -> None:
    """One packet in a hundred is lost on one rail, in both directions."""
    for nic in ("a0", "b0"):
        bed.netem(nic, "loss 1%")
    with running(bed, *LONG, env=VERIFY) as job:
        job.moving(5)
        job.stop()


def stopped_rank(bed: Bed) -> None:
    """A rank is stopped in the middle of a collective, for longer than any silence is borne, and
    goes on: its kernel answers for it, so no path fails at either rank, nothing is sent again."""
    events = ("path-down", "nic-down", "replay")
    with running(bed, *LONG) as job:
        job.moving()
        before = {event: job.told(event) for event in events}
        job.signal(1, "STOP")
        time.sleep(1)
        stood = job.iterations()
        time.sleep(STOPPED_SECONDS)
        assert job.iterations() == stood, "rank 1 was not stopped"
        job.signal(1, "CONT")
        job.moving()
        assert {event: job.told(event) for event in events} == before, job.text()
        assert job.told("path-up") > 0, "the journals were not read"
        job.stop()


def one_bulk_queue_pair(bed: Bed) -> None:
    """Of a path with two queue pairs for chunks one is dead, as behind a switch of which one way is
    broken; heartbeats, control and the other one live. Its retries end the path, whose other rail
    carries; it is back with queue pairs of other numbers. (7 retries are endless on soft-RoCE.)"""
    env = {"R2CCL_IB_QPS": "2", "NCCL_IB_RETRY_CNT": "6", "NCCL_IB_TIMEOUT": "14"}
    ends = 2 * RAILS * 2  # of two connections' paths, one for each rail
    with running(bed, *LONG, env=env) as job:
        job.until("all paths are up", lambda: job.told("path-up") >= ends)
        job.moving()
        downs, ups, nics = (job.told(event) for event in ("path-down", "path-up", "nic-down"))
        bed.mute_bulk("b0")
        job.until("the path ends", lambda: job.told("path-down") > downs)
        job.moving()
        job.until("it is back", lambda: job.told("path-up") > ups)
        job.until("b0 carries data", bed.carries("b0", bed.rdma_packets("b0") + 200))
        assert job.told("nic-down") == nics, "a NIC was blamed"
        job.stop()
