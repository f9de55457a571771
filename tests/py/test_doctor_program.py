"""doctor -- CMD: where a program has its NCCL. Rung 2: programs made by the compiler; what stands
in for NCCL is a function with its name. It cannot prove that a program opens no NCCL later."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build

from r2ccl_ctl.doctor import program
from r2ccl_ctl.doctor.finding import Finding
from r2ccl_ctl.elf import ElfError, defined_functions, has_loader

CC = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler in PATH")
NCCL = """
int ncclAllReduce(void);
const char *const names[] = {"NCCL_NET_PLUGIN", "NCCL_TOPO_FILE"};
int ncclAllReduce(void) { return names[0] == 0; }
"""
MAIN = "int ncclAllReduce(void); int main(void) { return ncclAllReduce(); }\n"


def made(folder: Path, name: str, source: str, *options: str | Path) -> Path:
    """Compiled; skips where the options need what is not here, as a static C library."""
    assert CC
    text = folder / f"{name}.c"
    text.write_text(source)
    out = folder / name
    done = subprocess.run([CC, text, "-o", out, *options], capture_output=True, text=True)
    if done.returncode and "-static" in options:
        pytest.skip(f"no static C library here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return out


def words(found: list[Finding]) -> list[str]:
    return [one.severity for one in found]


@pytest.mark.parametrize("options", [["-O1"], ["-O1", "-s"]])
def test_nccl_inside(tmp_path: Path, options: list[str]) -> None:
    """Also of a program that was stripped of its symbols."""
    inside = made(tmp_path, "inside", NCCL + MAIN, *options)
    found = program.check_program([str(inside)])
    assert words(found) == ["warning"] and "linked in statically" in found[0].evidence


def test_nccl_inside_of_a_library(tmp_path: Path) -> None:
    library = made(tmp_path, "libtorch_like.so", NCCL, "-shared", "-fPIC")
    outside = made(tmp_path, "outside", MAIN, library, f"-Wl,-rpath,{tmp_path}")
    (finding,) = program.check_program([str(outside)])
    assert finding.severity == "warning" and str(library) in finding.evidence


def test_nccl_beside(tmp_path: Path) -> None:
    library = made(tmp_path, "libnccl.so.2", NCCL, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2")
    outside = made(tmp_path, "outside", MAIN, library, f"-Wl,-rpath,{tmp_path}")
    (finding,) = program.check_program([str(outside)])
    assert finding.severity == "ok" and str(library) in finding.evidence
    outside.chmod(0o4755)
    found = program.check_program([str(outside)])
    assert words(found) == ["warning", "ok"] and "setuid" in found[0].evidence


def test_static_as_a_whole(tmp_path: Path) -> None:
    whole = made(tmp_path, "whole", NCCL + MAIN, "-static")
    assert not has_loader(whole)
    (finding,) = program.check_program([str(whole)])
    assert finding.severity == "error" and "no dynamic loader" in finding.evidence


def test_no_nccl(tmp_path: Path) -> None:
    plain = made(tmp_path, "plain", "int main(void) { return 0; }\n")
    assert words(program.check_program([str(plain)])) == ["note"]
    assert words(program.check_program(["no-such-program"])) == ["error"]
    assert program.check_program([]) == []


def test_scripts(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nexec python train.py\n")
    script.chmod(0o755)
    (finding,) = program.check_program([str(script)])
    assert finding.severity == "note" and "is a script" in finding.evidence
    script.write_text(f"#!{sys.executable}\n")
    (finding,) = program.check_program([str(script)])
    assert "is a script" not in finding.evidence


def test_pytorch_with_its_own_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found without being imported."""
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    made(package / "lib", "libtorch_cuda.so", NCCL, "-shared", "-fPIC")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = program.check_program([sys.executable, "train.py"])
    assert words(found) == ["warning"] and "libtorch_cuda.so" in found[0].evidence


def test_what_is_no_program(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("echo\n")
    text.chmod(0o755)
    assert words(program.check_program([str(text)])) == ["note"]
    with pytest.raises(ElfError):
        defined_functions(text)


def test_the_command(build: Build, tmp_path: Path) -> None:
    inside = made(tmp_path, "inside", NCCL + MAIN)
    for more in ([], ["--hosts", "here", "--via", "sh -c 'eval \"$1\"'"]):
        done = subprocess.run(
            [sys.executable, "-m", "r2ccl_ctl", "doctor", *more, "--json", "--", str(inside), "-b"],
            cwd=ROOT, env={**os.environ, "R2CCL_BUILD_DIR": str(build.path)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        rows = json.loads(done.stdout)["findings"]
        assert [row["severity"] for row in rows if row["check"] == "program"] == ["warning"], done
