"""Small messages that are done when they are sent (R2CCL_BUFFERED), while NICs fail: nothing is
lost, doubled or late, also what was sent last by a process that has ended.

Rung 3: real sockets and processes, injected faults. What is done when, and what a closed connection
still says, is test_engine_buffered's and test_engine_late_acks' matter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Build
from failover_bed import Side, loopback, running_pair, until

LAST = 10  # messages, fewer than go without a receive that the sender has heard of


def is_up(side: Side, nic: str) -> bool:
    """Both ways between the NICs of that name, its own and the peer's."""
    paths = [p for p in side.snapshot().paths if p.nic == nic and p.remote_nic == nic]
    return len(paths) == 2 and all(p.state == "up" for p in paths)


@pytest.mark.parametrize(("kind", "threads"), [("blackhole", 2), ("error", 1)])
def test_nics_fail_in_turn(build: Build, kind: str, threads: int) -> None:
    """NICs of both sides die in the middle of small messages and come back, again and again."""
    words = ("--size", "256", "--outstanding", 16, "--conns", 3, "--stall", 20, "--bidir")
    env: dict[str, str | int] = {
        "R2CCL_IO_THREADS": threads,
        "R2CCL_DAMP": 0,
        "R2CCL_RAMP": "200ms",
    }
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        pair.moving()
        for turn in range(4):
            side = pair.side(("tx", "rx")[turn % 2])
            nic = ("127.0.1.1", "127.0.2.1")[turn // 2 % 2]
            until("it works", lambda s=side, n=nic: is_up(s, n), show=pair)  # type: ignore[misc]
            side.fail(nic, kind)
            until("it is noticed", lambda s=side, n=nic: not is_up(s, n), show=pair)  # type: ignore[misc]
            pair.moving(200)
            side.recover(nic)
            pair.moving(200)
        pair.finish()
        assert pair.tx.named("replay") or pair.rx.named("replay"), str(pair)


@pytest.mark.parametrize("threads", [2, 4])
def test_last_words(build: Build, tmp_path: Path, threads: int) -> None:
    """A process sends its last messages into a NIC that has fallen silent, closes, and ends: it
    stays until they have arrived over the other NIC."""
    begin = tmp_path / "begin"
    words = ("--size", "256", "--count", LAST, "--outstanding", LAST, "--stall", 20, "--leave")
    env: dict[str, str | int] = {"PAIR_BEGIN": str(begin), "R2CCL_IO_THREADS": threads}
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        sender = pair.rx  # the second process
        until("both paths are up", lambda: len(sender.named("path-up")) >= 2)
        for nic in ("127.0.1.1", "127.0.2.1"):
            sender.fail(nic, "blackhole", "tx")
        begin.touch()
        until("all are sent", lambda: sender.counter("eager_messages") >= LAST)
        sender.recover("127.0.2.1")
        assert pair.wait() == 0, str(pair)
        (result,) = pair.results()
        assert result["wrong"] == 0 and result["bytes"] == LAST * 256, str(pair)
        assert sender.named("replay"), str(pair)
