"""Labs without root: everything happens inside a user namespace that a holder process keeps.

A command of an ordinary user runs itself again inside the holder's user, mount and network
namespaces. There it is root over the lab and over nothing else. What it starts in a node becomes
the ordinary user again, one user namespace further in, so that files and shared memory keep their
owner. Ends with `lab down`, or when the holder is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass

from r2ccl_ctl.interrupts import Interrupted, signals_interrupt, undisturbed
from r2ccl_ctl.lab import netns, nsexec
from r2ccl_ctl.lab.core import HOLDER_ENV, NETNS_DIR_ENV, USER_ENV
from r2ccl_ctl.lab.spec import LabError
from r2ccl_ctl.lab.state import Store, state_dir

START_TIMEOUT_S = 10.0
END_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Holder:
    """A holder process; its start time tells it from a later process with the same pid."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started

    def kill(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none (or a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def start_holder() -> tuple[Holder, subprocess.Popen[str]]:
    """Start a holder. It ends with us until its stdin says that it may stay."""
    proc = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(nsexec.__file__), "--hold", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert proc.stdout is not None
    ready, _, _ = select.select([proc.stdout], [], [], START_TIMEOUT_S)
    answer = proc.stdout.readline().strip() if ready else ""
    started = start_time(proc.pid)
    if answer != "ready" or started is None:
        proc.kill()
        proc.wait()
        raise LabError(
            "cannot make a lab without root: user namespaces are refused "
            f"({answer or 'no answer'}). Be root, or let the administrator allow them "
            "(kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces > 0)"
        )
    return Holder(proc.pid, started), proc


def holder_of(name: str) -> Holder | None:
    """The holder that a lab's state names, if it is alive."""
    path = Store(name).json_path
    try:
        raw = json.loads(path.read_text())["holder"]
        holder = Holder(int(raw[0]), int(raw[1]))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return holder if holder.alive else None


def inside(holder: Holder, name: str, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that run argv as root of the holder's namespaces."""
    env = dict(os.environ)
    env[HOLDER_ENV] = f"{holder.pid}:{holder.started}"
    env[USER_ENV] = f"{os.geteuid()}:{os.getegid()}"
    env["R2CCL_LAB_DIR"] = str(state_dir())
    env[NETNS_DIR_ENV] = str(state_dir() / f"{name}.netns")
    return nsexec.argv_for({"holder": holder.pid}, argv), env


def own_command() -> list[str]:
    """The command line that this process was started with."""
    return [sys.executable, *sys.orig_argv[1:]]


def rerun(name: str) -> None:
    """Go on inside the lab's holder if we have to; returns if we need not, or there is none."""
    if netns.has_admin():
        return
    holder = holder_of(name)
    if holder is not None:
        argv, env = inside(holder, name, own_command())
        sys.stdout.flush()
        os.execve(argv[0], argv, env)


def rerun_up(name: str) -> None:
    """For `up`: make a holder, run ourselves inside, exit as that run does."""
    if netns.has_admin():
        return
    if holder_of(name) is not None:
        raise LabError(f"lab '{name}' is already up: `r2ccl-ctl lab down --name {name}` first")
    holder, proc = start_holder()
    argv, env = inside(holder, name, own_command())
    code = 1
    try:
        code = subprocess.run(argv, env=env, check=False).returncode
    finally:
        if code != 0:
            holder.kill()
            proc.wait()
        else:
            assert proc.stdin is not None
            proc.stdin.write("stay\n")
            proc.stdin.flush()
            assert proc.stdout is not None
            proc.stdout.readline()
    sys.exit(code)


def rerun_down(name: str) -> None:
    """For `down`: run ourselves inside, end the holder, exit as that run did."""
    if netns.has_admin():
        return
    holder = holder_of(name)
    if holder is None:
        return
    argv, env = inside(holder, name, own_command())
    code = subprocess.run(argv, env=env, check=False).returncode
    if code == 0:
        holder.kill()
    sys.exit(code)


def rerun_whole(name: str) -> None:
    """For a command that makes a lab and takes it down itself: run ourselves inside a holder, end
    it, exit as that run did."""
    if netns.has_admin():
        return
    holder, proc = start_holder()
    argv, env = inside(holder, name, own_command())
    code = 1
    try:
        with signals_interrupt():
            child = subprocess.Popen(argv, env=env)
            try:
                code = child.wait()
            except Interrupted as err:
                with undisturbed():
                    code = _end_child(child, err.number)
    finally:
        holder.kill()
        proc.wait()
    sys.exit(code if code >= 0 else 128 - code)


def _end_child(child: subprocess.Popen[bytes], number: int) -> int:
    """It cleans up by itself. The terminal has told it too, if it was Ctrl-C."""
    for wait, told in ((1.0, number), (END_TIMEOUT_S, signal.SIGKILL)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(wait)
        child.send_signal(told)
    return child.wait()
