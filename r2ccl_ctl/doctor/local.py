"""Checks of one host. Each takes the facts that it judges, so that a test can make them up."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from r2ccl_ctl import env as environment
from r2ccl_ctl import paths, settings_view
from r2ccl_ctl.doctor.finding import Finding
from r2ccl_ctl.doctor.program import check_program
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.hostnics import HostNic, HostNics, load
from r2ccl_ctl.units import show_bytes

FILES_WANTED = 4096
SHM_WANTED = 64 << 20
ANSWER_S = 20.0
NCCL_FIRST = (2, 18)
NCCL_BY_PATH = (2, 21)
_NCCL_NAME = re.compile(rb"NCCL_[A-Z0-9_]{2,60}")
_NET_API = re.compile(rb"\0ncclNetPlugin_v(\d+)(?=\0)")
_GLIBC = re.compile(rb"\0GLIBC_(\d+\.\d+)(?=\.\d+\0|\0)")
_VERSION = (
    "import ctypes, sys; n = ctypes.c_int(); "
    "ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(n)); print(n.value)"
)


def check_all(command: Sequence[str] = ()) -> tuple[HostNics, list[Finding]]:
    """The NICs of this host, and all findings about it, and about a command to be started there."""
    base = os.environ
    try:
        nics = load()
    except R2Error as err:
        absent = Finding("error", "plugin", str(err), "build or install R2CCL on this host")
        return HostNics((), {}, str(err)), [absent]
    library = find_nccl(base)
    found = check_nics(nics)
    found += check_subnets(nics.nics, read_sysctl)
    found += check_limits(nics.nics)
    found += check_nccl(library)
    found += check_plugin(paths.plugin_path())
    found += check_preload()
    found += check_variables(base, nccl_names(library))
    found += check_rdma(nics.nics)
    found += check_program(command)
    return nics, found


# NICs


def check_nics(found: HostNics) -> list[Finding]:
    """Which NICs are used, and why each other one is not."""
    out = []
    if found.error:
        severity = "warning" if found.nics else "error"
        out.append(
            Finding(severity, "nics", found.error, "correct R2CCL_NICS or NCCL_SOCKET_IFNAME")
        )
    elif not found.nics:
        out.append(Finding("error", "nics", "there is no NIC to use", "give one an address"))
    for nic in found.nics:
        speed = f"{nic.speed_mbps} Mbit/s" if nic.speed_mbps else "speed unknown"
        out.append(Finding("ok", "nics", f"{nic.name} is used: {nic.addr}, {speed}, MTU {nic.mtu}"))
        if not nic.link_up:
            remedy = f"check its cable, or leave it out: R2CCL_NICS=^{nic.ifname}"
            out.append(Finding("warning", "link", f"{nic.name} has no link", remedy))
        if nic.loopback:
            remedy = "name the NICs to use in R2CCL_NICS"
            out.append(Finding("warning", "nics", f"{nic.name} is a loopback", remedy))
        if nic.weight == 0:
            text = f"{nic.name} is a spare: it has less than a tenth of the fastest NIC's speed"
            out.append(Finding("note", "nics", text))
    out += [Finding("note", "nics", f"{n} is not used: {why}") for n, why in found.others.items()]
    if len(found.nics) == 1:
        text = f"{found.nics[0].name} is the only NIC: no other one can take over"
        out.append(Finding("warning", "nics", text, "add NICs to R2CCL_NICS if there are more"))
    mtus = {nic.mtu for nic in found.nics if not nic.loopback}
    if len(mtus) > 1:
        text = "the MTUs differ: " + ", ".join(f"{nic.name} {nic.mtu}" for nic in found.nics)
        remedy = f"ip link set dev NIC mtu {max(mtus)}, on the switch as well"
        out.append(Finding("warning", "mtu", text, remedy))
    return out


def network(nic: HostNic) -> str:
    """Its subnet as text."""
    address = nic.addr.partition("%")[0]
    return str(ipaddress.ip_network(f"{address}/{nic.prefixlen}", strict=False))


def read_sysctl(name: str) -> int | None:
    """A number below /proc/sys; None where there is none."""
    try:
        return int(Path("/proc/sys", name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def check_subnets(nics: Sequence[HostNic], sysctl: Callable[[str], int | None]) -> list[Finding]:
    """NICs that share an IPv4 subnet need the kernel to keep their packets apart."""
    groups: dict[str, list[HostNic]] = {}
    for nic in nics:
        if not nic.loopback and ":" not in nic.addr:
            groups.setdefault(network(nic), []).append(nic)
    out = []
    for subnet, members in groups.items():
        if len(members) < 2:
            continue
        names = ", ".join(nic.name for nic in members)
        out.append(Finding("note", "subnet", f"{names} share the subnet {subnet}"))
        for nic in members:
            out += _kernel_settings(nic.ifname, sysctl)
    return out


def _kernel_settings(ifname: str, sysctl: Callable[[str], int | None]) -> list[Finding]:
    # The kernel takes the larger one of "all" and the interface's own.
    def value(name: str) -> int:
        both = (sysctl(f"net/ipv4/conf/{who}/{name}") for who in ("all", ifname))
        return max((number for number in both if number is not None), default=0)

    out = []
    # sysctl(8) takes / as the separator where a name has a dot in it.
    key = f"net/ipv4/conf/{ifname}" if "." in ifname else f"net.ipv4.conf.{ifname}"
    dot = "/" if "." in ifname else "."
    if value("rp_filter") == 1:
        text = f"rp_filter of {ifname} is 1 (strict): it drops packets of its own subnet"
        out.append(Finding("warning", "rp_filter", text, f"sysctl -w {key}{dot}rp_filter=2"))
    if value("arp_ignore") < 1:
        text = f"arp_ignore of {ifname} is 0: it answers ARP requests for the other NICs"
        remedy = f"sysctl -w {key}{dot}arp_ignore=1 {key}{dot}arp_announce=2"
        out.append(Finding("warning", "arp_ignore", text, remedy))
    return out


# What the process may use


def check_limits(nics: Sequence[HostNic]) -> list[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        stat = os.statvfs("/dev/shm")
        shm: int | None = stat.f_bavail * stat.f_frsize if os.access("/dev/shm", os.W_OK) else None
    except OSError:
        shm = None
    rdma = any(nic.rdma for nic in nics)
    return judge_limits(_or_none(files), _or_none(locked), shm, rdma=rdma)


def _or_none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def judge_limits(
    files: int | None, locked: int | None, shm: int | None, *, rdma: bool
) -> list[Finding]:
    """files, locked: None for no limit. shm: bytes free, None where nothing can be written."""
    out = []
    if files is not None and files < FILES_WANTED:
        text = f"a process may open {files} files; a large job needs more sockets"
        out.append(Finding("warning", "files", text, "ulimit -n 65536 in the job script"))
    if rdma and locked is not None:
        text = f"a process may lock {show_bytes(locked)} of memory; RDMA needs more"
        out.append(Finding("warning", "memlock", text, "ulimit -l unlimited in the job script"))
    if shm is None:
        text = "/dev/shm cannot be written: r2ccl-ctl will not see the job"
        out.append(Finding("warning", "shm", text, "mount a tmpfs at /dev/shm"))
    elif shm < SHM_WANTED:
        text = f"/dev/shm has {show_bytes(shm)} left"
        remedy = "give the container more (docker run --shm-size=1g), or r2ccl-ctl gc"
        out.append(Finding("warning", "shm", text, remedy))
    return out or [Finding("ok", "limits", "files, locked memory and /dev/shm suffice")]


# NCCL


def find_nccl(base: Mapping[str, str]) -> Path | None:
    """The NCCL that a program started from here would load, as far as that can be seen."""
    real = base.get("R2CCL_REAL_NCCL") or settings_view.from_file("R2CCL_REAL_NCCL")[0]
    folders = [f for f in base.get("LD_LIBRARY_PATH", "").split(":") if f]
    candidates = [Path(real)] if real else []
    candidates += [Path(folder, "libnccl.so.2") for folder in folders]
    candidates += [Path(entry, "nvidia/nccl/lib/libnccl.so.2") for entry in sys.path if entry]
    candidates += _cached()
    ours = paths.native_dir() / "nccl"
    return next((c for c in candidates if c.is_file() and c.resolve().parent != ours), None)


def _cached() -> list[Path]:
    """What ldconfig has in its cache."""
    for tool in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            done = subprocess.run(
                [tool, "-p"], capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        return [Path(p) for p in re.findall(r"libnccl\.so\.2 .*=> (\S+)", done.stdout)]
    return []


def nccl_version(library: Path) -> tuple[int, int] | None:
    """Asked in a process of its own: a library may do anything when it is loaded."""
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _VERSION, str(library)],
            capture_output=True, text=True, timeout=ANSWER_S, check=False, env=bare,
        )  # fmt: skip
        number = int(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return (number // 10000, number // 100 % 100) if number >= 10000 else (2, number // 100 % 10)


def check_nccl(library: Path | None) -> list[Finding]:
    if library is None:
        remedy = "name it in R2CCL_REAL_NCCL if the application does not bring its own"
        return [Finding("note", "nccl", "no libnccl.so.2 was found from here", remedy)]
    version = nccl_version(library)
    if version is None:
        remedy = "start the program that uses it with NCCL_DEBUG=VERSION"
        return [Finding("warning", "nccl", f"{library} does not tell its version", remedy)]
    text = f"{library} is NCCL {version[0]}.{version[1]}"
    if version < NCCL_FIRST:
        return [Finding("error", "nccl", text, "R2CCL needs NCCL 2.18 or later: update it")]
    if version < NCCL_BY_PATH:
        return [Finding("note", "nccl", text, "start the job with r2ccl-ctl run --by-name")]
    return [Finding("ok", "nccl", text)]


def check_plugin(plugin: Path) -> list[Finding]:
    """What NCCL looks for in the plugin, and the glibc that it needs."""
    data = plugin.read_bytes()
    versions = sorted({int(number) for number in _NET_API.findall(data)})
    if not versions:
        text = f"{plugin} has no ncclNetPlugin symbol: NCCL will not use it"
        return [Finding("error", "plugin", text, "build or install R2CCL again")]
    text = f"{plugin} has net API v{versions[0]} to v{versions[-1]}"
    needs = max((tuple(map(int, n.split(b"."))) for n in _GLIBC.findall(data)), default=None)
    if needs:
        have = (os.confstr("CS_GNU_LIBC_VERSION") or "unknown").removeprefix("glibc ")
        text += f"; it needs glibc {needs[0]}.{needs[1]}, here is {have}"
    return [Finding("ok", "plugin", text)]


def check_preload() -> list[Finding]:
    """The loader takes the shim: its glibc and its libraries are there."""
    try:
        shim = paths.shim_path()
    except R2Error as err:
        return [Finding("note", "preload", str(err), "r2ccl-ctl build")]
    try:
        done = subprocess.run(
            [sys.executable, "-c", ""], capture_output=True, text=True, timeout=ANSWER_S,
            check=False, env={**os.environ, "LD_PRELOAD": str(shim)},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        return [Finding("error", "preload", f"no program starts with {shim}: {err}")]
    if done.returncode or "ld.so" in done.stderr:
        why = done.stderr.strip()[-300:] or f"it ended with code {done.returncode}"
        remedy = "use a build for this system's glibc: r2ccl-ctl build"
        return [Finding("error", "preload", f"{shim} cannot be preloaded: {why}", remedy)]
    return [Finding("ok", "preload", f"a program starts with LD_PRELOAD={shim}")]


# Variables


def nccl_names(library: Path | None) -> set[str]:
    """The variables that this NCCL knows, read out of the library; none where there is none."""
    try:
        data = library.read_bytes() if library else b""
    except OSError:
        return set()
    return {name.decode() for name in _NCCL_NAME.findall(data)}


def check_variables(base: Mapping[str, str], known: set[str]) -> list[Finding]:
    """Misspelt names, bad values, and what contradicts itself. `known`: NCCL's names."""
    out = [Finding("warning", "variables", text) for text in settings_view.complaints({})]
    hindered = environment.hindrances(base) + environment.hindrances_in_files(base)
    out += [Finding("error", "variables", text) for text in hindered]
    out += [
        Finding("note", "variables", t) for t in environment.warnings(base) if t not in hindered
    ]
    out += check_env_plugin(base)
    out += [_misspelt(name, known) for name in _strangers(base, known)]
    nics = base.get("R2CCL_NICS") or settings_view.from_file("R2CCL_NICS")[0]
    if nics and base.get("NCCL_SOCKET_IFNAME"):
        text = "R2CCL_NICS and NCCL_SOCKET_IFNAME are both set: R2CCL obeys the first one"
        out.append(Finding("note", "variables", text, "NCCL's bootstrap obeys the other"))
    return out or [Finding("ok", "variables", "no variable is misspelt or contradicts another")]


