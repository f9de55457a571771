"""LL128: a consumer takes a line of 128 bytes as soon as its flag, the last 8 bytes, has arrived.

Rung 3. The kernel's copy into the receiver's buffer does not ascend inside a line: with recv()
straight into the buffer, 16 floats (the line's first 64 bytes) were seen stale about once in
15 s. So soak runs for longer than that, also with R2CCL_VERIFY=1, where lines are received and
copied in the same way. test_tcp_lines.c has the order without chance. It cannot prove the order on
a processor with a weaker memory model, nor what a GPU sees.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Build, RunBounded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verify", "seconds"),
    [
        ("0", 15),
        pytest.param("0", 60, marks=pytest.mark.soak),
        pytest.param("1", 60, marks=pytest.mark.soak),
    ],
)
def test_no_stale_half_lines(
    build: Build, tool: Path, run_bounded: RunBounded, verify: str, seconds: int
) -> None:
    launch: list[str | Path] = [
        tool,
        "launch",
        "-n",
        "4",
        "--emulate-nodes",
        "2",
        "--nics",
        "2",
        "--nccl",
        "standin",
    ]
    perf: list[str | Path] = [
        build.perf,
        "-b",
        "1M",
        "-e",
        "1M",
        "--duration",
        str(seconds),
        "--check-every",
    ]
    finished = run_bounded(
        [*launch, "--timeout", "110", "--", *perf],
        env={"NCCL_PROTO": "LL128", "R2CCL_VERIFY": verify},
        timeout=130,
    )
    assert "Out of bounds values : 0 OK" in finished.stdout
