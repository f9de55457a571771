"""status --check: one word about a job. Rung 1, with made-up processes, and rung 3 with a C
program's segment. It cannot prove that a job in danger would have been lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from segment_bed import StartWriter, start_writer
from test_cli import call, nobody

from r2ccl_ctl import verdict

__all__ = ["nobody", "start_writer"]


def snapshot(nics: list[str], *paths: str, silent_s: float = 0) -> Any:
    """A process with NICs and, to one peer, paths in these states; "up*" is a spare one."""
    process = SimpleNamespace(title="n0 pid 1", silent_s=silent_s, running=True)
    return SimpleNamespace(
        process=process,
        nics=[
            SimpleNamespace(name=f"eth{i}", state=state, link="up", cause="")
            for i, state in enumerate(nics)
        ],
        peers=[SimpleNamespace(index=0, connections=2, host="n1", pid=7)],
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


def test_what_is_certain_counts_before_what_is_not_known() -> None:
    reasons = [verdict.Reason(code, "") for code in (verdict.UNKNOWN, verdict.DEGRADED)]
    assert verdict.worst(reasons) == verdict.DEGRADED


def test_the_command(start_writer: StartWriter) -> None:
    writer = start_writer()
    words = ("status", "--check", "--job", writer.job)
    assert call(*words).stdout == "R2CCL HEALTHY: 1 process\n"
    assert "--json" in call(*words, "--json", code=2).output
    none = call("status", "--check", "--job", "no-such-job", code=verdict.UNKNOWN).stdout
    assert none.startswith("R2CCL UNKNOWN: no process")
