"""The kernel objects of a lab: namespaces, bridges, cables, shapers, addresses, routes.

Everything here runs in the lab's NsThread. A cable is a veth pair made inside the fabric's
namespace with its peer in the node's. So the host's namespace never sees a link. An interrupted
`up` leaves nothing outside the lab's own namespaces.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from r2ccl_ctl.lab import netns
from r2ccl_ctl.lab.nft import Drop, DropRules
from r2ccl_ctl.lab.spec import (
    MGMT,
    LabError,
    LabSpec,
    fab_port,
    host_limit,
    mgmt_address,
    netns_name,
    nic_index,
    tbf_burst,
    tbf_limit,
)
from r2ccl_ctl.lab.state import LabState

TBF_HANDLE = 0x10000
FAB = "fab"


class Fabric:
    """Netlink sockets into the namespaces of one lab, opened when first needed and kept."""

    def __init__(self, spec: LabSpec, directory: netns.NsDir) -> None:
        self.spec = spec
        self.dir = directory
        self._routes: dict[str, Any] = {}
        self._index: dict[tuple[str, str], int] = {}
        self._drops: DropRules | None = None

    def close(self) -> None:
        for ipr in self._routes.values():
            ipr.close()
        self._routes.clear()
        self._index.clear()
        if self._drops is not None:
            self._drops.close()
            self._drops = None

    # Sockets and interface indexes

    def ipr(self, where: str) -> Any:
        """The rtnetlink socket inside `where` ("fab", "n0", ...)."""
        if where not in self._routes:
            pyroute2 = _pyroute2()
            self.dir.enter(netns_name(self.spec.name, where))
            self._routes[where] = pyroute2.IPRoute()
        return self._routes[where]

    def index(self, where: str, link: str) -> int:
        key = (where, link)
        if key not in self._index:
            found = self.ipr(where).link_lookup(ifname=link)
            if not found:
                raise LabError(
                    f"{link} is missing in {where} of lab '{self.spec.name}': "
                    "`r2ccl-ctl lab down`, then up again"
                )
            self._index[key] = int(found[0])
        return self._index[key]

    def drop_rules(self) -> DropRules:
        if self._drops is None:
            self.dir.enter(netns_name(self.spec.name, FAB))
            self._drops = DropRules()
        return self._drops

    # Building

    def build(self) -> None:
        """Everything that `up` makes; raises at the first thing that cannot be made."""
        for where in [FAB, *self.spec.node_names()]:
            self._create_namespace(where)
        self._build_bridges()
        for node in range(self.spec.nodes):
            self._build_node(node)

    def _create_namespace(self, where: str) -> None:
        name = netns_name(self.spec.name, where)
        try:
            self.dir.create_here(name)
        except OSError as err:
            raise _no_permission(f"cannot make network namespace {name}", err) from err
        inside = [("net/ipv4/conf/all/rp_filter", "0"), ("net/ipv4/conf/default/rp_filter", "0")]
        if where == FAB and self.spec.rail_gateway(0):
            inside.append(("net/ipv4/ip_forward", "1"))
        if where != FAB and self.spec.variant == "one-subnet":
            for scope in ("all", "default"):
                inside.append((f"net/ipv4/conf/{scope}/arp_ignore", "1"))
                inside.append((f"net/ipv4/conf/{scope}/arp_announce", "2"))
        for key, value in inside:
            netns.write_sysctl(key, value, required=True)
        for scope in ("all", "default"):
            netns.write_sysctl(f"net/ipv6/conf/{scope}/keep_addr_on_down", "1", required=False)
        if not self.spec.ipv6 or where == FAB:
            netns.write_sysctl("net/ipv6/conf/default/disable_ipv6", "1", required=False)
        pyroute2 = _pyroute2()
        self._routes[where] = pyroute2.IPRoute()
        self.ipr(where).link("set", index=self.index(where, "lo"), state="up")

    def _build_bridges(self) -> None:
        ipr = self.ipr(FAB)
        for name in ["mgmt", *self.spec.bridges()]:
            options = {"br_stp_state": 0, "br_mcast_snooping": 0, "mtu": self.spec.mtu}
            _make("bridge", partial(ipr.link, "add", ifname=name, kind="bridge", **options))
            ipr.link("set", index=self.index(FAB, name), state="up")
        for rail in range(self.spec.rails):
            gateway = self.spec.rail_gateway(rail)
            if gateway:
                ipr.addr(
                    "add",
                    index=self.index(FAB, f"rail{rail}"),
                    address=gateway,
                    prefixlen=self.spec.prefix_len(),
                )

    def _build_node(self, node: int) -> None:
        name = f"n{node}"
        self._plug(node, MGMT, "mgmt")
        ipr = self.ipr(name)
        ipr.addr("add", index=self.index(name, MGMT), address=mgmt_address(node), prefixlen=24)
        ipr.link("set", index=self.index(name, MGMT), state="up")
        for nic in self.spec.nic_names(node):
            self.plug_nic(node, nic, self.spec.rate_of(nic_index(nic)))

    def plug_nic(self, node: int, nic: str, rate: int | None) -> None:
        """A NIC of a node, with its addresses, up."""
        rail = nic_index(nic)
        self._plug(node, nic, self.spec.bridge_of(rail))
        ipr, index = self.ipr(f"n{node}"), self.index(f"n{node}", nic)
        ipr.addr(
            "add",
            index=index,
            address=self.spec.nic_address(node, rail),
            prefixlen=self.spec.prefix_len(),
        )
        ipr.link("set", index=index, state="up")
        if self.spec.ipv6:
            ipr.addr(
                "add",
                index=index,
                address=self.spec.nic_address6(node, rail),
                prefixlen=64,
                flags=0x02,
            )  # IFA_F_NODAD
        self.set_rate(node, nic, rate, None)
        self.add_routes(node, nic)

    def unplug_nic(self, node: int, nic: str) -> None:
        """Take the interface away, its far end with it."""
        port, own = fab_port(node, nic), f"n{node}"
        self.ipr(own).link("del", index=self.index(own, nic))
        self._index.pop((own, nic))
        self._index.pop((FAB, port), None)

    def _plug(self, node: int, nic: str, bridge: str) -> None:
        """The cable of one NIC, its far end in the bridge."""
        ipr = self.ipr(FAB)
        port = fab_port(node, nic)
        mtu = self.spec.mtu
        fd = os.open(self.dir.file(netns_name(self.spec.name, f"n{node}")), os.O_RDONLY)
        try:
            peer = {"ifname": nic, "net_ns_fd": fd, "mtu": mtu}
            _make("veth", partial(ipr.link, "add", ifname=port, kind="veth", mtu=mtu, peer=peer))
        finally:
            os.close(fd)
        ipr.link("set", index=self.index(FAB, port), master=self.index(FAB, bridge), state="up")

    # Changes

    def add_routes(self, node: int, nic: str) -> None:
        """The routes that a NIC's going down takes away."""
        if nic == MGMT:
            return
        ipr = self.ipr(f"n{node}")
        for route in self.spec.node_routes(nic_index(nic)):
            more = {"priority": route.metric} if route.metric else {}
            ipr.route(
                "replace",
                dst=route.destination,
                gateway=route.gateway,
                oif=self.index(f"n{node}", nic),
                **more,
            )

    def set_rate(self, node: int, nic: str, rate: int | None, old: int | None) -> None:
        """Shape both ends of a cable: the node's end is its tx, the fabric's end its rx."""
        if rate is None and old is None:
            return
        ends = ((f"n{node}", nic, host_limit), (FAB, fab_port(node, nic), tbf_limit))
        for where, link, limit in ends:
            ipr, index = self.ipr(where), self.index(where, link)
            if rate is None:
                _ignore(errno.ENOENT, partial(ipr.tc, "del", index=index, root=True))
                continue
            options = {"rate": f"{rate}bit", "burst": tbf_burst(rate), "limit": limit(rate)}
            _make("tbf shaper", partial(ipr.tc, "replace", "tbf", index, TBF_HANDLE, **options))

    def set_link(self, node: int, nic: str, state: str) -> None:
        """up, carrier (the fabric's end down) or admin (the node's own end down)."""
        port, own = fab_port(node, nic), f"n{node}"
        if state == "carrier":
            self.ipr(FAB).link("set", index=self.index(FAB, port), state="down")
        elif state == "admin":
            self.ipr(own).link("set", index=self.index(own, nic), state="down")
        else:
            self.ipr(FAB).link("set", index=self.index(FAB, port), state="up")
            self.ipr(own).link("set", index=self.index(own, nic), state="up")
            self.add_routes(node, nic)

    def set_bridge(self, rail: int, *, up: bool) -> None:
        """A rail's switch on or off; the carriers of its NICs stay."""
        name = self.spec.bridge_of(rail)
        self.ipr(FAB).link("set", index=self.index(FAB, name), state="up" if up else "down")

    def set_drops(self, state: LabState) -> None:
        """Make the kernel drop what the state says is lost."""
        drops = []
        for node, table in enumerate(state.nics):
            for nic, now in table.items():
                if now.loss_tx or now.loss_rx:
                    port = self.index(FAB, fab_port(node, nic))
                    drops += [Drop(port, None, now.loss_tx)] if now.loss_tx else []
                    drops += [Drop(None, port, now.loss_rx)] if now.loss_rx else []
        for cut in state.cuts:
            a = self.index(FAB, fab_port(cut.a, cut.nic))
            b = self.index(FAB, fab_port(cut.b, cut.nic))
            drops += [Drop(a, b), Drop(b, a)]
        self.drop_rules().replace(drops)

    def links(self, where: str) -> dict[str, Any]:
        """Name -> rtnetlink message of every link inside `where`."""
        return {m.get_attr("IFLA_IFNAME"): m for m in self.ipr(where).get_links()}

    def unplug_all(self) -> None:
        """Delete every cable and bridge, so that no node keeps a NIC even for a moment."""
        for name, message in self.links(FAB).items():
            if name != "lo":
                _ignore(errno.ENODEV, partial(self.ipr(FAB).link, "del", index=message["index"]))


