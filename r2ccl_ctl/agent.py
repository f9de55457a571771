"""The helper on a host that remote.py starts: python -m r2ccl_ctl.agent.

It takes requests as lines of JSON on stdin and answers each with one line on stdout. It ends with
its stdin, and with it its sockets."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from r2ccl_ctl import __version__, control
from r2ccl_ctl.control import Selection
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.segment import SegmentError

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def processes(request: dict[str, Any]) -> dict[str, Any]:
    """All running processes of this host, whole. problems: of those that cannot be read."""
    found, problems = [], []
    for process in control.list_processes():
        try:
            found.append(process.snapshot().as_dict())
        except SegmentError as err:
            if process.path.exists():  # else it has just ended in order
                problems.append(str(err))
    other = control.left_out(Selection())
    return {
        "host": socket.gethostname(),
        "version": __version__,
        "mono_ns": time.monotonic_ns(),
        "processes": found,
        "problems": problems + ([other] if other else []),
    }


def serve(answers: Mapping[str, Answer]) -> None:
    for line in sys.stdin:
        try:
            request = json.loads(line)
            reply = answers[request["do"]](request)
        except R2Error as err:
            reply = {"refused": str(err)}
        print(json.dumps(reply), flush=True)


def main() -> None:
    from r2ccl_ctl.doctor.exchange import Exchanger

    doctor = Exchanger()
    serve({"processes": processes, "look": doctor.look, "listen": doctor.listen,
           "send": doctor.send})  # fmt: skip


if __name__ == "__main__":
    main()
