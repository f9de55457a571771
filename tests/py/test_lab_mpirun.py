"""nccl-tests' command line of README.md under Open MPI's own mpirun, over the nodes of a lab.

Rung 4: mpirun starts its daemons in the nodes through an agent, as it does with ssh, and these
start the ranks. all_reduce_perf is r2ccl_perf on the stand-in for NCCL. It cannot prove what MPI
does inside nccl-tests, nor GPUs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Build

from r2ccl_ctl import control
from r2ccl_ctl.lab import Lab, LabSpec

pytestmark = pytest.mark.lab

PER_NODE = 2
LARGEST = "1G"  # in README.md; less here
# By the environment, so that the command line stays as it is.
SITE = {
    "plm": "rsh",
    "plm_rsh_no_tree_spawn": "1",
    "oob_tcp_if_include": "mgmt0",
    "btl": "self,tcp",
    "btl_tcp_if_include": "mgmt0",
    "pml": "ob1",
    "hwloc_base_binding_policy": "none",
    "rmaps_base_oversubscribe": "1",
}


@pytest.fixture(scope="module")
def lab(lab_admin: None) -> Iterator[Lab]:
    with Lab.up(LabSpec(name=f"m{os.getpid()}")) as made:
        yield made


def command() -> list[str]:
    """README.md's, word for word."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^    r2ccl-ctl (run -- mpirun .*\\\n.*)$", text, re.MULTILINE)
    assert found, "README.md has no mpirun"
    return shlex.split(found[1].replace("\\\n", " "), comments=True)


def test_command_of_the_readme(build: Build, lab: Lab, tmp_path: Path) -> None:
    if not shutil.which("mpirun"):
        pytest.skip("no mpirun here (Debian: openmpi-bin)")
    words = ["1M" if word == LARGEST else word for word in command()]
    assert words[:3] == ["run", "--", "mpirun"] and "1M" in words
    (tmp_path / "all_reduce_perf").symlink_to(build.perf)
    tool = [sys.executable, "-m", "r2ccl_ctl"]
    agent = tmp_path / "agent"
    own = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "R2CCL_BUILD_DIR": str(build.path),
        "MASTER_ADDR": lab.address("n0", "mgmt0"),
        "MASTER_PORT": "29517",
    }
    settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in own.items())
    agent.write_text(
        f"#!/bin/sh\nnode=$1\nshift\n"
        f'exec env {settings} {shlex.join(tool)} lab exec --name {lab.name} $node -- sh -c "$*"\n'
    )
    agent.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"n{i} slots={PER_NODE}\n" for i in range(2)))
    job = f"mpirun-{os.getpid()}"
    site = {**SITE, "plm_rsh_agent": str(agent), "orte_default_hostfile": str(hosts)}
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("R2CCL_", "NCCL_", "OMPI_"))},
        **{f"OMPI_MCA_{k}": v for k, v in site.items()},
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **own,
        "R2CCL_JOB": job,
    }
    child = lab.popen(
        "n0", [*tool, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output = child.communicate(timeout=120)[0].decode(errors="replace")
    finally:
        child.kill()
    assert child.returncode == 0, output
    assert f"{2 * PER_NODE} ranks" in output and "Out of bounds values : 0 OK" in output, output
    ranks = [p for p in control.list_processes(dead=True) if p.job == job]
    assert sorted((p.host, p.rank) for p in ranks) == [
        (f"n{node}", node * PER_NODE + i) for node in range(2) for i in range(PER_NODE)
    ], output
    sent = {nic.name: nic.tx_bytes for p in ranks for nic in p.snapshot().nics if nic.tx_bytes}
    assert {"nic0", "nic1"} <= set(sent), f"{sent} {output}"
