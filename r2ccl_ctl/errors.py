"""The errors that users see: what, which value, and what to do about it."""

from __future__ import annotations


def plain(text: str, keep: str = "") -> str:
    """The same with nothing in it that could steer a terminal. Bytes that are no text stay."""
    return "".join(
        c if c.isprintable() or c in keep or "\ud800" <= c <= "\udfff" else "\ufffd" for c in text
    )


class R2Error(Exception):
    """Something could not be done; exit code 1."""

    exit_code = 1

    def __str__(self) -> str:
        return plain(super().__str__(), keep="\n\t")


class R2Unknown(R2Error):
    """A check could not be made; exit code 3."""

    exit_code = 3


class R2UsageError(R2Error):
    """The request itself is wrong; exit code 2."""

    exit_code = 2
