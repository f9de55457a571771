"""How long AllReduce takes on clusters that nobody has here: the executor's own schedules, carried
out in SimGrid (build/r2ccl_simulate, tests/simulate/simulate.cpp).

A node is one rank: its GPUs share its NICs, and what they do among themselves
is a term of bandwidth, which overlaps with the network. Rates are bytes per second each way, sizes
bytes, times seconds. A pattern is the set of NICs that are lost: pairs of node and NIC, from 0.
"""

from __future__ import annotations

import functools
import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2Error, R2UsageError

MOST_NODES = 1024
RING_MOST = 32  # nodes: a larger ring has too many messages for SimGrid, so its model is asked
TIMEOUT_S = 600.0
MESSAGES = 33_000  # of a simulated ring
ROUNDS, WINDOW = 64, 4
SCHEDULES = ("ring", "direct")
SIMGRID, MODEL = "simgrid", "model"

Pattern = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Cluster:
    """rate: of a NIC; nvlink: of a GPU; latency: of a message."""

    nodes: int
    nics: int
    rate: float
    gpus: int = 8
    nvlink: float = 450e9
    latency: float = 5e-6


@dataclass(frozen=True)
class Took:
    seconds: float
    bound: float
    engine: str


def check(cluster: Cluster) -> None:
    if not 2 <= cluster.nodes <= MOST_NODES:
        raise R2UsageError(f"--nodes {cluster.nodes}: give 2 to {MOST_NODES}")
    if cluster.nics < 1:
        raise R2UsageError(f"--nics {cluster.nics}: give 1 or more")
    if cluster.gpus < 1:
        raise R2UsageError(f"--gpus {cluster.gpus}: give 1 or more")


def program() -> Path:
    path = paths.native_dir() / "r2ccl_simulate"
    if not path.is_file():
        raise R2Error(
            f"{path} is missing, since SimGrid was not there when it was built: install "
            "libsimgrid-dev and g++ (Debian), then `make native` in a checkout"
        )
    return path


