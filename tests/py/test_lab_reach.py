"""Which NICs reach each other, and what is said where they do not: silence on the last common rail,
unlike address families, packets that are too large for the way, one subnet for several NICs.

Rung 4: real addresses, bridges and silence between network namespaces. It cannot prove what a
physical switch does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from conftest import Build, missing
from failover_bed import PerfJob, running_perf, until

from r2ccl_ctl.lab import Lab, LabSpec, netns

pytestmark = pytest.mark.lab

RATE = 1_000_000_000


@pytest.fixture(scope="module")
def lab(lab_rights: None) -> Iterator[Lab]:
    """2 nodes x 2 NICs on rails of their own."""
    if not netns.has_admin():
        missing("lab", "these tests make namespaces themselves: CAP_SYS_ADMIN is missing")
    with Lab.up(LabSpec(name=f"r{os.getpid()}", rates=(RATE,), ipv6=True)) as made:
        yield made


def told(job: PerfJob, nic: str) -> list[str]:
    names = ("nic-down", "nic-probing", "nic-ramping", "nic-up", "nic-healthy")
    return [f"{e.event}: {e.cause}" for e in job.named(*names) if e.nic == nic]


def ups(job: PerfJob, nic: str) -> list[str]:
    return [e.cause for e in job.named("path-up") if e.nic == nic]


def test_dead_nic_is_not_back_when_the_last_rail_goes(build: Build, lab: Lab) -> None:
    """nic1 is dead, then nic0 falls silent as well: nobody answers any more, which says nothing for
    nic1. Once both work again, the job goes on."""
    with running_perf(build, lab=lab.name, per_node=1, env={"R2CCL_RAMP": "500ms"}) as job:
        until("nic1 carries", lambda: len(ups(job, "nic1")) == 4, 20.0, job)
        lab.fail_link("n1", "nic1", "silent")
        until(
            f"nic1 is lost: {job}",
            lambda: any(t.startswith(("nic-down", "nic-probing")) for t in told(job, "nic1")),
        )
        time.sleep(3.0)  # longer than a NIC is looked at before it counts as not needed
        before = told(job, "nic1")
        lab.fail_link("n1", "nic0", "silent")
        time.sleep(4.0)
        after = told(job, "nic1")[len(before) :]
        assert not [t for t in after if t.startswith(("nic-ramping", "nic-up"))], f"{after} {job}"
        for nic in ("nic0", "nic1"):
            lab.recover_link("n1", nic)
        until(f"back: {job}", lambda: "nic-up" in " ".join(told(job, "nic1")[len(before) :]), 20.0)
        job.moving()
        job.finish()


def test_ramp_does_not_end_in_silence(build: Build, lab: Lab) -> None:
    """nic1 is on its way back when all NICs fall silent: it does not count as back."""
    with running_perf(build, lab=lab.name, per_node=1, env={"R2CCL_RAMP": "2s"}) as job:
        until("nic1 carries", lambda: len(ups(job, "nic1")) == 4, 20.0, job)
        lab.fail_link("n1", "nic1", "silent")
        until("nic1 is lost", lambda: "nic-probing" in " ".join(told(job, "nic1")), 10.0, job)
        lab.recover_link("n1", "nic1")
        until("nic1 ramps", lambda: "nic-ramping" in " ".join(told(job, "nic1")), 10.0, job)
        for nic in ("nic0", "nic1"):
            lab.fail_link("n1", nic, "silent")
        time.sleep(4.0)
        assert "nic-up" not in " ".join(told(job, "nic1")), str(job)
        for nic in ("nic0", "nic1"):
            lab.recover_link("n1", nic)
        until("nic1 is back", lambda: "nic-up" in " ".join(told(job, "nic1")), 20.0, job)
        job.finish()
