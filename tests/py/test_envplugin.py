"""Variables that an env plugin of NCCL sets (2.28.7 and later) count as those of the environment.

Rung 3: the plugin is loaded as NCCL would load it, by this test. It cannot prove that NCCL has
loaded it before net plugins: its source says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build, missing
from failover_bed import running_pair

NAME = "NCCL_SOCKET_IFNAME"
LOOK = """
import ctypes, json, sys
if sys.argv[2]:
    ctypes.CDLL(sys.argv[2])
ask = ctypes.CDLL(sys.argv[1]).r2ccl_settings_json
ask.restype = ctypes.c_char_p
print(json.dumps([s["value"] for s in json.loads(ask()) if s["name"] == sys.argv[3]]))
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if not compiler:
        missing("build", "no C compiler")
    made = tmp_path_factory.mktemp("env") / "libnccl-env-test.so"
    source = ROOT / "tests" / "py" / "envplugin.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True, timeout=60)
    return made


def value(build: Build, loaded: Path | str, **env: str) -> list[str]:
    argv = [sys.executable, "-c", LOOK, str(build.path / "libnccl-net-r2ccl.so"), str(loaded), NAME]
    done = subprocess.run(
        argv,
        env={**os.environ, NAME: "eth7", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_plugin_counts(build: Build, plugin: Path) -> None:
    """By path, by its short name, and as part of the program; not if it is not loaded."""
    assert value(build, "", NCCL_ENV_PLUGIN=str(plugin)) == ["eth7"]
    assert value(build, plugin, NCCL_ENV_PLUGIN=str(plugin)) == ["=lo"]
    folder = {"LD_LIBRARY_PATH": str(plugin.parent)}
    assert value(build, plugin.name, NCCL_ENV_PLUGIN="test", **folder) == ["=lo"]
    assert value(build, plugin.name, NCCL_ENV_PLUGIN="none", **folder) == ["eth7"]
    static = {"NCCL_ENV_PLUGIN": "STATIC_PLUGIN", "LD_PRELOAD": str(plugin)}
    assert value(build, "", **static) == ["=lo"]


def test_its_interface_is_used(build: Build, plugin: Path) -> None:
    env = {"NCCL_ENV_PLUGIN": "STATIC_PLUGIN", "LD_PRELOAD": str(plugin), NAME: "eth7"}
    words = ("--size", "64K", "--conns", 1, "--stall", 20)
    with running_pair(build.path, *words, nics="", **env) as pair:
        pair.moving()
        assert [nic.name for nic in pair.tx.snapshot().nics] == ["lo"], str(pair)
        pair.finish()
