"""Plays the cases on a bed, and keeps the record of each as a JSON file in the results folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from r2ccl_ctl import __version__, launch, paths
from r2ccl_ctl.control import Command
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.interrupts import undisturbed
from r2ccl_ctl.validate.bed import Bed, Host, HostError
from r2ccl_ctl.validate.cases import AFTER, CABLE, ENDS, PERF, Case, Step
from r2ccl_ctl.validate.judge import (
    WHOLE,
    carries_again,
    rate,
    returned,
    shown,
    source_of,
)

SCHEMA = 1
TICK_S = 0.1
START_S = 90.0  # for the ranks to join and the first collective to end
END_S = 60.0  # for them to end in order
ITERATION_S = 60.0  # r2ccl_perf gives up when one collective takes longer
SHOWN_S = 30.0  # for a fault to show
HAND_S = 300.0  # for a hand at a cable
BACK_S = 20.0  # for NICs that were given back
OVERHEAD_S = 4.0  # of a case, for the estimate
SLOW = 0.1  # of what the NIC carried
LEAST_RATE = 125_000


@dataclass(frozen=True)
class Setup:
    """What all cases share. size in bytes, seconds: a unit of time of the matrix. victims: the
    NICs of the first host that fail."""

    bed: str
    hosts: tuple[str, ...]
    per_node: int
    size: int
    seconds: float
    victims: tuple[str, ...]
    nccl: str = "auto"
    nccl_tests: str = ""
    via: str = ""

    @property
    def ranks(self) -> int:
        return self.per_node * len(self.hosts)


def inputs(setup: Setup, case: Case) -> dict[str, Any]:
    """What a record stands for: with other inputs the case is run again."""
    found: dict[str, Any] = {"version": __version__, "plugin": _digest(paths.plugin_path())}
    found |= {"setup": asdict(setup), "case": case.as_dict()}
    ours = ("NCCL_", "R2CCL_", "R2CC_")
    found["environment"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(ours)}
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as a record has it
    return plain


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def record_path(folder: Path, case: Case) -> Path:
    return folder / "cases" / f"{case.name}.json"


def load(folder: Path, case: Case) -> dict[str, Any] | None:
    """The record of an earlier run, None without one that can be read."""
    try:
        found = json.loads(record_path(folder, case).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else None


def finished(folder: Path, setup: Setup, case: Case) -> dict[str, Any] | None:
    """The record, if the case ran to its end with the same inputs."""
    found = load(folder, case)
    if found is None or not found.get("complete") or found.get("inputs") != inputs(setup, case):
        return None
    return found


def save(folder: Path, case: Case, record: dict[str, Any]) -> None:
    path = record_path(folder, case)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(record) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as err:
        raise R2UsageError(f"--output {folder}: cannot write there ({err.strerror})") from err


def seconds_of(case: Case, unit: float) -> float:
    """Of a run of the case; unit: Setup.seconds."""
    return case.length * unit + OVERHEAD_S


class Stopped(Exception):
    """The case cannot go on; the text becomes a problem of the record."""


@dataclass
class Run:
    """One case under way. Times in the record are our CLOCK_MONOTONIC."""

    bed: Bed
    setup: Setup
    case: Case
    tick: Callable[[float], None] = lambda done: None
    say: Callable[[str], None] = print
    record: dict[str, Any] = field(default_factory=dict)
    traffic_ns: int = 0  # the first collective has ended
    running: bool = True

    def play(self) -> dict[str, Any]:
        self.record = {
            "schema": SCHEMA, "inputs": inputs(self.setup, self.case), "complete": False,
            "began_ns": time.monotonic_ns(),
            "hosts": [_host_dict(host) for host in self.bed.hosts], "windows": [], "events": [],
            "samples": [[] for _ in self.bed.hosts], "processes": {}, "steps": [], "problems": [],
            "codes": {}, "words": {}, "output": "",
        }  # fmt: skip
        job = f"validate-{secrets.token_hex(3)}"
        program = None
        try:
            self._watch(job)
            if self.case.program == PERF:
                self._start_perf()
            else:
                from r2ccl_ctl.validate.mpi import NcclTests

                program = NcclTests(self.bed, self.setup, self.case, job)
            self._until(lambda: bool(self.record["windows"]), START_S, "no collective has ended",
                        program)  # fmt: skip
            self.traffic_ns = self.record["windows"][0]["end_ns"]
            for step in sorted(self.case.steps, key=lambda s: s.at):
                self._step(step, program)
            self._wait_at(self.case.length, program)
            if self.case.proves in ("failover", "slow", "drain"):
                self._wait_back(program)
            self._finish(program)
            self.record["complete"] = True
        except Stopped as stop:
            self.record["problems"].append(str(stop))
            self.record["complete"] = True  # it ran, and failed
        except HostError as err:
            self.record["problems"].append(str(err))
        finally:
            with undisturbed():
                if program is not None:
                    program.stop()
                self._stop()
        return self.record

    # Start and end

    def _watch(self, job: str) -> None:
        for host in self.bed.hosts:
            nics = host.facts["nics"]
            rdma = [(n["rdma"], n["rdma_port"]) for n in nics if n["rdma"]]
            ifnames = list(dict.fromkeys(n["ifname"] for n in nics if n["ifname"]))
            host.ask("watch", job=job, ifnames=ifnames, rdma=rdma,
                     count=self.setup.per_node)  # fmt: skip

    def _start_perf(self) -> None:
        first = self.bed.hosts[0]
        ports = first.ask("meet")["ports"]
        argv = ["--op", "all_reduce", "-b", str(self.setup.size), "--check-every"]
        argv += ["--duration", "3600", "--timeout", f"{ITERATION_S:g}"]
        token = secrets.token_hex(16)
        shares = self._gpus()
        for index, host in enumerate(self.bed.hosts):
            host.ask(
                "start", argv=argv, ranks=self.setup.ranks, first=index * self.setup.per_node,
                count=self.setup.per_node, address=first.address, ports=ports, token=token,
                nccl=self.setup.nccl, plugin="" if self.case.r2ccl else "none",
                host_id=host.host_id, nics=host.nics if self.case.r2ccl else "",
                socket_ifname=self._ifname(host), gpus=shares[index], env=self._env(),
            )  # fmt: skip

    def _ifname(self, host: Host) -> str:
        """Without R2CCL, NCCL's sockets are to use the NICs of the lab that R2CCL would use."""
        return host.socket_ifname if self.case.r2ccl or not host.nics else "nic"

    def _env(self) -> dict[str, str]:
        return {"R2CCL_SHM": "1"} if self.case.r2ccl else {}

    def _gpus(self) -> list[list[str]]:
        """Nodes of a lab share the GPUs of this machine; a real node has its own."""
        if self.bed.lab is None:
            return [[] for _ in self.bed.hosts]
        return launch.split_gpus(self.bed.hosts[0].facts["gpus"], len(self.bed.hosts))

    def _finish(self, program: Any) -> None:
        if program is None:
            self.bed.hosts[0].ask("finish")
        end = time.monotonic() + END_S + (program.longest_s if program is not None else 0.0)
        while self.running or (program is not None and program.running):
            if time.monotonic() > end:
                raise Stopped(f"the job did not end within {END_S:g} s of being asked to")
            self._look(program)
            time.sleep(TICK_S)
        self._look(program)
        if program is not None and program.code:
            raise Stopped(program.obituary())
        codes = self.record["codes"]
        if bad := {rank: code for rank, code in codes.items() if code}:
            first = min(bad, key=int)
            raise Stopped(f"rank {first} ended with {bad[first]}")

    def _stop(self) -> None:
        with contextlib.suppress(HostError):
            for reply in self.bed.all("stop", 60.0):
                self.record["words"].update(reply["words"])
        bad = [rank for rank, code in self.record["codes"].items() if code]
        self.record["words"] = {
            rank: text for rank, text in self.record["words"].items() if rank in bad
        }

    # Time

    def _until(
        self, holds: Callable[[], bool], seconds: float, what: str, program: Any = None
    ) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise Stopped(f"{what} within {seconds:g} s")
            time.sleep(TICK_S)
            self._look(program)
            ended = [(r, c) for r, c in self.record["codes"].items() if c is not None]
            if ended and not holds():
                raise Stopped(
                    f"rank {ended[0][0]} ended with {ended[0][1]} in the middle of the run"
                )
            if program is not None and not program.running and not holds():
                if program.code:
                    raise Stopped(program.obituary())
                raise HostError(
                    f"{program.obituary()}: before the case was over; give more --seconds"
                )

    def _wait_at(self, at: float, program: Any) -> None:
        due = self.traffic_ns + int(at * self.setup.seconds * 1e9)
        left = max(0.0, (due - time.monotonic_ns()) / 1e9)
        self._until(lambda: time.monotonic_ns() >= due, left + 5, "the clock stood still", program)

    def _wait_back(self, program: Any) -> None:
        """A NIC that was given back may return later than planned; the judge says if it did not."""
        self._at_most(BACK_S, lambda: returned(self.record) and carries_again(self.record), program)

    def _at_most(self, seconds: float, holds: Callable[[], bool], program: Any) -> None:
        """Wait until it holds, or that long: a slow machine needs more than the plan says."""
        end = time.monotonic() + seconds
        self._until(lambda: holds() or time.monotonic() > end, seconds + 5, "", program)

    def _wait_shown(self, step: Step, program: Any) -> None:
        """Before the next step the judge needs to have seen enough."""
        if not self.record["steps"]:
            self._at_most(SHOWN_S, lambda: len(self.record["windows"]) > WHOLE + 1, program)
        elif step.verb in ENDS.values() and self.case.proves != "flap":
            self._at_most(SHOWN_S, lambda: shown(self.record), program)

    def _step(self, step: Step, program: Any) -> None:
        self._wait_at(step.at, program)
        self._wait_shown(step, program)
        nic = self.setup.victims[step.nic]
        if step.returning:
            other = self.setup.victims[1 - step.nic]
            self._until(lambda: self._returns(other), 30, f"{other} does not return", program)
        if step.fault == CABLE or step.verb == "plug":
            self._hand(step, nic, program)
            return
        command = self._command(step, nic)
        asked = time.monotonic_ns()
        reply = self.bed.hosts[0].ask("act", command=asdict(command))
        answers = reply["answers"]
        self.record["steps"].append({
            "verb": step.verb, "fault": step.fault, "nic": nic, "at": step.at, "rate": command.rate,
            "returning": step.returning, "asked_ns": asked, "done_ns": time.monotonic_ns(),
            "answers": answers,
        })  # fmt: skip
        refused = [a for a in answers if not a["ok"]]
        if refused or not answers:
            why = refused[0]["text"] if refused else "no rank of this host has a control segment"
            raise HostError(f"{step.verb} {nic} could not be done: {why}")

    def _hand(self, step: Step, nic: str, program: Any) -> None:
        """A cable: that of a lab at once, a real one by the user's hand."""
        host, asked = self.bed.hosts[0], time.monotonic_ns()
        if self.bed.lab is not None:
            act = self.bed.lab.fail_link if step.verb == "pull" else self.bed.lab.recover_link
            act(host.name, nic)
        else:
            words = ("nic-down",) if step.verb == "pull" else ("nic-up", "path-up")
            self.say(f"{host.name}: {step.verb} the cable of {nic} now (within {HAND_S:g} s)")

            def seen() -> list[int]:
                return [
                    e["mono_ns"]
                    for e in self.record["events"]
                    if e["event"] in words and e["nic"] == nic and e["mono_ns"] >= asked
                ]

            self._at_most(HAND_S, lambda: bool(seen()), program)
            if not seen():
                raise HostError(f"no rank saw a change of the link of {nic}")
            asked = min(seen())
        self.record["steps"].append({
            "verb": step.verb, "fault": step.fault, "nic": nic, "at": step.at, "rate": 0,
            "returning": False, "asked_ns": asked, "done_ns": time.monotonic_ns(), "answers": [],
        })  # fmt: skip

    def _command(self, step: Step, nic: str) -> Command:
        if step.verb != "fail":
            return Command(f"{step.verb}-nic", nic=nic)
        if step.fault == "slow":
            rate = int(SLOW * self._rate_of(nic) / self.setup.per_node)
            return Command("fail-nic", nic=nic, fault="slow", direction="both",
                           rate=max(rate, LEAST_RATE))  # fmt: skip
        after = AFTER if step.fault == "error" else 0
        return Command("fail-nic", nic=nic, fault=step.fault, direction="both", after_bytes=after)

    def _rate_of(self, nic: str) -> float:
        """Bytes per second that the NIC has sent since the traffic began."""
        samples = self.record["samples"][0]
        source = source_of(self.record["hosts"][0], samples, nic)
        return rate(samples, source, self.traffic_ns, time.monotonic_ns()) or 0.0

    def _returns(self, nic: str) -> bool:
        since = max(s["asked_ns"] for s in self.record["steps"] if s["verb"] == "recover")
        words = ("path-up", "path-ramping", "nic-ramping", "nic-up")
        return any(
            e["event"] in words and e["mono_ns"] >= since and nic in (e["nic"], e["remote_nic"])
            for e in self.record["events"]
        )

    # Looking

    def _look(self, program: Any) -> None:
        """Ask all hosts what is new; their times become ours."""
        replies = self.bed.all("poll")
        for index, (host, reply) in enumerate(zip(self.bed.hosts, replies, strict=True)):
            move = host.offset_ns
            for process in reply["processes"]:
                self.record["processes"][process["name"]] = process
            self.record["events"] += [
                {**event, "mono_ns": event["mono_ns"] + move} for event in reply["events"]
            ]
            self.record["samples"][index] += [[ns + move, row] for ns, row in reply["samples"]]
            self.record["windows"] += [
                {**w, "begin_ns": w["begin_ns"] + move, "end_ns": w["end_ns"] + move}
                for w in reply["windows"]
            ]
            self.record["codes"].update(reply["codes"])
        self.running = any(reply["running"] for reply in replies)
        if program is not None:
            self.record["windows"] += program.windows()
            self.record["output"] = program.output()
        self.record["events"].sort(key=lambda event: event["mono_ns"])
        if any(w["wrong"] > 0 for w in self.record["windows"]):
            raise Stopped("a value is wrong: the case ends here")
        if self.traffic_ns:
            now = (time.monotonic_ns() - self.traffic_ns) / 1e9
            self.tick(min(now + OVERHEAD_S / 2, seconds_of(self.case, self.setup.seconds)))


