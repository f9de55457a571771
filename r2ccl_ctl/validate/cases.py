"""The matrix: which NICs fail how and when. Pure.

Times count from the first traffic, in units of --seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from r2ccl_ctl.errors import R2UsageError

PERF, NCCL_TESTS = "r2ccl_perf", "nccl-tests"
CABLE = "cable"
ENDS = {"fail": "recover", "drain": "undrain", "pull": "plug"}
AFTER = 256 << 10  # a connection is reset once so many bytes have passed: in the middle of a chunk


@dataclass(frozen=True)
class Step:
    """What is done to a NIC of the first host: fail, drain, pull (its cable), or the reverse.

    nic: 0 or 1, the first or second NIC to fail. returning: wait until the other NIC, which was
    given back, is on its way back."""

    at: float
    verb: str
    nic: int = 0
    fault: str = ""
    returning: bool = False


@dataclass(frozen=True)
class Case:
    """One run. proves: failover, flap, slow, drain, or nothing but right values. nics: how many
    each host needs."""

    name: str
    title: str
    length: float
    steps: tuple[Step, ...] = ()
    proves: str = ""
    nics: int = 1
    r2ccl: bool = True
    program: str = PERF

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _fail(at: float, nic: int = 0, fault: str = "blackhole", *, returning: bool = False) -> Step:
    return Step(at, "fail", nic, fault, returning)


def _back(at: float, nic: int = 0) -> Step:
    return Step(at, "recover", nic)


_FLAPS = tuple(step for i in range(3) for step in (_fail(1 + i, 0, "error"), _back(1.5 + i)))

ALL = (
    Case("reference", "without R2CCL, without faults", 2, r2ccl=False),
    Case("none", "no fault", 2),
    Case("one", "one NIC fails", 4, (_fail(1, 0, "error"), _back(3)), "failover", 2),
    Case(
        "two",
        "two NICs fail, one after the other",
        5,
        (_fail(1, 0, "error"), _fail(2, 1, "error"), _back(4, 0), _back(4, 1)),
        "failover",
        3,
    ),
    Case(
        "returning",
        "a NIC fails while another one returns",
        5,
        (_fail(1), _back(2), _fail(2, 1, returning=True), _back(4, 1)),
        "failover",
        2,
    ),
    Case("flap", "a NIC fails and returns three times", 5, _FLAPS, "flap", 2),
    Case("slow", "a NIC becomes ten times slower", 4, (_fail(1, 0, "slow"), _back(3)), "slow", 2),
    Case("blackhole", "packets vanish, the link stays up", 4, (_fail(1), _back(3)), "failover", 2),
    Case("drain", "a NIC is drained", 4, (Step(1, "drain"), Step(3, "undrain")), "drain", 2),
    Case(
        CABLE,
        "a link is cut",
        4,
        (Step(1, "pull", fault=CABLE), Step(3, "plug")),
        "failover",
        2,
    ),
    Case("nccl-tests-reference", "the same with nccl-tests, without R2CCL", 2, r2ccl=False,
         program=NCCL_TESTS),
    Case("nccl-tests-none", "nccl-tests, no fault", 2, program=NCCL_TESTS),
    Case("nccl-tests-one", "nccl-tests, one NIC fails", 4, (_fail(1, 0, "error"), _back(3)),
         "failover", 2, program=NCCL_TESTS),
    Case("nccl-tests-blackhole", "nccl-tests, packets vanish", 4, (_fail(1), _back(3)),
         "failover", 2, program=NCCL_TESTS),
)  # fmt: skip
NAMES = tuple(case.name for case in ALL)


def choose(names: tuple[str, ...], *, nccl_tests: bool, lab: bool) -> list[Case]:
    """The cases of these names, else all that can run by themselves: a real cable needs a hand."""
    for name in names:
        if name not in NAMES:
            raise R2UsageError(f"--case {name}: choose from {', '.join(NAMES)}")
        if name.startswith(NCCL_TESTS) and not nccl_tests:
            raise R2UsageError(
                f"--case {name}: all_reduce_perf is not in PATH; --nccl-tests DIR names its folder"
            )
    wanted = names or tuple(
        c.name for c in ALL if (nccl_tests or c.program == PERF) and (lab or c.name != CABLE)
    )
    return [case for case in ALL if case.name in wanted]
