"""tests/gpu/nettimes: a plugin around ours notes every message, and the reader finds what was noted
(rung 3, the stand-in). What the times say under NCCL is a matter of measurement."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import Build, RunBounded

from r2ccl_ctl import paths

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "gpu" / "nettimes"
READER = [sys.executable, str(HERE / "nettimes.py")]
SIZE, ITERS = 64 << 10, 20


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory, run_bounded: RunBounded) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    made = tmp_path_factory.mktemp("nettimes") / "libnettimes.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
    run_bounded(["gcc", *flags, f"-I{ROOT / 'net_plugin'}", "-o", made, HERE / "nettimes.c"])
    return made


def launch(plugin: Path, real: Path, out: Path) -> list[str]:
    env = {"NETTIMES_PLUGIN": real, "NETTIMES_OUT": out}
    words = [arg for name, value in env.items() for arg in ("--env", f"{name}={value}")]
    perf = [str(paths.native_dir() / "r2ccl_perf"), "--op", "sendrecv"]
    return [
        *(sys.executable, "-m", "r2ccl_ctl", "launch", "-n", "2", "--emulate-nodes", "2"),
        *("--nics", "1", "--plugin", str(plugin), "--timeout", "60", *words, "--"),
        *(*perf, "-b", str(SIZE), "-e", str(SIZE), "-n", str(ITERS), "-w", "1", "-c", "1"),
    ]


def rows(text: str) -> dict[int, list[float]]:
    """By size: what follows in the line."""
    found = {}
    for line in text.splitlines():
        if re.fullmatch(r"[ \d.]+", line):
            size, *rest = line.split()
            found[int(size)] = [float(word) for word in rest]
    return found


def test_every_message_is_noted(
    build: Build, plugin: Path, run_bounded: RunBounded, tmp_path: Path
) -> None:
    done = run_bounded(launch(plugin, paths.native_dir() / "libnccl-net-r2ccl.so", tmp_path))
    assert re.search(rf"^\[0\] +{SIZE} .* 0\b", done.stdout, re.M), done.stdout
    noted = {path: path.stat().st_size // 24 for path in tmp_path.iterdir()}
    by_side = {
        side: sorted(n for path, n in noted.items() if path.name.split(".")[1] == side)
        for side in ("send", "recv")
    }
    assert by_side["send"] == by_side["recv"] and by_side["send"][-1] >= ITERS
    text = run_bounded([*READER, tmp_path, "--skip", "0"]).stdout
    assert text.startswith(f"{len(by_side['send'])} connections")
    found = rows(text)
    assert sum(row[0] for row in found.values()) == sum(by_side["send"])
    for count, p10, p50, p90, late, sent, isend, irecv in found.values():
        assert count > 0 and 0 < p10 <= p50 <= p90 < 60e6 and 0 <= late <= 1
        assert 0 < sent < 60e6 and 0 < isend < sent and irecv > 0
    most = sum(row[0] for row in found.values())
    fewer = rows(run_bounded([*READER, tmp_path, "--skip", "0.5"]).stdout)
    assert most / 2 <= sum(row[0] for row in fewer.values()) <= most / 2 + len(noted)


def test_nothing_to_read(run_bounded: RunBounded, tmp_path: Path) -> None:
    done = run_bounded([*READER, tmp_path], code=1)
    assert "no connection of which both sides are noted" in done.stderr
    assert "--skip 1" in run_bounded([*READER, tmp_path, "--skip", "1"], code=2).stderr


@pytest.mark.parametrize(
    ("real", "words"), [("missing.so", "cannot open"), ("", "set it to a net plugin")]
)
def test_no_plugin_to_pass_on_to(
    build: Build, plugin: Path, run_bounded: RunBounded, tmp_path: Path, real: str, words: str
) -> None:
    argv = launch(plugin, tmp_path / real if real else Path(), tmp_path)
    if not real:
        argv = [arg for arg in argv if not arg.startswith("NETTIMES_PLUGIN=")]
        argv.remove("--env")
    done = run_bounded(argv)  # as with any plugin that has no NIC, NCCL takes another network
    assert words in done.stderr
    assert not list(tmp_path.iterdir())
