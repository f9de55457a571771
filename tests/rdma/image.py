"""Assembles the guest's initramfs: modules, tools, the project's programs and the shared libraries
that all of these need. Written directly in cpio's `newc` format, uncompressed (an emulated CPU
unpacks slower than qemu reads)."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from tests.rdma import parts
from tests.rdma.parts import Missing, Parts

PROVIDERS = "usr/lib/x86_64-linux-gnu/libibverbs"


class Cpio:
    """A cpio archive of the `newc` format; parents are made on the way, all owned by root."""

    def __init__(self, to: BinaryIO) -> None:
        self.to = to
        self.inode = 0
        self.known: set[str] = set()

    def _entry(self, path: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        self.inode += 1
        name = path.encode() + b"\0"
        fields = (self.inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields)
        self.to.write(head + name + b"\0" * (-(len(head) + len(name)) % 4))
        self.to.write(data + b"\0" * (-len(data) % 4))
        self.known.add(path)

    def _parents(self, path: str) -> None:
        folders = Path(path).parents
        for folder in reversed([str(f) for f in folders if str(f) != "."]):
            self.folder(folder)

    def folder(self, path: str) -> None:
        if path not in self.known:
            self._parents(path)
            self._entry(path, stat.S_IFDIR | 0o755, b"")

    def file(self, path: str, data: bytes, mode: int = 0o755) -> None:
        if path not in self.known:
            self._parents(path)
            self._entry(path, stat.S_IFREG | mode, data)

    def link(self, path: str, target: str) -> None:
        if path not in self.known:
            self._parents(path)
            self._entry(path, stat.S_IFLNK | 0o777, target.encode())

    def device(self, path: str, major: int, minor: int) -> None:
        self._parents(path)
        self._entry(path, stat.S_IFCHR | 0o600, b"", (major, minor))

    def close(self) -> None:
        self._entry("TRAILER!!!", 0, b"")


def libraries(program: Path, folders: Iterable[Path]) -> dict[str, Path]:
    """Path in the guest -> file, for all shared libraries of `program` and its loader."""
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(str(folder) for folder in folders)}
    done = subprocess.run(
        ["ldd", str(program)], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    found: dict[str, Path] = {}
    for line in done.stdout.splitlines():
        match = re.match(r"\s*(?:(\S+) => )?(/\S+|not found)", line)
        if match is None:
            continue
        name, path = match.groups()
        if path == "not found":
            raise Missing(f"{program.name} needs {name}, which is neither here nor in the packages")
        if name is None or name.startswith("/"):
            found[(name or path).lstrip("/")] = Path(path)
        else:
            found[f"usr/lib/x86_64-linux-gnu/{name}"] = Path(path)
    return found


def _library_folders(given: Parts) -> list[Path]:
    names = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")
    return [p.files / n for p in given.packages for n in names if (p.files / n).is_dir()]


def _put_modules(cpio: Cpio, kernel: Path) -> None:
    files = parts.module_files(kernel)
    cache: dict[str, bytes] = {}

    def depends(name: str) -> list[str]:
        if name not in files:
            raise Missing(f"the kernel package has no module {name}")
        cache[name] = parts.module_bytes(files[name])
        return parts.module_depends(cache[name])

    order = parts.module_order(parts.MODULES, depends)
    for name in order:
        cpio.file(f"modules.d/{name}.ko", cache[name], 0o644)
    cpio.file("modules", "".join(f"/modules.d/{name}.ko\n" for name in order).encode(), 0o644)


def write(given: Parts, agent: Path, programs: dict[str, Path], to: Path) -> None:
    """Writes the initramfs. `programs`: path in the guest -> file here (programs, libraries)."""
    folders = _library_folders(given)
    wanted: dict[str, Path] = {"bin/busybox": given.find("bin/busybox")}
    for name in ("ibv_devinfo", "ibv_devices"):
        wanted[f"usr/bin/{name}"] = given.find(f"usr/bin/{name}")
    for name in ("ip", "tc", "rdma"):
        wanted[f"usr/sbin/{name}"] = parts.host_program(name, "iproute2")
    # A static busybox's own shell prefers its own `ip`.
    wanted["bin/sh"] = parts.host_program("dash", "dash")
    for path in sorted(given.find(PROVIDERS).glob("librxe-*.so")):
        wanted[f"{PROVIDERS}/{path.name}"] = path
    wanted["usr/lib/x86_64-linux-gnu/libibverbs.so.1"] = given.find(
        "usr/lib/x86_64-linux-gnu/libibverbs.so.1"
    )
    wanted.update(programs)
    scratch = to.with_suffix(f".{os.getpid()}")
    with scratch.open("wb") as stream:
        cpio = Cpio(stream)
        cpio.device("dev/console", 5, 1)
        for folder in ("proc", "sys", "tmp", "run", "etc"):
            cpio.folder(folder)
        cpio.file("init", agent.read_bytes())
        cpio.link("lib", "usr/lib")
        cpio.link("lib64", "usr/lib64")
        cpio.file("etc/passwd", b"root:x:0:0:root:/tmp:/bin/sh\n", 0o644)
        cpio.file("etc/hosts", b"127.0.0.1 localhost\n", 0o644)
        cpio.file("etc/libibverbs.d/rxe.driver", b"driver rxe\n", 0o644)
        needed: dict[str, Path] = {}
        for name, path in wanted.items():
            needed.update(libraries(path, folders))
            cpio.file(name, path.read_bytes())
        for name, path in needed.items():
            cpio.file(re.sub("^(lib|lib64)/", r"usr/\1/", name), path.read_bytes())
        for applet in applets(wanted["bin/busybox"]):
            if applet not in ("ip", "tc", "sh", "ash"):
                cpio.link(f"bin/{applet}", "busybox")
        _put_modules(cpio, given.kernel.files)
        cpio.close()
    scratch.replace(to)


def applets(busybox: Path) -> list[str]:
    done = subprocess.run(
        [str(busybox), "--list"], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.split()
