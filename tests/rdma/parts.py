"""Where the parts of a guest come from: Debian packages, fetched with apt-get and unpacked below
build/rdma without being installed, and programs of this machine. Nothing here needs privileges.

A part that cannot be had raises `Missing`, whose text names it, the reason and the remedy; callers
skip with it. What was unpacked once is used again until the archive offers another version.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "build" / "rdma"
FETCH_SECONDS = 300
REMEMBER_SECONDS = 24 * 3600

# Modules of the guest. rxe looks for a crc32 by name and does not load it: it comes first.
MODULES = (
    "crc32_generic",
    "virtio_pci",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "veth",
    "sch_netem",
    "sch_ingress",
    "cls_flower",
    "cls_u32",
    "act_gact",
    "ib_uverbs",
    "rdma_rxe",
)
MODULE_FOLDERS = (
    "arch/x86/crypto/",
    "crypto/",
    "drivers/char/",
    "drivers/infiniband/core/",
    "drivers/infiniband/sw/",
    "drivers/net/",
    "drivers/virtio/",
    "lib/",
    "net/",
)
PACKAGES = (
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "libibverbs-dev",
    "libibverbs1",
    "libnl-3-200",
    "libnl-route-3-200",
)


class Missing(Exception):
    """A part of the guest is not there; the text says which, why and what to do."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    files: Path  # its files, as below /


@dataclass(frozen=True)
class Parts:
    qemu: Path
    kernel: Package
    packages: tuple[Package, ...]

    @property
    def vmlinuz(self) -> Path:
        return next(iter(sorted((self.kernel.files / "boot").glob("vmlinuz-*"))))

    def find(self, path: str) -> Path:
        """A file of one of the packages, by its path below /."""
        for package in self.packages:
            if (package.files / path).exists():
                return package.files / path
        raise Missing(f"none of the packages has /{path}")

    def version(self, name: str) -> str:
        return next(p.version for p in (self.kernel, *self.packages) if p.name.startswith(name))


def _command(*words: str, cwd: Path | None = None, seconds: float = 60) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{words[0]} was still running after {seconds:g} s"
    return done.returncode, done.stdout


def _program(name: str, package: str) -> Path:
    search = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    found = shutil.which(name, path=search)
    if found is None:
        raise Missing(f"no {name} in PATH (apt-get install {package})")
    return Path(found)


