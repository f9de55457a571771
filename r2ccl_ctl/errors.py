"""The errors that users see: what, which value, and what to do about it."""

from __future__ import annotations


class R2Error(Exception):
    """Something could not be done; exit code 1."""

    exit_code = 1


class R2UsageError(R2Error):
    """The request itself is wrong; exit code 2."""

    exit_code = 2
