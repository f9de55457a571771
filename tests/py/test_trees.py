"""Tree AllReduce of the stand-in in processes.

Rung 3, emulated nodes over loopback. What it cannot prove: anything about NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Build

from r2ccl_ctl import launch

LIMIT = 180.0  # beyond all that a rank waits for, so that it says itself what it waited for


def run(
    build: Build, tmp: Path, nodes: int, per_node: int, args: str, env: Mapping[str, str]
) -> None:
    """r2ccl_perf on emulated nodes, which all take the tree."""
    argv = [str(build.perf), "--op", "all_reduce", *args.split(), "--timeout", "60"]
    more = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp / "nccl.%p"), **env}
    spec = launch.LaunchSpec(
        argv=argv,
        emulate_nodes=nodes,
        per_node=per_node,
        nics=2,
        nccl="standin",
        plugin="none",
        env=more,
        timeout=LIMIT,
    )
    with launch.start(spec, echo=False) as job:
        code = job.wait(LIMIT + 30)
        said = [rank.output[-600:] for rank in job.ranks]
        logs = [file.read_text(errors="replace") for file in tmp.glob("nccl.*")]
        assert code == 0, "\n".join([f"exit code {code}", *said, *(log[-600:] for log in logs)])
        assert "".join(logs).count("Algo Tree") >= nodes * per_node


@pytest.mark.parametrize("dtype", ["half", "bfloat16", "f8e4m3", "f8e5m2"])
def test_tree_is_exact_in_short_types(build: Build, tmp_path: Path, dtype: str) -> None:
    for redop in ("sum", "max"):
        args = f"-b 1K -e 1M -f 32 -n 2 -d {dtype} -o {redop}"
        run(build, tmp_path, 3, 1, args, {"NCCL_ALGO": "Tree", "NCCL_MIN_NCHANNELS": "2"})
