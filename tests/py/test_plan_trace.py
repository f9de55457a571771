"""R2CCL_PLAN_TRACE: a run with plans, recorded and run again, on the stand-in.

Rung 3: four nodes on loopback. The results are sums of floats that depend on the order in which
they are added, so that their bytes show what schedule every operation ran under.
"""

from __future__ import annotations

import re
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Build
from plan_bed import RANKS, comms, floats, processes
from segment_bed import until

from r2ccl_ctl import control, journal
from r2ccl_ctl.control import Command
from r2ccl_ctl.job import Job

pytestmark = pytest.mark.slow


def job(
    build: Build, name: str, folder: Path, trace: str, pause: float = 0, **env: str
) -> AbstractContextManager[Job]:
    return floats(build, name, folder, pause, 5, {"R2CCL_PLAN_TRACE": trace, **env})


def command(name: str, verb: str) -> None:
    fault = {"fault": "blackhole", "direction": "both"} if verb == "fail-nic" else {}
    answer = control.send_command(
        processes(name)[1],
        Command(verb, nic="127.0.1.2", **fault),  # type: ignore[arg-type]
        timeout=10,
    )
    assert answer.ok, answer.text


def all_have(name: str, plan: str, epoch: int) -> bool:
    found = [comm for comm in comms(name) if comm.ranks == RANKS]
    return len(found) == 2 * RANKS and all(c.plan[:4] == plan and c.epoch >= epoch for c in found)


def results(folder: Path) -> list[str]:
    """What rank 0 got; all ranks have the same."""
    texts = [(folder / str(rank)).read_text(encoding="utf-8") for rank in range(RANKS)]
    assert len(set(texts)) == 1, "ranks differ"
    return texts[0].splitlines()


def output(running: Job) -> str:
    return "".join(rank.output for rank in running.ranks)


def said(name: str) -> list[str]:
    return [e.cause for process in processes(name) for e in journal.Cursor(process).events()]


@dataclass
class Recorded:
    trace: Path
    results: list[str]
    last: int

    @property
    def pattern(self) -> str:
        return f"replay:{self.trace}/t"

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.trace, to)
        return to


