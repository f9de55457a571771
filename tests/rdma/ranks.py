"""Two ranks, one per node of a bed, running r2ccl_perf on the stand-in for NCCL in the guest. And
what a test does to their NICs meanwhile. Every wait is bounded; values are checked after every
iteration."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from r2ccl_ctl.segment import layout
from tests.rdma import beds
from tests.rdma.guest import Done, Guest, GuestError, Job

Condition = Callable[[], bool]

RAILS = 2
PORT = 5100
JOURNAL = 64  # entries that are looked at, the first ones: more take an emulated CPU seconds
LOOK_SECONDS = 0.2  # a look is a process on the guest's emulated CPU
# Every test of the lane ends within 25 s on an idle machine. CI tries a test three times in a lane
# of 600 s: a failure must be told before that.
WAIT_SECONDS = 150.0 if os.environ.get("RDMA_SOAK") else 45.0


def count_of(event: str) -> str:
    """A shell function `count` for a guest: entries of that event in the journals of all ranks
    there."""
    seg = layout()
    at, size = seg.offset("r2_segment", "events"), seg.size("r2_seg_journal_entry")
    first = 2 * seg.offset("r2_seg_journal_entry", "event") + 1
    codes = {word: number for number, word in seg.enum("r2_seg_event", "R2_EV_").items()}
    code = f"{codes[event]:08x}"
    return (
        'count() { for f in /dev/shm/*; do [ "$(head -c 8 $f 2>/dev/null)" = R2CCLSEG ] &&'
        f" tail -c +{at + 1} $f | head -c {size * JOURNAL} |"
        f' hexdump -v -e \'{size // 4}/4 "%08x" "\\n"\' | cut -c{first}-{first + 7};'
        f" done | grep -cx {code} || :; }}\n"
    )


@dataclass
class Bed:
    """A bed as tests see it: a guest per node (the same one twice in bed `one`)."""

    name: str
    nodes: dict[str, Guest]
    port: int = field(default=PORT)
    removals: list[Job] = field(default_factory=list)

    def guest(self, nic: str) -> Guest:
        return self.nodes[nic[0]]

    def guests(self) -> list[Guest]:
        return list({id(guest): guest for guest in self.nodes.values()}.values())

    def down(self, nic: str) -> None:
        self.guest(nic).check(f"ip link set {nic} down")

    def up(self, nic: str) -> None:
        self.guest(nic).check(self.up_text(nic))

    def netem(self, nic: str, what: str) -> None:
        self.guest(nic).check(f"tc qdisc replace dev {nic} root netem {what}")

    def clean(self, nic: str) -> None:
        self.guest(nic).run(f"tc qdisc del dev {nic} root")

    def rdma_off(self, nic: str) -> None:
        """RoCE packets vanish on their way into a NIC, all others pass. (On the way out rxe knows,
        and tries again without end, in an interrupt: the guest stands still.)"""
        self.guest(nic).check(
            f"tc qdisc add dev {nic} clsact && tc filter add dev {nic} ingress protocol ip flower"
            " ip_proto udp dst_port 4791 action drop"
        )

    def mute_bulk(self, nic: str) -> None:
        """What comes for one queue pair for chunks vanishes on its way into a NIC: the one that was
        made last, behind its path's others (the low 24 bits at 32 are its number in the packet)."""
        self.guest(nic).check(
            f"qpn=$(rdma resource show qp link rxe_{nic}/1 | grep 'type RC state RTS' |"
            " sed 's/.*lqpn \\([0-9]*\\).*/\\1/' | sort -n | tail -n 1); [ -n \"$qpn\" ] &&"
            f" tc qdisc add dev {nic} clsact && tc filter add dev {nic} ingress protocol ip u32"
            " match ip protocol 17 0xff match u32 $qpn 0x00ffffff at 32 action drop"
        )

    def rdma_on(self, nic: str) -> None:
        self.guest(nic).run(f"tc qdisc del dev {nic} clsact")

    def up_text(self, nic: str) -> str:
        if self.name == "one":
            return beds.up_command(nic[0], int(nic[1:]))
        return f"ip link set {nic} up\n"

    def remove_device(self, nic: str) -> None:
        """The driver of the NIC's RDMA device is taken away. The command returns when everybody
        has let go of the device; nobody waits for that here."""
        self.removals.append(self.guest(nic).start(f"rdma link delete rxe_{nic}", 120))

    def add_device(self, nic: str) -> None:
        self.guest(nic).check(beds.device_command(nic))

    def mend(self) -> None:
        """Everything as it was when the bed was made."""
        for removal in self.removals:
            removal.wait()
        self.removals.clear()
        for guest in self.guests():
            text = ""
            for node, rail in ((n, r) for n in self.nodes for r in range(RAILS)):
                nic = f"{node}{rail}"
                if self.guest(nic) is guest:
                    text += f"tc qdisc del dev {nic} root 2>/dev/null\n"
                    text += f"tc qdisc del dev {nic} clsact 2>/dev/null\n"
                    text += f"{self.up_text(nic)}{beds.device_command(nic)}"
            guest.check(f"{text}:")

    def rdma_packets(self, nic: str) -> int:
        """Packets that the NIC's RDMA device has sent."""
        path = f"/sys/class/infiniband/rxe_{nic}/ports/1/hw_counters/sent_pkts"
        return int(self.guest(nic).check(f"cat {path}"))

    def carries(self, nic: str, packets: int) -> Condition:
        """Whether the NIC's RDMA device has sent so many packets."""
        return lambda: self.rdma_packets(nic) >= packets

    def kernel_bytes(self, nic: str) -> int:
        """Bytes that the interface has sent for the kernel's protocols and for soft-RoCE."""
        return int(self.guest(nic).check(f"cat /sys/class/net/{nic}/statistics/tx_bytes"))

    def sends(self, nic: str, more: int) -> Condition:
        """Whether the interface has sent so many more bytes since now."""
        wanted = self.kernel_bytes(nic) + more
        return lambda: self.kernel_bytes(nic) >= wanted

    def illness(self) -> list[str]:
        return [line for guest in self.guests() for line in guest.illness()]


