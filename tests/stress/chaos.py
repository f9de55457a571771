"""Random failures under a job for as long as you like: every value must stay right, nothing may
hang, fail or grow.

    .venv/bin/python tests/stress/chaos.py --minutes 10 [--seed N]

Rounds of a job of r2ccl_perf on the stand-in for NCCL, 3 nodes of 4 NICs. They are in a lab of one
of its variants where network namespaces can be made (rung 4), else on loopback (rung 3, `--bed
loopback`). Round n draws everything from seed + n, which the variant and verify mode follow; one
that fails prints its own command. Faults: links down, flapping links, black holes of each
direction, loss, slow links, cut pairs, faults inside the engine, drained and weighted NICs, stopped
ranks. Now and then every NIC of a node is away and one is given back.
What the ranks hold (descriptors beside the sockets of paths that are up, threads, memory) is looked
at all the while. At the end it may be no more than at the start and a bit. The line of a round says
what its second half held over the first; in a round of held.LONG_S or more that is bounded, too.
`--nccl DIR` takes the real NCCL of that folder: one rank per node, which share the GPUs there are
(and had better have MPS; tests/gpu/README.md). `--plans`: under libr2ccl.so, with plans that change
as often as they can; the communicators they keep are few, and what these hold is granted.
`--direct`: AllReduces alone, carried out by R2CCL, with weights that follow the failures.
The plan of a seed is always the same, its timing only roughly so; what undoes a fault after a while
is done by a thread of its own, on time however slow the plan is being carried out. That thread also
gives two nodes a rail back that have had none in common for NO_RAIL_S: a job need not outlive more.

Exit code 0: all well; 1: a round failed, or there can be no lab and TEST_REQUIRE has `lab`;
2: a wrong option, or a part that TEST_REQUIRE does not know.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/py"))

from conftest import Build, required_parts  # noqa: E402
from failover_bed import PerfJob, Side, running_perf  # noqa: E402
from held import (  # noqa: E402
    SETTLE_S,
    Held,
    at_start,
    granted,
    highest,
    look,
    over,
    second_half,
    settled,
    still_growing,
)

from r2ccl_ctl import control  # noqa: E402
from r2ccl_ctl.control import Command  # noqa: E402
from r2ccl_ctl.errors import R2Error  # noqa: E402
from r2ccl_ctl.lab import Lab, LabSpec, netns  # noqa: E402
from r2ccl_ctl.lab.spec import VARIANTS  # noqa: E402
from r2ccl_ctl.lab.state import Cut, LabState, Store  # noqa: E402

NODES, NICS = 3, 4
STANDIN = "standin"
RATES = (50_000_000, 200_000_000, 500_000_000, 1_000_000_000)
FLAP_S = 0.2
NO_RAIL_S = 8.0  # two nodes without a rail between them, at most: no job has to outlive more
RAIL_S = 3.0  # ... and with one before that counts anew
LOSS_MAX = 10.0  # percent; what loses more is no rail


def rails(state: LabState, a: int, b: int) -> list[str]:
    """The rails on which both nodes send and receive, and to each other."""

    def carries(node: int, nic: str) -> bool:
        now = state.nics[node][nic]
        return now.link == "up" and max(now.loss_tx, now.loss_rx) <= LOSS_MAX

    return [
        nic
        for nic in state.spec.nic_names(a)
        if carries(a, nic)
        and carries(b, nic)
        and Cut(nic, min(a, b), max(a, b)) not in state.cuts
        and nic not in state.dead_rails
    ]


class Under(NamedTuple):
    """What the job runs on. nccl: the folder of one, or STANDIN; plans: with the shim's plans;
    direct: R2CCL carries AllReduce out."""

    nccl: str = STANDIN
    plans: bool = False
    direct: bool = False

    def granted(self, per_node: int) -> Held:
        return granted(self.plans or self.direct, self.nccl != STANDIN, per_node)


class KeeperError(AssertionError):
    """The keeper could not go on: what it was to undo stays as it is, and the round has failed."""


class Keeper:
    """A thread that does what falls due, and every `LOOK_S` looks whether any two nodes have been
    without a rail for too long. Once it has raised something, `check` and `close` raise that."""

    LOOK_S = 0.1
    END_S = 60.0  # for what it is at, when it is told to end

    def __init__(self, lab: Lab | None, note: Callable[[str], None]) -> None:
        self.lab, self.note = lab, note
        self.due: list[tuple[float, Callable[[], None]]] = []  # appended to by others
        self.over = threading.Event()
        self.wrong: BaseException | None = None
        self.since: dict[tuple[int, int], float] = {}  # without a rail, but for moments
        self.last: dict[tuple[int, int], float] = {}  # when they were seen so last
        self.thread = threading.Thread(target=self.main, daemon=True)
        self.thread.start()

    def main(self) -> None:
        look = 0.0
        try:
            while not self.over.wait(0.005):
                now = time.monotonic()
                for item in [item for item in self.due if item[0] <= now]:
                    self.due.remove(item)
                    item[1]()
                if self.lab is not None and now >= look:
                    self.look(self.lab, now)
                    look = time.monotonic() + self.LOOK_S
        except BaseException as err:  # handed to the caller, whatever it is
            self.wrong = err

    def look(self, lab: Lab, now: float) -> None:
        state = Store(lab.name).load()
        for a, b in itertools.combinations(range(NODES), 2) if state else ():
            assert state is not None
            if rails(state, a, b):
                if now - self.last.get((a, b), 0.0) > RAIL_S:
                    self.since.pop((a, b), None)
                continue
            self.last[a, b] = now
            if now - self.since.setdefault((a, b), now) > NO_RAIL_S:
                nic = f"nic{(a + b) % NICS}"
                self.note(f"n{a} - n{b} have had no rail for long: {nic} recovers on both")
                lab.recover_link(f"n{a}", nic)
                lab.recover_link(f"n{b}", nic)

    def check(self) -> None:
        if self.wrong is not None:
            what = f"{type(self.wrong).__name__}: {self.wrong}"
            raise KeeperError(f"the keeper has failed: {what}") from self.wrong

    def end(self) -> bool:
        self.over.set()
        self.thread.join(self.END_S)
        return not self.thread.is_alive()

    def close(self) -> None:
        ended = self.end()
        self.check()
        if not ended:
            raise KeeperError(f"the keeper has not ended within {self.END_S:g} s")


class Monkey:
    """Draws one fault after the other; everything it breaks is mended by `mend`."""

    def __init__(self, rnd: random.Random, job: PerfJob, lab: Lab | None) -> None:
        self.rnd, self.job, self.lab = rnd, job, lab
        self.done: list[str] = []
        self.looks: list[list[Held]] = []  # what every rank held, in order
        self.stopped: set[int] = set()  # pids: they answer no commands
        self.keeper = Keeper(lab, self.note)

    def nic(self) -> tuple[int, str]:
        node, nic = self.rnd.randrange(NODES), self.rnd.randrange(NICS)
        return node, f"nic{nic}" if self.lab else f"127.0.{nic + 1}.{node + 1}"

    def note(self, text: str) -> None:
        self.done.append(f"{time.monotonic() - self.job.began:.2f} {text}")

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.keeper.due.append((time.monotonic() + seconds, action))

    def step(self) -> None:
        """The next fault, then sleep for a while."""
        choices = [self.engine, self.engine, self.stop, self.drain, self.weigh]
        if self.lab is not None:
            choices += [self.link, self.link, self.silent, self.silent, self.recover, self.recover]
            choices += [self.shape, self.cut, self.blackout, self.flap]
        else:
            choices += [self.engine, self.engine_blackout]
        self.rnd.choice(choices)()
        time.sleep(self.rnd.uniform(0.02, 0.6))

    def engine(self) -> None:
        """A fault inside a rank's engine; it ends by itself."""
        _, nic = self.nic()
        index = self.rnd.randrange(len(self.job.sides))
        side, node = self.job.sides[index], self.job.job.ranks[index].place.node
        if self.lab is None:
            nic = f"{nic.rpartition('.')[0]}.{node + 1}"
        kind = self.rnd.choice(["blackhole", "error", "slow", "loss"])
        direction = self.rnd.choice(["tx", "rx", "both"])
        more = {"for_ms": self.rnd.randint(20, 1500)}
        if kind == "slow":
            more["rate"] = self.rnd.choice([2_000_000, 50_000_000])
        if kind == "loss":
            more["loss_ppm"] = self.rnd.choice([1000, 200_000])
        if self.rnd.random() < 0.5:
            more["after_bytes"] = self.rnd.randint(1, 8 << 20)
        self.note(f"{side.name} {nic} {kind} {direction} {more}")
        self.command(side, nic, kind, direction, **more)

    def command(self, side: Side, nic: str, kind: str, direction: str, **more: int) -> None:
        if side.pid not in self.stopped:
            side.fail(nic, kind, direction, **more)

    def engine_blackout(self) -> None:
        side, gap = self.rnd.choice(self.job.sides), self.rnd.randint(200, 2500)
        kind = self.rnd.choice(["blackhole", "error"])
        self.note(f"{side.name} every NIC {kind} {gap} ms")
        for nic in side.snapshot().nics:
            self.command(side, nic.name, kind, "both", for_ms=gap)

    def drain(self) -> None:
        """The operator's word to one rank: a NIC of its is drained, and given back."""
        side, gap = self.rnd.choice(self.job.sides), self.rnd.uniform(0.05, 2.0)
        nic = self.nic_of(side)
        self.note(f"{side.name} drains {nic} for {gap:.2f} s")
        self.say(side, Command("drain-nic", nic=nic))
        self.later(gap, lambda: self.say(side, Command("undrain-nic", nic=nic)))

    def weigh(self) -> None:
        side, weight = self.rnd.choice(self.job.sides), self.rnd.choice([0, 1, 50, 100, 100])
        nic = self.nic_of(side)
        self.note(f"{side.name} {nic} has weight {weight}")
        self.say(side, Command("set-weight", nic=nic, weight=weight))

    def nic_of(self, side: Side) -> str:
        name: str = self.rnd.choice([nic.name for nic in side.snapshot().nics])
        return name

    def say(self, side: Side, command: Command) -> None:
        """A refusal is an answer too: the last usable NIC is not drained. A rank that has reached
        the job's end gives none."""
        if side.pid in self.stopped or not self.job.job.running:
            return
        try:
            control.send_command(side.segment, command, timeout=10.0)
        except R2Error:
            if not self.ending():
                raise

    def ending(self, within: float = 2.0) -> bool:
        """Whether some rank has ended; it may be gone for a moment before that is known."""
        end = time.monotonic() + within
        while all(rank.code is None for rank in self.job.job.ranks):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def stop(self) -> None:
        side, gap = self.rnd.choice(self.job.sides), self.rnd.uniform(0.05, 2.0)
        self.note(f"{side.name} stopped for {gap:.2f} s")
        with contextlib.suppress(ProcessLookupError):
            side.signal(signal.SIGSTOP)
            self.stopped.add(side.pid)
        # Of its own: the keeper may be waiting for this rank's answer.
        timer = threading.Timer(gap, self.cont, (side.pid,))
        timer.daemon = True
        timer.start()

    def cont(self, pid: int) -> None:
        self.stopped.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def link(self) -> None:
        node, nic = self.nic()
        mode = self.rnd.choice(["carrier", "admin"])
        self.note(f"n{node} {nic} {mode}")
        self.the_lab.fail_link(f"n{node}", nic, mode)

    def flap(self) -> None:
        """A link goes down and up every 200 ms for a while."""
        node, nic = self.nic()
        turns = self.rnd.randint(3, 8)
        self.note(f"n{node} {nic} flaps {turns} times")
        for turn in range(turns):
            at = 2 * FLAP_S * turn
            self.later(at, lambda: self.the_lab.fail_link(f"n{node}", nic))
            self.later(at + FLAP_S, lambda: self.the_lab.recover_link(f"n{node}", nic))

    def silent(self) -> None:
        node, nic = self.nic()
        direction = self.rnd.choice(["tx", "rx", "both"])
        loss = self.rnd.choice([100.0, 100.0, 1.0, 10.0, 40.0])
        self.note(f"n{node} {nic} silent {direction} {loss:g} %")
        self.the_lab.fail_link(f"n{node}", nic, "silent", direction=direction, loss=loss)

    def recover(self) -> None:
        node, nic = self.nic()
        self.note(f"n{node} {nic} recovers")
        self.the_lab.recover_link(f"n{node}", nic)

    def shape(self) -> None:
        node, nic = self.nic()
        rate = self.rnd.choice(RATES)
        self.note(f"n{node} {nic} at {rate} bit/s")
        self.the_lab.set_rate(f"n{node}", nic, rate)

    def cut(self) -> None:
        node, nic = self.nic()
        other = (node + 1) % NODES
        self.note(f"n{node} - n{other} cut on {nic}")
        self.the_lab.cut_pair(f"n{node}", f"n{other}", nic)

    def blackout(self) -> None:
        """Every path of a node away, then one given back."""
        node, back = self.nic()
        gap, mode = self.rnd.uniform(0.1, 3.0), self.rnd.choice(["carrier", "admin", "silent"])
        self.note(f"n{node} every NIC {mode}, {back} back after {gap:.2f} s")
        for nic in self.the_lab.nics(f"n{node}"):
            self.the_lab.fail_link(f"n{node}", nic, mode)
        self.later(gap, lambda: self.the_lab.recover_link(f"n{node}", back))

    @property
    def the_lab(self) -> Lab:
        assert self.lab is not None
        return self.lab

    def mend(self) -> None:
        """The links first: until then there may be no path, and an operator's words take time."""
        try:
            self.keeper.close()
        finally:
            if self.lab is not None:
                self.lab.recover_all()
            for side in self.job.sides:
                self.cont(side.pid)
        self.note("links mended")
        for side in self.job.sides:
            for nic in side.snapshot().nics if self.job.job.running else []:
                self.say(side, Command("undrain-nic", nic=nic.name))
                self.say(side, Command("set-weight", nic=nic.name, weight=100))
        self.note("all mended")


