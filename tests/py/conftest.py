"""What all Python tests share: the native build, what this machine allows, bounded processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(sys.executable).with_name("r2ccl-ctl")
PARTS = ("build", "lab", "userns", "gpu")

# Under nohup, or behind a shell's &, programs would be born deaf to what tests end them with.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def required_parts() -> set[str]:
    """Parts whose absence is a failure (TEST_REQUIRE=lab,gpu)."""
    text = os.environ.get("TEST_REQUIRE", "")
    parts = {part for part in text.replace(",", " ").split() if part}
    unknown = parts - set(PARTS)
    if unknown:
        raise pytest.UsageError(
            f"TEST_REQUIRE={text}: unknown {', '.join(sorted(unknown))}; "
            f"there are {', '.join(PARTS)}"
        )
    return parts


def missing(part: str, reason: str) -> NoReturn:
    """Skip for want of `part`, or fail where that part is required."""
    if part in required_parts():
        pytest.fail(f"{part} is required here (TEST_REQUIRE): {reason}", pytrace=False)
    pytest.skip(reason)


LEFT_OUT = {".git", ".venv", "build", "dist", "__pycache__"}


def source_files() -> list[Path]:
    """What a clone would hold, relative to ROOT; without git, all but what builds leave behind."""
    git = shutil.which("git")
    if git is not None:
        listing = subprocess.run(
            [git, "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        names = [Path(name) for name in listing.stdout.splitlines()]
        if listing.returncode == 0 and names:
            return [name for name in names if (ROOT / name).is_file()]
    return [
        path.relative_to(ROOT)
        for path in sorted(ROOT.rglob("*"))
        if path.is_file()
        and not any(
            part in LEFT_OUT or part.endswith((".egg-info", "_cache"))
            for part in path.relative_to(ROOT).parts
        )
    ]


# Several processes run the tests file by file (pytest -n 3): those that take longest begin.
LONGEST = (
    "test_shim_direct.py test_lab_failover.py test_shim_left_out.py test_health.py "
    "test_validate.py test_shim_plan_deaths.py test_lab_moves.py test_verbs.py test_shim_plan.py "
    "test_locate.py test_lab_health.py test_failover_process.py test_shim.py test_failover.py "
    "test_verbs_mixed.py test_shim_life.py test_grey.py test_trace.py test_silence.py "
    "test_package.py test_deb.py test_verbs_ib.py"
).split()


# What cannot hold over the stand-in, whose NICs are no hardware (TEST_VERBS).
NOT_OVER_VERBS = {
    "test_silence.py::test_no_core_to_spare": "the stand-in's NIC needs a core as well",
    "test_failover_process.py::test_strangers": "the stand-in lets strangers stay at its own doors",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files, where they are dealt out to several processes."""
    for item in items if over_verbs() else []:
        why = NOT_OVER_VERBS.get(f"{item.path.name}::{item.name.partition('[')[0]}")
        if why:
            item.add_marker(pytest.mark.skip(reason=f"TEST_VERBS: {why}"))
    if config.getoption("dist", "no") == "no" and not hasattr(config, "workerinput"):
        return
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


class Verbs(NamedTuple):
    """What tests did over queue pairs (TEST_VERBS), of those whose processes found the devices."""

    tests: int
    moved: int
    queue_pairs: int
    written: int
    rest: list[str]  # which moved nothing

    def enough(self) -> bool:
        """The suite did run over them. Some tests have devices and move nothing: they end too soon,
        are about something else, or are in the lab, whose NICs no device stands behind."""
        return 0 < self.tests <= 2 * self.moved


