"""A lab: bring it up, run things in its nodes, break and mend it, take it down.

    with Lab.up(LabSpec(nodes=2, nics=(2,), name="mine")) as lab:
        server = lab.popen("n0", ["python3", "server.py"])
        lab.fail_link("n0", "nic0")            # carrier loss, in effect when it returns
        lab.fail_link("n1", "nic1", "silent", direction="rx")
        lab.recover_link("n0", "nic0")

A Lab keeps its netlink sockets open: a failure takes effect within a few milliseconds. It may be
used from any thread. What it does is remembered on disk, so that the command line and other
processes see the same lab. Errors are LabError (LabUsageError for wrong names and values).
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from r2ccl_ctl.lab import netns, nsexec
from r2ccl_ctl.lab.fabric import FAB, Fabric
from r2ccl_ctl.lab.netns import NsDir, NsThread
from r2ccl_ctl.lab.spec import (
    DEFAULT_NAME,
    DIRECTIONS,
    MGMT,
    LabError,
    LabSpec,
    LabUsageError,
    check_name,
    fab_port,
    format_rate,
    mgmt_address,
    netns_name,
    netns_pattern,
    nic_index,
    parse_rate,
)
from r2ccl_ctl.lab.state import Cut, LabState, NicState, Store, known_labs

T = TypeVar("T")
Stream = int | IO[Any] | None

STATUS_SCHEMA = 1
FAIL_MODES = ("carrier", "admin", "silent")
NETNS_DIR_ENV = "R2CCL_LAB_NETNS_DIR"
# Set by userns.py for commands that run inside a holder: "pid:start time" and "uid:gid".
HOLDER_ENV = "R2CCL_LAB_HOLDER"
USER_ENV = "R2CCL_LAB_USER"


def netns_dir() -> NsDir:
    """Where named namespaces live: /run/netns, as `ip netns` has it, unless told otherwise."""
    named = os.environ.get(NETNS_DIR_ENV)
    return NsDir(Path(named)) if named else NsDir()


def _pair(variable: str) -> list[int] | None:
    """Two numbers from an environment variable "a:b" that this package set itself."""
    text = os.environ.get(variable)
    return [int(part) for part in text.split(":")] if text else None


class Lab:
    """A lab that is up. Get one from Lab.up or Lab.load; close() lets go without taking it down.

    As a context manager it takes the lab down at the end.
    """

    def __init__(self, spec: LabSpec, store: Store) -> None:
        self.spec = spec
        self._store = store
        self._dir = netns_dir()
        self._fabric = Fabric(spec, self._dir)
        self._thread = NsThread(f"lab-{spec.name}")
        self._open = True

    # Life

    @classmethod
    def up(cls, spec: LabSpec) -> Lab:
        """Build a lab. What an interrupted `up` of the same name left is swept away first."""
        if not netns.has_admin():
            raise LabError(
                "making a lab from a program needs CAP_SYS_ADMIN and CAP_NET_ADMIN: be root "
                "(docker: --privileged); docs/testing.md says how an ordinary user does it"
            )
        store = Store(spec.name)
        with store.lock():
            old = _load_or_none(store)
            if old is not None and old.phase == "up" and _all_there(old):
                raise LabError(
                    f"lab '{spec.name}' is already up ({old.spec.nodes} nodes): "
                    f"`r2ccl-ctl lab down --name {spec.name}` first, or choose another --name"
                )
            _sweep(store)
            state = LabState.fresh(spec)
            state.holder = _pair(HOLDER_ENV)
            lab = cls(spec, store)
            try:
                store.save(state)
                if lab._dir.ensure():
                    _made_mark(store).touch()
                store.hosts_path.write_text(_hosts_file(spec))
                lab._thread.call(lab._fabric.build)
                state.phase = "up"
                store.save(state)
            except BaseException as err:
                lab.close()
                _sweep(store)
                store.remove()
                if isinstance(err, OSError):
                    raise LabError(f"cannot build lab '{spec.name}': {err}") from err
                raise
        return lab

    @classmethod
    def load(cls, name: str = DEFAULT_NAME) -> Lab:
        """A lab that is up, whoever brought it up."""
        check_name(name)
        store = Store(name)
        state = store.load()
        if state is None:
            names = known_labs()
            there = f"up: {', '.join(names)}" if names else "none is up"
            raise LabUsageError(
                f"no lab '{name}' ({there}): `r2ccl-ctl lab up --name {name}` makes one"
            )
        if state.phase != "up" or not _all_there(state):
            raise LabError(
                f"lab '{name}' is not whole (interrupted up or down, or a restart): "
                f"`r2ccl-ctl lab down --name {name}`, then up again"
            )
        return cls(state.spec, store)

    def close(self) -> None:
        """Close the sockets. The lab stays up."""
        if self._open:
            self._open = False
            self._thread.call(self._fabric.close)
            self._thread.close()

    def down(self) -> int:
        """Take the lab down; the number of processes that were ended for it."""
        self.close()
        return remove(self.spec.name) or 0

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    # Names

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def nodes(self) -> list[str]:
        return self.spec.node_names()

    def nics(self, node: str) -> list[str]:
        """The NICs of a node, without mgmt0."""
        return self.spec.nic_names(self.node_index(node))

    def node_index(self, node: str) -> int:
        if node not in self.nodes:
            raise LabUsageError(
                f"no node '{node}' in lab '{self.name}': it has {', '.join(self.nodes)}"
            )
        return int(node[1:])

    def address(self, node: str, nic: str) -> str:
        """IPv4 address of a NIC, mgmt0 included."""
        index, nic = self._nic(node, nic)
        return mgmt_address(index) if nic == MGMT else self.spec.nic_address(index, nic_index(nic))

    def _nic(self, node: str, nic: str) -> tuple[int, str]:
        index = self.node_index(node)
        if nic != MGMT and nic not in self.spec.nic_names(index):
            names = ", ".join([*self.spec.nic_names(index), MGMT])
            raise LabUsageError(f"no NIC '{nic}' in node '{node}': it has {names}")
        return index, nic

    # Processes

    def plan(self, node: str, die_with: int = 0) -> dict[str, Any]:
        """What nsexec has to do to enter a node; `die_with` a signal to get when we end."""
        self.node_index(node)
        plan: dict[str, Any] = {
            "netns": self._dir.file(netns_name(self.name, node)),
            "hostname": node,
            "hosts": str(self._store.hosts_path),
        }
        if user := _pair(USER_ENV):
            plan["user"] = user
        if die_with:
            plan.update(deathsig=die_with, parent=os.getpid())
        return plan

    def popen(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        new_session: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start argv inside a node (own network, host name, /sys and /etc/hosts).

        env None inherits ours. A command that cannot be run ends with 126 or 127 and a line on
        stderr.
        """
        return subprocess.Popen(
            nsexec.argv_for(self.plan(node), list(argv)),
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=new_session,
        )

    def run(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run argv inside a node to its end and capture what it prints."""
        done = subprocess.run(
            nsexec.argv_for(self.plan(node), list(argv)),
            env=env,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode != 0:
            raise LabError(
                f"{argv[0]} in {node} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        return done

    def call_in(self, node: str, work: Callable[[], T]) -> T:
        """Call a short function with the node's network (sockets it makes stay there)."""
        name = netns_name(self.name, node)
        self.node_index(node)

        def inside() -> T:
            self._dir.enter(name)
            return work()

        return self._call(inside)

    # Breaking and mending

    def fail_link(
        self,
        node: str,
        nic: str,
        mode: str = "carrier",
        *,
        direction: str = "both",
        loss: float = 100.0,
    ) -> None:
        """Break a NIC; in effect when this returns. Breaking it twice is the same as once.

        mode "carrier": the node sees its link go down. "admin": the node's own end is set down.
        "silent": the carrier stays and `loss` percent of the packets vanish in `direction`
        (tx: what the node sends, rx: what it should receive, both).
        """
        if mode not in FAIL_MODES:
            raise LabUsageError(f"mode '{mode}': choose from {', '.join(FAIL_MODES)}")
        if direction not in DIRECTIONS:
            raise LabUsageError(f"direction '{direction}': choose from {', '.join(DIRECTIONS)}")
        if not 0 < loss <= 100:
            raise LabUsageError(f"loss {loss:g} %: give more than 0, up to 100")
        index, nic = self._nic(node, nic)
        with self._changing() as state:
            now = state.nics[index][nic]
            if mode == "silent":
                if direction in ("tx", "both"):
                    now.loss_tx = loss
                if direction in ("rx", "both"):
                    now.loss_rx = loss
                self._call(lambda: self._fabric.set_drops(state))
            else:
                if now.link not in ("up", mode):
                    self._call(lambda: self._fabric.set_link(index, nic, "up"))
                now.link = mode
                self._call(lambda: self._fabric.set_link(index, nic, mode))

    def recover_link(self, node: str, nic: str) -> None:
        """Undo every fault of a NIC, cut pairs included. Its rate stays."""
        index, nic = self._nic(node, nic)
        with self._changing() as state:
            self._recover(state, [(index, nic)])

    def recover_all(self) -> None:
        """Undo every fault of the lab."""
        with self._changing() as state:
            broken = {
                (i, n) for i, t in enumerate(state.nics) for n, s in t.items() if not s.healthy
            }
            broken |= {(i, c.nic) for c in state.cuts for i in (c.a, c.b)}
            self._recover(state, sorted(broken))
            for nic in sorted(state.dead_rails):
                self._call(functools.partial(self._fabric.set_bridge, nic_index(nic), up=True))
            state.dead_rails.clear()

    def _recover(self, state: LabState, nics: list[tuple[int, str]]) -> None:
        drops = False
        for index, nic in nics:
            now = state.nics[index][nic]
            cuts = {c for c in state.cuts if c.nic == nic and index in (c.a, c.b)}
            drops = drops or bool(cuts) or now.loss_tx > 0 or now.loss_rx > 0
            now.heal()
            state.cuts -= cuts
            self._call(functools.partial(self._fabric.set_link, index, nic, "up"))
        if drops:
            self._call(lambda: self._fabric.set_drops(state))

    def cut_pair(self, a: str, b: str, nic: str, *, cut: bool = True) -> None:
        """Keep two nodes from reaching each other over one rail; carriers and others stay."""
        (ia, _), (ib, _) = self._nic(a, nic), self._nic(b, nic)
        if ia == ib:
            raise LabUsageError(f"cut-pair {a} {b}: name two different nodes")
        pair = Cut(nic, min(ia, ib), max(ia, ib))
        with self._changing() as state:
            state.cuts = state.cuts | {pair} if cut else state.cuts - {pair}
            self._call(lambda: self._fabric.set_drops(state))

    def fail_rail(self, nic: str) -> None:
        """Switch a rail's bridge off: its NICs keep their carriers and lose each
        other (with one subnet: all of them). `nic` names the rail."""
        _, nic = self._nic(self.nodes[0], nic)
        if nic == MGMT:
            raise LabUsageError(f"{MGMT} is on no rail: name a NIC such as nic0")
        with self._changing() as state:
            self._call(lambda: self._fabric.set_bridge(nic_index(nic), up=False))
            state.dead_rails = state.dead_rails | {nic}

    def set_rate(self, node: str, nic: str, rate: str | int | None) -> None:
        """Shape a NIC: "2gbit", bits per second, or None / "none" for unshaped."""
        bps = parse_rate(rate) if isinstance(rate, str) else rate
        if bps is not None:
            parse_rate(f"{bps}bit")
        index, nic = self._nic(node, nic)
        with self._changing() as state:
            now = state.nics[index][nic]
            self._call(lambda: self._fabric.set_rate(index, nic, bps, now.rate))
            now.rate = bps

    def pull_nic(self, node: str, nic: str) -> None:
        """Take the interface itself away, as a driver that is unloaded does. Before anything else
        is done to the NIC, plug_nic."""
        index, nic = self._nic(node, nic)
        with self._changing():
            self._call(lambda: self._fabric.unplug_nic(index, nic))

    def plug_nic(self, node: str, nic: str) -> None:
        """Make the interface anew: same name and addresses, another index, no fault."""
        index, nic = self._nic(node, nic)
        with self._changing() as state:
            now = state.nics[index][nic]
            self._call(lambda: self._fabric.plug_nic(index, nic, now.rate))
            now.heal()
            state.cuts -= {c for c in state.cuts if c.nic == nic and index in (c.a, c.b)}
            self._call(lambda: self._fabric.set_drops(state))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[LabState]:
        """The state, locked; saved if the change went through."""
        with self._store.lock():
            state = self._store.load()
            if state is None or state.phase != "up":
                raise LabError(f"lab '{self.name}' was taken down meanwhile")
            yield state
            self._store.save(state)

    def _call(self, work: Callable[[], T]) -> T:
        """Run in the lab's thread, with the kernel's refusals in words."""
        if not self._open:
            raise LabError(f"lab '{self.name}' is closed")
        try:
            return self._thread.call(work)
        except LabError:
            raise
        except Exception as err:
            code = getattr(err, "code", None)
            if not isinstance(code, int) and not isinstance(err, OSError):
                raise
            why = os.strerror(code) if isinstance(code, int) else str(err)
            raise LabError(f"lab '{self.name}': the kernel refused: {why}") from err

    # Looking

    def status(self) -> dict[str, Any]:
        """Nodes and NICs as remembered, and their links as the kernel has them now."""
        state = self._store.load()
        if state is None:
            raise LabError(f"lab '{self.name}' was taken down meanwhile")
        fab = self._call(lambda: self._fabric.links(FAB))
        nodes = []
        for index, node in enumerate(self.nodes):
            links = self._call(functools.partial(self._fabric.links, node))
            nics = [
                self._nic_status(index, nic, now, links.get(nic), fab)
                for nic, now in state.nics[index].items()
            ]
            pids = self._dir.pids([netns_name(self.name, node)])
            nodes.append(
                {
                    "node": node,
                    "netns": netns_name(self.name, node),
                    "pids": sorted(pids),
                    "nics": nics,
                }
            )
        return {
            "schema": STATUS_SCHEMA,
            "lab": self.name,
            "variant": self.spec.variant,
            "mtu": self.spec.mtu,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(state.created)),
            "nodes": nodes,
            "cut_pairs": [
                {"nic": c.nic, "nodes": [f"n{c.a}", f"n{c.b}"]} for c in sorted(state.cuts)
            ],
        }

    def _nic_status(
        self, node: int, nic: str, now: NicState, link: Any, fab: dict[str, Any]
    ) -> dict[str, Any]:
        counters = (link.get_attr("IFLA_STATS64") or {}) if link else {}
        port = fab_port(node, nic)
        return {
            "nic": nic,
            "address": self.address(f"n{node}", nic),
            "rate": format_rate(now.rate),
            "admin_up": bool(link and link["flags"] & 1),
            "carrier": bool(link and link.get_attr("IFLA_CARRIER")),
            "fab_port": port,
            "fab_port_up": bool(port in fab and fab[port]["flags"] & 1),
            "faults": now.faults(),
            "rx_bytes": int(counters.get("rx_bytes", 0)),
            "tx_bytes": int(counters.get("tx_bytes", 0)),
        }


