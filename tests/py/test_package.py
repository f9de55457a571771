"""The wheel: built, installed into a fresh environment, used from an empty folder.

Rung 3. It cannot prove that the wheel's native code runs on other machines than this one.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, Build, RunBounded, source_files

pytestmark = pytest.mark.slow

NATIVE = (
    "r2ccl_ctl/_native/libnccl-net-r2ccl.so",
    "r2ccl_ctl/_native/hostnccl/libnccl.so.2",
    "r2ccl_ctl/_native/r2ccl_perf",
    "r2ccl_ctl/_native/segment.h",
    "r2ccl_ctl/_native/libr2ccl.so",
    "r2ccl_ctl/_native/nccl/libnccl.so.2",
    "r2ccl_ctl/_native/nccl/shim.o",
    "r2ccl_ctl/_native/raw.h",
)
# What applications may see of the plugin: NCCL's plugin tables, and a few functions of ours.
EXPORTED = re.compile(r"nccl(Net|CollNet|Tuner|Profiler)(Plugin)?_v\d+|r2ccl_\w+")


def source_copy(folder: Path) -> Path:
    """What git would track, copied: a build must not depend on files that a clone lacks."""
    for name in source_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(build: Build, tmp_path_factory: pytest.TempPathFactory, run_bounded: RunBounded) -> Path:
    """A wheel made from a copy of the sources, and of the objects that `make` has compiled of them:
    compiling is proven elsewhere."""
    base = tmp_path_factory.mktemp("wheel")
    source = source_copy(base / "source")
    if (build.path / "flags").is_file():
        for folder in ("net_plugin", "shim", "tests/hostnccl", "tests/perf", "named"):
            shutil.copytree(
                build.path / "obj" / folder,
                source / "build/wheel/obj" / folder,
                ignore=shutil.ignore_patterns("*.d"),
            )
        shutil.copy2(build.path / "flags", source / "build/wheel/flags")
    run_bounded(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", base / "dist", source],
        timeout=400,
        cwd=base,
    )
    wheels = list((base / "dist").glob("r2ccl-*.whl"))
    assert len(wheels) == 1, wheels
    return wheels[0]


@pytest.fixture(scope="module")
def installed(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, run_bounded: RunBounded
) -> Path:
    """The folder that the wheel was installed into; what it needs is this environment's. A fresh
    one, with what the wheel says that it needs, is test_wheels.py's."""
    folder = tmp_path_factory.mktemp("installed")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    run_bounded([*pip, "--target", folder, wheel], timeout=120)
    return folder


def test_wheel_has_the_native_artefacts(wheel: Path) -> None:
    assert re.fullmatch(r"r2ccl-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        mode = archive.getinfo(NATIVE[2]).external_attr >> 16
    assert set(NATIVE) <= names, sorted(set(NATIVE) - names)
    assert mode & 0o111, "r2ccl_perf is not executable"
    strays = [name for name in names if not name.startswith(("r2ccl_ctl/", "r2ccl-"))]
    assert not strays, strays


def test_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = wheel.parent.parent / "source"
    modules = {str(path.relative_to(source)) for path in source.glob("r2ccl_ctl/**/*.py")}
    assert modules <= names, sorted(modules - names)


def test_installed_tool_helps(installed: Path, tmp_path: Path, run_bounded: RunBounded) -> None:
    env = {"PYTHONPATH": str(installed)}
    finished = run_bounded([installed / "bin/r2ccl-ctl", "--help"], cwd=tmp_path, env=env)
    assert "fail-nic" in finished.stdout


def test_installed_demo(
    installed: Path, tmp_path: Path, run_bounded: RunBounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo runs from an empty folder, with no checkout in sight."""
    monkeypatch.delenv("R2CCL_BUILD_DIR", raising=False)
    short = ["--size", "4M", "--seconds-per-phase", "0.6"]
    words: list[str | Path] = [installed / "bin/r2ccl-ctl", "demo", "--json", *short]
    env = {"PYTHONPATH": str(installed)}
    finished = run_bounded(words, cwd=tmp_path, timeout=180, env=env)
    report = json.loads(finished.stdout)
    assert report["ok"] and report["wrong"] == 0 and report["problems"] == []
    assert [(e["nic"], e["action"]) for e in report["events"]] == [
        ("127.0.2.1", "fail"),
        ("127.0.4.1", "fail"),
        ("127.0.2.1", "recover"),
        ("127.0.4.1", "recover"),
    ]
    assert all(e["resume_ms"] > 0 for e in report["events"])
    assert all(p["algbw_gbs"] > 0 and p["iterations"] >= 2 for p in report["phases"])
    assert {"demo.json", "journal.jsonl"} <= {f.name for f in (tmp_path / "r2ccl-demo").iterdir()}


def test_plugin_exports_only_what_it_must(build: Build, run_bounded: RunBounded) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no `nm` in PATH (package binutils)")
    lines = run_bounded([nm, "-D", "--defined-only", build.plugin]).stdout.splitlines()
    names = {line.split()[-1].split("@")[0] for line in lines}
    strays = {name for name in names if not EXPORTED.fullmatch(name)}
    assert not strays, f"the plugin exports {', '.join(sorted(strays))}"
    for version in (6, 8, 10, 11, 12):
        assert f"ncclNetPlugin_v{version}" in names


def test_shim_exports_only_wrappers(build: Build, run_bounded: RunBounded) -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no `nm` in PATH (package binutils)")
    table = (ROOT / "shim/nccl/nccl.def").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^R2_\w+\((nccl\w+), (\d+)", table, re.MULTILINE))
    raw = set(re.findall(r"^R2_RAW\((nccl\w+),", table, re.MULTILINE))
    libraries = {
        build.path / "libr2ccl.so": set(rows) - raw
        | {"dlsym", "r2ccl_shim_reached", "r2ccl_plan_predict"},
        build.path / "nccl/libnccl.so.2": set(rows)
        | {f"p{name}" for name in rows}
        | {"r2ccl_shim_named", "r2ccl_shim_reached"},
    }
    for library, wanted in libraries.items():
        lines = run_bounded([nm, "-D", "--defined-only", library]).stdout.splitlines()
        names = {line.split()[-1].split("@")[0] for line in lines}
        assert names == wanted, library


def test_plugin_is_nccls_default_by_soname(build: Build, run_bounded: RunBounded) -> None:
    """What NCCL opens when nobody names a plugin: the shim loads ours, and NCCL finds it loaded."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no `readelf` in PATH (package binutils)")
    sonames = {
        "libnccl-net-r2ccl.so": "libnccl-net.so",
        "libr2ccl.so": "libr2ccl.so",
        "nccl/libnccl.so.2": "libnccl.so.2",
    }
    for name, soname in sonames.items():
        text = run_bounded([readelf, "-d", build.path / name]).stdout
        assert re.search(rf"SONAME.*\[{re.escape(soname)}\]", text), name


def test_plugin_stays_loaded(build: Build, run_bounded: RunBounded) -> None:
    """-z nodelete: threads of the plugin may outlive the last dlclose."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no `readelf` in PATH (package binutils)")
    text = run_bounded([readelf, "-d", build.plugin]).stdout
    assert "NODELETE" in text
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", text))
    strays = {
        name for name in needed if not re.match(r"lib(c|m|dl|rt|pthread|gcc_s)\.so|ld-", name)
    }
    if build.path.name == "build":  # sanitizers add libraries of their own
        assert not strays, f"the plugin needs {', '.join(sorted(strays))}"
