"""A running guest: qemu without acceleration, driven through a virtio port (agent.c).

    with Guest(vmlinuz, initramfs, folder) as guest:
        guest.check("ip link set a1 down")
        job = guest.start("r2ccl_perf ...", seconds=30)
        ...
        done = job.wait()

Every wait is bounded. When qemu or the guest's kernel dies, all waits end with GuestError, which
carries the end of the kernel's console. The process is killed when the block is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

BOOT_SECONDS = 180.0
COMMAND_SECONDS = 60.0  # a look took 30 beside a load of 19
SLACK_SECONDS = 15.0  # how much later than its limit a command's end may reach us
ILL = re.compile(r"BUG:|Oops|Kernel panic|general protection|Call Trace|rcu.*stall|soft lockup")


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """A guest does not outlive a test that was killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class GuestError(Exception):
    """The guest did not do what it was asked to."""


@dataclass(frozen=True)
class Done:
    command: str
    code: int
    out: str
    ms: int

    def lines(self) -> list[dict[str, object]]:
        """The JSON lines in its output; other lines are left out."""
        found: list[dict[str, object]] = []
        for line in self.out.splitlines():
            if line.startswith("{"):
                value = json.loads(line)
                assert isinstance(value, dict)
                found.append(value)
        return found


@dataclass
class Job:
    """A command that runs in the guest."""

    guest: Guest
    id: int
    command: str
    seconds: float
    out: list[str] = field(default_factory=list)
    code: int | None = None
    ms: int = 0

    def text(self) -> str:
        return "".join(self.out)

    def wait(self, seconds: float | None = None) -> Done:
        limit = self.seconds + SLACK_SECONDS if seconds is None else seconds
        self.guest.wait_until(lambda: self.code is not None, limit, f"the end of {self.command}")
        assert self.code is not None
        return Done(self.command, self.code, self.text(), self.ms)

    def kill(self) -> None:
        self.guest.send(f"kill {self.id}")


KILLED = 137  # exit code of a command that did not end in time


