#!/usr/bin/env python3
"""`vllm serve`, unchanged, over several nodes, and a client that asks it while NICs fail.

One rank for each node, driven by run_ddp.py --program vllm_serve.py --variants dlopen, with
--ranks-per-node 1. Each starts vLLM's own server for its node (--nnodes, --node-rank; all but the
first headless), which starts its engine and workers as processes of their own; rank 0 then asks
/v1/completions over HTTP, one prompt after the other. The model is vllm_app.py's, and so are the
digests that stand for losses: tokens and log-probabilities of every answer. With a batch of one
nothing depends on when a request comes. The servers are told to end at the end, or killed.
With --until FILE rank 0 asks nothing and lets others ask until that file is there.
Prints the same JSON lines as ddp_train.py. On a GPU only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from vllm_app import (
    VOCAB,
    digest_of,
    emit,
    graphs,
    parse_args,
    prompt,
    set_environment,
    vllm_is_there,
    write_model,
)

START_S = 170.0  # engines compile kernels first
NAME = "llama"


def port(number: int) -> int:
    """The ports of a job follow MASTER_PORT, which is its ranks' door."""
    return int(os.environ["MASTER_PORT"]) + 20 + number


class ServeError(Exception):
    """The server did not start, ended, or gave no answer; the text says which."""


def server(folder: Path, opts: argparse.Namespace, rank: int, world: int) -> list[str]:
    more = ["--compilation-config", json.dumps(graphs(opts))] if opts.graph else ["--enforce-eager"]
    if rank:
        more.append("--headless")
    return [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder),
        "--served-model-name", NAME, "--tokenizer", str(folder), "--load-format", "dummy",
        "--tensor-parallel-size", str(opts.tp), "--pipeline-parallel-size", str(opts.pp),
        "--nnodes", str(world), "--node-rank", str(rank),
        "--master-addr", os.environ["MASTER_ADDR"],
        "--master-port", str(port(0)), "--host", "127.0.0.1", "--port", str(port(1)),
        "--disable-custom-all-reduce",
        "--attention-backend", opts.attention, "--no-enable-prefix-caching", "--seed", "1",
        "--max-model-len", str(opts.tokens + opts.answer + 16), "--max-num-seqs", str(opts.batch),
        "--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30), *more,
    ]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one word for each number; prompts come as numbers anyway."""
    words = {f"w{i}": i for i in range(VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1",
        "eos_token": "w2"}), encoding="utf-8")


def call(path: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> bytes:
    """An HTTP request of the server of this node."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port(1)}{path}", headers={"Content-Type": "application/json"},
        data=None if body is None else json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return bytes(answer.read())


def wait_until_up(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServeError(f"vllm serve ended with {process.returncode} before it was up")
        with contextlib.suppress(OSError):
            call("/health", timeout=5)
            return
        time.sleep(0.3)
    raise ServeError(f"vllm serve was not up after {START_S:.0f} s")


def answer_digest(opts: argparse.Namespace, step: int) -> str:
    """Asks for the continuation of a prompt: of its tokens and their log-probabilities."""
    try:
        said = json.loads(call("/v1/completions", {
            "model": NAME, "prompt": prompt(opts, step), "max_tokens": opts.answer,
            "temperature": 0, "logprobs": 1, "ignore_eos": True, "return_token_ids": True}))
    except urllib.error.HTTPError as err:
        raise ServeError(f"request {step + 1}: {err}: {err.read()[:300]!r}") from None
    except (OSError, http.client.HTTPException) as err:
        raise ServeError(f"request {step + 1}: no answer: {err}") from None
    choice = said["choices"][0]
    if len(choice["token_ids"]) != opts.answer:
        raise ServeError(f"request {step + 1}: {len(choice['token_ids'])} tokens came back")
    return digest_of(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))


def serve_until(file: Path, process: subprocess.Popen[bytes]) -> None:
    while not file.exists():
        if process.poll() is not None:
            raise ServeError(f"vllm serve ended with {process.returncode}")
        time.sleep(0.1)


def ask(opts: argparse.Namespace) -> str:
    everything = hashlib.sha256()
    for step in range(opts.steps):
        text = answer_digest(opts, step)
        everything.update(text.encode())
        emit(event="step", step=step + 1, loss=text)
    return everything.hexdigest()


def end(process: subprocess.Popen[bytes]) -> None:
    """Tells the server to end, which ends its own processes; kills it after 15 s."""
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def others(world: int) -> socket.socket:
    """Rank 0's door: ranks that have come in stay until it closes."""
    door = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
                                backlog=world)
    door.settimeout(START_S)
    return door


def come_in() -> socket.socket:
    """Another rank's way to that door."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(
                (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise ServeError("rank 0 did not open its door within 30 s") from None
            time.sleep(0.2)


def first(opts: argparse.Namespace, process: subprocess.Popen[bytes], world: int) -> None:
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(others(world))
        try:
            for _ in range(world - 1):
                stack.enter_context(door.accept()[0])
        except TimeoutError:
            raise ServeError(f"not all of {world} ranks came within {START_S:.0f} s") from None
        wait_until_up(process)
        emit(event="start", world=world, tp=opts.tp, pp=opts.pp, graph=opts.graph, port=port(1),
             vllm=json.loads(call("/version"))["version"])
        if opts.until:
            serve_until(Path(opts.until), process)
            return
        began = time.monotonic()
        losses = ask(opts)
        emit(event="end", rank=0, steps=opts.steps, losses=losses, weights="none",
             seconds=round(time.monotonic() - began, 3))


def main() -> int:
    opts = parse_args(__doc__, batch=1, tokens=1024)
    if not vllm_is_there("vllm_serve"):
        return 2
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        set_environment(VLLM_HOST_IP=probe.getsockname()[0])
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), opts)
        write_tokenizer(Path(folder))
        env = {k: v for k, v in os.environ.items()
               if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        process = subprocess.Popen(server(Path(folder), opts, rank, world), env=env,
                                   stdout=sys.stderr)
        try:
            if rank == 0:
                first(opts, process, world)
            else:
                with come_in() as door:
                    door.settimeout(None)
                    door.recv(1)  # until rank 0 is through
        except ServeError as err:
            print(f"vllm_serve: {err}", file=sys.stderr)
            return 1
        finally:
            end(process)
    return 0


if __name__ == "__main__":
    sys.exit(main())
