"""tests/gpu/serving_figures.py and open_loop.py without vLLM: a server that streams as vLLM does.

Rung 3 (processes over loopback). What it cannot prove: that vLLM serves on through a NIC loss;
`tests/gpu/serving_figures.py` on a machine with a GPU does.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
pytest.importorskip("pyroute2")

figures: Any = importlib.import_module("serving_figures")


def free_ports() -> str:
    """The first of two, of those that the kernel gives to nobody's connection."""
    while True:
        first = random.randrange(20000, 30000, 2)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", first))
            two.bind(("127.0.0.1", first + 1))
            return str(first)


# In the place of vllm.entrypoints.cli.main; the file STILL: it stands still.
SERVER = """
import http.server, json, os, pathlib, sys, time
options = sys.argv[3:]
said = dict(zip(options, options[1:]))
if said["--node-rank"] == "1":
    time.sleep(600)
still = pathlib.Path(os.environ["STILL"] + os.environ.get("NCCL_NET", ""))
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "stand-in"}')
    def do_POST(self):
        count = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.send_response(200)
        self.end_headers()
        for i in range(count):
            time.sleep(0.01)
            while still.exists():
                time.sleep(0.01)
            self.wfile.write(b'data: {"choices": [{"token_ids": [7]}]}\\n\\n')
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(said["--port"])), Handler).serve_forever()
"""


class StillBed:
    """Every rank runs right here. A lost NIC makes the server over sockets stand still."""

    nodes, nics = 2, 2
    master_addr, nic_prefix, oob = "127.0.0.1", "nic", "lo"

    def __init__(self, still: Path) -> None:
        self.orders: list[tuple[str, int, int]] = []
        self.still = Path(f"{still}Socket")

    def fail(self, node: int, nic: int, kind: str) -> None:
        self.orders.append((kind, node, nic))
        self.still.touch()

    def recover(self, node: int, nic: int) -> None:
        self.orders.append(("up", node, nic))
        self.still.unlink(missing_ok=True)

    def command(self, node: int, argv: Any) -> list[str]:
        if argv[0] == sys.executable and "--until" in argv and self.still.exists():
            self.still.unlink()  # started anew over the NICs that are left
        return list(argv)


def test_sockets_hang_and_are_started_anew(tmp_path: Path, monkeypatch: Any) -> None:
    place = tmp_path / "vllm" / "entrypoints" / "cli"
    place.mkdir(parents=True)
    for folder in (place, place.parent, place.parent.parent):
        (folder / "__init__.py").touch()
    (place / "main.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    opts = figures.parse_args(
        [
            *"--variants sockets --loads 10,20 --seconds 1.5 --warm 0.3 --hang 3".split(),
            *"--answer 4 --tokens 8 --python".split(),
            sys.executable,
            "--env",
            f"STILL={tmp_path / 'still'}",
            "--env",
            f"MASTER_PORT={free_ports()}",
        ]
    )
    found, bed = figures.Found(), StillBed(tmp_path / "still")
    monkeypatch.setattr(figures, "carried", lambda _bed: [0, time.monotonic_ns()])
    figures.run_all(bed, opts, 0, found)
    assert not found.problems and not found.left_out, (found.problems, found.left_out)
    assert [(row.state, row.load) for row in found.rows] == [
        ("healthy", 10),
        ("healthy", 20),
        ("through the loss", 20),
        ("restarted, NIC lost", 20),
    ]
    took = found.notes["sockets restart"]
    assert 0 < took["kill_to_first_token_s"] < took["loss_to_first_token_s"]
    assert bed.orders == [("carrier", 0, 1), ("up", 0, 1)] and len(figures.table(found)) == 6
