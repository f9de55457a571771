#!/usr/bin/env python3
"""Are the trees that NCCL built those that plans count on?

    NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p APPLICATION
    tests/gpu/nccl_trees.py /tmp/nccl.*

Reads the "Trees" lines of all ranks of one communicator (the first in each file), reduces them to
nodes (ranks with one host name are one node, in the order of their first ranks), and compares each
channel with build/tests/plan_tree, which prints what shim/plan/tree.c computes. Exit code 0: equal
on every channel, both trees on as many; 1: not; 2: the logs do not hold it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# HOST:PID:TID [DEVICE] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] ...
_LINE = re.compile(r"^(\S+?):(\d+):\d+ .*?\bNCCL INFO .*?Trees((?: \[\d+\] [-\d/]+->\d+->-?\d+)+)")
_CHANNEL = re.compile(r"\[(\d+)\] ([-\d]+)/([-\d]+)/([-\d]+)->(\d+)->(-?\d+)")


class TreesError(Exception):
    """The logs cannot be judged; the text says why."""


@dataclass
class Found:
    """host: of each rank. up: of each channel, the rank above each rank, -1 for the root."""

    host: dict[int, str] = field(default_factory=dict)
    up: dict[int, dict[int, int]] = field(default_factory=dict)


def read(texts: Iterable[str]) -> Found:
    """The first Trees line of each rank. A rank's links must agree with its neighbours'."""
    found = Found()
    down: dict[tuple[int, int], set[int]] = {}
    for text in texts:
        for line in text.splitlines():
            match = _LINE.match(line)
            if not match:
                continue
            for channel, a, b, c, rank_text, above in _CHANNEL.findall(match[3]):
                rank = int(rank_text)
                if rank in found.up.setdefault(int(channel), {}):
                    continue
                found.host[rank] = match[1]
                found.up[int(channel)][rank] = int(above)
                down[int(channel), rank] = {int(x) for x in (a, b, c)} - {-1}
    if not found.host:
        raise TreesError("no Trees line: set NCCL_DEBUG=INFO and give the logs of all ranks")
    ranks = set(range(max(found.host) + 1))
    for channel, above_of in found.up.items():
        if set(above_of) != ranks:
            missing = sorted(ranks - set(above_of))
            raise TreesError(f"channel {channel}: no Trees line of ranks {missing}")
        for rank in ranks:
            if down[channel, rank] != {r for r in ranks if above_of[r] == rank}:
                raise TreesError(f"channel {channel}: rank {rank} and its children disagree")
    return found


def node_trees(found: Found) -> tuple[int, dict[int, tuple[int, ...]]]:
    """How many nodes, and for each channel the node above each node (-1: the root)."""
    order = list(dict.fromkeys(found.host[rank] for rank in sorted(found.host)))
    node = {rank: order.index(host) for rank, host in found.host.items()}
    trees = {}
    for channel, above_of in found.up.items():
        links: dict[int, int] = {}
        for rank, above in above_of.items():
            here = node[rank]
            there = node[above] if above >= 0 else -1
            if there == here:
                continue
            if here in links:
                raise TreesError(f"channel {channel}: node {here} has two nodes above it")
            links[here] = there
        trees[channel] = tuple(links[n] for n in range(len(order)))
    return len(order), trees


def planned(program: Path, nodes: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """The two trees that plans count on, and the positions with their loads, lightest first."""
    try:
        done = subprocess.run(
            [str(program), str(nodes)], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as err:
        raise TreesError(f"{program}: {err}; build it with `make native`") from err
    up: dict[int, list[int]] = {0: [], 1: []}
    light = []
    for words in map(str.split, done.stdout.splitlines()):
        if words[0] == "light":
            light.append((int(words[1]), int(words[2])))
        else:
            up[int(words[0])].append(int(words[2]))
    return [tuple(up[0]), tuple(up[1])], light


def loads(nodes: int, trees: Mapping[int, Sequence[int]]) -> list[float]:
    """What each node sends, in times the data, when the channels share them equally."""
    load = [0.0] * nodes
    for tree in trees.values():
        for here, there in enumerate(tree):
            if there >= 0:
                load[here] += 1 / len(trees)
                load[there] += 1 / len(trees)
    return load


def check(found: Found, program: Path) -> tuple[list[str], list[str]]:
    """What to say, and what differs from the plans' trees."""
    nodes, trees = node_trees(found)
    if nodes < 2:
        raise TreesError("all ranks are on one node: there is no tree over nodes")
    want, light = planned(program, nodes)
    said, wrong = [], []
    seen: Counter[int] = Counter()
    for channel, tree in sorted(trees.items()):
        which = want.index(tree) if tree in want else -1
        seen[which] += 1
        if which < 0:
            wrong.append(f"channel {channel}: nodes above {list(tree)}, planned {want}")
    if seen[0] != seen[1] and want[0] != want[1]:
        wrong.append(f"{seen[0]} channels have the first tree and {seen[1]} the second")
    real = loads(nodes, trees)
    for position, load in light:
        if abs(real[position] - load / 2) > 1e-9:
            wrong.append(f"node {position} carries {real[position]:g} n, planned {load / 2:g} n")
    said.append(f"{nodes} nodes, {len(found.host)} ranks, {len(trees)} channels")
    said.append("load of each node: " + " ".join(f"{load:g}" for load in real))
    return said, wrong


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    try:
        texts = [Path(name).read_text(encoding="utf-8", errors="replace") for name in argv]
        said, wrong = check(read(texts), ROOT / "build" / "tests" / "plan_tree")
    except (OSError, TreesError) as err:
        print(f"nccl_trees: {err}", file=sys.stderr)
        return 2
    print("\n".join(said))
    for line in wrong:
        print(f"WRONG: {line}")
    print("NCCL's trees are not the planned ones" if wrong else "NCCL's trees are the planned ones")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
