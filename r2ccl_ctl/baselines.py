"""What a lost NIC costs a training job by other approaches: models, not measurements.

Each approach is a stop and a step time. Assumptions stand in ASSUMED and in each approach's text;
those of papers are theirs. Communication does not overlap with computing: the worst case. Messages
have no latency here, since gradients are large.
"""

from __future__ import annotations

from dataclasses import dataclass

from r2ccl_ctl import simulate
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.simulate import Cluster

FLOPS = 400e12  # of a GPU, as used
TOKENS = 4e6  # of a step, all GPUs together
BYTES = 2  # of a gradient
RESTART_S = 68 * 60.0  # median recovery, R2CCL's paper: detect, isolate, load again
WORKER_S = 30.0  # a worker of DejaVu starts: our assumption, its paper's is not known here
REPLICA_BYTES = 40e9  # of a stage's cache, to be fetched: our assumption
STOP_S = 0.011  # R2CCL resumes: the longest of 100, docs/measurements.md
ASSUMED = (
    f"{FLOPS / 1e12:.0f} TFLOPS used of each GPU, {TOKENS / 1e6:.0f} million tokens a step, "
    f"{BYTES} bytes a gradient, no overlap of communication and computing"
)


@dataclass(frozen=True)
class Model:
    """stages: of the pipeline, a node each; the GPUs of a node share a layer."""

    name: str
    params: float
    stages: int


MODELS = {"7B": Model("7B", 7e9, 1), "175B": Model("175B", 175e9, 8)}


@dataclass(frozen=True)
class Approach:
    """stop_s: nothing runs. step: to the healthy step. lost_s: in the hour after the failure."""

    name: str
    kind: str
    stop_s: float
    step: float
    lost_s: float
    factor: float
    assumes: str


def _comm(cluster: Cluster, model: Model, kind: str, share: float) -> float:
    """One AllReduce of the gradients, with a node that keeps `share` of its NICs' rate."""
    replicas = cluster.nodes // model.stages
    size = int(model.params * BYTES / model.stages)
    whole = cluster.rate * cluster.nics
    ports = [(whole * share, whole * share)] + [(whole, whole)] * (replicas - 1)
    took = simulate.allreduce(kind, size, ports, 0)
    return max(took.seconds, simulate.within_node(cluster, size))


def step_time(cluster: Cluster, model: Model) -> tuple[float, float]:
    """Of a healthy step: computing, communicating."""
    flops = 6 * model.params * TOKENS / (cluster.nodes * cluster.gpus)
    return flops / FLOPS, _comm(cluster, model, "ring", 1)


def approaches(cluster: Cluster, name: str) -> list[Approach]:
    """After one NIC of one node is lost."""
    model = MODELS[name]
    replicas, rest = divmod(cluster.nodes, model.stages)
    if rest or replicas < 3:
        raise R2UsageError(
            f"--model {name} has {model.stages} nodes a replica: give a multiple of it, "
            f"{3 * model.stages} nodes or more"
        )
    if cluster.nics < 2:
        raise R2UsageError("--model needs two NICs a node or more: one is lost")
    compute, comm = step_time(cluster, model)
    healthy = compute + comm
    one = 1 - 1 / cluster.nics
    units = replicas if model.stages > 1 else cluster.nodes * cluster.gpus
    fewer = compute * units / (units - 1) + comm
    node_rate = cluster.rate * cluster.nics
    rebuild = WORKER_S + (model.params * BYTES / model.stages + REPLICA_BYTES) / node_rate
    found = [
        ("R2CCL, direct", "simulated", STOP_S, compute + _comm(cluster, model, "direct", one),
         "resumes as in the lab; plan in force at once"),
        ("R2CCL, balance", "simulated", STOP_S, compute + _comm(cluster, model, "ring", one),
         "the NICs that are left share the ring's traffic"),
        ("one backup NIC (migrate)", "simulated", STOP_S,
         compute + _comm(cluster, model, "ring", 1 / 2),
         "the backup NIC carries double, and all wait for it"),
        ("AdapCC", "model", 0.0, fewer,
         "leaves out the rank behind the NIC, or its replica where a pipeline is one; fails in the "
         "middle of a collective are not survived, and count here as survived"),
        ("DejaVu (serving)", "model", rebuild, healthy,
         f"a spare worker starts in {WORKER_S:.0f} s, then loads weights and "
         f"{REPLICA_BYTES / 1e9:.0f} GB of cache over a node's NICs; these are our assumptions"),
        ("checkpoint and restart", "model", RESTART_S, healthy,
         "68 minutes, the median that R2CCL's paper names; steps since the checkpoint not counted"),
    ]  # fmt: skip
    best = _lost(found[0][2], found[0][3], healthy)
    return [
        Approach(
            title,
            kind,
            stop,
            step / healthy,
            _lost(stop, step, healthy),
            _lost(stop, step, healthy) / best,
            assumes,
        )
        for title, kind, stop, step, assumes in found
    ]


def _lost(stop: float, step: float, healthy: float) -> float:
    """Seconds of work that are missing an hour after the failure (or when it runs again)."""
    return stop + max(0.0, 3600 - stop) * (1 - healthy / step)
