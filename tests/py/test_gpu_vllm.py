"""tests/gpu/vllm_serve.py and vllm_app.py without vLLM: a server that answers as vLLM's does.

Rung 3 (processes over loopback). What it cannot prove: that vLLM runs over the plugin;
`tests/gpu/run_matrix.py --rows vllm-serve,vllm-tp` on a machine with a GPU does.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.importorskip("pyroute2")

scripts: Any = importlib.import_module("test_gpu_scripts")

# In the place of vllm.entrypoints.cli.main. STAND_IN: what goes wrong.
SERVER = """
import argparse, http.server, json, os, pathlib, sys, time
wrong = os.environ.get("STAND_IN", "")
folder = pathlib.Path(sys.argv[2])
options = sys.argv[3:]
assert sys.argv[1] == "serve" and (folder / "config.json").exists(), sys.argv
said = dict(zip(options, options[1:]))
assert said["--nnodes"] == "2" and "RANK" not in os.environ
assert ("--headless" in options) == (said["--node-rank"] == "1")
(pathlib.Path(os.environ["SEEN"]) / said["--node-rank"]).write_text(str(os.getpid()))
if said["--node-rank"] == "1":
    time.sleep(600)
if wrong == "dead":
    sys.exit(9)
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def say(self, body, status=200):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.say({"version": "stand-in"})
    def do_POST(self):
        global asked
        asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = [(sum(body["prompt"]) + i) % 4096 for i in range(body["max_tokens"])]
        if asked == 3 and wrong == "refuses":
            return self.say({"error": "out of patience"}, 500)
        if asked == 3 and wrong == "dies":
            os._exit(1)
        likely = [-0.5 - i - (asked == 3 and wrong == "bits") * 1e-9 for i in range(len(ids))]
        short = asked == 3 and wrong == "short"
        self.say({"choices": [{"token_ids": ids[short:],
                               "logprobs": {"token_logprobs": likely[short:]}}]})
http.server.HTTPServer(("127.0.0.1", int(said["--port"])), Handler).serve_forever()
"""


def free_ports() -> str:
    """The first of two, of those that the kernel gives to nobody's connection."""
    while True:
        first = random.randrange(20000, 30000, 2)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", first))
            two.bind(("127.0.0.1", first + 1))
            return str(first)


def serve(tmp_path: Path, wrong: str = "") -> Any:
    """Two ranks of vllm_serve.py over that server: how they ended, and what they printed."""
    place = tmp_path / "vllm" / "entrypoints" / "cli"
    place.mkdir(parents=True, exist_ok=True)
    for folder in (place, place.parent, place.parent.parent):
        (folder / "__init__.py").touch()
    (place / "main.py").write_text(SERVER)
    env = {
        "PYTHONPATH": str(tmp_path),
        "MASTER_PORT": free_ports(),
        "STAND_IN": wrong,
        "SEEN": str(tmp_path),
    }
    argv = [sys.executable, str(scripts.GPU / "vllm_serve.py"), "--steps", "5", "--tokens", "8"]
    job = scripts.jobs.Job(scripts.LocalBed(), scripts.jobs.Shape(2, 1), argv, env)
    job.start()
    ended = job.wait(60)
    return ended, scripts.run_ddp.read_curve(ended)


def gone(tmp_path: Path) -> bool:
    """Whether the servers of both nodes have ended; one may not have begun."""
    pids = [int(at.read_text()) for at in (tmp_path / "0", tmp_path / "1") if at.exists()]
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_answers_are_compared_bit_by_bit(tmp_path: Path) -> None:
    ended, curve = serve(tmp_path)
    assert ended.ok, ended.tail()
    assert len(curve.losses) == len(set(curve.losses)) == 5 and gone(tmp_path)
    assert curve.start["vllm"] == "stand-in"
    again, same = serve(tmp_path)
    assert again.ok, again.tail()
    assert curve.differences(same) == []
    other, differs = serve(tmp_path, "bits")
    assert other.ok and any("loss of step 3" in text for text in curve.differences(differs))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("dead", "vllm serve ended with 9 before it was up"),
        ("refuses", 'request 3: HTTP Error 500: Internal Server Error: b\'{"error": "out of'),
        ("dies", "request 3: no answer: "),
        ("short", "request 3: 15 tokens came back"),
    ],
)
def test_a_server_that_fails_is_said(tmp_path: Path, wrong: str, words: str) -> None:
    ended, _ = serve(tmp_path, wrong)
    assert ended.codes[0] == 1 and not ended.timed_out and f"vllm_serve: {words}" in ended.logs[0]
    assert "Traceback" not in "".join(ended.logs) and gone(tmp_path)


def test_whose_journals_count() -> None:
    def setup(program: str, torchrun: bool = False) -> Any:
        return scripts.run_ddp.Setup(
            scripts.LocalBed(),
            scripts.jobs.Shape(2, 1),
            "python",
            "nccl",
            1,
            1.0,
            [],
            {},
            scripts.GPU / program,
            torchrun,
        )

    assert setup("vllm_app.py").ranks_call_nccl
    assert not setup("vllm_serve.py").ranks_call_nccl
    assert not setup("ddp_train.py", torchrun=True).ranks_call_nccl
