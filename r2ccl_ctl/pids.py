"""Whether processes of this machine are there, by what the kernel says of their pids."""

from __future__ import annotations

import os
from pathlib import Path


def own_pidns() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_ticks(pid: int) -> int:
    """When this process began, in the kernel's ticks; -1: no such process, or not for our eyes."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1


def is_gone(pid: int, started: int) -> bool:
    """True where no process of our PID namespace has that pid, or a younger one has. /proc may hide
    those of others (hidepid), which a signal that is none still finds."""
    found = start_ticks(pid)
    if found >= 0:
        return found != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
