"""Helpers on other hosts, started through the user's own ssh, srun or mpirun (agent.py)."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from r2ccl_ctl.env import prepend
from r2ccl_ctl.errors import R2UsageError

T = TypeVar("T")
H = TypeVar("H")

LAUNCHERS = ("srun", "mpirun", "mpiexec")  # no shell takes their words apart
AGENT = "r2ccl_ctl.agent"
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"
PEERS = "peers"  # --hosts: those that the job's own processes name
LAST_WORDS_S = 2.0


def parse_hosts(names: str | None, hostfile: Path | None) -> list[str]:
    """Of --hosts a,b and of a file with a host at the start of each line (slots=N may follow)."""
    found = [name.strip() for name in (names or "").split(",") if name.strip()]
    if names is not None and not found:
        raise R2UsageError(f"--hosts '{names}' names no host")
    if hostfile is not None:
        try:
            text = hostfile.read_text(encoding="utf-8")
        except OSError as err:
            raise R2UsageError(f"--hostfile {hostfile}: {err.strerror}") from err
        except UnicodeDecodeError as err:
            raise R2UsageError(f"--hostfile {hostfile} is no text") from err
        lines = (line.partition("#")[0].split() for line in text.splitlines())
        found += [words[0].partition(":")[0] for words in lines if words]
        if not found:
            raise R2UsageError(f"--hostfile {hostfile} names no host")
    for name in found:
        if name.startswith("-") or not name.isprintable():
            raise R2UsageError(f"'{name}' is no host name")
    return list(dict.fromkeys(found))


def words_of(via: str) -> list[str]:
    """--via as a shell reads it."""
    try:
        words = shlex.split(via)
    except ValueError as err:
        raise R2UsageError(f"--via {via}: {err}") from err
    if not words:
        raise R2UsageError("--via is empty: give ssh, srun or mpirun")
    return words


def starter(via: str, host: str) -> list[str]:
    """The words before a command that is to run on a host."""
    words = words_of(via)
    kind = Path(words[0]).name
    if kind == "srun":  # beside the steps of a job that has all of the node's cores
        return [*words, "--overlap", "-N1", "-n1", "-w", host]
    if kind in ("mpirun", "mpiexec"):
        return [*words, "-n", "1", "--host", host]
    return [*words, host]


def attempt(via: str, host: str) -> str:
    """A command with which a user can see why a helper gave no answer."""
    return shlex.join([*starter(via, host), "true"])


def python_path(env: Mapping[str, str]) -> str:
    """Where a helper finds this package, and what the user's own PYTHONPATH has."""
    return prepend([str(Path(__file__).resolve().parents[1])], env.get("PYTHONPATH", ""))


def argv_for(via: str, host: str, env: Mapping[str, str], module: str = AGENT) -> list[str]:
    """The command that starts a helper on a host."""
    words = starter(via, host)
    passed = {n: v for n, v in env.items() if n.startswith(("NCCL_", "R2CCL_", "R2CC_"))}
    passed["PYTHONPATH"] = python_path(env)
    if env.get("LD_LIBRARY_PATH"):
        passed["LD_LIBRARY_PATH"] = env["LD_LIBRARY_PATH"]
    agent = ["env", *(f"{n}={v}" for n, v in passed.items())]
    agent += [sys.executable, "-m", module]
    direct = Path(words[0]).name in LAUNCHERS
    return [*words, *agent] if direct else [*words, shlex.join(agent)]


def argv_for_peer(via: str, host: str) -> list[str]:
    """The same for a host as its processes call it: Slurm's name of a node has no domain."""
    slurm = Path(starter(via, host)[0]).name == "srun"
    return argv_for(via, host.partition(".")[0] if slurm else host, os.environ)


class NoAnswer(Exception):
    """A helper did not answer."""


class Helper:
    """A helper process on a host, or the one that argv starts. Ctrl-C at the terminal does not
    reach it: it ends with us."""

    def __init__(
        self,
        host: str,
        via: str,
        *,
        module: str = AGENT,
        argv: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self.via = via
        argv = argv or argv_for(via, host, os.environ, module)
        try:
            self.popen = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", env=env, start_new_session=True,
            )  # fmt: skip
        except OSError as err:
            raise R2UsageError(f"--via: {argv[0]} cannot be run: {err.strerror}") from err
        self.lines: queue.Queue[str] = queue.Queue()
        self.said: deque[str] = deque(maxlen=8)
        self._readers = [threading.Thread(target=read, daemon=True)
                         for read in (self._read, self._listen)]  # fmt: skip
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.popen.stdout
        for line in self.popen.stdout:
            if line.startswith("{"):  # a login shell may greet first
                self.lines.put(line)
        self.lines.put("")

    def _listen(self) -> None:
        """What it says on stderr is read all the time, so that it never waits for room."""
        assert self.popen.stderr
        self.said.extend(line.strip() for line in self.popen.stderr if line.strip())

    def ask(self, timeout: float, **request: Any) -> dict[str, Any]:
        """Its answer to one request. After NoAnswer it is of no use."""
        assert self.popen.stdin
        try:
            print(json.dumps(request), file=self.popen.stdin, flush=True)
        except OSError:
            raise NoAnswer(self._last_words()) from None
        return self.receive(timeout)

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next answer."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            said = f": {self.said[-1]}" if self.said else ""
            raise NoAnswer(f"no answer in {timeout:g} s{said}") from None
        if not line:
            raise NoAnswer(self._last_words())
        try:
            found = json.loads(line)
        except ValueError:
            raise NoAnswer(f"its answer is no JSON: {line[:60].strip()}") from None
        assert isinstance(found, dict)
        if "refused" in found:
            raise NoAnswer(str(found["refused"]))
        return found

    def _last_words(self) -> str:
        try:
            self.popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its output ended"
        self._readers[1].join(timeout=LAST_WORDS_S)
        code = self.popen.returncode
        return f"it ended with code {code}" + (f": {self.said[-1]}" if self.said else "")

    def stop(self, timeout: float = 3) -> None:
        if self.popen.stdin:
            try:
                self.popen.stdin.close()
            except OSError:
                pass
        for end in (self.popen.terminate, self.popen.kill):  # srun takes its waiting job back
            try:
                self.popen.wait(timeout=timeout)
                return
            except subprocess.TimeoutExpired:
                end()
        self.popen.wait()


def at_once(work: Callable[[H], T], helpers: Sequence[H]) -> list[T]:
    """The same for all helpers at the same time."""
    from concurrent.futures import ThreadPoolExecutor  # takes long to load

    if not helpers:
        return []
    with ThreadPoolExecutor(max_workers=len(helpers)) as pool:
        return list(pool.map(work, helpers))
