"""nccl-tests under mpirun or srun: its rows, with the times at which they came."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from r2ccl_ctl import env as environment
from r2ccl_ctl import launch
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.job import LaunchSpec
from r2ccl_ctl.lab import Lab, nsexec
from r2ccl_ctl.remote import LAUNCHERS, words_of
from r2ccl_ctl.validate.nccltests import parse_row, starts

PROGRAM = "all_reduce_perf"
STEP = 4096  # bytes between two rows
TRIAL_ROWS = 3
TRIAL_S = 120.0
ROWS_MOST = 5000
SPARE = 1.3
LAB_MPI = (
    "--mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include mgmt0 --mca btl self,tcp "
    "--mca btl_tcp_if_include mgmt0 --mca pml ob1 --bind-to none --oversubscribe"
)


def find(folder: str) -> str:
    """all_reduce_perf of --nccl-tests DIR, else of PATH; "" without one."""
    if folder:
        for place in (Path(folder) / PROGRAM, Path(folder) / "build" / PROGRAM):
            if os.access(place, os.X_OK) and place.is_file():
                return str(place.resolve())
        raise R2UsageError(f"--nccl-tests {folder}: there is no {PROGRAM}: give its folder")
    return shutil.which(PROGRAM) or ""


def starter(via: str) -> list[str]:
    """srun or mpirun, with the options of --via; mpirun of PATH where that is ssh."""
    words = words_of(via)
    if Path(words[0]).name in LAUNCHERS:
        return words
    found = shutil.which("mpirun")
    return [found] if found else []


class NcclTests:
    """One run of all_reduce_perf: as many rows as the case takes seconds."""

    def __init__(self, bed: Any, setup: Any, case: Any, job: str) -> None:
        self.bed, self.setup, self.case, self.job = bed, setup, case, job
        self._scratch = tempfile.TemporaryDirectory(prefix="r2ccl-validate-")
        self._popen: subprocess.Popen[bytes] | None = None
        self._lines: list[tuple[int, str]] = []
        self._given = 0
        self._last_ns = 0
        self.longest_s = TRIAL_S
        try:
            row_s = self._trial()
            rows = math.ceil(case.length * setup.seconds * SPARE / row_s) + TRIAL_ROWS
            rows = min(rows, ROWS_MOST)
            self.longest_s = rows * row_s * 5
            self._start(rows)
        except BaseException:
            self.stop()
            raise

    def _trial(self) -> float:
        """Seconds of a row, from a short run without faults; known for the next cases."""
        from r2ccl_ctl.validate.bed import HostError

        known: dict[bool, float] = vars(self.bed).setdefault("row_s", {})
        if self.case.r2ccl not in known:
            self._start(TRIAL_ROWS, R2CCL_SHM="0")  # no rank that could be taken for the case's
            assert self._popen is not None
            try:
                self._popen.wait(TRIAL_S)
            except subprocess.TimeoutExpired:
                pass
            self._reader.join(5)
            if (apart := starts(line for _, line in self._lines)) > 1:
                raise HostError(
                    f"{PROGRAM} ran as {apart} jobs of one rank, not as one: build it with MPI=1; "
                    "under Slurm, --via 'srun --mpi=pmix' (`srun --mpi=list` shows the kinds)"
                )
            rows = [ns for ns, line in self._lines if _row(line) is not None]
            if self._popen.poll() != 0 or len(rows) < 2:
                raise HostError(f"a trial of {PROGRAM} failed: {self.obituary()}")
            known[self.case.r2ccl] = max(0.001, (rows[-1] - rows[0]) / 1e9 / (len(rows) - 1))
        self._lines, self._given = [], 0
        return known[self.case.r2ccl]

    def _start(self, rows: int, **more: str) -> None:
        size = self.setup.size
        argv = [self.setup.nccl_tests, "-b", str(size), "-e", str(size + rows * STEP)]
        argv += ["-i", str(STEP), "-n", "2", "-w", "1", "-c", "1"]
        variables = {**self._variables(), **more}
        argv = ["env", *(f"{name}={value}" for name, value in variables.items()), *argv]
        lab = self.bed.lab
        argv = self._mpirun(argv)
        if lab is not None:
            argv = nsexec.argv_for(lab.plan(lab.nodes[0], signal.SIGKILL), argv)
        self._popen = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._last_ns = time.monotonic_ns()
        self._reader = threading.Thread(target=self._read, args=(self._popen,), daemon=True)
        self._reader.start()

    def _variables(self) -> dict[str, str]:
        """What all ranks get; each host has the same NICs' names, or R2CCL_NICS of its own."""
        setup, first = self.setup, self.bed.hosts[0]
        spec = LaunchSpec(argv=[PROGRAM], nccl=setup.nccl, plugin="" if self.case.r2ccl else "none")
        natives = launch.find_natives(spec, len(first.facts["gpus"]))
        found = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("NCCL_", "R2CCL_")) or name == "LD_LIBRARY_PATH"
        }
        found |= {"R2CCL_JOB": self.job, "NCCL_NET_PLUGIN": natives.nccl_plugin or "none"}
        if self.case.r2ccl:
            found |= environment.KEEP_LOADED
        if natives.nccl_dir:
            found["LD_LIBRARY_PATH"] = environment.prepend(
                [natives.nccl_dir], found.get("LD_LIBRARY_PATH", "")
            )
        if self.bed.lab is not None:
            found["NCCL_SOCKET_IFNAME"] = "mgmt0" if self.case.r2ccl else "nic"
            if self.case.r2ccl:
                found["R2CCL_NICS"] = first.nics
            held = self.bed.hosts[0].ask("meet")["ports"]  # for a program without MPI of its own
            found |= {"MASTER_ADDR": first.address, "MASTER_PORT": str(held[0])}
        return found

    def _mpirun(self, argv: list[str]) -> list[str]:
        setup, names = self.setup, [host.name for host in self.bed.hosts]
        words = starter(setup.via)
        if not words:
            raise R2UsageError(f"{PROGRAM} needs mpirun or srun, and neither is in PATH: --via")
        if Path(words[0]).name == "srun":
            return [*words, "-N", str(len(names)), "-n", str(setup.ranks), "-w", ",".join(names),
                    f"--ntasks-per-node={setup.per_node}", *argv]  # fmt: skip
        slots = ",".join(f"{name}:{setup.per_node}" for name in names)
        more: list[str] = []
        if self.bed.lab is not None:
            more = ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", self._agent(self.bed.lab)]
            more += LAB_MPI.split()
        if os.geteuid() == 0:
            more.append("--allow-run-as-root")
        return [*words, *more, "-n", str(setup.ranks), "--host", slots, *argv]

    def _agent(self, lab: Lab) -> str:
        """A program that mpirun calls in place of ssh: it enters the node."""
        path = Path(self._scratch.name) / "rsh"
        lines = ["#!/bin/sh", "node=$1", "shift", 'case "$node" in']
        for node in lab.nodes:
            argv = nsexec.argv_for(lab.plan(node), ["/bin/sh", "-c"])
            lines.append(f'{node}) exec {shlex.join(argv)} "$*" ;;')
        path.write_text("\n".join([*lines, "esac", "exit 1", ""]))
        path.chmod(0o700)
        return str(path)

    # While it runs

    def _read(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        for raw in popen.stdout:
            self._lines.append((time.monotonic_ns(), raw.decode(errors="replace")))

    @property
    def running(self) -> bool:
        return self._popen is not None and (self._popen.poll() is None or self._reader.is_alive())

    @property
    def code(self) -> int:
        return (self._popen.poll() or 0) if self._popen is not None else 0

    def windows(self) -> list[dict[str, Any]]:
        """The rows that are new. A damaged one is left to the judge, who reads the whole output."""
        fresh = []
        for ns, line in self._lines[self._given :]:
            self._given += 1
            row = _row(line)
            if row is not None:
                wrong = row.wrong
                fresh.append({
                    "begin_ns": self._last_ns, "end_ns": ns, "iteration": self._given,
                    "seconds": row.seconds, "bytes": row.size,
                    "wrong": -1 if wrong is None else wrong,
                })  # fmt: skip
                self._last_ns = ns
        return fresh

    def output(self) -> str:
        return "".join(line for _, line in self._lines)

    def obituary(self) -> str:
        said = [line.strip() for _, line in self._lines if line.strip()]
        code = None if self._popen is None else self._popen.poll()
        return f"{PROGRAM} ended with {code}: {' | '.join(said[-2:])[:300]}"

    def stop(self) -> None:
        """mpirun ends its ranks when it is told to; it gets 5 s for that."""
        popen = self._popen
        if popen is not None and popen.poll() is None:
            for number, wait in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
                try:
                    os.killpg(popen.pid, number)
                    popen.wait(wait)
                    break
                except ProcessLookupError:
                    break
                except subprocess.TimeoutExpired:
                    continue
        self._scratch.cleanup()


def _row(line: str) -> Any:
    try:
        return parse_row(line)
    except ValueError:
        return None
