"""The pieces that NCCL cuts sends and receives into (R2CCL_P2P_CHUNK), as the stand-in takes them.

Rung 3. Real NCCL has to show that it reads the variable after the plugin's first call, as the
stand-in does. Its log says "P2P Chunksize set to"; when it is set, test_p2pchunk's matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from conftest import Build
from test_hostnccl import Job, Ranks, good, plugin_env

from r2ccl_ctl import control

NAME = "NCCL_P2P_NET_CHUNKSIZE"
MIB = 1 << 20
ARGS = f"--op sendrecv -b {8 * MIB} -n 2 -w 0 --timeout 20".split()


def clean(env: dict[str, str]) -> dict[str, str]:
    """Whatever this process has in its environment."""
    return {NAME: "", "R2CCL_P2P_CHUNK": ""} | env


def sendrecv(build: Build, tmp: Path, env: Mapping[str, str]) -> tuple[Ranks, int]:
    """The ranks, and how many messages rank 0 has sent."""
    job = Job(build, tmp, 2, ARGS, clean(plugin_env(build, NCCL_DEBUG="INFO", **env)))
    result = job.finish()
    counters = control.find(job.processes[0].pid).snapshot().counters
    return result, counters["messages_sent"]


def test_pieces_are_larger(build: Build, tmp_path: Path) -> None:
    """A quarter of the messages of NCCL's default, and the log says why."""
    (tmp_path / "as_it_is").mkdir()
    as_it_is, many = sendrecv(build, tmp_path / "as_it_is", {"R2CCL_P2P_CHUNK": "0"})
    assert NAME not in good(as_it_is).stderr[0], str(as_it_is)
    ours, few = sendrecv(build, tmp_path, {})
    assert f"{NAME}=524288, by R2CCL_P2P_CHUNK" in good(ours).stderr[0], str(ours)
    assert many > 3 * few > 0  # 4, but for some that are small anyway


def test_users_own_value_stays(build: Build, tmp_path: Path) -> None:
    result, many = sendrecv(build, tmp_path, {NAME: "131072"})
    assert f"{NAME}=524288" not in good(result).stderr[0], str(result)
    (tmp_path / "half").mkdir()
    half, few = sendrecv(build, tmp_path / "half", {"R2CCL_P2P_CHUNK": "256K"})
    assert "262144" in good(half).stderr[0], str(half)
    assert 1.5 * few < many < 2.5 * few


def test_ranks_that_differ_are_told(build: Build, tmp_path: Path) -> None:
    """NCCL compares nothing; collectives go on, and a user reads what to do."""
    args = "--op all_reduce -b 1M -n 2 --timeout 20".split()
    env = clean(plugin_env(build, NCCL_DEBUG="WARN"))
    result = good(Job(build, tmp_path, 2, args, env, {"R2CCL_P2P_CHUNK": "0"}).finish())
    assert f"{NAME} is 512 KiB here and 128 KiB at" in result.stderr[0], str(result)
    assert f"{NAME} is 128 KiB here and 512 KiB at" in result.stderr[1], str(result)
    assert "to the same on all ranks" in result.stderr[0], str(result)