def verbs_seen(config: pytest.Config) -> Verbs:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    seen: dict[str, tuple[int, int]] = {}
    for report in reporter.stats.get("", []) if reporter else []:
        found = dict(report.user_properties).get("verbs")
        if report.when == "teardown" and found and found[0]:
            seen[report.nodeid] = found[1], found[2]
    moved = {name for name, (_, written) in seen.items() if written}
    totals = [sum(numbers) for numbers in zip(*seen.values(), strict=True)] or [0, 0]
    return Verbs(len(seen), len(moved), totals[0], totals[1], sorted(seen.keys() - moved))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Under TEST_VERBS a run that did not go over queue pairs has failed, whatever it found."""
    chief = over_verbs() and not hasattr(session.config, "workerinput")
    if chief and exitstatus == 0 and not verbs_seen(session.config).enough():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def tell_verbs(terminalreporter: pytest.TerminalReporter) -> None:
    """Under TEST_VERBS: how many tests moved their data over queue pairs, and which did not."""
    if not over_verbs():
        return
    seen = verbs_seen(terminalreporter.config)
    terminalreporter.write_sep("-", "over queue pairs (TEST_VERBS)")
    terminalreporter.write_line(
        f"{seen.moved} of {seen.tests} tests that had devices; {seen.queue_pairs} queue pairs, "
        f"{seen.written} bytes written"
    )
    for name in seen.rest:
        terminalreporter.write_line(f"no byte: {name}")
    if not seen.enough():
        terminalreporter.write_line("FAILED: fewer than half of them; this was no run over verbs")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of tests that passed at a later try only: what failed at first. They are bugs to find."""
    tell_verbs(terminalreporter)
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("-", f"failed and tried again: {report.nodeid}")
        for line in f"{report.longreprtext}\n{report.caplog}".strip().splitlines()[-60:]:
            terminalreporter.write_line(line[:400])


@dataclass(frozen=True)
class Build:
    """The folder that `make` filled, with the names of what is in it."""

    path: Path

    @property
    def plugin(self) -> Path:
        return self.path / "libnccl-net-r2ccl.so"

    @property
    def host_nccl(self) -> Path:
        """The folder of the stand-in's libnccl.so.2, for LD_LIBRARY_PATH."""
        return self.path / "hostnccl"

    @property
    def perf(self) -> Path:
        return self.path / "r2ccl_perf"

    def absent(self) -> list[str]:
        wanted = (self.plugin, self.host_nccl / "libnccl.so.2", self.perf)
        return [str(file) for file in wanted if not file.is_file()]


@pytest.fixture(scope="session")
def build() -> Build:
    """The native build; another folder than build/ with R2CCL_BUILD_DIR."""
    folder = Build((ROOT / os.environ.get("R2CCL_BUILD_DIR", "build")).resolve())
    absent = folder.absent()
    if absent:
        missing("build", f"{', '.join(absent)}: not there; run `make native`")
    return folder


@pytest.fixture(scope="session")
def lab_rights() -> None:
    """Skips where this machine lets nobody make network namespaces."""
    unshare = shutil.which("unshare")
    if unshare is None:
        missing("lab", "no `unshare` in PATH (package util-linux)")
    options = ["-n"] if os.geteuid() == 0 else ["-Urn"]
    probe = subprocess.run(
        [unshare, *options, "true"], capture_output=True, text=True, timeout=20, check=False
    )
    if probe.returncode != 0:
        missing("lab", f"unshare {' '.join(options)} is refused here: {probe.stderr.strip()}")


@pytest.fixture(scope="session")
def lab_admin(lab_rights: None) -> None:
    """Skips where this process may not make network namespaces itself."""
    from r2ccl_ctl.lab import netns

    if not netns.has_admin():
        missing("lab", "these tests make namespaces themselves: CAP_SYS_ADMIN is missing")


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many NVIDIA GPUs there are; skips where there is none."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        missing("gpu", "no nvidia-smi in PATH")
    listing = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=60, check=False)
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    if count == 0:
        missing("gpu", f"nvidia-smi lists no GPU: {listing.stderr.strip()}")
    return count


@dataclass(frozen=True)
class Finished:
    """A process that ended by itself."""

    command: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return (
            f"{' '.join(self.command)}\nended with {self.code}\n"
            f"--- stdout\n{self.stdout[-6000:]}\n--- stderr\n{self.stderr[-6000:]}"
        )


