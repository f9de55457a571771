"""Names of jobs. A control segment has little room for one: two longer names with the same start
would be one job, and a fault meant for one of them would hit both."""

from __future__ import annotations

import os

from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.segment import printable

MOST = 63  # bytes: `job` in struct r2_seg_process, and R2CCL_JOB in settings.def


def checked(name: str, given_as: str) -> str:
    """The name, if a process can bear it."""
    size = len(os.fsencode(name))
    if size > MOST:
        raise R2UsageError(
            f"{given_as} '{name}': a name of {size} bytes in UTF-8, and a job's has at most {MOST}"
            ": give a shorter one"
        )
    return name


def start_of(raw: bytes, most: int = MOST) -> bytes:
    """At most so many bytes, without part of a character at the end, as r2_row_text cuts."""
    if len(raw) <= most:
        return raw
    while most > 0 and raw[most] & 0xC0 == 0x80:
        most -= 1
    return raw[:most]


def kept(name: str) -> str:
    """As a control segment has it, whoever gave it (a scheduler's id may have any length)."""
    return printable(start_of(os.fsencode(name)))
