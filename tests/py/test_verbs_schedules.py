"""Random failures over the stand-in for libibverbs, by seed: every byte is right, and the job
reaches its end.

Rung 3: real processes; what real devices do when they fail only the RDMA guest and hardware show.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time

import pytest
from conftest import Build
from failover_bed import Pair, loopback, running_pair
from verbs_bed import command, over, settings


def schedule(build: Build, seed: int) -> None:
    """Two ports: requests fail at random, writes land after their acknowledgement (until the queue
    pair has been drained), completions come late. Those of odd seeds come in another order than
    that in which queue pairs were used. Every byte is right."""
    rng = random.Random(seed)
    chaos = {
        "seed": seed,
        "late_write": rng.choice([0, 300, 900]),
        "late_cqe": rng.choice([0, 100, 400]),
        "late_us": rng.choice([200, 3000, 20000]),
        "error": rng.choice([500, 3000, 10000]),
        "cmd_us": rng.choice([0, 20000]),
        "overtake": seed % 2,
    }
    words: list[str | int] = ["--register", "--conns", 2, "--stall", 25]
    words += ["--size", rng.choice(["64K", "300001", "1M"]), "--count", rng.choice([100, 250])]
    words += rng.choice([["--random-sizes"], ["--bidir"], []])
    env = settings(
        build,
        R2_FAKEVERBS_CHAOS=",".join(f"{name}={value}" for name, value in chaos.items()),
        R2CCL_VERIFY=rng.choice([0, 0, 1]),
        R2CCL_IB_QPS=rng.choice([1, 1, 2]),
        NCCL_IB_TIMEOUT=13,
    )
    command_line = [str(build.path / "stress" / "pair"), *map(str, words)]
    done = subprocess.run(
        command_line,
        env={**os.environ, "R2CCL_NICS": loopback(2), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    told = f"seed {seed}: {env} {' '.join(command_line)}\n{done.stdout}{done.stderr[-3000:]}"
    assert done.returncode == 0, f"exit code {done.returncode}, {told}"
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert results and all(result["wrong"] == 0 for result in results), told


@pytest.mark.parametrize("seed", [1, 4, 5, 7])  # each kind of lateness, alone and together
def test_failure_schedules(build: Build, seed: int) -> None:
    schedule(build, seed)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_failure_schedules_long(build: Build, block: int) -> None:
    for seed in [*range(100 + 10 * block, 110 + 10 * block), *([3] if block == 0 else [])]:
        schedule(build, seed)


# What fails, and how it is mended (D: the device's number, E: its address' third byte, Q: one of
# its queue pairs, "stop": the process). Twenty kinds, as test_verbs_storm has them in one process.
FAILURES = [
    ("port fvD 1 down", "port fvD 1 up"),
    ("port fvD 1 blackhole", "port fvD 1 up"),
    ("gid fvD 1 1 0.0.0.0", "gid fvD 1 1 127.0.E.1"),
    ("gid fvD 1 3 127.0.E.1;gid fvD 1 1 0.0.0.0", "gid fvD 1 1 127.0.E.1;gid fvD 1 3 0.0.0.0"),
    ("pkey fvD 1 0 32771", "pkey fvD 1 0 65535"),
    ("remove fvD", "restore fvD"),
    ("vanish fvD", "restore fvD"),
    ("fatal fvD", "remove fvD;restore fvD"),
    ("hang fvD 1", "unhang"),
    ("hang fvD 2;event fvD 9 1", "unhang"),
    ("refuse fvD err 3", "refuse fvD err 0"),
    ("chaos late_write=800,late_us=60000", "chaos late_write=0"),
    ("chaos late_cqe=300,late_us=20000", "chaos late_cqe=0"),
    ("chaos lost_cqe=20000", "chaos lost_cqe=0"),
    ("chaos error=5000", "chaos error=0"),
    ("most fvD 4096", "most fvD 0"),
    ("queue fvD 1 Q", ""),
    ("freeze fvD Q", ""),
    ("inject fvD S", ""),
    ("lose fvD K 2", "lose fvD 0"),
    ("stop", "continue"),
]
WEATHER_S = 5.0


def tell(pair: Pair, side: str, text: str, device: int, rng: random.Random) -> None:
    """One end of a failure at that process; a process that has ended shows later."""
    at = pair.side(side)
    if text in ("stop", "continue"):
        at.signal(signal.SIGSTOP if text == "stop" else signal.SIGCONT)
        return
    for letter, value in [
        ("fvD", f"fv{device}"),
        (".E.", f".{device + 1}."),
        (" Q", f" {rng.randrange(8)}"),
        (" S", f" {rng.randrange(1, 24)}"),
        (" K", f" {rng.choice([1, 2, 3, 4, 7])}"),
    ]:
        text = text.replace(letter, value)
    for one in filter(None, text.split(";")):
        command(at.pid, one)


def weather(pair: Pair, rng: random.Random, told: list[str]) -> None:
    """Failures at both ends for some seconds, two at a time, of different kinds. Each is of one
    device at one process, and is mended a little later. `told` gets what was done."""
    failing: dict[int, tuple[float, int, int, str]] = {}
    begun = time.monotonic()
    while failing or time.monotonic() - begun < WEATHER_S:
        now = time.monotonic()
        for device in (0, 1):
            if device in failing and now > failing[device][0]:
                _, what, at, side = failing.pop(device)
                tell(pair, side, FAILURES[what][1], at, rng)
            elif device not in failing and now - begun < WEATHER_S and rng.random() < 0.1:
                what, side = rng.randrange(len(FAILURES)), rng.choice(["tx", "rx"])
                stopped = [s for _, w, _, s in failing.values() if FAILURES[w][0] == "stop"]
                if what in [w for _, w, _, _ in failing.values()] or side in stopped:
                    continue  # not the same twice; a stopped process hears nothing
                if FAILURES[what][0] == "stop" and failing:
                    continue
                told.append(f"{now - begun:.2f} {side} fv{device} {FAILURES[what][0]}")
                tell(pair, side, FAILURES[what][0], device, rng)
                lasts = rng.uniform(0.01, 1.5 if rng.random() < 0.25 else 0.3)
                failing[device] = (now + lasts, what, device, side)
        time.sleep(0.01)


def outdoors(build: Build, seed: int) -> None:
    """What is asked for and what fails at both ends, by the seed: ports, GIDs and partition keys;
    devices that go and come back; commands that hang; completions that get lost; errors; queue
    pairs that freeze; stopped processes."""
    rng = random.Random(seed)
    device = rng.random() < 0.3
    words: list[str | int] = ["--device" if device else "--register", "--conns", 2]
    words += ["--size", rng.choice(["8", "64K", "300001", "1M"]), "--stall", 60]
    words += rng.choice([["--random-sizes"], ["--bidir"], []]) if not device else []
    env = settings(
        build,
        R2CCL_VERIFY=rng.choice([0, 0, 1]),
        R2CCL_IB_QPS=rng.choice([1, 1, 2]),
        R2CCL_GPU_MEMORY="direct" if device else "host",
        R2_FAKEVERBS_NIC="process",  # they answer while the process is stopped, as hardware does
        R2_FAKEVERBS_CHAOS=f"seed={seed},gpu={int(device)},overtake={seed % 2}",
        NCCL_IB_TIMEOUT=14,
    )
    told: list[str] = []
    with running_pair(build.path, *words, nics=loopback(2), **env) as pair:
        try:
            over(pair, "verbs", 2)
            pair.moving()
            weather(pair, rng, told)
            pair.moving()
            pair.finish(70.0)
        except BaseException:
            print(f"seed {seed}: {words}", *told, sep="\n")
            raise


@pytest.mark.parametrize("seed", [0, 3, 5])  # host and device memory, with and without checks
def test_weather(build: Build, seed: int) -> None:
    outdoors(build, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_weather_long(build: Build, seed: int) -> None:
    outdoors(build, seed)
