"""The shim as a library with NCCL's name: what it lacks, and one made anew for a newer NCCL. And
how a running process reaches NCCL."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from r2ccl_ctl import paths
from r2ccl_ctl.elf import ElfError, exported_functions
from r2ccl_ctl.errors import R2Error, R2UsageError

_NAME = re.compile(r"nccl[A-Z]\w*")
_SECOND = re.compile(r"pnccl[A-Z]\w*")
BUILD_S = 120


def nccl_functions(library: Path) -> set[str]:
    """NCCL's public functions in a library; an error when it is no NCCL."""
    try:
        found = {name for name in exported_functions(library) if _NAME.fullmatch(name)}
    except ElfError as err:
        raise R2UsageError(f"--nccl: {err}") from err
    if "ncclCommInitRank" not in found:
        raise R2UsageError(f"--nccl '{library}' is no NCCL: it has no ncclCommInitRank")
    if _is_named_shim(library):
        raise R2UsageError(
            f"--nccl '{library}' is R2CCL's own library with NCCL's name: give NCCL's libnccl.so.2"
        )
    return found


def lacking(nccl: Path, shim: Path | None = None) -> list[str]:
    """Functions of this NCCL that the library with NCCL's name does not pass on."""
    have = exported_functions(shim or paths.named_shim_path())
    return sorted(nccl_functions(nccl) - have)


def stubs(names: list[str], header: Path) -> str:
    """C source that passes these functions on."""
    rows = "\n".join(f"R2_RAW_STUB({name})" for name in names)
    return f'#include "{header}"\n\n{rows}\n'


def _check_place(output: Path) -> None:
    """Before the compiler works for nothing. A folder that is not there may be a slip."""
    try:
        if stat.S_ISDIR(output.stat().st_mode):
            raise R2UsageError(
                f"--output '{output}' is a folder: name the file, libnccl.so.2, as well"
            )
    except FileNotFoundError:
        folder = output.parent
        if not folder.is_dir():
            raise R2UsageError(
                f"--output '{output}': there is no folder '{folder}'; make it first (mkdir -p)"
            ) from None
    except OSError as err:
        raise R2UsageError(f"--output '{output}' cannot be written: {err.strerror}") from err


def build(nccl: Path, output: Path) -> list[str]:
    """Writes a shim that passes on every function of this NCCL; returns those that were added."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        raise R2Error("no C compiler: install gcc, or set CC")
    known = exported_functions(paths.named_shim_path())
    every = nccl_functions(nccl) | {
        name for name in exported_functions(nccl) if _SECOND.fullmatch(name)
    }
    added = sorted(every - known)
    _check_place(output)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "stubs.c"
        source.write_text(stubs(added, paths.stubs_header()), encoding="utf-8")
        made = Path(folder) / "libnccl.so.2"
        command = [
            *compiler.split(), "-shared", "-fPIC", "-O2", "-fvisibility=hidden",
            "-Wl,-soname,libnccl.so.2", "-Wl,-z,nodelete", "-Wl,-z,defs", "-o", str(made),
            str(paths.shim_object()), str(source), "-pthread", "-ldl", "-lrt", "-lm",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_S, check=False
            )
        except OSError as err:
            raise R2Error(f"{compiler} cannot be run: {err.strerror}") from err
        except subprocess.TimeoutExpired:
            raise R2Error(f"{compiler} was not done after {BUILD_S} s") from None
        if done.returncode:
            raise R2Error(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        try:
            shutil.copy2(made, output)
        except OSError as err:
            raise R2UsageError(f"--output '{output}' cannot be written: {err.strerror}") from err
    return added


@dataclass
class Reach:
    """How a process reaches NCCL. statically: files that seem to contain an NCCL of their own."""

    pid: int
    shim: str = ""
    plugin: str = ""
    nccl: list[str] = field(default_factory=list)
    statically: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """One line, with a remedy where there is one."""
        if self.statically and not self.nccl:
            return (
                f"{Path(self.statically[0]).name} contains an NCCL of its own, which no shim "
                "reaches: start it with `r2ccl-ctl run`, which brings the plugin alone"
            )
        if not self.nccl:
            return "no NCCL is loaded (yet)"
        if not self.shim:
            return (
                "NCCL runs over R2CCL's plugin, without the shim"
                if self.plugin
                else "NCCL runs without R2CCL: start it with LD_PRELOAD=libr2ccl.so"
            )
        if not self.plugin:
            return (
                "the shim is loaded and no NCCL call has reached it: nothing was called yet, "
                "another network was asked for (see the process's warnings), or the program opens "
                "NCCL with dlopen, which needs R2CCL_DLSYM=1"
            )
        return "NCCL runs over R2CCL's plugin, with the shim"


def reach(pid: int, *, proc: Path = Path("/proc")) -> Reach:
    """What the process has mapped; R2Error when it may not be looked at."""
    try:
        text = (proc / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise R2UsageError(f"--pid {pid}: no such process") from None
    except OSError as err:
        raise R2Error(f"pid {pid} cannot be looked at ({err.strerror}): use sudo") from err
    files = dict.fromkeys(
        line.split(maxsplit=5)[5].removesuffix(" (deleted)")
        for line in text.splitlines()
        if len(line.split(maxsplit=5)) == 6 and "/" in line
    )
    found = Reach(pid)
    for name in files:
        base = Path(name).name
        if base == paths.SHIM or (base.startswith("libnccl.so") and _is_named_shim(Path(name))):
            found.shim = name
        elif base == paths.PLUGIN:
            found.plugin = name
        elif base.startswith("libnccl.so"):
            found.nccl.append(name)
        elif _contains_nccl(Path(name)):
            found.statically.append(name)
    return found


def _is_named_shim(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        return _search(file.fileno(), b"r2ccl_shim_named")
    return False


def _contains_nccl(path: Path) -> bool:
    """NCCL's code names this variable; ours, and what only calls NCCL, does not."""
    if path.suffix not in ("", ".so") and ".so." not in path.name:
        return False
    if path.name.startswith("libr2ccl"):
        return False
    with contextlib.suppress(OSError):
        if not path.is_file():
            return False
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        return _search(file.fileno(), b"NCCL_NET_PLUGIN_REF_COUNT") or _search(
            file.fileno(), b"NCCL_P2P_NET_CHUNKSIZE"
        )
    return False


def _search(fd: int, what: bytes) -> bool:
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        return data.find(what) >= 0
