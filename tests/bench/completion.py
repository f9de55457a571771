"""Completion errors of RDMA: how long until one is known on both ends and traffic goes on.

Rung 3, over the stand-in for libibverbs (tests/fakeverbs). The next request of a NIC fails with a
code that devices and fabrics give, at the sending or the receiving node in turn. Meanwhile one pair
of processes sends messages without pause over the queue pairs of two loopback NICs. Counted from
when that request failed, by the stand-in's clock. It cannot show how long a real NIC retries before
it says so, nor what its driver does then.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

import resume
from figures import Section
from rig import Bed, BenchError, Options, Sides

from r2ccl_ctl import paths
from r2ccl_ctl.control import Process

PART = "completion"
NICS = 2
# enum ibv_wc_status: retries exhausted, local queue pair, remote operation, general error.
CODES = (12, 2, 11, 21)
ANSWER_S = 10.0
BEGIN_S = 20.0
KIND = resume.Kind(
    "completion error",
    {"traffic resumed": (20, 50, None)},
    call="told, until a request came and failed",
    back="path back after the error",
)


def fakeverbs() -> Path:
    return paths.native_dir() / "fakeverbs" / "libibverbs.so.1"


def run(options: Options, section: Section) -> None:
    """Fill in the section; what was found stays when it fails later or is cut off."""
    if not options.wants(PART):
        return
    if not fakeverbs().is_file():
        section.notes.append(
            f"No completion errors: {fakeverbs()} is not there (it needs <infiniband/verbs.h>; "
            "Debian: libibverbs-dev)."
        )
        return
    section.notes.append(
        f"Completion errors: the stand-in for libibverbs, 2 nodes x {NICS} loopback NICs, "
        "unshaped, 256 KiB messages, 8 outstanding, default settings without flap damping; codes "
        f"{', '.join(map(str, CODES))} of enum ibv_wc_status in turn. To be known at once, at the "
        "other node a round trip later."
    )
    env = {
        **resume.UNDAMPED,
        "R2CCL_IBVERBS_LIB": str(fakeverbs()),
        # Of its own, as hardware is: a busy process does not keep its NIC from answering.
        "R2_FAKEVERBS_NIC": "process",
        "R2_FAKEVERBS_CHAOS": "",
    }
    series = resume.Series(KIND, len(CODES) if options.smoke else options.runs)

    def breaks(sides: Sides) -> None:
        _fail_often(sides, series, section, options)

    resume.under_traffic(section, series, Bed(NICS), env, breaks)


def _fail_often(sides: Sides, series: resume.Series, section: Section, options: Options) -> None:
    processes = resume.processes(sides)
    with closing(resume.Watch(processes)) as watch:
        _over_queue_pairs(processes[0])
        time.sleep(0.5)
        while series.more():
            turn = len(series.faults)
            node, nic, code = turn % 2, turn // 2 % NICS, CODES[turn // (2 * NICS) % len(CODES)]
            pid = (sides.sender, sides.receiver)[node].pid
            series.faults.append(_fail_once(watch, pid, node, nic, code))
            series.say(options)
        paths_now = processes[0].snapshot().paths
    carried = {path.via: 0 for path in paths_now}
    for path in paths_now:
        carried[path.via] += path.tx_bytes
    section.details[f"{KIND.title}: bytes over"] = carried


def _over_queue_pairs(process: Process) -> None:
    """Wait until every NIC has a path of queue pairs, or BenchError."""
    until = time.monotonic() + BEGIN_S
    while True:
        found = process.snapshot().paths
        up = {path.nic for path in found if path.via == "verbs" and path.state == "up"}
        if len(up) == NICS:
            return
        if time.monotonic() > until:
            raise BenchError(f"no paths over queue pairs within {BEGIN_S:g} s: {found}")
        time.sleep(0.02)


def _fail_once(watch: resume.Watch, pid: int, node: int, nic: int, code: int) -> resume.Fault:
    for _ in watch.drain():
        pass
    told = time.monotonic_ns()
    ask(pid, f"inject fv{nic} {code}")
    fault = resume.Fault(node, f"127.0.{nic + 1}.{node + 1}", told, 0)
    watch.follow(fault)
    fault.at = int(ask(pid, "injected"))
    fault.call = fault.at - told
    fault.healed = fault.at  # of itself: there is nothing to mend
    if not told < fault.at < min(fault.down.values()):
        raise BenchError(f"{fault.nic}: a path ended, and not by code {code}: {fault}")
    # A spare, which a path between unlike NICs is, is not made again while both others are up.
    if len({name.rpartition(".")[0] for name in fault.ends[node]}) == 1:
        fault.back = watch.until_up(fault)
    time.sleep(resume.STEADY_S)
    fault.end = time.monotonic_ns()
    return fault


def ask(pid: int, command: str) -> str:
    """A command to the stand-in in that process (tests/fakeverbs/script.c), and its answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.bind(f"\0r2fv-bench.{os.getpid()}.{pid}")
        s.settimeout(ANSWER_S)
        try:
            s.sendto(command.encode(), f"\0r2fv-ctl.{pid}")
            return s.recv(32).decode()
        except OSError as err:
            raise BenchError(
                f"the stand-in for libibverbs in process {pid} does not answer '{command}': {err}"
            ) from err
