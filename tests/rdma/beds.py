"""The two beds: what a guest is told after it booted, so that soft-RoCE devices face each other.

`one`: two emulated nodes in one guest. Rail r is a veth pair a<r>-b<r> with an rxe device on each
end (rxe_a0, ...); node a owns the a ends. Packets between two addresses of one host would never
leave it, because the `local` routing table is asked first: it is moved down, each interface routes
for itself, and the neighbours are told, since nobody answers for an address that is its own.

`two`: two guests, one node each, joined by one virtual cable per rail; nothing is bent.

Addresses: rail r is 10.<r+1>.0.0/24, node a is .1 and node b is .2. IPv4 GIDs are RoCE v2.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.guest import Guest
from tests.rdma.parts import Parts

NODES = ("a", "b")
MTU = 4200  # lets RoCE use its MTU of 4096

COMMON = """set -e
ip link set lo up
for name in all default; do
    echo 0 > /proc/sys/net/ipv4/conf/$name/rp_filter
    echo 1 > /proc/sys/net/ipv4/conf/$name/accept_local
    echo 1 > /proc/sys/net/ipv6/conf/$name/disable_ipv6
done
"""

RAIL_OF_ONE = """ip link add a{r} type veth peer name b{r}
for end in a b; do
    ip link set ${{end}}{r} mtu {mtu} up
    echo 0 > /proc/sys/net/ipv4/conf/${{end}}{r}/rp_filter
    echo 1 > /proc/sys/net/ipv4/conf/${{end}}{r}/accept_local
done
ip addr add 10.{n}.0.1/24 dev a{r}
ip addr add 10.{n}.0.2/24 dev b{r}
mac() {{ cat /sys/class/net/$1/address; }}
ip neigh replace 10.{n}.0.2 lladdr $(mac b{r}) dev a{r} nud permanent
ip neigh replace 10.{n}.0.1 lladdr $(mac a{r}) dev b{r} nud permanent
ip rule add pref 10 iif a{r} lookup local
ip rule add pref 10 iif b{r} lookup local
ip rule add pref 100 oif a{r} lookup 1{r}1
ip rule add pref 100 oif b{r} lookup 1{r}2
ip rule add pref 200 from 10.{n}.0.1 to 10.{n}.0.2 lookup 1{r}1
ip rule add pref 200 from 10.{n}.0.2 to 10.{n}.0.1 lookup 1{r}2
ip route add 10.{n}.0.0/24 dev a{r} src 10.{n}.0.1 table 1{r}1
ip route add 10.{n}.0.0/24 dev b{r} src 10.{n}.0.2 table 1{r}2
rdma link add rxe_a{r} type rxe netdev a{r}
rdma link add rxe_b{r} type rxe netdev b{r}
"""

LOCAL_LAST = """ip rule add pref 32765 lookup local
ip rule del pref 0
"""

# A link that went down has lost the routes of its own table and its neighbours.
UP_OF_ONE = """ip link set {end}{r} up
ip route replace 10.{n}.0.0/24 dev {end}{r} src 10.{n}.0.{i} table 1{r}{i}
mac() {{ cat /sys/class/net/$1/address; }}
ip neigh replace 10.{n}.0.{j} lladdr $(mac {peer}{r}) dev {end}{r} nud permanent
"""


@dataclass(frozen=True)
class Built:
    """What a bed is booted from."""

    parts: Parts
    initramfs: Path
    folder: Path


def up_command(node: str, rail: int) -> str:
    """Brings the interface of a node up again in bed `one`."""
    i = NODES.index(node) + 1
    peer = NODES[2 - i]
    return UP_OF_ONE.format(end=node, r=rail, n=rail + 1, i=i, j=3 - i, peer=peer)


def device_command(nic: str) -> str:
    """Makes the RDMA device of an interface, unless there is one."""
    return (
        f"[ -e /sys/class/infiniband/rxe_{nic} ] || rdma link add rxe_{nic} type rxe netdev {nic}\n"
    )


def one(built: Built, rails: int = 2) -> Guest:
    guest = Guest(built.parts.qemu, built.parts.vmlinuz, built.initramfs, built.folder, name="one")
    try:
        guest.wait_booted()
        text = COMMON + "".join(
            RAIL_OF_ONE.format(r=rail, n=rail + 1, mtu=MTU) for rail in range(rails)
        )
        guest.check(text + LOCAL_LAST, seconds=120)
    except BaseException:
        guest.close()
        raise
    return guest


def two(built: Built, rails: int = 2) -> tuple[Guest, Guest]:
    cables = [socket.socketpair() for _ in range(rails)]
    guests: list[Guest] = []
    try:
        for number, node in enumerate(NODES):
            nics = tuple(
                (f"52:54:00:00:{rail:02x}:{number + 1:02x}", ends[number].fileno())
                for rail, ends in enumerate(cables)
            )
            guests.append(
                Guest(
                    built.parts.qemu,
                    built.parts.vmlinuz,
                    built.initramfs,
                    built.folder,
                    name=f"two-{node}",
                    nics=nics,
                    cpus=1,
                    memory_mib=768,
                )
            )
        for number, guest in enumerate(guests):
            guest.wait_booted()
            text = COMMON
            for rail in range(rails):
                # Interfaces are eth0, eth1 here; NICs have the same names in both beds.
                name = f"{NODES[number]}{rail}"
                text += f"ip link set eth{rail} name {name}\n"
                text += f"ip link set {name} up\n"
                text += f"ip addr add 10.{rail + 1}.0.{number + 1}/24 dev {name}\n"
                text += f"rdma link add rxe_{name} type rxe netdev {name}\n"
            guest.check(text, seconds=120)
    except BaseException:
        for guest in guests:
            guest.close()
        raise
    finally:
        for ends in cables:
            for end in ends:
                end.close()
    return guests[0], guests[1]


ACT = """#!/bin/sh
# Faults on rail {r} of bed `one`, by the names that the probe uses.
set -e
case $1 in
down_a) ip link set a{r} down ;;
down_b) ip link set b{r} down ;;
up_a)
    {up_a}
    ;;
up_b)
    {up_b}
    ;;
hole_a) tc qdisc replace dev a{r} root netem loss 100% ;;
hole_b) tc qdisc replace dev b{r} root netem loss 100% ;;
fill_a) tc qdisc del dev a{r} root ;;
fill_b) tc qdisc del dev b{r} root ;;
loss)
    tc qdisc replace dev a{r} root netem loss 1%
    tc qdisc replace dev b{r} root netem loss 1%
    ;;
clean)
    tc qdisc del dev a{r} root
    tc qdisc del dev b{r} root
    ;;
gidoff_a) ip addr del 10.{n}.0.1/24 dev a{r} ;;
gidon_a)
    ip addr add 10.{n}.0.1/24 dev a{r}
    {up_a}
    ;;
remove_b) rdma link delete rxe_b{r} ;;
*)
    echo "act: $1?"
    exit 2
    ;;
esac
"""


def act_script(rail: int) -> str:
    """The script that breaks and mends a rail of bed `one`."""
    indented = {
        f"up_{node}": up_command(node, rail).strip().replace("\n", "\n    ") for node in NODES
    }
    return ACT.format(r=rail, n=rail + 1, **indented)
