"""Checks between hosts: helpers started through the user's ssh, srun or mpirun exchange bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from r2ccl_ctl.doctor.finding import Finding
from r2ccl_ctl.doctor.local import network
from r2ccl_ctl.hostnics import HostNic
from r2ccl_ctl.remote import Helper, NoAnswer, at_once, attempt
from r2ccl_ctl.units import show_rate

LOOK_S = 90.0
SEND_S = 0.4
ANSWER_S = 20.0
ALL_PAIRS = 8  # hosts; of more, each one exchanges bytes with the next one only
LOSSY = 0.01
SLOW = 0.5  # of the median


class Site(Helper):
    """A host, and what is known of it."""

    def __init__(self, host: str, via: str) -> None:
        super().__init__(host, via)
        self.nics: list[HostNic] = []
        self.version = ""
        self.token = ""
        self.places: list[dict[str, Any]] = []


def check(hosts: Sequence[str], via: str, command: Sequence[str] = ()) -> list[Finding]:
    """All findings about these hosts and the network between them."""
    helpers = [Site(host, via) for host in hosts]
    found: list[Finding] = []
    try:
        for lines in at_once(partial(_look, via, command), helpers):
            found += lines
        ready = [helper for helper in helpers if helper.places]
        found += compare(ready)
        for step in range(1, len(ready) if len(ready) <= ALL_PAIRS else 2):
            others = {one.host: ready[(i + step) % len(ready)] for i, one in enumerate(ready)}
            for lines in at_once(partial(_with_other, others), ready):
                found += lines
        if len(ready) > ALL_PAIRS:
            text = f"of {len(ready)} hosts each one exchanged bytes with the next one only"
            found.append(Finding("note", "exchange", text))
        if len(hosts) == 1:
            text = "one host alone was checked: no bytes were exchanged"
            found.append(Finding("note", "exchange", text, "name two or more hosts"))
    finally:
        at_once(Site.stop, helpers)
    return found


def _look(via: str, command: Sequence[str], helper: Site) -> list[Finding]:
    try:
        seen = helper.ask(LOOK_S, do="look", command=command)
        helper.nics = [HostNic(**row) for row in seen["nics"]]
        helper.version = seen["version"]
        listening = helper.ask(ANSWER_S, do="listen")
    except NoAnswer as err:
        remedy = f"try `{attempt(via, helper.host)}`; R2CCL has to be at the same place there"
        text = f"the helper on {helper.host} could not be asked: {err}"
        return [Finding("error", "unknown", text, remedy, helper.host)]
    found = [Finding(**{**row, "node": helper.host}) for row in seen["findings"]]
    helper.token, helper.places = listening["token"], listening["places"]
    for nic, place in zip(helper.nics, helper.places, strict=True):
        if place["error"]:
            text = f"{nic.name} cannot listen: {place['error']}"
            remedy = "widen R2CCL_PORT_RANGE, or end what uses its ports"
            found.append(Finding("error", "listen", text, remedy, helper.host))
    return found


def compare(helpers: Sequence[Site]) -> list[Finding]:
    """What should be the same on all hosts, beside the first one."""
    if len(helpers) < 2:
        return []
    first, found = helpers[0], []

    def differ(check: str, helper: Site, what: str, a: object, b: object, remedy: str) -> None:
        if a != b:
            text = f"{what}: {first.host} has {a}, {helper.host} has {b}"
            found.append(Finding("warning", check, text, remedy, helper.host))

    for one in helpers[1:]:
        a, b = first.nics, one.nics
        differ("versions", one, "versions of R2CCL", first.version, one.version, "install the same")
        differ("nics", one, "number of NICs", len(a), len(b), "set R2CCL_NICS on each host")
        differ("families", one, "address families", families(a), families(b),
               "set NCCL_SOCKET_FAMILY")  # fmt: skip
        for x, y in zip(a, b, strict=False):
            what = f"MTU of {x.name} and {y.name}"
            differ("mtu", one, what, x.mtu, y.mtu, f"ip link set dev {y.ifname} mtu {x.mtu}")
        nets = {network(nic) for nic in a}
        for nic in b:
            if nets and network(nic) not in nets:
                text = f"{nic.name} is in {network(nic)}; {first.host} has no NIC in it"
                remedy = "routes must lead there; else give it an address of a common subnet"
                found.append(Finding("note", "subnet", text, remedy, one.host))
    return found


def families(nics: Sequence[HostNic]) -> str:
    return "/".join(sorted({"IPv6" if ":" in nic.addr else "IPv4" for nic in nics})) or "none"


def partner(nic: HostNic, index: int, there: Sequence[HostNic]) -> int | None:
    """The NIC of the other host that it is paired with: the same subnet, else the same number."""
    same = [i for i, other in enumerate(there) if (":" in other.addr) == (":" in nic.addr)]
    near = [i for i in same if network(there[i]) == network(nic)]
    choice = near or same
    return min(choice, key=lambda i: (i - index % len(there)) % len(there), default=None)


def _with_other(others: Mapping[str, Site], one: Site) -> list[Finding]:
    return _exchange(one, others[one.host])


def _exchange(a: Site, b: Site) -> list[Finding]:
    """From every NIC of a to its partner at b."""
    found, rates = [], []
    for index, nic in enumerate(a.nics):
        other = partner(nic, index, b.nics)
        if other is None or not b.places[other]["port"]:
            continue
        peer = b.nics[other]
        name = f"{nic.name} to {b.host} {peer.name} ({peer.addr} port {b.places[other]['port']})"
        try:
            said = a.ask(ANSWER_S, do="send", nic=index, addr=peer.addr, token=b.token,
                         port=b.places[other]["port"], seconds=SEND_S)  # fmt: skip
        except NoAnswer as err:
            found.append(Finding("error", "unknown", f"{name}: {err}", node=a.host))
            break
        found.append(judge(name, nic, said, a.host))
        found += _last_port(a, b, index, other, said)
        if not said["error"]:
            rates.append((said["rate"], name))
    middle = sorted(rate for rate, _ in rates)[len(rates) // 2] if rates else 0
    for rate, name in rates:
        if rate < SLOW * middle:
            text = f"{name}: {show_rate(rate)}, where the median is {show_rate(middle)}"
            found.append(Finding("warning", "rate", text, "check its link speed", a.host))
    return found


def _last_port(a: Site, b: Site, nic: int, other: int, said: dict[str, Any]) -> list[Finding]:
    """The other end of R2CCL_PORT_RANGE, if its first port is open."""
    port, peer = b.places[other]["last"], b.nics[other]
    if not port or said["error"]:
        return []
    try:
        last = a.ask(ANSWER_S, do="send", nic=nic, addr=peer.addr, token=b.token, port=port,
                     seconds=0)  # fmt: skip
    except NoAnswer as err:
        return [Finding("error", "unknown", f"port {port} of {b.host}: {err}", node=a.host)]
    if not last["error"]:
        return []
    text = f"{a.nics[nic].name} to {b.host} {peer.name} ({peer.addr} port {port}): {last['error']}"
    remedy = "open all ports of R2CCL_PORT_RANGE in the firewall"
    return [Finding("error", "ports", text, remedy, a.host)]


def judge(name: str, nic: HostNic, said: dict[str, Any], node: str) -> Finding:
    """One exchange as a finding."""
    error = said["error"]
    if error and said["stage"] == "connect":
        remedy = "check the cable, the routes and the firewall (R2CCL_PORT_RANGE)"
        return Finding("error", "exchange", f"{name}: no connection: {error}", remedy, node)
    if error:
        remedy = f"check that the switch passes an MTU of {nic.mtu}: ping -M do -s {nic.mtu - 28}"
        return Finding("error", "exchange", f"{name}: connected, but {error}", remedy, node)
    text = f"{name}: {show_rate(said['rate'])}, segments of {said['mss']} bytes"
    if said["loss"] > LOSSY:
        text += f", {said['loss']:.1%} sent again"
        return Finding("warning", "loss", text, "look for errors in ethtool -S", node)
    return Finding("ok", "exchange", text, "", node)
