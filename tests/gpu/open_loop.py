#!/usr/bin/env python3
"""An open-loop client of a server that streams completions, as `vllm serve` does.

Each request goes out when its time has come, however many are unanswered; times count from then, so
that a server (or client) that stands still is seen. The times are a Poisson process, from a seed.
Prints one JSON object: what each request met, in seconds of the monotonic clock.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request. due: when it had to go out; tokens: when each token came."""

    due: float
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    error: str = ""
    whole: bool = False

    @property
    def first_s(self) -> float:
        """Time to the first token (TTFT); infinite if none came."""
        return self.tokens[0] - self.due if self.tokens else math.inf

    @property
    def each_s(self) -> float:
        """Time per token after the first (TPOT); infinite without a whole answer."""
        if not self.whole:
            return math.inf
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)

    def gap_s(self, until: float) -> float:
        """The longest wait for the next token; a broken answer waits until `until`."""
        times: list[float] = [self.due, *self.tokens] + ([] if self.whole else [until])
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests are due, in seconds from the start."""
    dice, at = random.Random(seed), 0.0
    times: list[float] = []
    while True:
        at += dice.expovariate(rate)
        if at >= seconds:
            return times
        times.append(at)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: a value that was met, so that one that is infinite stays so."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def summary(asked: Sequence[Asked], until: float) -> dict[str, Any]:
    """In milliseconds; None: that many had no answer."""
    def ms(values: Sequence[float], share: float) -> float | None:
        value = percentile(values, share) * 1e3
        return round(value, 2) if math.isfinite(value) else None

    first, each = [one.first_s for one in asked], [one.each_s for one in asked]
    return {
        "requests": len(asked), "unanswered": sum(not one.whole for one in asked),
        "ttft_p50": ms(first, 0.5), "ttft_p99": ms(first, 0.99),
        "tpot_p50": ms(each, 0.5), "tpot_p99": ms(each, 0.99),
        "gap_max": ms([one.gap_s(until) for one in asked], 1.0),
        "late_max": ms([one.sent - one.due for one in asked if one.sent], 1.0),
    }


def events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """What a stream of server-sent events says, up to its end."""
    while line := answer.readline():
        text = line.strip()
        if text == b"data: [DONE]":
            return
        if text.startswith(b"data: "):
            yield json.loads(text[6:])


def ask(one: Asked, port: int, body: dict[str, Any], patience: float) -> None:
    one.sent = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            one.error = f"status {answer.status}: {answer.read()[:200]!r}"
            return
        for event in events(answer):
            came = [len(choice.get("token_ids") or ()) for choice in event.get("choices", ())]
            one.tokens += [time.monotonic()] * sum(came)
            if "error" in event:
                one.error = str(event["error"])[:200]
        one.whole = len(one.tokens) == body["max_tokens"]
        if not one.whole and not one.error:
            one.error = f"{len(one.tokens)} tokens of {body['max_tokens']}"
    except (OSError, ValueError, http.client.HTTPException) as err:
        one.error = f"{type(err).__name__}: {err}"
    finally:
        connection.close()


def body_of(opts: argparse.Namespace, dice: random.Random) -> dict[str, Any]:
    return {"model": opts.model, "max_tokens": opts.answer, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
            "prompt": [dice.randrange(3, opts.vocab) for _ in range(opts.tokens)]}


def drive(opts: argparse.Namespace) -> list[Asked]:
    """Sends all requests in their time, and waits --drain seconds for the last answers."""
    dice, threads = random.Random(opts.seed + 1), []
    start = time.monotonic() + 0.05
    asked = [Asked(start + at) for at in arrivals(opts.rate, opts.seconds, opts.seed)]
    for one in asked:
        body = body_of(opts, dice)
        time.sleep(max(0.0, one.due - time.monotonic()))
        thread = threading.Thread(target=ask, daemon=True,
                                  args=(one, opts.port, body, opts.seconds + opts.drain))
        thread.start()
        threads.append(thread)
    ends = start + opts.seconds + opts.drain
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return asked


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--port", type=int, required=True, help="of a server on 127.0.0.1")
    p.add_argument("--model", default="llama")
    p.add_argument("--rate", type=float, default=5.0, help="requests a second")
    p.add_argument("--seconds", type=float, default=10.0)
    p.add_argument("--drain", type=float, default=10.0, help="seconds for answers after the last")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tokens", type=int, default=512, help="of a prompt")
    p.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    p.add_argument("--vocab", type=int, default=4096)
    opts = p.parse_args(argv)
    if opts.rate <= 0:
        p.error(f"--rate {opts.rate:g}: more than 0")
    return opts


def main(argv: Sequence[str] | None = None) -> int:
    opts = parse_args(argv)
    asked = drive(opts)
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"until": time.monotonic(), "asked": [asdict(one) for one in asked]}),
              flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still wait for a server that hangs
