"""Words about processes that run here and that this tool cannot read."""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from r2ccl_ctl.segment import VERSIONS

if TYPE_CHECKING:
    from r2ccl_ctl.control import Process

OTHER = "other version"
NAMED = 8


def others_text(others: Mapping[int, int], pid: int | None) -> str:
    """A sentence about objects (pid -> user) that we may not read, or ""; `pid` is the one
    meant."""
    if pid is not None:
        uid = others.get(pid)
        return "" if uid is None else f"pid {pid} belongs to {user(uid)}: use sudo"
    if not others:
        return ""
    users = ", ".join(sorted({user(uid) for uid in others.values()}))
    count = f"{len(others)} process{'' if len(others) == 1 else 'es'}"
    return f"{count} of {users} may not be read by you: use sudo"


def user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def layouts_text(there: Iterable[Process], found: Iterable[Process], pid: int | None) -> str:
    """A sentence about running processes with another layout that are not among those found, or
    ""; `pid` is the one meant."""
    names = {process.name for process in found}
    left = [
        process
        for process in there
        if process.state == OTHER
        and process.name not in names
        and (pid is None or pid in (process.pid, process.local_pid))
    ]
    if not left:
        return ""
    one = len(left) == 1
    count = f"{len(left)} running process{'' if one else 'es'} with another layout"
    named = ", ".join(f"pid {process.pid}: layout {process.layout}" for process in left[:NAMED])
    more = f", and {len(left) - NAMED} more" if len(left) > NAMED else ""
    reads = ", ".join(str(version) for version in VERSIONS)
    return (
        f"{count} {'is' if one else 'are'} left out ({named}{more}; this r2ccl-ctl reads {reads}): "
        f"use the r2ccl-ctl that came with {'its' if one else 'their'} plugin"
    )
