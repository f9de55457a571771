"""The play: start the job, take NICs away and give them back, watch, clean up.

One thread does it all, in steps of TICK_S. Ranks die with this process, whatever happens to it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from r2ccl_ctl import env as environment
from r2ccl_ctl import launch, paths
from r2ccl_ctl.control import Command, Process, list_processes, send_commands
from r2ccl_ctl.demo.evidence import Outcome, judge_failure, judge_recovery
from r2ccl_ctl.demo.feeds import JobFeed, Timeline, Window
from r2ccl_ctl.demo.plan import Action, DemoSpec, Phase
from r2ccl_ctl.demo.report import Deed, PhaseResult, Report, build_report
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.interrupts import signals_interrupt, undisturbed
from r2ccl_ctl.job import NCCL_STANDIN, Job, LaunchSpec
from r2ccl_ctl.units import show_bytes, show_span

TICK_S = 0.1
START_S = 60.0  # for the ranks to join and the first AllReduce to end
COMMAND_S = 30.0  # for one r2ccl-ctl fail-nic
SWEEP_S = 3.0
WINDOWS_MIN = 2  # whole AllReduces that a phase needs
ITERATION_S = 60.0  # r2ccl_perf gives up when one AllReduce takes longer


class Screen(Protocol):
    """Where progress goes: see screen.py."""

    def begin(self, spec: DemoSpec, job: str) -> None: ...
    def say(self, text: str) -> None: ...
    def phase(self, title: str) -> None: ...
    def show(self, feed: JobFeed, windows: list[Window]) -> None: ...
    def end(self) -> None: ...


class Stopped(Exception):
    """The demo cannot go on; the text is a problem for the report."""


def run(spec: DemoSpec, screen: Screen) -> Report:
    """Play the demo. R2Error when it cannot even start; what goes wrong later is in the report.
    Interrupted (Ctrl-C, SIGTERM, SIGHUP) passes through when all is cleaned up."""
    spec.check()
    hindered = environment.hindrances(os.environ)
    if hindered:
        raise R2UsageError(f"the demo shows R2CCL, and {'; '.join(hindered)}")
    folder = spec.make_folder()
    perf = paths.perf_path()
    job_name = f"demo-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="r2ccl-demo-") as scratch, signals_interrupt():
        timeline = Timeline(Path(scratch) / "timeline.jsonl")
        screen.begin(spec, job_name)
        _tell_load(screen)
        job: Job | None = None
        try:
            job = launch.start(_launch_spec(spec, perf, timeline.path, job_name), echo=False)
            return Play(spec, screen, job, timeline).play(folder)
        finally:
            with undisturbed():
                screen.end()
                if job is not None:
                    job.kill()
                sweep(job_name)


def _tell_load(screen: Screen) -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        screen.say(
            f"this machine is busy (load {load:.0f} on {cores} cores): bandwidths will be unsteady"
        )


def _launch_spec(spec: DemoSpec, perf: Path, timeline: Path, name: str) -> LaunchSpec:
    argv = [str(perf), "--op", "all_reduce", "-b", str(spec.size), "--check-every"]
    argv += ["--duration", "3600", "--timeline", str(timeline), "--timeout", str(ITERATION_S)]
    return LaunchSpec(
        argv=argv,
        ranks=spec.ranks,
        per_node=spec.ranks_per_node,
        emulate_nodes=spec.nodes,
        nics=spec.nics,
        nccl=NCCL_STANDIN,
        env={"R2CCL_SHM": "1"},
        job=name,
        grace=1.0,
        kill_after=2.0,
        timeout=3600.0,
    )


def sweep(job_name: str) -> None:
    """Remove the control segments that the job's ranks have left. They are ours: the name of the
    job is random. A process that a rank had started may need a moment to end."""
    end = time.monotonic() + SWEEP_S
    while True:
        left = [p for p in list_processes(dead=True) if p.job == job_name]
        late = time.monotonic() > end
        for process in left:
            if not process.running or late:
                with contextlib.suppress(OSError):
                    process.path.unlink()
        if late or not any(process.running for process in left):
            return
        time.sleep(TICK_S)


def operator_argv(action: Action, job: str, kind: str) -> list[str]:
    """What an operator would type."""
    argv = ["r2ccl-ctl", f"{action.verb}-nic", action.nic, "--job", job]
    return [*argv, "--kind", kind] if action.verb == "fail" else argv


class Play:
    """One performance."""

    def __init__(self, spec: DemoSpec, screen: Screen, job: Job, timeline: Timeline) -> None:
        self.spec, self.screen, self.job, self.timeline = spec, screen, job, timeline
        self.feed = JobFeed([], "node0")
        self.phases: list[PhaseResult] = []
        self.deeds: list[Deed] = []
        self.problems: list[str] = []
        self._next_tick = 0.0

    def play(self, folder: Path) -> Report:
        began = time.monotonic_ns()
        try:
            self._rehearse()
            for phase in self.spec.phases():
                self._play_phase(phase)
        except Stopped as stop:
            self.problems.append(str(stop))
        except R2Error as err:
            self.problems.append(str(err))
        finally:
            self.feed.close()
        self.timeline.poll()
        return build_report(
            self.spec,
            self.job.name,
            folder,
            began,
            self.feed,
            self.timeline.windows,
            self.phases,
            self.deeds,
            self.problems,
        )

    # The steps

    def _rehearse(self) -> None:
        """Until all ranks are there, have done an AllReduce, and have their NICs limited."""
        found: list[Process] = []

        def joined() -> bool:
            nonlocal found
            found = [p for p in list_processes() if p.job == self.job.name and p.rank is not None]
            return len(found) == self.spec.ranks

        self._until(joined, START_S, "not all ranks have joined")
        self.feed = JobFeed(found, "node0")
        self._until(lambda: bool(self.timeline.windows), START_S, "no AllReduce has ended")
        if self.spec.nic_rate:
            for node in range(self.spec.nodes):
                for rail in range(self.spec.nics):
                    self._limit(self.spec.nic(rail, node))
            begun = len(self.timeline.windows) + 1  # the one under way began without the limit
            self._until(
                lambda: len(self.timeline.windows) > begun, START_S, "no AllReduce has ended"
            )

    def _limit(self, nic: str) -> None:
        """Loopback has no NICs with a speed of their own: this gives them one."""
        node = f"node{int(nic.rsplit('.', 1)[1]) - 1}"
        ranks = [rank.process for rank in self.feed.ranks if rank.process.host == node]
        command = Command(
            "fail-nic", nic=nic, fault="slow", direction="tx", rate=self.spec.nic_rate
        )
        for answer in send_commands([(rank, command) for rank in ranks], timeout=COMMAND_S):
            if not answer.ok:
                raise Stopped(f"{nic} cannot be limited: {answer.process.title}: {answer.text}")

    def _play_phase(self, phase: Phase) -> None:
        result = PhaseResult(phase, time.monotonic_ns())
        self.phases.append(result)
        self.screen.phase(phase.title)
        deeds = [self._act(action, phase) for action in phase.actions]
        least = time.monotonic() + self.spec.seconds
        limit = self.spec.seconds * 4 + 20
        told: set[str] = set()

        def enough() -> bool:
            for deed in deeds:
                deed.outcome = self._judge(deed)
                self._tell(deed, told)
            settled = [deed.outcome.settled_ns for deed in deeds]
            if None in settled:
                return False
            result.settled_ns = max([result.begin_ns, *(ns for ns in settled if ns is not None)])
            whole = result.whole(self.timeline.windows)
            return time.monotonic() >= least and len(whole) >= WINDOWS_MIN

        try:
            self._until(enough, limit, f"phase '{phase.title}'")
        finally:
            result.end_ns = time.monotonic_ns()

    def _judge(self, deed: Deed) -> Outcome:
        events = self.feed.events
        if deed.action.verb == "fail":
            return judge_failure(events, deed.action.nic, self.spec.kind, deed.asked_ns)
        failed = min(
            d.asked_ns
            for d in self.deeds
            if d.action.verb == "fail" and d.action.nic == deed.action.nic
        )
        return judge_recovery(events, deed.action.nic, failed, deed.asked_ns)

    def _tell(self, deed: Deed, told: set[str]) -> None:
        outcome, nic = deed.outcome, deed.action.nic
        if outcome.resume_ms is None or nic in told:
            return
        told.add(nic)
        if deed.action.verb == "fail":
            self.screen.say(
                f"traffic goes on without {nic} after {outcome.resume_ms:.0f} ms, "
                f"{show_bytes(outcome.replayed_bytes)} replayed"
            )
        else:
            self.screen.say(f"{nic} is in use again after {outcome.resume_ms:.0f} ms")

    def _act(self, action: Action, phase: Phase) -> Deed:
        """What an operator does, in a process of its own."""
        typed = operator_argv(action, self.job.name, self.spec.kind)
        deed = Deed(action, phase.name, shlex.join(typed), time.monotonic_ns())
        self.deeds.append(deed)
        self.screen.say(f"$ {deed.command}")
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "r2ccl_ctl", *typed[1:], "--timeout", f"{COMMAND_S:g}s"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_operator_env(),
                start_new_session=True,
            )
            try:
                self._until(lambda: process.poll() is not None, COMMAND_S + 10, deed.command)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            if process.returncode:
                output.seek(0)
                text = " ".join(output.read().decode(errors="replace").split())
                raise Stopped(f"`{deed.command}` ended with {process.returncode}: {text[-400:]}")
        if action.verb == "recover" and self.spec.nic_rate:
            self._limit(action.nic)  # recover-nic has ended the limit as well
        return deed

    # Waiting

    def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        """Watch the job until it holds; Stopped when it takes too long or the job ends."""
        end = time.monotonic() + seconds
        while True:
            self._tick()
            if holds():
                return
            if time.monotonic() > end:
                raise Stopped(f"{what}: not within {show_span(seconds)}")

    def _tick(self) -> None:
        pause = self._next_tick - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        self._next_tick = time.monotonic() + TICK_S
        fresh = self.timeline.poll()
        if self.feed.ranks:
            self.feed.poll_events()
            self.feed.poll_nics(time.monotonic_ns())
        self.screen.show(self.feed, self.timeline.windows)
        if any(window.wrong for window in fresh):
            raise Stopped("a value is wrong: the demo ends here")
        if not self.job.running or any(rank.code is not None for rank in self.job.ranks):
            raise Stopped(self._obituary())

    def _obituary(self) -> str:
        """Which rank ended first, and its last words."""
        with contextlib.suppress(TimeoutError):
            self.job.wait(5.0)
        ended = [rank for rank in self.job.ranks if rank.code is not None]
        first = min(ended, key=lambda rank: rank.ended_at or 0.0)
        lines = [line.strip() for line in first.output.splitlines() if line.strip()]
        words = " | ".join(lines[-3:]) or "it said nothing"
        return f"the job died: rank {first.place.rank} ended with {first.code}: {words}"


def _operator_env() -> dict[str, str]:
    """This environment; from a checkout that is not installed, with the way to the package."""
    env = dict(os.environ)
    root = paths.checkout()
    if root is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), env.get("PYTHONPATH"))))
    return env
