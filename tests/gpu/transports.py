"""The transports under comparison: which environment makes NCCL use each."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# NVLink multicast stays off: a program that uses it can hang GPUs that others share.
COMMON = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class TransportError(Exception):
    """A transport that cannot be used here; the text says what is missing."""


@dataclass(frozen=True)
class Variant:
    """A named transport with its settings.

    base: r2ccl (the plugin named to NCCL), preload (libr2ccl.so alone), sockets or fastsocket.
    """

    name: str
    base: str
    settings: dict[str, str] = field(default_factory=dict)


def _socks(threads: int, per_thread: int, **more: str) -> dict[str, str]:
    return {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(per_thread), **more}


VARIANTS = {
    v.name: v
    for v in (
        Variant("r2ccl", "r2ccl"),
        Variant("preload", "preload"),
        Variant("dlopen", "preload", {"R2CCL_DLSYM": "1"}),
        # Nothing preloaded: the program is given the path of our library with NCCL's name.
        Variant("named", "preload", {"LD_PRELOAD": ""}),
        Variant("plan", "preload", {"R2CCL_PLAN": "auto", "R2CCL_PLAN_HOLD": "1s"}),
        Variant("r2ccl-verify", "r2ccl", {"R2CCL_VERIFY": "1"}),
        Variant("sockets", "sockets"),
        Variant("sockets-4x2", "sockets", _socks(4, 2)),
        Variant("sockets-2x4", "sockets", _socks(2, 4)),
        Variant("sockets-8x2", "sockets", _socks(8, 2)),
        Variant("sockets-4x2-8ch", "sockets", _socks(4, 2, NCCL_MIN_NCHANNELS="8")),
        Variant("fastsocket", "fastsocket"),
        Variant("fastsocket-4x2", "fastsocket", _socks(4, 2)),
    )
}
BASES = ("r2ccl", "preload", "sockets", "fastsocket")
OURS = ("r2ccl", "preload")  # that run our plugin and have its journal


def parse_variant(text: str) -> Variant:
    """A known name, or NAME=BASE:KEY=VALUE:KEY=VALUE for one of your own."""
    if text in VARIANTS:
        return VARIANTS[text]
    name, eq, rest = text.partition("=")
    base, *pairs = rest.split(":")
    if not eq or base not in BASES or any("=" not in pair for pair in pairs):
        raise TransportError(
            f"variant '{text}' is not known: choose from {', '.join(VARIANTS)}, or write "
            f"NAME=BASE:KEY=VALUE with BASE one of {', '.join(BASES)}"
        )
    return Variant(name, base, dict(pair.split("=", 1) for pair in pairs))


def required(name: str) -> str:
    """An environment variable that has to be set."""
    value = os.environ.get(name)
    if not value:
        raise TransportError(f"{name} is not set: see tests/gpu/README.md")
    return value


def default_plugin() -> Path:
    return Path(os.environ.get("R2CCL_PLUGIN", ROOT / "build" / "libnccl-net-r2ccl.so"))


def library_path(*places: Path | None) -> str:
    """LD_LIBRARY_PATH with these directories in front of what is there."""
    parts = [str(p) for p in places if p is not None]
    return ":".join([*parts, *filter(None, [os.environ.get("LD_LIBRARY_PATH", "")])])


def find_nccl() -> Path | None:
    """The directory of libnccl.so.2: $NCCL_LIB, or that of the wheel PyTorch uses."""
    named = os.environ.get("NCCL_LIB")
    if named:
        return Path(named)
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "lib" / "libnccl.so.2").exists():
            return Path(place) / "lib"
    return None


def transport_env(variant: Variant, nics: str = "nic", oob: str = "mgmt0") -> dict[str, str]:
    """The environment of one variant. nics: prefix of the NICs' names; oob: for NCCL's bootstrap.

    NCCL's sockets and FastSocket take the interfaces of the bootstrap for the data as well, so
    there the bootstrap runs over the first NIC.
    """
    env = dict(COMMON)
    if variant.base == "sockets":
        env |= {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none", "NCCL_SOCKET_IFNAME": nics}
    elif variant.base == "fastsocket":
        path = os.environ.get("FASTSOCKET", "")
        if not Path(path).is_file():
            raise TransportError(
                f"variant {variant.name}: FASTSOCKET='{path}' is no file; set it to the path of "
                "libnccl-net-fastsocket.so (built from google/nccl-fastsocket)"
            )
        env |= {"NCCL_NET": "FastSocket", "NCCL_NET_PLUGIN": path, "NCCL_SOCKET_IFNAME": nics}
    elif variant.base == "preload":
        shim = default_plugin().with_name("libr2ccl.so")
        if not shim.is_file():
            raise TransportError(
                f"variant {variant.name}: {shim} does not exist; run `make native`"
            )
        env |= {"LD_PRELOAD": str(shim), "NCCL_SOCKET_IFNAME": oob, "R2CCL_NICS": nics + "*"}
    else:
        plugin = default_plugin()
        if not plugin.is_file():
            raise TransportError(
                f"variant {variant.name}: {plugin} does not exist; run `make native`, or set "
                "R2CCL_PLUGIN to the library"
            )
        # NCCL_NET makes a silent fall-back to other transports an error. NCCL 2.27.3 to 2.29.7
        # forget a plugin's name when they unload it; a reference keeps it loaded.
        env |= {"NCCL_NET": "R2CCL", "NCCL_NET_PLUGIN": str(plugin),
                "NCCL_NET_PLUGIN_REF_COUNT": "1", "NCCL_SOCKET_IFNAME": oob,
                "R2CCL_NICS": nics + "*"}
    return env | variant.settings
