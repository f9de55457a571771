"""The plugin built where verbs' headers are missing: it builds, has nothing of RDMA in it, and
works over sockets even where a library and devices could be had.

Rung 3; the headers are not really gone: make is told to build as if they were, or the compiler
finds others first, which do not compile.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Build, RunBounded
from failover_bed import loopback, running_pair, until
from verbs_bed import moved

pytestmark = pytest.mark.slow

BUILT = ROOT / "build" / "noverbs"
KNOWS = "R2_HAVE_VERBS"


def as_usual(build: Build) -> None:
    """What does not know whether there are verbs compiles to the same: its objects are copied, and
    are newer than the stamp of the flags."""
    for folder in ("net_plugin", "shim", "tests/stress"):
        for source in (ROOT / folder).rglob("*.[ch]"):
            made = build.path / "obj" / source.relative_to(ROOT).with_suffix(".o")
            if KNOWS in source.read_text(encoding="utf-8"):
                assert source.suffix == ".c", f"{source}: who includes it has to be compiled"
            elif source.suffix == ".c" and made.is_file() and "verbs" not in made.parts:
                there = BUILT / "obj" / made.relative_to(build.path / "obj")
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(made, there)


@pytest.fixture(scope="module")
def without(build: Build, run_bounded: RunBounded) -> Path:
    words: list[str | Path] = ["make", "-j2", "VERBS=no", "WERROR=1"]
    run_bounded([*words, BUILT.relative_to(ROOT) / "flags"], cwd=ROOT, timeout=60)
    if build.path == ROOT / "build":  # sanitizers have objects of their own
        as_usual(build)
    for name in ("libnccl-net-r2ccl.so", "stress/pair"):
        words.append(BUILT.relative_to(ROOT) / name)
    run_bounded(words, cwd=ROOT, timeout=500)
    return BUILT


def test_make_notices_by_itself(run_bounded: RunBounded, tmp_path: Path) -> None:
    """On a machine without them nobody says VERBS=no."""
    hidden = tmp_path / "infiniband" / "verbs.h"
    hidden.parent.mkdir()
    hidden.write_text("#error missing\n")
    words = ["make", "-n", f"CC=gcc -I{tmp_path}", f"B={tmp_path / 'build'}", "native"]
    done = run_bounded(words, cwd=ROOT, timeout=100)
    assert "net_plugin/transport/tcp/ep.c" in done.stdout
    assert "net_plugin/transport/verbs/" not in done.stdout
    assert "tests/fakeverbs/" not in done.stdout


def test_nothing_of_rdma_is_in_it(without: Path, build: Build) -> None:
    def names(library: Path) -> str:
        listing = subprocess.run(
            ["nm", str(library)], capture_output=True, text=True, timeout=60, check=True
        )
        return listing.stdout

    assert "r2_transport_tcp" in names(without / "libnccl-net-r2ccl.so")
    assert "r2_transport_verbs" not in names(without / "libnccl-net-r2ccl.so")


def test_it_works_over_sockets(without: Path, build: Build) -> None:
    """With RDMA asked for, a library named and GPU memory wanted: sockets, and every byte right."""
    library = build.path / "fakeverbs" / "libibverbs.so.1"
    env = {"R2CCL_IBVERBS_LIB": str(library), "R2CCL_GPU_MEMORY": "direct"}
    words = ("--register", "--size", "100000", "--conns", 2, "--stall", 20)
    with running_pair(without, *words, nics=loopback(2), **env) as pair:
        pair.moving(50)
        until("sockets carry", lambda: moved(pair.tx.snapshot(), "tcp") > 0)
        assert moved(pair.tx.snapshot(), "verbs") == 0
        pair.finish()
