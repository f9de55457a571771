"""Network namespaces by name, and work done inside them. No external programs."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

from r2ccl_ctl.lab import nsexec
from r2ccl_ctl.lab.spec import LabError

T = TypeVar("T")

DEFAULT_DIR = Path("/run/netns")
CALL_TIMEOUT_S = 60.0
GRACE_S = 1.0  # between TERM and KILL
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21


def has_admin() -> bool:
    """Whether this process may make namespaces and links itself."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(row for row in file if row.startswith("CapEff:"))
    bits = int(line.split()[1], 16)
    return bool(bits >> CAP_NET_ADMIN & 1 and bits >> CAP_SYS_ADMIN & 1)


class NsThread:
    """One thread that moves between network namespaces on behalf of its callers.

    A thread's network namespace is its own, so the caller's never changes. Callers may be any
    threads; calls are carried out one after the other.
    """

    def __init__(self, name: str = "r2ccl-lab") -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T], timeout: float = CALL_TIMEOUT_S) -> T:
        """Carry out `work` in the thread; its result or exception is ours."""
        if threading.current_thread() is self._thread:
            return work()
        future: Future[T] = Future()
        self._queue.put((future, work))
        try:
            return future.result(timeout)
        except FutureTimeout as err:
            if future.done():
                raise
            raise LabError(f"the kernel did not answer within {timeout:.0f} s") from err

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CALL_TIMEOUT_S)

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            try:
                future.set_result(work())
            except BaseException as err:  # handed to the caller, whatever it is
                future.set_exception(err)


class NsDir:
    """A directory of named network namespaces, as `ip netns` keeps it."""

    def __init__(self, path: Path = DEFAULT_DIR) -> None:
        self.path = path

    def file(self, name: str) -> str:
        return str(self.path / name)

    def ensure(self) -> bool:
        """Make the directory; True when it was not there."""
        try:
            self.path.mkdir(mode=0o755, parents=True)
        except FileExistsError:
            return False
        return True

    def names(self, pattern: re.Pattern[str]) -> list[str]:
        try:
            return sorted(n for n in os.listdir(self.path) if pattern.fullmatch(n))
        except FileNotFoundError:
            return []

    def is_mounted(self, name: str) -> bool:
        """Whether a namespace is there, and not only its name, as after a restart."""
        try:
            return os.stat(self.file(name)).st_dev != os.stat(self.path).st_dev
        except FileNotFoundError:
            return False

    def create_here(self, name: str) -> None:
        """Make a namespace, name it, and leave the calling thread inside it."""
        path = self.file(name)
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0))
        nsexec.unshare(nsexec.CLONE_NEWNET)
        nsexec.mount("/proc/thread-self/ns/net", path, None, nsexec.MS_BIND)

    def enter(self, name: str) -> None:
        """Move the calling thread into the namespace."""
        nsexec.join(self.file(name), nsexec.CLONE_NEWNET)

    def remove(self, name: str) -> None:
        """Forget the name; the namespace goes when nothing is left inside it."""
        path = self.file(name)
        with contextlib.suppress(OSError):
            nsexec.umount(path)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            self._unlink_covered(path)

    def _unlink_covered(self, path: str) -> None:
        """The name is still a mount point under a mount of the whole directory: the first
        `ip netns add` of the machine makes one. Another mount namespace may remove the name; the
        kernel then detaches what is mounted on it elsewhere."""

        def work() -> None:
            nsexec.unshare(nsexec.CLONE_NEWNS)
            nsexec.mount("none", "/", None, nsexec.MS_REC | nsexec.MS_PRIVATE)
            for covered in (str(self.path), path):
                with contextlib.suppress(OSError):
                    while True:
                        nsexec.umount(covered)
            os.unlink(path)

        thread = NsThread("r2ccl-unlink")
        try:
            thread.call(work)
        finally:
            thread.close()

    def remove_dir(self) -> bool:
        """Remove the directory if it is empty; whether it is gone."""
        if self.names(re.compile(".*")):
            return False
        with contextlib.suppress(OSError):
            nsexec.umount(str(self.path))
        with contextlib.suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()

    def pids(self, names: list[str]) -> list[int]:
        """The processes inside the namespaces, other than this one and its ancestors."""
        wanted = set()
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.stat(self.file(name))
                wanted.add((stat.st_dev, stat.st_ino))
        spared = _ancestors()
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) in spared:
                continue
            with contextlib.suppress(OSError):
                stat = os.stat(f"/proc/{entry}/ns/net")
                if (stat.st_dev, stat.st_ino) in wanted:
                    found.append(int(entry))
        return found


def _ancestors() -> set[int]:
    pids, pid = set(), os.getpid()
    while pid > 0:
        pids.add(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            break
    return pids


def kill_all(find: Callable[[], list[int]]) -> int:
    """TERM, then KILL, until `find` finds no more; the number of processes ended."""
    seen: set[int] = set()
    started = time.monotonic()
    while pids := find():
        elapsed = time.monotonic() - started
        if elapsed > GRACE_S + 5.0:
            raise LabError(f"processes {pids} do not end: end them, then `r2ccl-ctl lab down`")
        for pid in pids:
            if pid not in seen or elapsed > GRACE_S:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if elapsed > GRACE_S else signal.SIGTERM)
        seen.update(pids)
        time.sleep(0.02)
    return len(seen)


def write_sysctl(key: str, value: str, required: bool) -> None:
    """Set a network setting of the calling thread's namespace, unless it is so already."""
    path = f"/proc/sys/{key}"
    try:
        with open(path, encoding="ascii") as file:
            if file.read().strip() == value:
                return
        with open(path, "w", encoding="ascii") as file:
            file.write(value)
    except OSError as err:
        if required:
            raise LabError(
                f"cannot set {key}={value} in the lab ({err.strerror}): "
                "/proc/sys must be writable (docker: --privileged)"
            ) from err
