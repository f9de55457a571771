#!/usr/bin/env python3
"""fake_act.py FAULT: what beds.ACT does to soft-RoCE, done to the stand-in for libibverbs in the
process that calls this (its commands: tests/fakeverbs/script.c)."""

from __future__ import annotations

import os
import socket
import sys

COMMANDS = {
    "down_a": ("port fv0 1 down", "port fv1 1 down"),  # the carrier is that of both ends
    "down_b": ("port fv0 1 down", "port fv1 1 down"),
    "up_a": ("port fv0 1 up", "port fv1 1 up"),
    "up_b": ("port fv0 1 up", "port fv1 1 up"),
    "hole_a": ("port fv0 1 blackhole",),
    "fill_a": ("port fv0 1 up",),
    "hole_b": ("port fv1 1 blackhole",),
    "fill_b": ("port fv1 1 up",),
    "loss": (),  # its wires are TCP connections
    "clean": (),
    "gidoff_a": ("gid fv0 1 {index} 0.0.0.0",),
    "gidon_a": ("gid fv0 1 {index} 127.0.1.1",),
    "remove_b": ("unload fv1",),
}


def main(fault: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        for command in COMMANDS[fault]:
            text = command.format(index=os.environ.get("FAKE_GID_INDEX", "0"))
            control.sendto(text.encode(), f"\0r2fv-ctl.{os.getppid()}")


if __name__ == "__main__":
    main(sys.argv[1])
