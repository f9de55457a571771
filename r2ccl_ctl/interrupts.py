"""Ctrl-C while modules are loaded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
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