@pytest.fixture(scope="module")
def recorded(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Stock, a NIC is lost, tree; it comes back, stock again."""
    name, base = "trace-record", tmp_path_factory.mktemp("trace")
    trace = base / "traces"
    trace.mkdir()
    with job(build, name, base / "run", f"{trace}/t", pause=5) as running:
        until(lambda: all_have(name, "", 0) and comms(name)[0].nodes == RANKS, "they meet", 60)
        command(name, "fail-nic")
        until(lambda: all_have(name, "tree", 2), "the plan is taken everywhere", 60)
        command(name, "recover-nic")
        until(lambda: all_have(name, "", 3), "back to stock", 60)
        last = max(comm.operations for comm in comms(name)) + 50
        (base / "run/stop").write_text(str(last))
        assert running.wait(120) == 0, output(running)
    assert sorted(file.name for file in trace.iterdir()) == [f"t.{rank}" for rank in range(RANKS)]
    return Recorded(trace, results(base / "run"), last)


def replay(
    build: Build, recorded: Recorded, name: str, folder: Path, trace: str, **env: str
) -> tuple[list[str], Job]:
    folder.mkdir()
    (folder / "stop").write_text(str(recorded.last))
    with job(build, name, folder, trace, 0, **env) as running:
        assert running.wait(120) == 0, output(running)
    return results(folder), running


def test_the_same_bits(build: Build, recorded: Recorded, tmp_path: Path) -> None:
    """Without any fault, and as fast as it goes: the plans come at the same operations."""
    assert len({line.split()[2] for line in recorded.results}) > 2, "orders show in the bits"
    again, running = replay(build, recorded, "trace-again", tmp_path / "a", recorded.pattern)
    assert again == recorded.results
    said_so = [line for line in output(running).splitlines() if "replay" in line]
    assert len(said_so) == 2 and all("is complete at operation" in line for line in said_so)


def test_other_bits_without_it(build: Build, recorded: Recorded, tmp_path: Path) -> None:
    plain, _ = replay(build, recorded, "trace-plain", tmp_path / "p", "")
    assert plain != recorded.results


@pytest.mark.soak
def test_the_same_bits_with_the_fault(build: Build, recorded: Recorded, tmp_path: Path) -> None:
    """A NIC is lost at another moment and does not come back: that is no matter to the plans."""
    name, folder = "trace-fault", tmp_path / "f"
    folder.mkdir()
    (folder / "stop").write_text(str(recorded.last))
    with job(build, name, folder, recorded.pattern, pause=10) as running:
        until(lambda: len(comms(name)) == 2 * RANKS, "communicators", 60)
        command(name, "fail-nic")
        until(lambda: all_have(name, "tree", 2), "the plan", 60)
        assert running.wait(120) == 0, output(running)
    assert results(folder) == recorded.results


def spoil(trace: Path, how: str) -> str:
    """What is wrong with rank 2's file, and how that is said."""
    file = trace / "t.2"
    text = file.read_bytes()
    if how == "missing":
        file.unlink()
        return "No such file"
    assert how == "cut off"
    file.write_bytes(text[:-30])
    return r"line \d+ is cut off"


@pytest.mark.soak
@pytest.mark.parametrize("how", ["missing", "cut off"])
def test_a_trace_that_is_no_good(
    build: Build, recorded: Recorded, tmp_path: Path, how: str
) -> None:
    """One rank's is enough: nobody replays, nobody plans, and that is said where it is. In which
    ways a file can be bad: test_trace.c."""
    trace = recorded.copy(tmp_path / "traces")
    says = spoil(trace, how)
    plain, running = replay(
        build, recorded, "trace-spoilt", tmp_path / "run", f"replay:{trace}/t.%r"
    )
    assert len({line.split()[2] for line in plain if line.startswith("world")}) == 1, "all stock"
    assert re.search(f"t.2 cannot be replayed: {says}", running.ranks[2].output)
    for rank in running.ranks:
        assert "is not replayed: every rank must replay its own trace" in rank.output


@pytest.mark.soak
def test_a_trace_is_not_written_over(build: Build, recorded: Recorded, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in recorded.trace.iterdir()}
    _, running = replay(build, recorded, "trace-over", tmp_path / "run", f"{recorded.trace}/t")
    assert "is there already and is not written over" in output(running)
    assert {file.name: file.read_bytes() for file in recorded.trace.iterdir()} == before


@pytest.mark.soak
def test_a_plan_that_cannot_run_here(build: Build, recorded: Recorded, tmp_path: Path) -> None:
    """Tree cannot be forced: NCCL's own choice, and nobody waits for a plan."""
    plain, running = replay(
        build, recorded, "trace-unable", tmp_path / "run", recorded.pattern, NCCL_ALGO="Ring"
    )
    assert len({line.split()[2] for line in plain if line.startswith("world")}) == 1
    assert "NCCL_ALGO is set, so that Tree cannot be forced" in output(running)


@pytest.mark.soak
def test_the_operator_ends_a_replay(build: Build, recorded: Recorded, tmp_path: Path) -> None:
    name, folder = "trace-off", tmp_path / "o"
    folder.mkdir()
    (folder / "stop").write_text(str(recorded.last + 200))
    with job(build, name, folder, recorded.pattern, pause=10) as running:
        until(lambda: all_have(name, "tree", 2), "the plan", 60)
        for process in processes(name):
            assert control.send_command(process, Command("plan", plan=False), timeout=10).ok
        until(
            lambda: any("replay ended" in line for line in said(name)) and all_have(name, "", 3),
            "stock, and why",
            60,
        )
        assert running.wait(120) == 0, output(running)
    results(folder)


@pytest.mark.soak
def test_a_killed_run_is_replayed(build: Build, tmp_path: Path) -> None:
    """What a run that was killed has recorded is whole."""
    name, first, trace = "trace-kill", tmp_path / "first", tmp_path / "t.%r"
    with job(build, name, first, str(trace), pause=5) as running:
        until(lambda: all_have(name, "", 0) and comms(name)[0].nodes == RANKS, "they meet", 60)
        command(name, "fail-nic")
        until(lambda: all_have(name, "tree", 2), "the plan is taken everywhere", 60)
        goal = max(comm.operations for comm in comms(name)) + 50
        until(lambda: comms(name)[0].operations > goal, "traffic", 60)
        running.kill(grace=0)
    lines = [(first / str(rank)).read_text(encoding="utf-8").splitlines() for rank in range(RANKS)]
    common = min(len(some) for some in lines)
    last = common // 2 - 2
    second = tmp_path / "second"
    again, _ = replay(
        build, Recorded(tmp_path, [], last), "trace-killed", second, f"replay:{trace}"
    )
    assert again == lines[0][: len(again)]
    assert len(again) == 2 * (last + 1)
