"""A benchmark that is cut off, by a signal or its own time, prints what it has and says so.

Rungs 3 and 4. Nothing here judges how fast anything is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build, RunBounded, kill_group

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import completion

from r2ccl_ctl.lab.state import known_labs

RUN = ROOT / "tests" / "bench" / "run.py"
END_S = 40.0


@pytest.fixture(autouse=True)
def natives(build: Build) -> None:
    """All of these run programs of the build."""


def section_of(path: Path) -> dict[str, Any]:
    (section,) = json.loads(path.read_text(encoding="utf-8"))["sections"]
    found: dict[str, Any] = section
    return found


@contextlib.contextmanager
def running(
    words: list[str], said: str, command: tuple[str, ...] = (sys.executable, str(RUN))
) -> Iterator[subprocess.Popen[bytes]]:
    """run.py, once it has said that on stderr."""
    process = subprocess.Popen(
        [*command, *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        heard, until = b"", time.monotonic() + END_S
        os.set_blocking(process.stderr.fileno(), False)
        while said.encode() not in heard:
            heard += process.stderr.read() or b""
            assert process.poll() is None and time.monotonic() < until, heard.decode()
            time.sleep(0.02)
        yield process
    finally:
        kill_group(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal(tmp_path: Path, number: signal.Signals) -> None:
    """After one fault of a thousand: its times are there, and so is why there are no more."""
    if not completion.fakeverbs().is_file():
        pytest.skip("no <infiniband/verbs.h> here (Debian: libibverbs-dev)")
    out, tables = tmp_path / "bench.json", tmp_path / "bench.md"
    words = ["--only", "resume", "--part", "completion", "--runs", "1000", "--json", str(out)]
    with running([*words, "--markdown", str(tables)], "1 of 1000: known") as process:
        process.send_signal(number)
        process.send_signal(number)  # an impatient one changes nothing
        said = process.communicate(timeout=END_S)[0].decode()
    assert process.returncode == 128 + number, said
    assert f"CUT OFF by {number.name}" in said
    assert "completion error: traffic resumed, median" in said
    section = section_of(out)
    assert section["cut"] == number.name and not section["errors"]
    assert 0 < max(row["samples"] for row in section["rows"]) < 1000
    assert f"Cut off by {number.name}" in tables.read_text(encoding="utf-8")


@pytest.mark.parametrize("to", ["group", "script"])
def test_make_bench(tmp_path: Path, to: str) -> None:
    """Ctrl-C, which all processes of a terminal's group get, and SIGTERM to make's child alone, end
    `make bench` in the same way."""
    if not completion.fakeverbs().is_file() or not (ROOT / ".venv/bin/python").exists():
        pytest.skip("no <infiniband/verbs.h> here (Debian: libibverbs-dev), or no .venv")
    out = tmp_path / "bench.json"
    words = ["--only", "resume", "--part", "completion", "--runs", "1000", "--json", str(out)]
    with running(words, "1 of 1000: known", (str(ROOT / "mk" / "bench"),)) as process:
        if to == "group":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=END_S)[0].decode()
    number = signal.SIGINT if to == "group" else signal.SIGTERM
    assert process.returncode == 1, said
    assert f"CUT OFF by {number.name}: the figures so far" in said
    assert "0 ran, 1 failed" in said
    assert section_of(out)["rows"]


def terminated(words: list[str], until: str) -> tuple[int, str]:
    """Its process, and what it said, of one that gets SIGTERM once it has said `until`."""
    with running(words, until) as process:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=END_S)[0].decode()
    assert process.returncode == 128 + signal.SIGTERM, said
    return process.pid, said


def test_before_there_is_a_figure(tmp_path: Path) -> None:
    """No figures are no error then, and sections that were still to come are left out."""
    out = tmp_path / "bench.json"
    words = ["--only", "unshaped", "--only", "growth", "--json", str(out)]
    assert "CUT OFF by SIGTERM: no figures yet" in terminated(words, "turn 1")[1]
    assert not section_of(out)["errors"]


@pytest.mark.lab
def test_in_a_lab(lab_rights: None, tmp_path: Path) -> None:
    """Times of `known` that were taken are rows, and no lab stays behind."""
    out = tmp_path / "bench.json"
    words = ["--only", "locate", "--runs", "1000", "--json", str(out)]
    pid = terminated(words, "1 of 1000 of each kind")[0]
    assert section_of(out)["rows"]
    assert not [name for name in known_labs() if name.endswith(f"-{pid}")]


@pytest.mark.lab
@pytest.mark.parametrize(
    "words",
    [["known", "--part", "killed"], ["resume", "--part", "carrier"], ["locate"]],
    ids=lambda words: str(words[0]),
)
def test_slice(lab_rights: None, run_bounded: RunBounded, tmp_path: Path, words: list[str]) -> None:
    """Its time is up before all faults were made; a busy machine takes most of 5 s for the lab."""
    out = tmp_path / "bench.json"
    command = [sys.executable, str(RUN), "--only", *words, "--runs", "1000", "--json", str(out)]
    for seconds in (5, 20):
        done = run_bounded([*command, "--slice", str(seconds)], code=124)
        assert f"CUT OFF by --slice {seconds}" in done.stdout
        section = section_of(out)
        assert section["cut"] == f"--slice {seconds}" and not section["errors"]
        if section["rows"]:
            return
    assert section["rows"]
