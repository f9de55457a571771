"""status --check: one word about a job. Rung 1, with made-up processes, and rung 3 with a C
program's segment. It cannot prove that a job in danger would have been lost."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from segment_bed import StartWriter, start_writer
from test_cli import call, nobody

from r2ccl_ctl import pids, verdict

__all__ = ["nobody", "start_writer"]


def snapshot(nics: list[str], *paths: str, silent_s: float = 0) -> Any:
    """A process with NICs and, to one peer, paths in these states; "up*" is a spare one."""
    process = SimpleNamespace(title="n0 pid 1", host="n0", silent_s=silent_s, running=True)
    return SimpleNamespace(
        process=process,
        nics=[
            SimpleNamespace(name=f"eth{i}", state=state, link="up", cause="")
            for i, state in enumerate(nics)
        ],
        peers=[SimpleNamespace(index=0, connections=2, host="n1", pid=7, direction="tx")],
        paths=[
            SimpleNamespace(peer=0, state=state.rstrip("*"), spare=state.endswith("*"))
            for state in paths
        ],
    )


WELL = ["healthy", "healthy"]


@pytest.mark.parametrize(
    ("looked", "standing", "word"),
    [
        (snapshot(WELL, "up", "up"), "", "HEALTHY"),
        (snapshot(["healthy"], "up"), "", "HEALTHY"),  # one NIC is all it has
        (snapshot(WELL, "up", "closed"), "", "HEALTHY"),
        (snapshot(["healthy", "failed"], "up", "up"), "", "DEGRADED"),
        (snapshot(WELL, "up", "up", "down"), "", "DEGRADED"),
        (snapshot(WELL, "up", "down*"), "", "HEALTHY"),
        (snapshot(["healthy", "failed"], "up", "down"), "", "DANGER"),
        (snapshot(["healthy", "failed"], "up", "down", "up*"), "", "DANGER"),
        (snapshot(WELL, "down", "down"), "", "DANGER"),
        (snapshot(WELL, "up", "up"), "no path to n1:7", "DANGER"),
        (snapshot(WELL, "up", "up", silent_s=9), "", "UNKNOWN"),
    ],
)
def test_judge(looked: Any, standing: str, word: str) -> None:
    assert verdict.WORDS[verdict.worst(verdict.judge(looked, standing))] == word


def test_both_ways_between_two_processes_are_told_apart() -> None:
    looked = snapshot(WELL, "up", "down")
    looked.peers.append(SimpleNamespace(**{**vars(looked.peers[0]), "index": 1, "direction": "rx"}))
    looked.paths += [SimpleNamespace(peer=1, state=s, spare=False) for s in ("up", "up", "down")]
    words = [reason.text.split(" namespace")[0] for reason in verdict.judge(looked, "")]
    assert words == ["paths to", "paths from"]


def test_what_is_certain_counts_before_what_is_not_known() -> None:
    reasons = [verdict.Reason(code, "") for code in (verdict.UNKNOWN, verdict.DEGRADED)]
    assert verdict.worst(reasons) == verdict.DEGRADED


def test_what_several_processes_say_stands_once() -> None:
    def nic(pid: int) -> verdict.Reason:
        return verdict.Reason(verdict.DEGRADED, "NIC eth1 is failed", f"n0 pid {pid}", "n0")

    path = verdict.Reason(verdict.DEGRADED, "paths to n1:7: 2 left, 1 lost", "n0 pid 1", "n0")
    silent = verdict.Reason(verdict.UNKNOWN, "does not answer", "n1 pid 5", "n1")
    said = verdict.line([silent, path, *(nic(pid) for pid in range(480))], 4)
    assert said == (
        "n0: NIC eth1 is failed, 480 processes; n0 pid 1: paths to n1:7: 2 left, 1 lost; "
        "n1 pid 5: does not answer"
    )
    assert verdict.line([path, silent], 1).endswith("; and 1 more")
    assert verdict.line([], 4) == ""


def test_who_may_not_read_is_told_so(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor runs as a user of its own: it is not told that nothing runs."""
    start = pids.start_ticks(os.getpid())
    (nobody / f"r2ccl.0.{pids.own_pidns()}.{os.getpid()}.{start}").touch()
    monkeypatch.setattr(os, "access", lambda *words, **options: False)
    said = call("status", "--check", code=verdict.UNKNOWN).stdout
    assert said.startswith("R2CCL UNKNOWN: 1 process of user ") and "use sudo" in said


def test_the_command(start_writer: StartWriter) -> None:
    writer = start_writer()
    words = ("status", "--check", "--job", writer.job)
    assert call(*words).stdout == "R2CCL HEALTHY: 1 process\n"
    assert "--json" in call(*words, "--json", code=2).output
    none = call("status", "--check", "--job", "no-such-job", code=verdict.UNKNOWN).stdout
    assert none.startswith("R2CCL UNKNOWN: no process")
