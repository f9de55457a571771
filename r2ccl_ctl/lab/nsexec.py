"""Enter namespaces, then exec: the first thing that runs in a process of a lab node.

Runs as a script of its own (`python -I -S nsexec.py PLAN -- CMD...`): a fresh process with one
thread, so that every namespace can be joined and nothing of the parent's state matters. It may
import only the standard library. The package imports the system calls below from here.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            None,
        ),
        f"mount {target}",
    )


def umount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def join(path: str, kind: int) -> None:
    """Join the namespace that a file stands for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(fd, kind)
    finally:
        os.close(fd)


def die_with_parent(number: int, parent: int) -> None:
    """Ask for a signal when the thread that started us ends; end now if it has."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def map_user(inside_uid: int, outside_uid: int, inside_gid: int, outside_gid: int) -> None:
    """Map one user and one group into the user namespace that we have just made."""
    try:
        with open("/proc/self/setgroups", "w", encoding="ascii") as file:
            file.write("deny")
    except OSError as err:
        if err.errno not in (errno.ENOENT, errno.EPERM):
            raise
    with open("/proc/self/uid_map", "w", encoding="ascii") as file:
        file.write(f"{inside_uid} {outside_uid} 1")
    with open("/proc/self/gid_map", "w", encoding="ascii") as file:
        file.write(f"{inside_gid} {outside_gid} 1")


def private_mounts(hosts: str | None) -> None:
    """Own mount namespace: /sys shows the node's NICs, /etc/hosts names the nodes.

    Kept as it is when the container forbids mounts; then /sys shows the host's NICs.
    """
    unshare(CLONE_NEWNS)
    try:
        mount("none", "/", None, MS_REC | MS_SLAVE)
    except OSError as err:
        _warn(f"/sys and /etc/hosts stay the host's ({err.strerror})")
        return
    try:
        _fresh_sys()
    except OSError as err:
        _warn(f"/sys shows the host's NICs, not the node's ({err.strerror})")
    if hosts and os.path.exists(hosts) and os.path.exists("/etc/hosts"):
        try:
            mount(hosts, "/etc/hosts", None, MS_BIND)
        except OSError as err:
            _warn(f"/etc/hosts does not name the nodes ({err.strerror})")


def _fresh_sys() -> None:
    """A sysfs of this network namespace over /sys, with the old /sys/fs (cgroups) kept."""
    old = os.open("/sys/fs", os.O_PATH | os.O_CLOEXEC)
    try:
        mount("sysfs", "/sys", "sysfs", 0)
        try:
            mount(f"/proc/self/fd/{old}", "/sys/fs", None, MS_BIND | MS_REC)
        except OSError as err:
            _warn(f"/sys/fs has no cgroups ({err.strerror})")
    finally:
        os.close(old)


def _warn(text: str) -> None:
    print(f"r2ccl-ctl lab: note: {text}", file=sys.stderr, flush=True)


def enter(plan: dict[str, Any]) -> None:
    """Everything that comes before the exec. Keys of the plan, all optional:

    deathsig, parent   signal when `parent` (our parent's pid) ends.
    holder             pid whose user, mount and network namespaces are joined first.
    netns              file of a network namespace.
    hostname, hosts    own host name; own /etc/hosts.
    user               [uid, gid] to become inside a nested user namespace.
    """
    if plan.get("deathsig"):
        die_with_parent(int(plan["deathsig"]), int(plan["parent"]))
    holder = plan.get("holder")
    if holder:
        # All three are opened first: /proc may look different once the user has changed.
        kinds = (("user", CLONE_NEWUSER), ("mnt", CLONE_NEWNS), ("net", CLONE_NEWNET))
        fds = [(os.open(f"/proc/{holder}/ns/{n}", os.O_RDONLY | os.O_CLOEXEC), k) for n, k in kinds]
        here = os.getcwd()
        for fd, kind in fds:
            setns(fd, kind)
            os.close(fd)
        os.chdir(here)
    if plan.get("netns"):
        join(plan["netns"], CLONE_NEWNET)
        private_mounts(plan.get("hosts"))
    if plan.get("hostname"):
        unshare(CLONE_NEWUTS)
        socket.sethostname(plan["hostname"])
    if plan.get("user"):
        uid, gid = plan["user"]
        outer_uid, outer_gid = os.geteuid(), os.getegid()
        unshare(CLONE_NEWUSER)
        map_user(uid, outer_uid, gid, outer_gid)


def hold(parent: int) -> None:
    """Make a user, mount and network namespace and keep them until killed.

    Says "ready" on stdout, ends with `parent` until told to stay by a line on stdin, says "ok".
    """
    uid, gid = os.geteuid(), os.getegid()
    os.setsid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET)
    map_user(0, uid, 0, gid)
    mount("none", "/", None, MS_REC | MS_SLAVE)
    os.chdir("/")
    die_with_parent(signal.SIGKILL, parent)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    _check(_libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0), "prctl")
    print("ok", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    while True:
        signal.pause()


def argv_for(plan: dict[str, Any], command: list[str]) -> list[str]:
    """The command line that runs `command` after carrying out the plan."""
    script = os.path.abspath(__file__)
    return [sys.executable, "-I", "-S", script, json.dumps(plan), "--", *command]


def main(argv: list[str]) -> int:
    if argv[:1] == ["--hold"]:
        try:
            hold(int(argv[1]))
        except OSError as err:
            print(str(err.strerror), flush=True)
        return 1
    plan, command = json.loads(argv[0]), argv[2:]
    try:
        enter(plan)
    except OSError as err:
        where = plan.get("hostname") or "the lab"
        print(f"r2ccl-ctl: cannot enter {where}: {err.strerror}", file=sys.stderr, flush=True)
        return 126
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as err:
        print(f"r2ccl-ctl: cannot run {command[0]}: {err.strerror}", file=sys.stderr, flush=True)
        return 127 if err.errno == errno.ENOENT else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
