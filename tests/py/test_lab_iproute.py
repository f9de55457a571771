"""A lab beside `ip netns`, which mounts /run/netns over itself when it is first used. In a mount
namespace of its own, where /run is empty, so that no other lab is touched. Rung 4."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, missing

from r2ccl_ctl.lab import netns

pytestmark = pytest.mark.lab

SCRIPT = """
set -e
mount -t tmpfs none /run
lab() { "$PYTHON" -m r2ccl_ctl lab "$@" --name "$LAB"; }
for turn in 1 2; do
    lab up --nodes 2 --nics 1
    ip netns add "$LAB-foreign-$turn"
    lab status
    lab down
done
ls /run/netns
"""


def test_ip_netns_add_while_a_lab_is_up(lab_rights: None) -> None:
    """The lab goes down and comes up again; the namespaces of others stay."""
    if not netns.has_admin() or not shutil.which("ip") or not shutil.which("unshare"):
        missing("lab", "this test needs CAP_SYS_ADMIN, ip and unshare")
    name = f"i{os.getpid()}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", SCRIPT],
        env={**os.environ, "PYTHON": sys.executable, "LAB": name},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done
    left = [line for line in done.stdout.splitlines() if line.startswith(f"{name}-")]
    assert left == [f"{name}-foreign-1", f"{name}-foreign-2"], done