@functools.cache
def _run(line: str) -> tuple[float, float]:
    """Seconds, and the lower bound."""
    command = [str(program()), "--log=root.thresh:error"]
    try:
        done = subprocess.run(
            command, input=line + "\n", capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as err:
        raise R2Error(f"a simulation took more than {TIMEOUT_S:.0f} s: fewer nodes") from err
    if done.returncode != 0:
        raise R2Error(f"{command[0]} failed: {done.stderr.strip()[-300:] or done.returncode}")
    found = json.loads(done.stdout)
    return found["seconds"], found["bound"]


def _rounds(kind: str, size: int, ports: Sequence[tuple[float, float]], latency: float) -> int:
    """Small pieces fill the ports soon, but a message shall take longer than its latency. A ring of
    many ranks has few rounds, since each has 2 p p messages."""
    p, rate = len(ports), max(max(port) for port in ports)
    ring = kind != "direct"
    most = min(ROUNDS, MESSAGES // (2 * p * p)) if ring else ROUNDS
    if latency > 0:
        most = min(most, int(size / (p if ring else 2) / rate / (2 * latency)))
    return max(1, most)


def allreduce(
    kind: str,
    size: int,
    ports: Sequence[tuple[float, float]],
    latency: float,
    *,
    rounds: int | None = None,
    fold: bool | None = None,
) -> Took:
    """ports: what each rank sends and receives. kind: also "r2ccl", whose slow rank is the one with
    the slowest port."""
    p = len(ports)
    engine = MODEL if kind == "ring" and p > RING_MOST else SIMGRID
    if rounds is None:
        rounds = 0 if engine == MODEL else _rounds(kind, size, ports, latency)
    fold = kind == "direct" if fold is None else fold
    slow = min(range(p), key=lambda i: min(ports[i]))
    head = f"{kind} {size} {rounds} {WINDOW} {latency:g} {fold:d} {slow} 16 {p} "
    return Took(*_run(head + " ".join(f"{out:.0f} {into:.0f}" for out, into in ports)), engine)


def within_node(cluster: Cluster, size: int) -> float:
    """Reduce-scatter and all-gather over NVLink; they overlap with the network."""
    return 2 * (cluster.gpus - 1) / cluster.gpus * size / cluster.nvlink


def ports_left(cluster: Cluster, pattern: Pattern) -> list[tuple[float, float]]:
    """In ascending order of what is left: which node it is makes no difference to the time."""
    lost = Counter(node for node, _ in pattern)
    rates = sorted(cluster.rate * (cluster.nics - lost[node]) for node in range(cluster.nodes))
    return [(rate, rate) for rate in rates]


def time_of(kind: str, cluster: Cluster, size: int, pattern: Pattern = frozenset()) -> Took:
    took = allreduce(kind, size, ports_left(cluster, pattern), cluster.latency)
    return Took(max(took.seconds, within_node(cluster, size)), took.bound, took.engine)


# ---- patterns


def random_pattern(cluster: Cluster, lost: int, rng: random.Random) -> Pattern:
    """Any NICs, but one of each node is left."""
    if lost > cluster.nodes * (cluster.nics - 1):
        raise R2UsageError(f"--lost {lost}: with so many, a node has no NIC left")
    while True:
        found: set[tuple[int, int]] = set()
        while len(found) < lost:
            found.add((rng.randrange(cluster.nodes), rng.randrange(cluster.nics)))
        if _most_lost(found) < cluster.nics:
            return frozenset(found)


def _most_lost(pattern: Iterable[tuple[int, int]]) -> int:
    """NICs of the node that has lost most."""
    return max(Counter(node for node, _ in pattern).values(), default=0)


def random_patterns(cluster: Cluster, lost: int, count: int, seed: int) -> list[Pattern]:
    rng = random.Random(f"{seed} {cluster.nodes} {cluster.nics} {lost}")
    return [random_pattern(cluster, lost, rng) for _ in range(count)]


def read_patterns(text: str, cluster: Cluster) -> list[Pattern]:
    """A pattern a line: NODE:NIC and so on, from 0. Empty lines and what follows # do not count."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        pattern = set()
        for word in words:
            node, _, nic = word.partition(":")
            if not (node.isdecimal() and nic.isdecimal()):
                raise R2UsageError(f"line {number}: '{word}' is no NODE:NIC, such as 3:0")
            if int(node) >= cluster.nodes or int(nic) >= cluster.nics:
                raise R2UsageError(
                    f"line {number}: {word} does not exist: there are nodes 0 to "
                    f"{cluster.nodes - 1} with NICs 0 to {cluster.nics - 1}"
                )
            pattern.add((int(node), int(nic)))
        if _most_lost(pattern) >= cluster.nics:
            raise R2UsageError(f"line {number}: a node has no NIC left")
        if words:
            found.append(frozenset(pattern))
    if not found:
        raise R2UsageError("the file names no NIC: a line is a pattern, such as `3:0 7:1`")
    return found


# ---- many of them


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


@dataclass(frozen=True)
class Row:
    """Ratios are to the healthy ring's time."""

    nodes: int
    gpus: int
    size: int
    lost: int
    patterns: int
    schedule: str
    engine: str
    healthy_ring_s: float
    median_s: float
    median: float
    p95: float
    bound: float


@dataclass(frozen=True)
class Rails:
    """The ring of a rail-only fabric, in the nodes' order and in the order that bridges."""

    nodes: int
    lost: int
    patterns: int
    engine: str
    plain_median: float
    plain_p95: float
    bridged_median: float
    bridged_p95: float
    gain_median: float
    gain_p95: float
    helped: float


def rows_of(
    cluster: Cluster, size: int, lost: int, patterns: Sequence[Pattern], tick: Callable[[], None]
) -> list[Row]:
    healthy = time_of("ring", cluster, size).seconds
    found = []
    for kind in SCHEDULES:
        took = _each(functools.partial(time_of, kind, cluster, size), patterns)
        tick()
        seconds = [one.seconds for one in took]
        found.append(
            Row(
                cluster.nodes,
                cluster.nodes * cluster.gpus,
                size,
                lost,
                len(patterns),
                kind,
                took[0].engine,
                healthy,
                median(seconds),
                median(seconds) / healthy,
                percentile(seconds, 0.95) / healthy,
                median([one.bound for one in took]) / healthy,
            )
        )
    return found


def _each(run: Callable[[Pattern], Took], patterns: Sequence[Pattern]) -> list[Took]:
    """Two at a time; what was simulated before is not simulated again."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, patterns))


# ---- rail-only fabrics


def rails_left(cluster: Cluster, pattern: Pattern) -> list[frozenset[int]]:
    every = frozenset(range(cluster.nics))
    lost: dict[int, set[int]] = {}
    for node, nic in pattern:
        lost.setdefault(node, set()).add(nic)
    return [every - lost.get(node, set()) for node in range(cluster.nodes)]


def shared(order: Sequence[int], rails: Sequence[frozenset[int]]) -> list[int]:
    """Rails that both ends of each edge of the ring have."""
    return [len(rails[a] & rails[b]) for a, b in zip(order, [*order[1:], order[0]], strict=True)]


def bridged(rails: Sequence[frozenset[int]]) -> list[int]:
    """Nodes that have lost the same rails stand together; between such groups stands a node with
    more rails, if there is one. The paper's re-ranking, as far as its text goes."""
    groups: dict[frozenset[int], list[int]] = {}
    most = max(len(one) for one in rails)
    for node, one in enumerate(rails):
        groups.setdefault(one, []).append(node)
    bridges = [node for one, nodes in groups.items() if len(one) == most for node in nodes]
    order: list[int] = []
    for one, nodes in sorted(groups.items(), key=lambda item: (len(item[0]), min(item[1]))):
        if len(one) < most:
            order += nodes + ([bridges.pop()] if bridges else [])
    return order + bridges


def ring_time(cluster: Cluster, size: int, edges: Sequence[int]) -> Took:
    """edges[i]: rails from place i to the next. A ring's time does not depend on their order."""
    rates = [cluster.rate * edge for edge in sorted(edges)]
    ports = list(zip(rates, [rates[-1], *rates[:-1]], strict=True))
    return allreduce("ring", size, ports, cluster.latency)


def rails_of(
    cluster: Cluster, size: int, lost: int, patterns: Sequence[Pattern], tick: Callable[[], None]
) -> Rails:
    """Patterns in which two neighbours share no rail stop the plain ring; they count as infinite
    there."""
    healthy = ring_time(cluster, size, [cluster.nics] * cluster.nodes)

    def both(pattern: Pattern) -> tuple[float, float]:
        rails = rails_left(cluster, pattern)
        return tuple(  # type: ignore[return-value]
            ring_time(cluster, size, edges).seconds / healthy.seconds
            if min(edges)
            else float("inf")
            for edges in (
                shared(range(cluster.nodes), rails),
                shared(bridged(rails), rails),
            )
        )

    with ThreadPoolExecutor(2) as pool:
        pairs = list(pool.map(both, patterns))
    tick()
    plain, better = [a for a, _ in pairs], [b for _, b in pairs]
    gains = [1 - b / a if a != b else 0.0 for a, b in pairs]
    return Rails(
        cluster.nodes,
        lost,
        len(patterns),
        healthy.engine,
        median(plain),
        percentile(plain, 0.95),
        median(better),
        percentile(better, 0.95),
        median(gains),
        percentile(gains, 0.95),
        sum(gain > 0.005 for gain in gains) / len(gains),
    )


# ---- the picture


def draw(rows: Iterable[Row], into: Path) -> None:
    """Time over lost NICs, a line for each schedule and size of cluster."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as err:
        raise R2Error(f"--plot: matplotlib cannot be imported ({err}): pip install it") from err
    lines: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.schedule, row.gpus, row.size), []).append(row)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (schedule, gpus, size), points in lines.items():
        points.sort(key=lambda row: row.lost)
        axes.plot(
            [row.lost for row in points],
            [row.median for row in points],
            marker="o" if schedule == "direct" else "x",
            linestyle="-" if schedule == "direct" else "--",
            label=f"{schedule}, {gpus} GPUs, {size >> 20} MiB",
        )
    axes.set_xlabel("lost NICs")
    axes.set_ylabel("AllReduce: time / healthy ring (median)")
    axes.set_title("Simulated (SimGrid, fluid model), no hardware")
    axes.legend(fontsize="small")
    figure.tight_layout()
    try:
        figure.savefig(into)
    except (OSError, ValueError) as err:
        raise R2UsageError(f"--plot {into}: {err}") from err
    finally:
        pyplot.close(figure)