def _pyroute2() -> Any:
    try:
        return importlib.import_module("pyroute2")
    except ImportError as err:
        raise LabError("the lab needs pyroute2: `pip install pyroute2`") from err


def _netlink_code(err: Exception) -> int | None:
    code = getattr(err, "code", None)
    return code if isinstance(code, int) else None


def _make(what: str, work: Callable[[], Any]) -> None:
    """Carry out one request; say in words what a refusal means."""
    try:
        work()
    except Exception as err:
        code = _netlink_code(err)
        if code is None:
            raise
        if code in (errno.EPERM, errno.EACCES):
            raise _no_permission(f"cannot make a {what}", OSError(code, os.strerror(code))) from err
        if code in (errno.EOPNOTSUPP, errno.ENOENT):
            raise LabError(f"this kernel has no {what}: load its module, or use another") from err
        raise LabError(f"cannot make a {what}: {os.strerror(code)}") from err


def _ignore(code: int, work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception as err:
        # Deleting the default queue discipline gives ENOENT or EINVAL, by kernel.
        if _netlink_code(err) not in (code, errno.EINVAL):
            raise


def _no_permission(what: str, err: OSError) -> LabError:
    if err.errno in (errno.EPERM, errno.EACCES):
        return LabError(
            f"{what}: {err.strerror}. The lab needs CAP_SYS_ADMIN and CAP_NET_ADMIN: be root "
            "(docker: --privileged), or an ordinary user where user namespaces are allowed"
        )
    return LabError(f"{what}: {err.strerror}")