@dataclass
class Ranks:
    """A running job; rank 0 on node a, rank 1 on node b."""

    bed: Bed
    jobs: list[Job]

    def text(self) -> str:
        return "\n".join(f"--- rank {n}\n{job.text()[-6000:]}" for n, job in enumerate(self.jobs))

    def stacks(self) -> str:
        """Where the ranks' threads are in the guests' kernels."""
        look = (
            "for t in $(grep -l r2ccl_perf /proc/[0-9]*/task/*/comm); do d=${t%/comm};"
            " echo $d $(cat $d/wchan) $(grep State $d/status); head -6 $d/stack; done"
        )
        return "\n".join(guest.run(look).out for guest in self.bed.guests())

    def crashes(self) -> str:
        """Where programs crashed, as the guests' kernels tell it."""
        look = "dmesg | grep -A 1 segfault"
        return "\n".join(guest.run(look).out for guest in self.bed.guests())

    def iterations(self) -> int:
        """Windows that rank 0 has finished, none of which had a wrong value."""
        lines = self.bed.nodes["a"].check("cat /tmp/timeline 2>/dev/null || :").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        wrong = [row for row in rows if row["wrong"]]
        assert not wrong, f"wrong values: {wrong}\n{self.text()}"
        return len(rows)

    def told(self, event: str) -> int:
        """How often the ranks' journals have that event (by r2ccl-ctl's name)."""
        return sum(int(g.check(f"{count_of(event)}count")) for g in self.bed.guests())

    def signal(self, rank: int, name: str) -> None:
        guest = list(self.bed.nodes.values())[rank]
        guest.check(
            "for p in $(pidof r2ccl_perf); do tr '\\0' '\\n' < /proc/$p/environ |"
            f" grep -qx R2CCL_RANK={rank} && kill -{name} $p && exit 0; done; exit 1"
        )

    def moving(self, more: int = 3, within: float = WAIT_SECONDS) -> None:
        """Until so many more iterations have been finished."""
        wanted = self.iterations() + more
        self.until(f"{more} more iterations", lambda: self.iterations() >= wanted, within)

    def until(self, what: str, reached: Condition, within: float = WAIT_SECONDS) -> None:
        end = time.monotonic() + within
        while not reached():
            if any(job.code is not None for job in self.jobs):
                text = f"{self.text()}\n{self.crashes()}"
                pytest.fail(f"a rank ended while waiting for {what}\n{text}", pytrace=False)
            if time.monotonic() > end:
                text = f"{self.text()}\n{self.stacks()}"
                pytest.fail(f"not within {within:g} s: {what}\n{text}", pytrace=False)
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """Ends a job that would run on: until now all values were right, on both ranks."""
        self.moving(1)
        for job in self.jobs:
            assert job.code is None, f"a rank ended with {job.code}\n{self.text()}"
            job.kill()
        for job in self.jobs:
            job.wait(30)

    def finish(self) -> list[Done]:
        """Both ranks end by themselves and all values were right."""
        done = [job.wait() for job in self.jobs]
        for one in done:
            assert one.code == 0, f"exit code {one.code}\n{self.text()}"
        assert "Out of bounds values : 0 OK" in done[0].out, self.text()
        return done


@contextmanager
def running(
    bed: Bed, *words: str, seconds: float = 600, env: Mapping[str, str] | None = None
) -> Iterator[Ranks]:
    """r2ccl_perf with `words` on both nodes. A port of its own each time."""
    bed.port += 1
    meet = "127.0.0.1" if bed.name == "one" else "10.2.0.1"
    jobs: list[Job] = []
    for rank, (node, guest) in enumerate(bed.nodes.items()):
        names = {
            "R2CCL_RANK": str(rank),
            "R2CCL_NRANKS": "2",
            "R2CCL_RENDEZVOUS": f"{meet}:{bed.port}",
            "R2CCL_NICS": ",".join(f"10.{rail + 1}.0.{rank + 1}" for rail in range(RAILS)),
            "R2CCL_LOG": "info",
            "NCCL_DEBUG": "INFO",
            "NCCL_HOSTID": f"node-{node}",
            "NCCL_NET_PLUGIN": "/r2ccl/libnccl-net-r2ccl.so",
            "NCCL_NVLS_ENABLE": "0",
            "LD_LIBRARY_PATH": "/r2ccl/hostnccl",
            **(env or {}),
        }
        text = " ".join(f"{name}={value}" for name, value in names.items())
        line = f"rm -f /tmp/timeline; {text} /r2ccl/r2ccl_perf {' '.join(words)}"
        line += " --check-every --timeout 140"
        line += " --timeline /tmp/timeline" if rank == 0 else ""
        jobs.append(guest.start(f"{line} 2>&1", seconds))
    ranks = Ranks(bed, jobs)
    try:
        yield ranks
    except GuestError as error:
        pytest.fail(f"{error}\n{ranks.text()}", pytrace=False)
    finally:
        if not any(guest.dead for guest in bed.guests()):
            for job in jobs:
                if job.code is None:
                    job.kill()
            for guest in bed.guests():
                guest.run("rm -f /dev/shm/*")
