"""The library with NCCL's name, one made for a newer NCCL, and what `r2ccl-ctl shim check` sees.

Rung 3. It cannot prove that a real, newer NCCL works behind it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Build, RunBounded

from r2ccl_ctl import elf, paths, shim
from r2ccl_ctl.errors import R2Error

NEWER = """
int ncclGetVersion(int *version) { *version = 29901; return 0; }
int ncclCommInitRank(void *out, int n) { (void)out; (void)n; return 0; }
struct team { int ranks, rank, stride; };
struct team ncclTeamWorld(void *comm) { (void)comm; struct team t = {8, 3, 1}; return t; }
struct big { char bytes[128]; };
int ncclShinyNew(int a, long b, double c, void *d, int e, int f, struct big g, int h, float i,
                 int j)
{
    return a == 1 && b == 2 && c == 3.5 && d == (void *)4 && e == 5 && f == 6 &&
           g.bytes[127] == 7 && h == 8 && i == 9.5f && j == 10 ? 77 : -1;
}
int pncclShinyNew(void) { return 78; }
"""
CALLER = """
#include <stdio.h>
struct team { int ranks, rank, stride; };
struct big { char bytes[128]; };
struct team ncclTeamWorld(void *comm);
int ncclShinyNew(int, long, double, void *, int, int, struct big, int, float, int);
int pncclShinyNew(void), ncclGetVersion(int *), pncclGetVersion(int *), ncclGroupStart(void);
int main(void)
{
    struct big big = {{0}};
    struct team team = ncclTeamWorld(0);
    int first = 0, second = 0;
    big.bytes[127] = 7;
    ncclGetVersion(&first);
    pncclGetVersion(&second);
    printf("%d %d %d %d ", team.ranks, team.rank, team.stride,
           ncclShinyNew(1, 2, 3.5, (void *)4, 5, 6, big, 8, 9.5f, 10));
    printf("%d %d %d %d\\n", pncclShinyNew(), first, second, ncclGroupStart());
    return 0;
}
"""


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory, run_bounded: RunBounded) -> Path:
    """An NCCL of the future."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc in PATH")
    folder = tmp_path_factory.mktemp("newer")
    (folder / "nccl.c").write_text(NEWER, encoding="utf-8")
    library = folder / "libnccl.so.2"
    run_bounded(
        [gcc, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, folder / "nccl.c"]
    )
    return library


def test_exported_functions(newer: Path, tmp_path: Path) -> None:
    assert "ncclShinyNew" in elf.exported_functions(newer)
    assert elf.exported_functions(Path("/proc/self/exe")) is not None
    data = newer.read_bytes()
    for cut in (0, 3, 60, 63, 200, len(data) // 2):
        (tmp_path / "cut").write_bytes(data[:cut])
        with pytest.raises(elf.ElfError, match="no shared library"):
            elf.exported_functions(tmp_path / "cut")
    with pytest.raises(elf.ElfError, match="cannot be read"):
        elf.exported_functions(tmp_path / "nothing")


def test_what_the_named_library_lacks(
    build: Build, newer: Path, run_bounded: RunBounded, tool: Path
) -> None:
    assert shim.lacking(newer) == ["ncclShinyNew"]
    assert shim.lacking(build.host_nccl / "libnccl.so.2") == []
    found = json.loads(run_bounded([tool, "shim", "lacks", "--nccl", newer, "--json"]).stdout)
    assert found["lacks"] == ["ncclShinyNew"]
    refused = run_bounded([tool, "shim", "lacks", "--nccl", build.plugin], code=2)
    assert "is no NCCL" in refused.stderr


def test_it_says_what_it_lacks(newer: Path, run_bounded: RunBounded) -> None:
    script = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(ctypes.c_int()))"
    )
    env = {"R2CCL_REAL_NCCL": str(newer), "R2CCL_LOG": "warn"}
    named = paths.named_shim_path()
    finished = run_bounded([sys.executable, "-c", script, named], env=env)
    assert finished.stderr.count("does not pass on: ncclShinyNew.") == 1