def remove(name: str = DEFAULT_NAME) -> int | None:
    """Take a lab down, whole or half built.

    Returns the number of processes that were ended for it; None if there is no such lab.
    """
    check_name(name)
    store = Store(name)
    with store.lock():
        state = _load_or_none(store)
        if state is None and not store.exists() and not netns_dir().names(netns_pattern(name)):
            store.remove()
            return None
        ended = _sweep(store)
        store.remove()
    return ended


def _sweep(store: Store) -> int:
    """Remove whatever a lab of this name left: processes, cables, bridges, namespaces."""
    name = store.name
    directory = netns_dir()
    names = directory.names(netns_pattern(name))
    if not names:
        return _forget_names(directory, names, store)
    if not any(directory.is_mounted(n) for n in names):
        return _forget_names(directory, names, store)
    if not netns.has_admin():
        raise LabError(f"cannot take lab '{name}' down: it was made by root, be root")
    ended = netns.kill_all(lambda: directory.pids(names))
    thread = NsThread(f"sweep-{name}")
    fabric = Fabric(LabSpec(name=name), directory)
    try:
        if netns_name(name, FAB) in names:
            # A namespace whose making was interrupted cannot be entered, and holds nothing.
            with contextlib.suppress(OSError):
                thread.call(fabric.unplug_all)
        thread.call(fabric.close)
    finally:
        thread.close()
    _forget_names(directory, names, store)
    return ended


