"""The NICs of this host, as a job that is started from here would choose them. The built plugin
answers, so that the choice and the order are the engine's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cffi

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.gpus import Device, hops, shared
from r2ccl_ctl.rows import Nic

_CDEF = """
char *r2ccl_nics_json(void);
int r2ccl_nics_order(int n, const char *const *pci_paths, const int *numa, const int *weights,
                     int home, int *order);
void free(void *);
"""


class Placed(Device, Protocol):
    """A NIC, as far as the order of spilling over depends on it."""

    @property
    def weight(self) -> int: ...


@dataclass(frozen=True)
class HostNic:
    """A NIC that a job would use. numa: None where it is not known; speed_mbps: 0 likewise."""

    name: str
    ifname: str
    addr: str
    prefixlen: int
    mtu: int
    speed_mbps: int
    numa: int | None
    pci_path: str
    rdma: str
    rdma_port: int
    weight: int
    rail: int
    link_up: bool
    loopback: bool


@dataclass(frozen=True)
class HostNics:
    """others: interface -> why a job would not use it. error: what the plugin says of its list."""

    nics: tuple[HostNic, ...]
    others: dict[str, str]
    error: str


def load(plugin: Path | None = None) -> HostNics:
    """The NICs that this process's environment chooses."""
    ffi, library = _open(plugin)
    text = library.r2ccl_nics_json()
    if text == ffi.NULL:
        raise R2Error("the plugin has no memory left to list the NICs")
    try:
        raw: Any = ffi.string(text)
    finally:
        library.free(text)
    return parse(raw.decode("utf-8", errors="replace"))


def parse(text: str) -> HostNics:
    found = json.loads(text)
    nics = []
    for row in found["nics"]:
        known = {name: row[name] for name in HostNic.__dataclass_fields__}
        known["numa"] = row["numa"] if row["numa"] >= 0 else None
        nics.append(HostNic(**known))
    others = {row["name"]: row["why"] for row in found["others"]}
    return HostNics(tuple(nics), others, found["error"])


def spill_order(nics: Sequence[Placed], home: int) -> list[int]:
    """In which order the NICs serve a connection whose home is `home`: that one is first."""
    ffi, library = _open(None)
    texts = [ffi.new("char[]", nic.pci_path.encode()) for nic in nics]
    order = ffi.new("int[]", len(nics))
    numa = [-1 if nic.numa is None else nic.numa for nic in nics]
    code = library.r2ccl_nics_order(
        len(nics), ffi.new("char *[]", texts), numa, [nic.weight for nic in nics], home, order
    )
    if code:
        raise R2Error(f"no order of {len(nics)} NICs from number {home} on")
    return list(order)


NEARNESS = ("same switch", "same NUMA node", "across", "spare")


def spill_names(nics: Sequence[Nic | HostNic], home: int) -> list[str]:
    """Names of the NICs that take over from NIC number `home`, nearest first; none where this
    installation has no plugin to ask."""
    try:
        return [nics[i].name for i in spill_order(nics, home)[1:]]
    except R2Error:
        return []


def why_near(home: Placed, other: Placed) -> str:
    """How near `other` is to `home`, in the words of the order."""
    if not other.weight:
        return "spare"
    if home.pci_path and shared(hops(home.pci_path), hops(other.pci_path)) > 1:
        return "same switch"
    return "same NUMA node" if home.numa == other.numa else "across"


_OPENED: dict[Path, tuple[cffi.FFI, Any]] = {}


def _open(plugin: Path | None) -> tuple[cffi.FFI, Any]:
    path = plugin or paths.plugin_path()
    if path not in _OPENED:
        ffi = cffi.FFI()
        ffi.cdef(_CDEF)
        try:
            library: Any = ffi.dlopen(str(path))
            for name in ("r2ccl_nics_json", "r2ccl_nics_order"):
                getattr(library, name)
        except (OSError, AttributeError) as err:
            raise R2Error(f"{path} does not tell its NICs: {err}; build it again") from err
        _OPENED[path] = (ffi, library)
    return _OPENED[path]
