"""Ctrl-C while modules are loaded, and signals that end what must be cleaned up first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def ends_without_a_word() -> Iterator[None]:
    """Loading takes a moment in which nobody handles Ctrl-C yet: meanwhile it ends this program as
    it ends one in C, by the signal and without a word. Not where it is ignored, as under nohup, or
    handled otherwise; for the main thread, which alone may say so, and nothing in others."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or another signal that asks for an end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Signals that end a program raise Interrupted, so that the clean-up runs. What the caller
    ignores (nohup) stays ignored."""

    def on_signal(number: int, frame: object) -> None:
        raise Interrupted(number)

    with _handled(on_signal, [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not stop the clean-up, which is bounded."""
    with _handled(signal.SIG_IGN, ENDING):
        yield


@contextmanager
def _handled(
    handler: Callable[[int, object], None] | signal.Handlers, numbers: Iterable[signal.Signals]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
