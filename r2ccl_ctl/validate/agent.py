"""The helper of `validate` on each host: python -m r2ccl_ctl.validate.agent.

It takes requests as lines of JSON on stdin and answers each with one line on stdout. It ends with
its stdin, and its ranks with it. Times are this host's CLOCK_MONOTONIC in nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from r2ccl_ctl import __version__, env, hostnics, launch, paths
from r2ccl_ctl.control import Command, Process, list_processes, open_segment, send_commands
from r2ccl_ctl.demo.feeds import Timeline
from r2ccl_ctl.demo.stage import sweep
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.job import Job, LaunchSpec, Place
from r2ccl_ctl.journal import Cursor, read_all
from r2ccl_ctl.lab import nsexec
from r2ccl_ctl.ports import Ports
from r2ccl_ctl.rows import comm, nic
from r2ccl_ctl.segment import SegmentError

SAMPLE_S = 0.1
COMMAND_S = 5.0
TAIL = 2000
SYS = Path("/sys/class")


def counters(ifnames: Iterable[str], rdma: Iterable[tuple[str, int]] = (), root: Path = SYS
             ) -> dict[str, list[int]]:  # fmt: skip
    """Bytes sent and received, as the kernel (or the HCA, in words of four bytes) counts them."""
    found: dict[str, list[int]] = {}
    for name in ifnames:
        folder = root / "net" / name / "statistics"
        with contextlib.suppress(OSError, ValueError):
            found[name] = [int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")]
    for device, port in rdma:
        folder = root / "infiniband" / device / "ports" / str(port) / "counters"
        names = ("port_xmit_data", "port_rcv_data")
        with contextlib.suppress(OSError, ValueError):
            found[f"{device}:{port}"] = [4 * int((folder / name).read_text()) for name in names]
    return found


class Sampler:
    """Reads the counters in a thread of its own: a slow request must not leave a gap."""

    def __init__(self, ifnames: list[str], rdma: list[tuple[str, int]]) -> None:
        self._what = (ifnames, rdma)
        self._fresh: list[tuple[int, dict[str, list[int]]]] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while not self._end.wait(SAMPLE_S):
            row = (time.monotonic_ns(), counters(*self._what))
            with self._lock:
                self._fresh.append(row)

    def take(self) -> list[tuple[int, dict[str, list[int]]]]:
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return fresh

    def stop(self) -> None:
        self._end.set()
        self._thread.join(2)


def here(process: Process) -> bool:
    """Of this host: nodes of a lab share their /dev/shm."""
    return process.host in (socket.gethostname(), os.environ.get("R2CCL_NODE_NAME", ""))


class Watched:
    """One rank: its journal, and the rows of its segment."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.cursor = Cursor(process)
        self.segment = open_segment(process.path)

    def rows(self) -> dict[str, Any]:
        nics = self.segment.used_rows("nics", "r2_seg_nic")
        comms = self.segment.used_rows("comms", "r2_seg_comm")
        return {
            "nics": [vars(nic(i, row)) for i, row in nics],
            "comms": [vars(comm(i, row)) for i, row in comms],
        }

    def close(self) -> None:
        self.cursor.close()
        self.segment.close()


