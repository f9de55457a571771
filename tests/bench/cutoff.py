"""What ends a benchmark before all of it is done: a signal, or its own time (`--slice`).

A signal unwinds as an exception does, so that labs and processes go away and what was measured so
far is kept: parts that repeat make their rows in a `finally`.
"""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIME_CODE = 124  # as timeout(1) has it
caught: list[int] = []


class CutOff(BaseException):
    """A signal. No Exception: nobody is to take it for a failure of what it interrupts."""


def listen() -> None:
    """From now on the first signal raises CutOff, and those after it are ignored: the end is
    bounded, and a second one would leave labs behind."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _on_signal)


def _on_signal(number: int, frame: object) -> None:
    caught.append(number)
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise CutOff


def by_signal() -> str:
    """Its name, or "": none came. Whatever became of the exception on its way up."""
    return signal.Signals(caught[0]).name if caught else ""
