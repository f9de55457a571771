"""What AllReduce would run as with some NICs lost: the shim's own planner, asked without a job.

Rates are bytes per second each way, sizes bytes, times seconds.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from r2ccl_ctl import paths
from r2ccl_ctl.control import Process
from r2ccl_ctl.errors import R2Error, R2UsageError

MOST_NODES = 256
MOST_RANKS = 1024  # of a node
SCHEDULES = ("stock", "direct", "r2ccl-allreduce")
WISHES = {"auto": 0, "optimal": 1, "r2ccl-allreduce": 2}  # by R2CCL_MODE
_WHY = 160
_DOWN = ("failed", "probing", "drained", "damped")  # states of a NIC that carries nothing


@dataclass(frozen=True)
class Node:
    """capacity: with all of its NICs; share: what is left of it."""

    name: str
    capacity: float
    share: float


@dataclass(frozen=True)
class Prediction:
    """times: of each schedule that can be had. gain: what the chosen one saves. from_bytes: the
    plan holds from this size on; None: for none. weights: what each node owns under direct."""

    chosen: str
    times: dict[str, float]
    bound: float
    gain: float
    from_bytes: int | None
    weights: tuple[float, ...]
    why: str


@cache
def _library() -> ctypes.CDLL:
    """It does nothing by itself in a process that never calls NCCL."""
    path = paths.shim_path()
    try:
        library = ctypes.CDLL(str(path))
        library.r2ccl_plan_predict.restype = ctypes.c_int
    except (OSError, AttributeError) as err:
        raise R2Error(f"{path} has no planner to ask: {err}; build it again (make)") from err
    return library


def predict(nodes: Sequence[Node], size: int, mode: str = "auto", per_node: int = 1) -> Prediction:
    """per_node: ranks of each node."""
    p = len(nodes)
    if not 1 <= p <= MOST_NODES:
        raise R2UsageError(f"{p} nodes: give 1 to {MOST_NODES}")
    if not 1 <= per_node <= MOST_RANKS:
        raise R2UsageError(f"{per_node} ranks of a node: give 1 to {MOST_RANKS}")
    if size < 1:
        raise R2UsageError(f"size {size}: give 1 byte or more")
    doubles, words = ctypes.c_double * p, ctypes.c_uint32 * p
    figures, weights = (ctypes.c_double * 5)(), words()
    from_bytes, why = ctypes.c_uint64(), ctypes.create_string_buffer(_WHY)
    schedule = _library().r2ccl_plan_predict(
        p,
        doubles(*(node.capacity for node in nodes)),
        doubles(*(node.share for node in nodes)),
        per_node,
        ctypes.c_uint64(size),
        WISHES[mode],
        figures,
        weights,
        ctypes.byref(from_bytes),
        why,
        ctypes.c_size_t(_WHY),
    )
    if schedule < 0:
        raise R2UsageError("the planner refuses these nodes: rates must be above 0")
    *times, bound, gain = figures
    return Prediction(
        SCHEDULES[schedule],
        {name: ns / 1e9 for name, ns in zip(SCHEDULES, times, strict=True) if math.isfinite(ns)},
        bound / 1e9,
        gain,
        None if schedule == 0 else from_bytes.value,
        tuple(weight / 65536 for weight in weights),
        why.value.decode("utf-8", "replace"),
    )


def imagined(count: int, nics: int, rate: float, lost: Sequence[tuple[int, int]]) -> list[Node]:
    """`count` equal nodes; lost: node and NIC, from 0."""
    if not 1 <= count <= MOST_NODES:
        raise R2UsageError(f"--nodes {count}: give 1 to {MOST_NODES}")
    if nics < 1:
        raise R2UsageError(f"--nics {nics}: give 1 or more")
    for node, nic in lost:
        if node >= count:
            raise R2UsageError(f"--fail {node}:{nic}: there are nodes 0 to {count - 1}")
        if nic >= nics:
            raise R2UsageError(f"--fail {node}:{nic}: a node has NICs 0 to {nics - 1}")
    gone = set(lost)
    return [
        Node(f"node{i}", nics * rate, 1 - sum(node == i for node, _ in gone) / nics)
        for i in range(count)
    ]


def of_job(processes: Sequence[Process]) -> tuple[list[Node], int, str]:
    """The nodes of a running job, the ranks of each, and a remark. Only this host's processes are
    seen: others of the job count as healthy, and as fast as the fastest here."""
    seen: dict[str, Node] = {}
    expected, per_node = 0, 1
    for process in processes:
        snapshot = process.snapshot()
        speeds = [(nic.speed_mbps * 125_000, nic.state not in _DOWN) for nic in snapshot.nics]
        whole = sum(speed for speed, _ in speeds)
        for comm in snapshot.comms:
            if comm.nodes and comm.ranks:
                expected, per_node = max(
                    (expected, per_node), (comm.nodes, comm.ranks // comm.nodes)
                )
        if not whole:
            continue
        node = Node(process.host, whole, sum(s for s, works in speeds if works) / whole)
        if process.host not in seen or node.share < seen[process.host].share:
            seen[process.host] = node
    if not seen:
        raise R2Error("no process of the job here has a NIC whose speed is known")
    nodes = list(seen.values())
    more = max(0, expected - len(nodes))
    fastest = max(node.capacity for node in nodes)
    nodes += [Node(f"elsewhere{i}", fastest, 1.0) for i in range(more)]
    return (
        nodes,
        per_node,
        f"{more} nodes are not on this host: they count as healthy" if more else "",
    )
