"""A lab of an ordinary user, in user namespaces. Rung 4; run by root it becomes `nobody`.

It cannot prove that a distribution allows it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pyroute2
import pytest
from conftest import ROOT, missing

pytestmark = pytest.mark.lab

NOBODY = 65534
MAIN = "from r2ccl_ctl.cli.lab_cmds import lab; lab()"
Rootless = Callable[..., subprocess.CompletedProcess[str]]


def as_user(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run as an ordinary user: ourselves, or nobody when we are root."""
    folders = {str(Path(str(m.__file__)).parents[1]) for m in (click, pyroute2)} | {str(ROOT)}
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sorted(folders)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "R2CCL_LAB_DIR": str(folder / "lab"),
    }
    who = NOBODY if os.geteuid() == 0 else None
    return subprocess.run(
        argv,
        cwd="/",
        env=env,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
        user=who,
        group=who,
        extra_groups=None if who is None else [],
    )


def interpreter(folder: Path) -> str:
    """A Python that the ordinary user can run and that finds what the lab imports."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if as_user([python, "-c", "import pyroute2, r2ccl_ctl.lab"], folder).returncode == 0:
                return python
        except OSError:
            continue
    missing("userns", "no Python that the user nobody may run")


@pytest.fixture
def rootless() -> Iterator[Rootless]:
    """`r2ccl-ctl lab` of an ordinary user; the lab is gone at the end."""
    folder = Path("/tmp") / f"r2lab-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    python = interpreter(folder)

    def lab(*args: str) -> subprocess.CompletedProcess[str]:
        return as_user([python, "-c", MAIN, *args], folder)

    try:
        yield lab
    finally:
        lab("down")
        folder.rmdir()


def gone(pid: int, within: float = 5.0) -> bool:
    """Whether a process ends (or is a zombie that its parent has yet to reap)."""
    status = Path(f"/proc/{pid}/status")
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if "State:\tZ" in status.read_text():
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def up(rootless: Rootless, *args: str) -> dict[str, object]:
    """Bring the lab up; its state."""
    done = rootless("up", *args)
    if "user namespaces are refused" in done.stderr:
        missing("userns", done.stderr)
    assert done.returncode == 0, done.stderr
    state = Path("/tmp") / f"r2lab-test-{os.getpid()}" / "lab" / "r2lab.json"
    data: dict[str, object] = json.loads(state.read_text())
    return data


def test_whole_life(rootless: Rootless) -> None:
    holder = up(rootless, "--nics", "2", "--rate", "1gbit")["holder"]
    assert isinstance(holder, list)
    again = rootless("up")
    assert again.returncode == 1 and "already up" in again.stderr
    assert rootless("fail-link", "n0", "nic1").returncode == 0
    assert rootless("fail-link", "n0", "nic0", "--silent").returncode == 0
    shell = "id -u; hostname; cat /sys/class/net/nic0/carrier /sys/class/net/nic1/carrier"
    inside = rootless("exec", "n0", "--", "sh", "-c", shell)
    user = str(NOBODY if os.geteuid() == 0 else os.geteuid())
    assert inside.stdout.split() == [user, "n0", "1", "0"], inside.stderr
    wrong = rootless("fail-link", "n0", "nic7")
    assert wrong.returncode == 2 and "nic0, nic1" in wrong.stderr
    nics = json.loads(rootless("status", "--json").stdout)["nodes"][0]["nics"]
    assert [n["faults"] for n in nics] == [[], ["silent-both"], ["carrier-down"]]
    assert rootless("recover-link", "--all").returncode == 0
    down = rootless("down")
    assert down.returncode == 0, down.stderr
    assert gone(holder[0])
    folder = Path("/tmp") / f"r2lab-test-{os.getpid()}"
    assert list(folder.iterdir()) == []


def test_after_a_killed_holder(rootless: Rootless) -> None:
    """What a restart of the machine looks like: files without namespaces."""
    holder = up(rootless)["holder"]
    assert isinstance(holder, list)
    os.kill(holder[0], 9)
    assert gone(holder[0])
    assert "not whole" in rootless("status").stderr
    assert up(rootless, "--nics", "1")["phase"] == "up"
    assert rootless("status").returncode == 0


def test_a_bad_up_leaves_no_holder(rootless: Rootless) -> None:
    done = rootless("up", "--nics", "0")
    assert done.returncode == 2 and "--nics" in done.stderr
    folder = Path("/tmp") / f"r2lab-test-{os.getpid()}"
    assert list(folder.iterdir()) == []