class Archive:
    """Debian's package archive, as far as this machine reaches it."""

    def __init__(self, store: Path = STORE) -> None:
        self.store = store
        self.options: list[str] = []
        _program("apt-get", "apt")
        _program("dpkg-deb", "dpkg")

    def _own_lists(self) -> None:
        """Package lists of our own, where the machine's are empty (fresh containers)."""
        state = self.store / "apt"
        for folder in ("lists/partial", "cache/archives/partial"):
            (state / folder).mkdir(parents=True, exist_ok=True)
        user = _command("id", "-un")[1].strip()
        self.options = ["-o", f"Dir::State::lists={state}/lists", "-o", f"Dir::Cache={state}/cache"]
        self.options += ["-o", f"APT::Sandbox::User={user}"]
        _command("apt-get", "-qq", *self.options, "update", seconds=FETCH_SECONDS)

    def _show(self, name: str) -> str:
        code, text = _command("apt-cache", *self.options, "show", "--no-all-versions", name)
        return text if code == 0 else ""

    def version(self, name: str) -> str:
        text = self._show(name)
        if not text and not self.options:
            self._own_lists()
            text = self._show(name)
        found = re.search(r"^Version: (\S+)", text, re.MULTILINE)
        if found is None:
            raise Missing(f"the package archive of this machine has no {name}")
        return found.group(1)

    def kernel_name(self) -> str:
        """The package that the metapackage linux-image-amd64 stands for."""
        self.version("linux-image-amd64")
        found = re.search(r"^Depends: (linux-image-[^\s,]+)", self._show("linux-image-amd64"), re.M)
        if found is None:
            raise Missing("linux-image-amd64 does not say which kernel it stands for")
        return found.group(1)

    def fetch(self, name: str, wanted: Callable[[str], bool] = lambda path: True) -> Package:
        """The files of a package for which `wanted` is true, unpacked in the store."""
        version = self.version(name)
        target = self.store / "packages" / f"{name}_{version.replace(':', '%3a')}"
        if not (target / ".complete").exists():
            scratch = target.with_name(f"{target.name}.{os.getpid()}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            try:
                _unpack(self._download(name, version, scratch), scratch / "files", wanted)
                (scratch / ".complete").touch()
                shutil.rmtree(target, ignore_errors=True)
                scratch.rename(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return Package(name, version, target / "files")

    def _download(self, name: str, version: str, folder: Path) -> Path:
        words = ["apt-get", "-qq", *self.options, "-o", "Acquire::Retries=3", "download"]
        code, text = _command(*words, f"{name}={version}", cwd=folder, seconds=FETCH_SECONDS)
        found = sorted(folder.glob("*.deb"))
        if code != 0 or not found:
            last = (text.strip().splitlines() or ["no message"])[-1]
            raise Missing(f"apt-get download {name}: {last}")
        return found[0]


def _unpack(package: Path, target: Path, wanted: Callable[[str], bool]) -> None:
    """Unpacks regular files and links; owners and devices do not matter here."""
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        with tarfile.open(fileobj=child.stdout, mode="r|") as tar:
            for member in tar:
                path = member.name.removeprefix("./")
                if ".." in Path(path).parts or not wanted(path):
                    continue
                to = target / path
                if member.isfile():
                    to.parent.mkdir(parents=True, exist_ok=True)
                    data = tar.extractfile(member)
                    assert data is not None
                    to.write_bytes(data.read())
                    to.chmod(0o644 | (member.mode & 0o111))
                elif member.issym():
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.symlink_to(member.linkname)
    if child.returncode != 0:
        raise Missing(f"dpkg-deb --fsys-tarfile {package.name} ended with {child.returncode}")
    package.unlink()


def _of_kernel(path: str) -> bool:
    if path.startswith("boot/vmlinuz-"):
        return True
    found = re.search(r"lib/modules/[^/]+/kernel/(.*\.ko)(\.xz)?$", path)
    if found is None or found.group(1).startswith("drivers/net/") and found.group(1).count("/") > 2:
        return False
    return found.group(1).startswith(MODULE_FOLDERS)


def module_files(kernel: Path) -> dict[str, Path]:
    """Module name -> file; names as the kernel spells them, with underscores."""
    return {
        path.name.split(".ko")[0].replace("-", "_"): path
        for path in kernel.glob("**/lib/modules/*/kernel/**/*.ko*")
    }


def module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def module_depends(data: bytes) -> list[str]:
    """The modules that one needs, from the text in its .modinfo section."""
    found = re.search(rb"\0depends=([^\0]*)\0", data)
    names = found.group(1).decode().replace("-", "_") if found else ""
    return [name for name in names.split(",") if name]


def module_order(wanted: Iterable[str], depends: Callable[[str], list[str]]) -> list[str]:
    """`wanted` and all that they need, each after what it needs, else in the given order."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for other in depends(name):
            visit(other)
        order.append(name)

    for name in wanted:
        visit(name)
    return order


def _remembered(store: Path) -> tuple[Package, ...]:
    """What the last gathering found, kernel first; the archive is asked again after a day."""
    memory = store / "gathered.json"
    try:
        if time.time() - memory.stat().st_mtime > REMEMBER_SECONDS:
            return ()
        rows = json.loads(memory.read_text(encoding="utf-8"))
        found = tuple(Package(name, version, Path(files)) for name, version, files in rows)
    except (OSError, ValueError, TypeError):
        return ()
    there = all((package.files.parent / ".complete").exists() for package in found)
    return found if there and {p.name for p in found[1:]} == set(PACKAGES) else ()


def gather(store: Path = STORE) -> Parts:
    """Everything a guest is made of, fetched where it must be. Raises Missing."""
    if os.uname().machine != "x86_64":
        raise Missing(f"guests are x86_64 Debian; this machine is {os.uname().machine}")
    qemu = _program("qemu-system-x86_64", "qemu-system-x86")
    for tool in ("ip", "tc", "rdma"):
        host_program(tool, "iproute2")
    found = _remembered(store)
    if not found:
        archive = Archive(store)
        kernel = archive.fetch(archive.kernel_name(), _of_kernel)
        found = (kernel, *(archive.fetch(name) for name in PACKAGES))
        rows = [(package.name, package.version, str(package.files)) for package in found]
        (store / "gathered.json").write_text(json.dumps(rows), encoding="utf-8")
    return Parts(qemu, found[0], found[1:])


def host_program(name: str, package: str) -> Path:
    return _program(name, package)


if __name__ == "__main__":
    try:
        gather()
    except Missing as reason:
        print(f"skipped: {reason}")
        sys.exit(77)
