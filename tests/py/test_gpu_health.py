"""tests/gpu/run_health.py without a GPU: what its steps complain of, and two on the stand-in.

Rung 1 and 4. What it cannot prove: what the health machinery does under real NCCL.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Build

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path.insert(0, str(GPU))
pytest.importorskip("pyroute2")

run_health: Any = importlib.import_module("run_health")

Events = list[list[dict[str, Any]]]


def event(name: str, nic: str = "nic0", cause: str = "") -> dict[str, Any]:
    return {"event": name, "nic": nic, "cause": cause}


def test_quiet_complains_of_each_trouble() -> None:
    assert run_health.quiet([[event("weight")], [], [event("connection-opened")]]) == ""
    for name in run_health.TROUBLE:
        assert name in run_health.quiet([[], [event(name)], []])


def test_verdicts_have_to_be_right_at_every_node() -> None:
    judge = run_health.verdict("local NIC", "remote NIC")
    own, others = event("verdict", cause="local NIC: x"), event("verdict", cause="remote NIC: y")
    assert judge([[own], [others], [others, others]]) == ""
    assert "node 2" in judge([[own], [others], []])
    assert "node 0" in judge([[own, others], [others], [others]])
    assert "node 1" in judge([[own], [own], [others]])


def test_the_word_has_to_be_of_that_nic() -> None:
    judge = run_health.said("weight", "nic0", "slow", calm=("no-path",))
    right: Events = [[event("weight", cause="slow: 3 % of its best")], [], []]
    assert judge(right) == ""
    assert judge([[event("weight", "nic1", "slow: 3 %")], [], []])
    assert judge([[event("weight", cause="as fast as its siblings again")], [], []])
    assert judge([[], right[0], []])
    assert "no-path" in judge([right[0], [event("no-path")], []])


def test_names_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_health.main(["--steps", "carrier,fire"])
    assert ended.value.code == 2
    assert "step 'fire': choose from" in capsys.readouterr().err


@pytest.mark.lab
@pytest.mark.slow
def test_steps_on_the_stand_in(lab_rights: None, build: Build, tmp_path: Path) -> None:
    if build.path != GPU.parents[1] / "build":
        pytest.skip("the script runs what is in build/")
    out = tmp_path / "health.json"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("R2CCL_", "NCCL_"))}
    done = subprocess.run(
        [sys.executable, str(GPU / "run_health.py"), "--nics", "2", "--steps", "drained,carrier",
         "--args", "--op all_reduce -b 256K -c 1", "--within", "40", "--timeout", "240",
         "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
        env=clean | {"GPU_COUNT": "0", "NCCL_LIB": str(build.host_nccl)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] and not found["wrong"]
    assert [step["name"] for step in found["steps"]] == ["drained", "carrier"]
    assert any("verdict" in words for words in found["steps"][1]["events"])
