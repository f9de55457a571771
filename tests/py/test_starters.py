"""What starts the ranks: the variables of torchrun, Open MPI's mpirun and PMI, and only LD_PRELOAD.

Rung 3, r2ccl_perf on the stand-in, two ranks as processes of one node over loopback. What it cannot
prove: the starters themselves, PyTorch, GPUs.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from conftest import Build

RANKS = 2
STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


def free_port() -> int:
    """Of two in a row: the id is exchanged on the next one."""
    for _ in range(100):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no two ports in a row are free")


@pytest.mark.parametrize("starter", STARTERS)
def test_only_ld_preload(build: Build, tmp_path: Path, starter: str) -> None:
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    for number in range(RANKS):
        names = STARTERS[starter]
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("R2CCL_", "NCCL_"))},
            **dict(zip(names, map(str, (number, RANKS, number)), strict=True)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LD_PRELOAD": str(build.path / "libr2ccl.so"),
            "LD_LIBRARY_PATH": str(build.path / "hostnccl"),
            "R2CCL_NICS": "127.0.1.1,127.0.2.1",
            "HOSTNCCL_BOOTSTRAP_ADDR": "127.0.0.1",
            "NCCL_NET": "R2CCL",
        }
        argv = [str(build.perf), *"-b 8 -e 1M -f 64 -n 3 --timeout 30".split()]
        with (tmp_path / f"rank{number}").open("wb") as out:
            ranks.append(
                subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
                )
            )
    try:
        codes = [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=20)
    text = (tmp_path / "rank0").read_text(encoding="utf-8")
    assert codes == [0] * RANKS, text
    assert f"{RANKS} ranks" in text
    assert "Out of bounds values : 0 OK" in text