def _host_dict(host: Host) -> dict[str, Any]:
    return {"name": host.name, "offset_ns": host.offset_ns, "error_ns": host.error_ns, **host.facts}


def plan(setup: Setup, chosen: Sequence[Case], nics: int) -> tuple[list[Case], dict[str, str]]:
    """The cases that can run with so many NICs at each host, and why the others cannot."""
    fit = [case for case in chosen if case.nics <= nics and (setup.victims or not case.steps)]
    skipped = {
        case.name: f"needs {case.nics} NICs of each host, and there are {nics}"
        for case in chosen
        if case not in fit
    }
    return fit, skipped


def run_cases(
    bed: Bed, setup: Setup, chosen: Sequence[Case], folder: Path, screen: Any, *, again: bool
) -> dict[str, dict[str, Any]]:
    """Run what is not finished; the records of all."""
    records: dict[str, dict[str, Any]] = {}
    todo = []
    for case in chosen:
        found = None if again else finished(folder, setup, case)
        if found is not None:
            records[case.name] = found
        else:
            todo.append(case)
    screen.begin(
        todo, len(chosen) - len(todo), sum(seconds_of(case, setup.seconds) for case in todo)
    )
    for case in todo:
        screen.case(case, seconds_of(case, setup.seconds))
        record = Run(bed, setup, case, screen.tick, screen.say).play()
        save(folder, case, record)
        records[case.name] = record
        screen.done(case, record)
    return records
