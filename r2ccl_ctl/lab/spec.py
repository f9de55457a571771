"""What a lab looks like: names, addresses, rates. Pure: no clock, no socket, no privileges."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.units import rate_bits

DEFAULT_NAME = "r2lab"
VARIANTS = ("rail-only", "routed", "one-subnet", "default-route")
DIRECTIONS = ("tx", "rx", "both")
MGMT = "mgmt0"
MAX_NODES = 200
MAX_NICS = 64
MAX_MTU = 65521
# tbf keeps its rate in 32 bits of bytes per second.
MAX_RATE_BPS = 8 * (2**32 - 1)
# Its burst is kept as a time, in 32 bits of ticks: the least burst at less than that does not fit.
MIN_RATE_BPS = 8000
GATEWAY_HOST = 254

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")


class LabError(R2Error):
    """A lab operation that failed; the text names the thing, the value and the remedy."""


class LabUsageError(LabError, R2UsageError):
    """The caller asked for something that cannot be: bad name, unknown NIC, bad rate."""


def parse_rate(text: str) -> int | None:
    """Bits per second of `1gbit`, `500mbit`, `2.5gbit`; None of `none` (unshaped)."""
    if text.strip().lower() == "none":
        return None
    try:
        bps = rate_bits(text, "for example 500mbit or 2.5gbit, or none for an unshaped NIC")
    except R2UsageError as err:
        raise LabUsageError(str(err)) from err
    if bps < MIN_RATE_BPS:
        raise LabUsageError(
            f"rate '{text}' is below {format_rate(MIN_RATE_BPS)}, the least that the shaper can "
            "do: give a higher one, or use fail-link"
        )
    if bps > MAX_RATE_BPS:
        raise LabUsageError(
            f"rate '{text}' is above {format_rate(MAX_RATE_BPS)}, the most that the shaper can do: "
            "use none for an unshaped NIC"
        )
    return int(bps)


def format_rate(bps: int | None) -> str:
    """The inverse of parse_rate, with the largest unit that keeps it short."""
    if bps is None:
        return "none"
    for unit, scale in (("g", 10**9), ("m", 10**6), ("k", 10**3)):
        if bps >= scale:
            return f"{bps / scale:.4g}{unit}bit"
    return f"{bps}bit"


def tbf_burst(bps: int) -> int:
    """Bytes of burst: 1 ms of the rate, from one full GSO packet to 512 KiB. A timer that is later
    than that loses rate."""
    return max(80 * 1024, min(512 * 1024, bps // 8 // 1000))


def tbf_limit(bps: int) -> int:
    """Bytes of a switch port's queue: 20 ms of the rate, from 256 KiB to 1 MiB."""
    return max(256 * 1024, min(1024 * 1024, bps // 8 // 50))


def host_limit(bps: int) -> int:
    """Bytes of a node's own queue: 200 ms of the rate, from 256 KiB to 16 MiB. A host's queue holds
    a thousand packets. Where it drops one, a socket with nothing else under way waits 200 ms."""
    return max(256 * 1024, min(16 * 1024 * 1024, bps // 8 // 5))


def parse_rates(text: str) -> tuple[int | None, ...]:
    """A comma list of rates: one for all NICs, or one per NIC of a node."""
    return tuple(parse_rate(part) for part in text.split(","))


def parse_counts(text: str) -> tuple[int, ...]:
    """A comma list of positive counts: one for all nodes, or one per node."""
    counts = []
    for part in text.split(","):
        if not part.strip().isdecimal() or int(part) < 1:
            raise LabUsageError(
                f"--nics '{text}' is not understood: give a positive number for all nodes, "
                "or one per node (for example 4,2)"
            )
        counts.append(int(part))
    return tuple(counts)


@dataclass(frozen=True)
class LabSpec:
    """What `lab up` builds.

    nodes: how many nodes. nics: NICs of each node, one count for all or one per node.
    rates: bits per second of each NIC of a node (None: unshaped), one for all or one per NIC.
    """

    nodes: int = 2
    nics: tuple[int, ...] = (2,)
    rates: tuple[int | None, ...] = (None,)
    name: str = DEFAULT_NAME
    variant: str = "rail-only"
    mtu: int = 9000
    ipv6: bool = False
    nic_counts: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.nodes <= MAX_NODES:
            raise LabUsageError(f"{self.nodes} nodes: a lab has 1 to {MAX_NODES}")
        if len(self.nics) not in (1, self.nodes):
            raise LabUsageError(
                f"--nics gives {len(self.nics)} counts for {self.nodes} nodes: "
                "give one count for all nodes, or one per node"
            )
        counts = self.nics * self.nodes if len(self.nics) == 1 else self.nics
        if min(counts) < 1 or max(counts) > MAX_NICS:
            raise LabUsageError(f"--nics {max(counts)}: a node has 1 to {MAX_NICS} NICs")
        if len(self.rates) not in (1, max(counts)):
            raise LabUsageError(
                f"--rate gives {len(self.rates)} rates for {max(counts)} NICs: "
                "give one rate for all NICs, or one per NIC"
            )
        if self.variant not in VARIANTS:
            raise LabUsageError(
                f"variant '{self.variant}' does not exist: choose from {', '.join(VARIANTS)}"
            )
        if not 1280 <= self.mtu <= MAX_MTU:
            raise LabUsageError(f"mtu {self.mtu}: give 1280 to {MAX_MTU}")
        object.__setattr__(self, "nic_counts", tuple(counts))

    @property
    def rails(self) -> int:
        """The number of rails: the NICs of the node that has most."""
        return max(self.nic_counts)

    def rate_of(self, nic: int) -> int | None:
        """The rate of NIC number `nic` of every node when the lab comes up."""
        return self.rates[nic] if len(self.rates) > 1 else self.rates[0]

    def node_names(self) -> list[str]:
        return [f"n{i}" for i in range(self.nodes)]

    def nic_names(self, node: int) -> list[str]:
        return [f"nic{r}" for r in range(self.nic_counts[node])]

    def prefix_len(self) -> int:
        return 16 if self.variant == "one-subnet" else 24

    def nic_address(self, node: int, nic: int) -> str:
        """IPv4 address of a NIC; with one subnet the rail moves to the third byte."""
        if self.variant == "one-subnet":
            return f"10.1.{nic + 1}.{node + 1}"
        return f"10.{nic + 1}.0.{node + 1}"

    def nic_address6(self, node: int, nic: int) -> str:
        subnet = 1 if self.variant == "one-subnet" else nic + 1
        host = ((nic + 1) << 16 | (node + 1)) if self.variant == "one-subnet" else node + 1
        return str(ipaddress.IPv6Address((0xFD52_0CC1 << 96) | (subnet << 64) | host))

    def rail_subnet(self, rail: int) -> str:
        return "10.1.0.0/16" if self.variant == "one-subnet" else f"10.{rail + 1}.0.0/24"

    def rail_gateway(self, rail: int) -> str | None:
        """The fabric's own address on a rail; only variants that route have one."""
        if self.variant in ("routed", "default-route"):
            return f"10.{rail + 1}.0.{GATEWAY_HOST}"
        return None

    def bridge_of(self, rail: int) -> str:
        return "rail0" if self.variant == "one-subnet" else f"rail{rail}"

    def bridges(self) -> list[str]:
        return sorted({self.bridge_of(rail) for rail in range(self.rails)})

    def node_routes(self, nic: int) -> list[Route]:
        """Routes that go away when the NIC is set down, beyond its own subnet."""
        gateway = self.rail_gateway(nic)
        if gateway is None:
            return []
        if self.variant == "default-route":
            return [Route("default", gateway, 0)] if nic == 0 else []
        return [
            Route(self.rail_subnet(rail), gateway, 100 + nic)
            for rail in range(self.rails)
            if rail != nic
        ]


@dataclass(frozen=True)
class Route:
    """A route of a node through one of its NICs."""

    destination: str
    gateway: str
    metric: int


def check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None or re.fullmatch(r".*-(n\d+|fab)", name):
        raise LabUsageError(
            f"lab name '{name}' is not usable: start with a lower-case letter, then up to 31 of "
            "a-z, 0-9, _ and -, and do not end in -fab or -n<number>"
        )


def netns_name(lab: str, node: str) -> str:
    """The real name of a node's (or the fabric's) network namespace."""
    return f"{lab}-{node}"


def netns_pattern(lab: str) -> re.Pattern[str]:
    """Matches the real names that belong to a lab, and to no other."""
    return re.compile(re.escape(lab) + r"-(?:fab|n\d+)")


def mgmt_address(node: int) -> str:
    return f"10.250.0.{node + 1}"


def fab_port(node: int, nic: str) -> str:
    """The fabric's end of a NIC's cable: n0r1 for nic1 of n0, n0m for its mgmt0."""
    return f"n{node}m" if nic == MGMT else f"n{node}r{nic_index(nic)}"


def nic_index(nic: str) -> int:
    return int(nic.removeprefix("nic"))