class Agent:
    """What one host does."""

    def __init__(self) -> None:
        self.job_name = ""
        self.count = 0  # ranks of this host
        self.job: Job | None = None
        self.sampler: Sampler | None = None
        self.ports: Ports | None = None
        self.ranks: dict[str, Watched] = {}
        self.scratch = tempfile.TemporaryDirectory(prefix="r2ccl-validate-")
        self.timeline: Timeline | None = None

    # What this host is

    def clock(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"mono_ns": time.monotonic_ns()}

    def look(self, request: dict[str, Any]) -> dict[str, Any]:
        nics = hostnics.load()
        return {
            "host": socket.gethostname(),
            "version": __version__,
            "nics": [asdict(one) for one in nics.nics],
            "nics_error": nics.error,
            "gpus": launch.visible_gpus(os.environ),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "system": _os_name(),
            "cores": len(os.sched_getaffinity(0)),
            "hindrances": env.warnings(os.environ),
        }

    def journals(self, request: dict[str, Any]) -> dict[str, Any]:
        """Of the job's processes here, ended ones too; for `trace`."""
        wanted = request.get("job", "")
        found = [p for p in list_processes(dead=True) if here(p) and wanted in ("", p.job)]
        rows = []
        for process in found:
            with contextlib.suppress(SegmentError):
                events = [event.as_dict() for event in read_all(process)]
                rows.append({"process": process.as_dict(), "events": events})
        return {"ranks": rows}

    # A run

    def meet(self, request: dict[str, Any]) -> dict[str, Any]:
        self.ports = Ports(2)
        return {"ports": list(self.ports.numbers)}

    def watch(self, request: dict[str, Any]) -> dict[str, Any]:
        self.stop({})
        self.job_name, self.count = request["job"], request["count"]
        self.sampler = Sampler(request["ifnames"], [tuple(pair) for pair in request["rdma"]])
        return {}

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        size, first, count = request["ranks"], request["first"], request["count"]
        folder = Path(self.scratch.name)
        for name in ("timeline", "until"):
            (folder / name).unlink(missing_ok=True)
        argv = [str(paths.perf_path()), *request["argv"], "--until", str(folder / "until")]
        argv += ["--timeline", str(folder / "timeline")]
        spec = LaunchSpec(
            argv=argv, ranks=count, nccl=request["nccl"], plugin=request["plugin"],
            env=request["env"], job=self.job_name, grace=1.0, kill_after=2.0,
        )  # fmt: skip
        gpus = request["gpus"]
        natives = launch.find_natives(spec, len(launch.visible_gpus(os.environ)))
        bed = launch.Bed(
            nodes=2, host_ids=[request["host_id"]], node_names=[""], nics=[request["nics"]],
            socket_ifname=request["socket_ifname"], address=request["address"],
            wrap=lambda node, argv: argv, ports=Ports,
        )  # fmt: skip
        meeting = launch.Meeting(self.job_name, request["token"], size, request["ports"])
        places = [Place(first + i, 0, i, count) for i in range(count)]
        die = {"deathsig": int(signal.SIGKILL), "parent": os.getpid()}
        commands = []
        for place in places:
            one = launch.rank_env(spec, bed, place, meeting, natives, os.environ, gpus)
            commands.append((nsexec.argv_for(die, argv), one))
        self.timeline = Timeline(folder / "timeline") if first == 0 else None
        held, self.ports = self.ports, None
        if held is not None and first != 0:
            held.close()
            held = None
        self.job = Job(spec, self.job_name, commands, places, False, held)
        return {}

    def poll(self, request: dict[str, Any]) -> dict[str, Any]:
        """What is new since the last time."""
        for process in list_processes(dead=True) if len(self.ranks) < self.count else ():
            if process.job == self.job_name and here(process) and process.name not in self.ranks:
                with contextlib.suppress(SegmentError):
                    self.ranks[process.name] = Watched(process)
        events, state = [], {}
        for name, rank in self.ranks.items():
            events += [{"process": name, **event.as_dict()} for event in rank.cursor.events()]
            with contextlib.suppress(SegmentError):
                state[name] = rank.rows()
        job = self.job
        return {
            "processes": [rank.process.as_dict() for rank in self.ranks.values()],
            "events": events,
            "rows": state,
            "mono_ns": time.monotonic_ns(),
            "samples": self.sampler.take() if self.sampler else [],
            "windows": [asdict(w) for w in self.timeline.poll()] if self.timeline else [],
            "codes": {rank.place.rank: rank.code for rank in job.ranks} if job else {},
            "running": bool(job and job.running),
        }

    def act(self, request: dict[str, Any]) -> dict[str, Any]:
        """A fault, a drain, or the end of either, through the ranks' control segments."""
        command = Command(**request["command"])
        pairs = [(rank.process, command) for rank in self.ranks.values()]
        answers = send_commands(pairs, timeout=COMMAND_S)
        return {"answers": [{"who": a.process.title, "ok": a.ok, "text": a.text} for a in answers]}

    def finish(self, request: dict[str, Any]) -> dict[str, Any]:
        (Path(self.scratch.name) / "until").touch()
        return {}

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """End what still runs; the last words of the ranks."""
        words = {}
        if self.job is not None:
            if self.job.running:
                self.job.kill()
            words = {rank.place.rank: rank.output[-TAIL:] for rank in self.job.ranks}
        for rank in self.ranks.values():
            rank.close()
        self.ranks.clear()
        if self.sampler is not None:
            self.sampler.stop()
        if self.ports is not None:
            self.ports.close()
        if self.job_name:
            sweep(self.job_name)
        self.job, self.sampler, self.ports, self.timeline, self.job_name = (
            None,
            None,
            None,
            None,
            "",
        )
        return {"words": words}


def _os_name() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return platform.system()


REQUESTS = ("clock", "look", "journals", "meet", "watch", "start", "poll", "act", "finish", "stop")


def main() -> None:
    agent = Agent()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            what = request["do"]
            if what not in REQUESTS:
                raise SystemExit(f"no such request: {what}")
            try:
                reply = getattr(agent, what)(request)
            except (R2Error, OSError) as err:
                reply = {"error": str(err)}
            print(json.dumps({**reply, "number": request["number"]}), flush=True)
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        agent.stop({})
        agent.scratch.cleanup()


if __name__ == "__main__":
    main()