def trouble(job: PerfJob, monkey: Monkey, seconds: float) -> None:
    """Faults for that long, then none. On a slow machine the job may reach its end first: then some
    rank answers no more, and how the job ends is for its exit codes to say."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and job.job.running:
            monkey.step()
            monkey.keeper.check()
            monkey.looks += [held for held in [look(job)] if held]
        monkey.mend()
        job.moving(2)
    except KeeperError:
        raise
    except (pytest.fail.Exception, AssertionError, R2Error):
        if all(rank.code is None for rank in job.job.ranks):
            raise
        monkey.mend()


def shape(seed: int) -> tuple[str, int]:
    """The lab's variant, and whether verify mode is on: every pair within 2 * len(VARIANTS) seeds
    that follow each other."""
    turn, number = divmod(seed, len(VARIANTS))
    return list(VARIANTS)[number], turn % 2


def round_of(build: Build, seed: int, lab: Lab | None, seconds: float, under: Under) -> str:
    """One job; what it did, in a line. Raises what a failed test raises."""
    rnd = random.Random(seed)
    size = rnd.choice(["64K", "1M", "2M", "8M", "32M"])
    op = rnd.choice(["all_reduce", "all_reduce", "all_gather", "alltoall", "sendrecv"])
    spec: dict[str, Any] = {"per_node": rnd.choice([1, 1, 2]), "timeout": seconds + 150}
    if under.nccl != STANDIN:
        spec |= {"nccl": under.nccl, "per_node": 1}
    spec |= {"lab": lab.name} if lab is not None else {"emulate_nodes": NODES, "nics": NICS}
    env: dict[str, str | int] = {
        "R2CCL_VERIFY": shape(seed)[1],
        "NCCL_DEBUG": "WARN",
        "R2CCL_LOG": "warn",
    }
    # Where cores are few there would be one. Behind slow NICs callers stand in for several; where
    # they are many, little traffic keeps to few lanes.
    kind = random.Random(f"threads {seed}").random()
    if kind < 0.25:
        env |= {"R2CCL_IO_THREADS": 12, "R2CCL_LANES": 4}
    elif kind < 0.45:
        env |= {"R2CCL_IO_THREADS": 6, "R2CCL_LANES": 4, "R2CCL_CHUNK": "64K"}
    elif kind < 0.65:
        env |= {"R2CCL_IO_THREADS": 3}
    if under.direct:
        size, op = rnd.choice(["1M", "8M", "32M"]), "all_reduce"
        env |= {"LD_PRELOAD": str(build.path / "libr2ccl.so"), "R2CCL_ALLREDUCE": "direct"}
    if under.plans:
        env |= {"LD_PRELOAD": str(build.path / "libr2ccl.so")}
        env |= {"R2CCL_MODE": "optimal", "R2CCL_PLAN_HOLD": "1"}
    if lab is not None:
        for node in lab.nodes:
            for nic in lab.nics(node):
                lab.set_rate(node, nic, RATES[-1])
    words = ("--op", op, "-b", size, "--duration", str(seconds + 10 + SETTLE_S))
    with running_perf(build, *words, env=env, **spec) as job:
        monkey = Monkey(rnd, job, lab)
        try:
            job.moving()
            start = at_start(job)
            trouble(job, monkey, seconds)
            may = under.granted(spec["per_node"])
            grown = settled(job, start, may)
            job.finish(90)
            kept = under.plans or under.direct
            changes = f"{len(job.sides[0].named('plan'))} plans, " if kept else ""
            more = over(grown, start, may) + still_growing(monkey.looks, seconds)
            assert not more, "; ".join(more)
        except (AssertionError, pytest.fail.Exception, R2Error, OSError):
            if monkey.keeper.wrong is not None:
                monkey.note(f"the keeper has failed: {monkey.keeper.wrong!r}")
            print("\n".join(["--- what was done", *monkey.done, str(job)]), flush=True)
            raise
        finally:
            monkey.keeper.end()
            for side in job.sides:
                monkey.cont(side.pid)
            if lab is not None:
                lab.recover_all()
    where = lab.spec.variant if lab is not None else "loopback"
    most, later = (highest(held) for held in (grown, second_half(monkey.looks)))
    return (
        f"{op} {size} x {spec['per_node']}, {where}, {len(monkey.done)} faults, {changes}"
        f"most {most}, second half over first {later}"
    )


def no_lab(name: str) -> str:
    """Why a lab that is wanted, if there can be one, cannot be; "": it can, or is not wanted."""
    if name != "auto" or netns.has_admin():
        return ""
    return "no network namespaces can be made here (CAP_SYS_ADMIN is missing)"


@contextlib.contextmanager
def bed(name: str, seed: int) -> Iterator[Lab | None]:
    """The lab of a round, or None for loopback NICs."""
    if name == "loopback" or no_lab(name):
        yield None
        return
    spec = LabSpec(
        name=f"c{os.getpid()}",
        nodes=NODES,
        nics=(NICS,),
        rates=(RATES[-1],),
        variant=shape(seed)[0],
    )
    with Lab.up(spec) as lab:
        yield lab


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=0, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=12.0, help="of faults in a round")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--bed", choices=["auto", "lab", "loopback"], default="auto")
    parser.add_argument("--nccl", default=STANDIN, metavar="DIR", help="of the real libnccl.so.2")
    parser.add_argument("--plans", action="store_true", help="under the shim, with its plans on")
    parser.add_argument("--direct", action="store_true", help="with R2CCL_ALLREDUCE=direct")
    given = parser.parse_args()
    under = Under(given.nccl, given.plans, given.direct)
    build = Build((ROOT / os.environ.get("R2CCL_BUILD_DIR", "build")).resolve())
    if build.absent():
        print(f"chaos: {', '.join(build.absent())}: not there; run `make native`", file=sys.stderr)
        return 1
    why = no_lab(given.bed)
    try:
        required = required_parts()
    except pytest.UsageError as err:
        print(f"chaos: {err}", file=sys.stderr)
        return 2
    if why and "lab" in required:
        print(f"chaos: lab is required here (TEST_REQUIRE): {why}", file=sys.stderr)
        return 1
    if why:
        print(f"chaos: {why}: on loopback NICs, without failures of links", flush=True)
    print(f"chaos: --seed {given.seed} --seconds {given.seconds:g}", flush=True)
    end, number, failed = time.monotonic() + 60 * given.minutes, 0, 0
    while time.monotonic() < end and (not given.rounds or number < given.rounds):
        seed = given.seed + number
        number += 1
        try:
            with bed(given.bed, seed) as lab:
                done = round_of(build, seed, lab, given.seconds, under)
                print(f"round {seed}: {done}", flush=True)
        except (AssertionError, pytest.fail.Exception, R2Error, OSError) as err:
            failed += 1
            print(f"FAIL round {seed}: {err}".split("\n", maxsplit=1)[0])
            print(
                f"  again: tests/stress/chaos.py --seed {seed} --rounds 1 "
                f"--seconds {given.seconds:g} --bed {given.bed} --nccl {given.nccl}"
                f"{' --plans' * given.plans}{' --direct' * given.direct}",
                flush=True,
            )
    print(f"chaos: {number} rounds, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