def _forget_names(directory: NsDir, names: list[str], store: Store) -> int:
    """Remove the names, and the directory if a lab made it; no process is ended for that."""
    for each in names:
        directory.remove(each)
    mark = _made_mark(store)
    if mark.exists() and directory.remove_dir():
        mark.unlink(missing_ok=True)
    return 0


def _made_mark(store: Store) -> Path:
    """Says that a lab made the directory of named namespaces, so the last one removes it."""
    return store.dir / "made-netns-dir"


def _load_or_none(store: Store) -> LabState | None:
    """The state, or None when it is not readable: what it described is found by name."""
    try:
        return store.load()
    except LabError:
        return None


def _all_there(state: LabState) -> bool:
    """Whether every namespace exists, and is one (not only a name left by a restart)."""
    directory = netns_dir()
    names = {netns_name(state.spec.name, n) for n in [FAB, *state.spec.node_names()]}
    if not names <= set(directory.names(netns_pattern(state.spec.name))):
        return False
    return all(directory.is_mounted(n) for n in names)


def _hosts_file(spec: LabSpec) -> str:
    """The host's own names, then each node's by its management address."""
    try:
        text = Path("/etc/hosts").read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        text = "127.0.0.1 localhost"
    rows = [f"{mgmt_address(i)} n{i}" for i in range(spec.nodes)]
    return "\n".join([text, *rows]) + "\n"
