"""The program r2ccl-ctl, also as `python -m r2ccl_ctl`."""

from __future__ import annotations

import signal


def main() -> None:
    """Load the commands, and run the one that is asked for.

    Loading takes a moment in which nobody handles Ctrl-C yet: until then it ends this program as
    it ends one in C, by the signal and without a word.
    """
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler  # not where it is ignored, as under nohup
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from r2ccl_ctl.cli.main import main as commands

    if ours:
        signal.signal(signal.SIGINT, before)
    commands(prog_name="r2ccl-ctl")


if __name__ == "__main__":
    main()
