"""Tree AllReduce of the stand-in in processes, and the script that compares NCCL's trees with those
that plans count on.

Rung 3, emulated nodes over loopback. What it cannot prove: that the real NCCL builds these trees;
tests/gpu/nccl_trees.py does, from its log on a machine with GPUs.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build

from r2ccl_ctl import launch

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
trees: Any = importlib.import_module("nccl_trees")

LIMIT = 180.0  # beyond all that a rank waits for, so that it says itself what it waited for


def run(
    build: Build, tmp: Path, nodes: int, per_node: int, args: str, env: Mapping[str, str]
) -> str:
    """r2ccl_perf on emulated nodes; the logs of all ranks, each rank on a host of its node."""
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
        logs = [file.read_text(errors="replace")[-600:] for file in tmp.glob("nccl.*")]
        assert code == 0, "\n".join([f"exit code {code}", *said, *logs])
    text = ""
    for file in sorted(tmp.glob("nccl.*")):
        log = file.read_text(encoding="utf-8")
        rank = re.search(r"Trees \[0\] \S+->(\d+)->", log)
        assert rank, log[-600:]
        text += re.sub(r"^[^:\n]+:", f"node{int(rank[1]) // per_node}:", log, flags=re.MULTILINE)
    return text


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 1), (4, 2), (5, 1), (8, 1)])
def test_trees_are_the_planned_ones(
    build: Build, tmp_path: Path, nodes: int, per_node: int
) -> None:
    log = run(
        build,
        tmp_path,
        nodes,
        per_node,
        "-b 256K -e 256K -n 1",
        {"NCCL_ALGO": "Tree", "NCCL_MIN_NCHANNELS": "2"},
    )
    assert len(re.findall("Algo Tree", log)) == nodes * per_node
    said, wrong = trees.check(trees.read([log]), build.path / "tests" / "plan_tree")
    assert not wrong
    assert said[0] == f"{nodes} nodes, {nodes * per_node} ranks, 4 channels"


@pytest.mark.parametrize("dtype", ["half", "bfloat16", "f8e4m3", "f8e5m2"])
def test_tree_is_exact_in_short_types(build: Build, tmp_path: Path, dtype: str) -> None:
    for redop in ("sum", "max"):
        args = f"-b 1K -e 1M -f 32 -n 2 -d {dtype} -o {redop}"
        run(build, tmp_path, 3, 1, args, {"NCCL_ALGO": "Tree", "NCCL_MIN_NCHANNELS": "2"})


GOOD = """\
a:1:1 [0] NCCL INFO Trees [0] 2/-1/-1->0->-1 [1] -1/-1/-1->0->1
b:1:1 [0] NCCL INFO Trees [0] -1/-1/-1->1->2 [1] 0/2/-1->1->3
c:1:1 [0] NCCL INFO Trees [0] 1/3/-1->2->0 [1] -1/-1/-1->2->1
d:1:1 [0] NCCL INFO Trees [0] -1/-1/-1->3->2 [1] 1/-1/-1->3->-1
"""


def test_other_trees_are_found(build: Build) -> None:
    program = build.path / "tests" / "plan_tree"
    assert not trees.check(trees.read([GOOD]), program)[1]
    # The same tree twice, and a chain.
    twice = re.sub(r" \[1\].*", lambda _: "", GOOD)
    assert trees.check(trees.read([twice]), program)[1]
    chain = "".join(
        f"{name}:1:1 [0] NCCL INFO Trees [0] {down}/-1/-1->{rank}->{up}\n"
        for name, rank, down, up in (
            ("a", 0, 1, -1),
            ("b", 1, 2, 0),
            ("c", 2, 3, 1),
            ("d", 3, -1, 2),
        )
    )
    assert "channel 0" in trees.check(trees.read([chain]), program)[1][0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nothing", "no Trees line"),
        (GOOD.split("\n", 1)[1], r"no Trees line of ranks \[0\]"),
        (GOOD.replace("2/-1/-1->0->-1", "3/-1/-1->0->-1"), "disagree"),
        (re.sub(r"^\w:", "a:", GOOD, flags=re.MULTILINE), "one node"),
    ],
)
def test_logs_that_say_nothing(build: Build, text: str, why: str) -> None:
    with pytest.raises(trees.TreesError, match=why):
        trees.check(trees.read([text]), build.path / "tests" / "plan_tree")