class RunBounded(Protocol):
    """See `run_bounded`."""

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        code: int | None = 0,
    ) -> Finished: ...


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and every child in its group, and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


def run_process(
    command: Sequence[str | Path],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    code: int | None = 0,
) -> Finished:
    """Run a command in a process group of its own; fail the test when it is still running after
    `timeout` seconds, or ends with another code than `code` (None: any). `env` is added to the
    environment. Output goes through files: a child that keeps a pipe open cannot hang us."""
    words = tuple(str(word) for word in command)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        hung = False
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            kill_group(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    finished = Finished(words, process.returncode, *texts)
    if hung:
        pytest.fail(f"still running after {timeout:.0f} s: {finished}", pytrace=False)
    if code is not None and finished.code != code:
        pytest.fail(f"exit code {code} was expected: {finished}", pytrace=False)
    return finished


@pytest.fixture(scope="session")
def run_bounded() -> RunBounded:
    """`run_process` as a fixture."""
    return run_process


@pytest.fixture(scope="session")
def tool() -> Path:
    """The r2ccl-ctl of this environment."""
    if not TOOL.exists():
        missing("build", f"{TOOL}: not there; run `make`")
    return TOOL


@pytest.fixture
def seed() -> int:
    """The seed of a random test: SEED, or a new one. pytest shows it when the test fails."""
    value = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**31))
    print(f"SEED={value}")
    return value


Tmp = pytest.TempPathFactory
TALLY = struct.Struct("=QQ")  # struct fv_tally of tests/fakeverbs/fake.h


def over_verbs() -> bool:
    """TEST_VERBS=1: engines find RDMA devices, those of tests/fakeverbs, behind loopback NICs.
    `thread`: a NIC is a thread of its process, not a process of its own (fake.h)."""
    return os.environ.get("TEST_VERBS", "0") not in ("", "0")


@contextlib.contextmanager
def verbs_behind_nics(patch: pytest.MonkeyPatch, item: pytest.Item, tmp: Tmp) -> Iterator[None]:
    """Under TEST_VERBS: sets what `over_verbs` says, and afterwards records what went over queue
    pairs (`verbs` among the test's properties: processes, queue pairs, bytes)."""
    if not over_verbs():
        yield
        return
    library = ROOT / os.environ.get("R2CCL_BUILD_DIR", "build") / "fakeverbs/libibverbs.so.1"
    if not library.is_file():
        pytest.fail(f"TEST_VERBS: {library} is not there (libibverbs-dev, make)", pytrace=False)
    folder = tmp.mktemp("verbs")
    patch.setenv("R2CCL_IBVERBS_LIB", str(library.resolve()))
    apart = os.environ["TEST_VERBS"] != "thread"
    patch.setenv("R2_FAKEVERBS_NIC", "process" if apart else "thread")
    patch.setenv("R2_FAKEVERBS_TALLY", str(folder))
    yield
    seen = [TALLY.unpack(file.read_bytes()) for file in folder.iterdir()]
    item.user_properties.append(("verbs", [len(seen), *(sum(n) for n in zip(*seen, strict=True))]))


@pytest.fixture(autouse=True)
def clean_environment(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path_factory: Tmp
) -> Iterator[None]:
    """Settings of the caller's shell, or of a test before, must not change what a test sees."""
    build = os.environ.get("R2CCL_BUILD_DIR")
    for name in list(os.environ):
        ours = name.startswith(("R2CCL_", "R2CC_", "NCCL_"))
        if ours and name != "R2CCL_BUILD_DIR":
            monkeypatch.delenv(name)
    with verbs_behind_nics(monkeypatch, request.node, tmp_path_factory):
        yield
    os.environ.pop("R2CCL_BUILD_DIR", None)
    if build is not None:
        os.environ["R2CCL_BUILD_DIR"] = build
