"""tests/gpu/open_loop.py and serving_figures.py without vLLM: servers that stream as vLLM does.

Rung 3 (processes over loopback). What it cannot prove: that vLLM serves on through a NIC loss;
`tests/gpu/serving_figures.py` on a machine with a GPU does.
"""

from __future__ import annotations

import argparse
import http.server
import importlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.importorskip("pyroute2")

scripts: Any = importlib.import_module("test_gpu_scripts")
loop: Any = importlib.import_module("open_loop")
figures: Any = importlib.import_module("serving_figures")

FIRST_S, EACH_S = 0.1, 0.03


class StandIn(http.server.ThreadingHTTPServer):
    """Streams answers at a known pace; `open` shut: it stands still."""

    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.open, self.asked, self.short = threading.Event(), 0, False
        self.open.set()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *args: Any) -> None:
        pass

    def chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def do_POST(self) -> None:
        self.server.asked += 1
        count = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(count - self.server.short):
            time.sleep(EACH_S if i else FIRST_S)
            self.server.open.wait(10)
            event = json.dumps({"choices": [{"text": "w", "token_ids": [i]}]})
            self.chunk(f"data: {event}\n\n")
        self.chunk("data: [DONE]\n\n")
        self.chunk("")


@pytest.fixture
def standin() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.open.set()
        server.shutdown()
        thread.join()


def options(standin: StandIn, **more: Any) -> argparse.Namespace:
    opts: argparse.Namespace = loop.parse_args(["--port", str(standin.server_address[1])])
    vars(opts).update({"rate": 20.0, "seconds": 0.5, "answer": 4, "tokens": 8, **more})
    return opts


def test_times_of_an_answer(standin: StandIn) -> None:
    asked = loop.drive(options(standin, seconds=0.48, even=True))
    assert len(asked) == 9 == standin.asked
    got = loop.summary(asked, 0.0)
    assert got["unanswered"] == 0 and [len(one.tokens) for one in asked] == [4] * 9
    assert all(FIRST_S <= one.first_s and EACH_S <= one.each_s for one in asked)
    # The best one is not far above what the server waits, however busy this machine is.
    assert min(one.first_s for one in asked) < FIRST_S + 0.15
    assert min(one.each_s for one in asked) < EACH_S + 0.1


def test_a_short_answer_is_none(standin: StandIn) -> None:
    standin.short = True
    asked = loop.drive(options(standin, rate=10.0))
    assert asked and all(one.error == "3 tokens of 4" for one in asked)
    got = loop.summary(asked, time.monotonic())
    assert got["unanswered"] == got["requests"] and got["tpot_p50"] is None


def test_requests_go_out_while_the_server_stands_still(standin: StandIn) -> None:
    """A client that waited for answers would hide the stall: fewer requests, none of them slow."""
    standin.open.clear()
    opts = options(standin, rate=40.0, seconds=0.99, even=True)
    threading.Timer(4.0, standin.open.set).start()
    asked = loop.drive(opts)
    assert standin.asked == len(asked) == 39
    assert max(one.sent - one.due for one in asked) < 2.5  # none waited for an answer
    waits = [one.first_s for one in asked]
    assert waits[0] > 3.8 and 3.3 < waits[19] < waits[0]  # each waits from its own time on
    assert loop.summary(asked, 0.0)["gap_max"] >= waits[0] * 1e3 - 1


def test_a_server_that_never_answers_is_waited_for_in_bounds(standin: StandIn) -> None:
    standin.open.clear()
    begun = time.monotonic()
    asked = loop.drive(options(standin, seconds=0.3, drain=0.5))
    assert time.monotonic() - begun < 3 and asked
    got = loop.summary(asked, time.monotonic())
    assert got["unanswered"] == len(asked) and got["ttft_p50"] is None
    assert got["gap_max"] >= 500


def test_no_server_is_an_error_of_each_request(standin: StandIn) -> None:
    asked = loop.drive(options(standin, port=scripts.free_port(), seconds=0.2, drain=1.0))
    assert asked and all("refused" in one.error for one in asked)


def test_arrivals() -> None:
    one = loop.arrivals(50.0, 20.0, 7, even=False)
    assert one == loop.arrivals(50.0, 20.0, 7, False) != loop.arrivals(50.0, 20.0, 8, False)
    assert 850 < len(one) < 1150 and one == sorted(one) and one[-1] < 20
    gaps = [b - a for a, b in zip(one, one[1:], strict=False)]
    assert 0.3 < sum(gap < 0.01 for gap in gaps) / len(gaps) < 0.5  # exponential: 0.39
    even = loop.arrivals(4.0, 1.0, 7, even=True)
    assert even == [0.25, 0.5, 0.75]


def test_percentiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert loop.percentile(values, 0.5) == 50 and loop.percentile(values, 0.99) == 99
    assert math.isinf(loop.percentile([1.0, math.inf], 0.99))
    assert loop.percentile([1.0, 2.0, math.inf], 0.5) == 2.0


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


class StillBed(scripts.LocalBed):  # type: ignore[misc]
    """A lost NIC makes the server over sockets stand still."""

    def __init__(self, still: Path) -> None:
        super().__init__()
        self.still = Path(f"{still}Socket")

    def fail(self, node: int, nic: int, kind: str) -> None:
        super().fail(node, nic, kind)
        self.still.touch()

    def recover(self, node: int, nic: int) -> None:
        super().recover(node, nic)
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
            f"MASTER_PORT={scripts.free_port()}",
        ]
    )
    found, bed = figures.Found(), StillBed(tmp_path / "still")
    monkeypatch.setattr(figures, "carried", lambda _bed: [0, time.monotonic_ns()])
    figures.run_all(bed, opts, 0, found)
    assert not found.problems and not found.left_out, (found.problems, found.left_out)
    rows = {(row.state, row.load): row.figures for row in found.rows}
    assert [*rows] == [
        ("healthy", 10),
        ("healthy", 20),
        ("through the loss", 20),
        ("restarted, NIC lost", 20),
    ]
    assert rows["healthy", 20]["unanswered"] == 0 and rows["healthy", 20]["ttft_p50"] < 500
    assert rows["through the loss", 20]["unanswered"] > 0
    assert rows["restarted, NIC lost", 20]["unanswered"] == 0
    took = found.notes["sockets restart"]
    assert 0 < took["kill_to_first_token_s"] < took["loss_to_first_token_s"]
    assert bed.orders == [("carrier", 0, 1), ("up", 0, 1)] and len(figures.table(found)) == 6
