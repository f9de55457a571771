"""How long messages of several connections take that one polling thread of each of two processes
drives through the net plugin, as NCCL's thread does (tests/bench/crowd.c): whole, as they are sent,
beside cut into pieces of 128 KiB (R2CCL_CHUNK) and, where FASTSOCKET names that plugin, FastSocket.

Rung 4: the plugin as NCCL loads it, between two lab nodes with two unshaped NICs. On fewer than 16
processors threads seldom poll. Whether a collective gains what a message does is seen under NCCL
only (tests/gpu; docs/decisions.md 44).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from figures import Section
from rig import Bed, Options, Sides, clean_env, lab_bed, program

from r2ccl_ctl import paths

TITLE = "Messages of several connections at once, whole beside cut"
NICS = 2
# Connections, messages of each on their way, bytes.
SHAPES = ((1, 1, 512 << 10), (2, 1, 512 << 10), (4, 1, 512 << 10), (4, 4, 512 << 10), (2, 2, 8192))
LIMIT_S = 60.0


@dataclass(frozen=True)
class Found:
    """us: half of there and back, the median. gbs: each way. isend_us: a call of it."""

    us: float
    gbs: float
    isend_us: float
    cpus: float


def variants() -> dict[str, tuple[str, dict[str, str]]]:
    """The plugin of each, and what is set for it; "cut" is the baseline."""
    ours = str(paths.native_dir() / "libnccl-net-r2ccl.so")
    found: dict[str, tuple[str, dict[str, str]]] = {
        "cut": (ours, {"R2CCL_CHUNK": "128K"}),
        "r2ccl": (ours, {}),
    }
    if os.environ.get("FASTSOCKET"):
        found["FastSocket 4x2"] = (
            os.environ["FASTSOCKET"],
            {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "2"},
        )
    return found


def measure(
    bed: Bed, plugin: str, env: dict[str, str], shape: tuple[int, int, int], iters: int
) -> Found:
    tool, at = program("crowd"), bed.meeting()
    conns, window, size = (str(n) for n in shape)
    receiver = [tool, "--plugin", plugin, "--listen", at]
    sender = [
        tool,
        "--plugin",
        plugin,
        "--dial",
        at,
        "--conns",
        conns,
        "--window",
        window,
        "--size",
        size,
        "--iters",
        str(iters),
    ]
    envs = [
        clean_env(
            R2CCL_NICS=bed.r2ccl_nics(node),
            NCCL_SOCKET_IFNAME="=" + bed.r2ccl_nics(node),
            R2CCL_JOB=f"bench-{os.getpid()}",
            **env,
        )
        for node in (0, 1)
    ]
    with Sides(bed, receiver, sender, (envs[0], envs[1]), LIMIT_S) as sides:
        sides.finish()
        assert sides.sender.stdout is not None
        row = json.loads(sides.sender.stdout.read())
    return Found(row["us"], row["gbs"], row["isend_us"], row["cpus"])


def run(options: Options, section: Section) -> None:
    """Interleaved repetitions, each in another order."""
    section.notes.append(
        f"{len(os.sched_getaffinity(0))} processors, {NICS} unshaped NICs. CPU time: of one of the "
        "two processes, in processors; its own thread polls, which takes one."
    )
    names = list(variants())
    with lab_bed("crowd", NICS, (None,)) as bed:
        for shape in SHAPES[:2] if options.smoke else SHAPES:
            iters = 100 if options.smoke else 2000 if shape[2] > 8192 else 20000
            found: dict[str, list[Found]] = {name: [] for name in names}
            words = f"{shape[0]} x {shape[1]} of {shape[2] >> 10} KiB"
            for turn in range(1 if options.smoke else options.repetitions):
                options.say(f"{words}: turn {turn + 1}")
                for i in range(len(names)):
                    name = names[(i + turn) % len(names)]
                    plugin, env = variants()[name]
                    found[name].append(measure(bed, plugin, env, shape, iters))
            for name in names[1:]:
                for what, unit in (
                    ("us", "us"),
                    ("gbs", "GB/s"),
                    ("isend_us", "us"),
                    ("cpus", "CPUs"),
                ):
                    section.compare(
                        f"{words}, {name}: {WORDS[what]}",
                        [getattr(one, what) for one in found[name]],
                        [getattr(one, what) for one in found["cut"]],
                        unit,
                        "cut",
                        None,
                        at_least=what == "gbs",
                    )


WORDS = {"us": "one way", "gbs": "each way", "isend_us": "a call of isend", "cpus": "CPU time"}