class Guest:
    def __init__(
        self,
        qemu: Path,
        vmlinuz: Path,
        initramfs: Path,
        folder: Path,
        *,
        name: str = "guest",
        memory_mib: int = 1024,
        cpus: int = 2,
        nics: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """`nics`: (MAC address, descriptor of a connected stream socket) of each NIC; the other
        end belongs to the other guest's qemu."""
        self.name = name
        self.console = folder / f"{name}.console"
        self.hello: dict[str, object] = {}
        self.jobs: dict[int, Job] = {}
        self.changed = threading.Condition()
        self.dead: str | None = None
        self.next_id = 0
        folder.mkdir(parents=True, exist_ok=True)
        # Socket paths are limited to 107 bytes, build folders are not.
        self.scratch = tempfile.TemporaryDirectory(prefix="r2guest-")
        port = self._listen("port")
        words = [
            *(str(qemu), "-name", name, "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"),
            *("-m", str(memory_mib), "-smp", str(cpus)),
            *("-kernel", str(vmlinuz), "-initrd", str(initramfs), "-append"),
            "console=ttyS0 rdinit=/init panic=-1 loglevel=5 mitigations=off net.ifnames=0",
            *("-serial", f"file:{self.console}"),
            *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
            *("-chardev", f"socket,id=port,path={self.scratch.name}/port"),
            *("-device", "virtserialport,chardev=port,name=agent"),
        ]
        for number, (mac, fd) in enumerate(nics):
            words += ["-netdev", f"socket,id=net{number},fd={fd}"]
            words += ["-device", f"virtio-net-pci,id=nic{number},netdev=net{number},mac={mac}"]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{name}.qemu").open("wb"),
            pass_fds=[fd for _, fd in nics],
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.messages = folder / f"{name}.qemu"
        try:
            self.port = self._accept(port)
        except BaseException:
            self.close()
            raise
        self.reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self.reader.start()

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"{self.scratch.name}/{name}")
        listener.listen(1)
        listener.settimeout(0.2)
        return listener

    def _accept(self, listener: socket.socket) -> socket.socket:
        deadline = time.monotonic() + 20
        with listener:
            while time.monotonic() < deadline and self.process.poll() is None:
                try:
                    connected, _ = listener.accept()
                except TimeoutError:
                    continue
                connected.settimeout(None)
                return connected
        text = self.messages.read_text(errors="replace").strip()
        raise GuestError(f"{self.name}: qemu did not start: {text or 'no message within 20 s'}")

    def wait_booted(self) -> None:
        self.wait_until(lambda: bool(self.hello), BOOT_SECONDS, "the guest's first word")
        if self.hello["failed"]:
            raise GuestError(f"{self.name}: modules not loaded: {self.hello['failed']}")

    # --- the virtio port ---------------------------------------------------------------------
    def _read(self) -> None:
        rest = b""
        while True:
            try:
                data = self.port.recv(65536)
            except OSError:
                data = b""
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._message(line)
        with self.changed:
            self.dead = self.dead or "its console is closed"
            self.changed.notify_all()

    def _message(self, line: bytes) -> None:
        value = json.loads(line)
        with self.changed:
            if "hello" in value:
                self.hello = value
            job = self.jobs.get(value.get("id", -1))
            if job is not None and "out" in value:
                job.out.append(value["out"])
            elif job is not None:
                job.ms = value["ms"]
                job.code = value["exit"]
            self.changed.notify_all()

    def send(self, line: str) -> None:
        try:
            self.port.sendall(line.encode("latin-1") + b"\n")
        except OSError as error:
            raise GuestError(f"{self.name}: {error}; {self.last_words()}") from error

    def wait_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: done() or self.dead is not None, seconds)
            if done():
                return
            why = self.dead or f"not within {seconds:g} s"
        raise GuestError(f"{self.name}: waiting for {what}: {why}; {self.last_words()}")

    # --- what tests use ----------------------------------------------------------------------
    def start(self, command: str, seconds: float = COMMAND_SECONDS) -> Job:
        """Starts a shell command; it is killed with all its children after `seconds`."""
        with self.changed:
            self.next_id += 1
            job = self.jobs[self.next_id] = Job(self, self.next_id, command, seconds)
        text = command.replace("\\", "\\\\").replace("\n", "\\n")
        self.send(f"run {job.id} {round(seconds * 1000)} {text}")
        return job

    def run(self, command: str, seconds: float = COMMAND_SECONDS) -> Done:
        return self.start(command, seconds).wait()

    def check(self, command: str, seconds: float = COMMAND_SECONDS) -> str:
        """Runs a command that must succeed."""
        try:
            done = self.run(command, seconds)
        except GuestError as late:
            raise GuestError(f"{late}\n{self.blocked()}") from late
        if done.code != 0:
            what = command if len(command) < 200 else f"{command[:200]}..."
            late_too = f"\n{self.blocked()}" if done.code == KILLED else ""
            raise GuestError(
                f"{self.name}: {what}: exit code {done.code}: {done.out.strip()}{late_too}"
            )
        return done.out

    def blocked(self) -> str:
        """What the guest's kernel says of tasks that wait and of what its CPUs do; said where a
        command did not come back, which may wait for a lock of the kernel."""
        ask = "for c in w l; do echo $c > /proc/sysrq-trigger; sleep 1; done"
        try:
            return self.run(f"dmesg -c > /dev/null; {ask}; dmesg", 20).out
        except GuestError as silent:
            with self.changed:
                self.dead = self.dead or "it stands still"  # later waits end at once
            return f"nor does the guest say what is blocked: {silent}"

    def last_words(self) -> str:
        try:
            lines = self.console.read_text(errors="replace").splitlines()[-15:]
        except OSError:
            lines = []
        return "console: " + " | ".join(line.strip() for line in lines)

    def illness(self) -> list[str]:
        """Lines of the kernel's console that mean that it is not well."""
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return [line for line in text.splitlines() if ILL.search(line)]

    def close(self) -> None:
        with self.changed:
            self.dead = self.dead or "it was closed"
            self.changed.notify_all()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        if hasattr(self, "port"):
            self.port.close()
        self.scratch.cleanup()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