def test_build_for_a_newer_nccl(
    newer: Path, run_bounded: RunBounded, tool: Path, tmp_path: Path
) -> None:
    """The made library passes on what it does not know, with every kind of argument, and functions
    without a prototype that it does know; and it still is the shim."""
    made = tmp_path / "libnccl.so.2"
    said = run_bounded([tool, "shim", "build", "--nccl", newer, "-o", made]).stdout
    assert "2 functions added: ncclShinyNew, pncclShinyNew" in said
    assert shim.lacking(newer, made) == []
    (tmp_path / "caller.c").write_text(CALLER, encoding="utf-8")
    caller = tmp_path / "caller"
    gcc = shutil.which("gcc")
    assert gcc is not None
    run_bounded([gcc, "-o", caller, tmp_path / "caller.c", made, f"-Wl,-rpath,{tmp_path}"])
    env = {"R2CCL_REAL_NCCL": str(newer), "R2CCL_LOG": "warn"}
    finished = run_bounded([caller], env=env)
    assert finished.stdout == "8 3 1 77 78 29901 29901 5\n"
    assert "does not pass on" not in finished.stderr
    assert "ncclGroupStart was called, but the NCCL in use" in finished.stderr


def test_build_refuses(newer: Path, run_bounded: RunBounded, tool: Path) -> None:
    before = newer.read_bytes()
    refused = run_bounded([tool, "shim", "build", "--nccl", newer, "-o", newer], code=2)
    assert "is the NCCL itself" in refused.stderr
    assert newer.read_bytes() == before
    command: list[str | Path] = [tool, "shim", "build", "--nccl", newer, "-o", newer.with_name("x")]
    refused = run_bounded(command, code=1, env={"CC": "/nowhere/cc"})
    assert "/nowhere/cc cannot be run" in refused.stderr


def test_path(run_bounded: RunBounded, tool: Path, build: Build) -> None:
    assert run_bounded([tool, "shim", "path"]).stdout.strip() == str(build.path / "libr2ccl.so")
    named = run_bounded([tool, "shim", "path", "--named"]).stdout.strip()
    assert named == str(build.path / "nccl/libnccl.so.2")


def fake_proc(folder: Path, files: list[Path]) -> Path:
    (folder / "7").mkdir(parents=True)
    rows = [f"7f00-7f01 r-xp 00000000 00:00 1 {file}\n" for file in files]
    (folder / "7/maps").write_text("".join(rows), encoding="utf-8")
    return folder


def test_check_tells_the_ways_apart(build: Build, tmp_path: Path) -> None:
    host = build.host_nccl / "libnccl.so.2"
    preload, plugin = build.path / "libr2ccl.so", build.plugin
    static = tmp_path / "libtorch_cuda.so"
    static.write_bytes(b"\x7fELF...NCCL_P2P_NET_CHUNKSIZE\0...")
    cases: list[tuple[list[Path], str]] = [
        ([], "no NCCL is loaded"),
        ([host], "NCCL runs without R2CCL"),
        ([host, plugin], "without the shim"),
        ([host, plugin, preload], "over R2CCL's plugin, with the shim"),
        ([host, preload], "R2CCL_DLSYM=1"),
        ([host, plugin, build.path / "nccl/libnccl.so.2"], "with the shim"),
        ([static, preload], "libtorch_cuda.so contains an NCCL of its own"),
    ]
    for number, (files, verdict) in enumerate(cases):
        found = shim.reach(7, proc=fake_proc(tmp_path / str(number), files))
        assert verdict in found.verdict(), files


def test_check_of_a_process(run_bounded: RunBounded, tool: Path) -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        try:
            command: list[str | Path] = [tool, "shim", "check", "--pid", str(process.pid)]
            assert "no NCCL is loaded" in run_bounded(command).stdout
        finally:
            process.kill()
    refused = run_bounded([tool, "shim", "check", "--pid", str(process.pid)], code=2)
    assert "no such process" in refused.stderr
    with pytest.raises(R2Error):
        shim.reach(process.pid)