def check_env_plugin(base: Mapping[str, str]) -> list[Finding]:
    name = base.get("NCCL_ENV_PLUGIN", "")
    if not name or name.lower() == "none":
        return []
    text = f"NCCL_ENV_PLUGIN={name} may set NCCL's variables when a job starts: not seen here"
    remedy = 'with NCCL_DEBUG=INFO a job must say "Using network R2CCL"'
    return [Finding("note", "variables", text, remedy)]


def _strangers(base: Mapping[str, str], known: set[str]) -> Iterable[str]:
    honoured = {s.name for s in settings_view.load()}
    for name in sorted(base):
        if known and name.startswith("NCCL_") and name not in known | honoured:
            yield name


def _misspelt(name: str, known: set[str]) -> Finding:
    near = difflib.get_close_matches(name, known, 1, 0.8)
    remedy = f"did you mean {near[0]}?" if near else "unset it, unless a plugin reads it"
    return Finding("warning" if near else "note", "variables", f"NCCL does not know {name}", remedy)


# RDMA


def check_rdma(nics: Sequence[HostNic], sysfs: Path = Path("/sys")) -> list[Finding]:
    out = []
    for nic in nics:
        if not nic.rdma:
            continue
        port = sysfs / "class/infiniband" / nic.rdma / "ports" / str(nic.rdma_port or 1)
        gids = sorted((port / "gids").glob("*")) if (port / "gids").is_dir() else []
        if any(_has_gid(gid) for gid in gids):
            out.append(Finding("ok", "rdma", f"{nic.rdma} of {nic.name} has a GID"))
        else:
            remedy = f"give {nic.ifname} an address, or check the driver (ibv_devinfo)"
            out.append(Finding("warning", "rdma", f"{nic.rdma} of {nic.name} has no GID", remedy))
    if out and not (sysfs / "module/nvidia_peermem").is_dir():
        text = "the module nvidia_peermem is not loaded: GPU memory goes over host buffers"
        out.append(Finding("note", "rdma", text, "modprobe nvidia_peermem, unless dma-buf serves"))
    return out


def _has_gid(file: Path) -> bool:
    try:
        return bool(set(file.read_text(encoding="ascii").strip()) - set("0:"))
    except OSError:
        return False
