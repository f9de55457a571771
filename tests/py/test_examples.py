"""docs/examples: scripts run here with stand-ins for what starts the ranks, and r2ccl_perf in the
place of the application (rung 3); mpirun is the real one where it is installed. YAML is read by a
parser. It cannot prove that PyTorch, Slurm, Ray, vLLM or Kubernetes do as the files expect."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Build

from r2ccl_ctl.cli.main import main

EXAMPLES = ROOT / "docs/examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")])
MANIFESTS = sorted([*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*.yml")])
RIGHT = "Out of bounds values : 0 OK"
PERF_ARGS = ["-b", "1M", "-n", "3", "--timeout", "60"]

# A stand-in for torchrun: two ranks, which are r2ccl_perf. It says with what it was started.
TORCHRUN = """#!{python}
import os, subprocess, sys
print("torchrun", *sys.argv[1:], flush=True)
perf = [os.environ["PERF"], *sys.argv[sys.argv.index("--") + 1:]]
ranks = [subprocess.Popen(perf, env={{**os.environ, "RANK": str(n), "LOCAL_RANK": str(n),
         "WORLD_SIZE": "2"}}) for n in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""
SAYS = """#!{python}
import os, sys
print({name!r}, *sys.argv[1:])
for name in ("LD_PRELOAD", "NCCL_NET_PLUGIN", "R2CCL_DLSYM", "R2CCL_JOB"):
    print(f"{{name}}={{os.environ.get(name, '')}}")
"""
SRUN = """#!/bin/bash
# Takes srun's options away and runs the rest here.
while [ "${1#-}" != "$1" ]; do
    case $1 in -w | --jobid) shift 2 ;; *) shift ;; esac
done
exec "$@"
"""


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


@pytest.fixture
def stage(tmp_path: Path, build: Build) -> dict[str, str]:
    """An environment in whose PATH are r2ccl-ctl and the stand-ins."""
    tools = {
        "r2ccl-ctl": f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m r2ccl_ctl "$@"\n',
        "torchrun": TORCHRUN.format(python=sys.executable),
        "srun": SRUN,
        "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n",
        **{name: SAYS.format(python=sys.executable, name=name) for name in ("ray", "vllm")},
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = str(free_port())
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "R2CCL_BUILD_DIR": str(build.path),
        "PERF": str(build.perf),
        "R2CCL_PERF_NCCL": str(build.host_nccl / "libnccl.so.2"),
        "R2CCL_NICS": "127.0.1.1,127.0.2.1",
        "HOSTNCCL_BOOTSTRAP_ADDR": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def run(name: str, stage: dict[str, str], *words: str, code: int = 0, **env: str) -> str:
    done = subprocess.run(["bash", EXAMPLES / name, *words], env={**stage, **env}, text=True,
                          capture_output=True, timeout=120, cwd=ROOT)  # fmt: skip
    assert done.returncode == code, done
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    tool = Path(sys.executable).with_name("shellcheck")
    found = str(tool) if tool.exists() else shutil.which("shellcheck")
    if found is None:
        pytest.skip("no shellcheck in PATH")
    done = subprocess.run([found, "-s", "bash", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_each_says_what_to_expect(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "Expected" in text or file.suffix == ".json"


def used() -> Iterator[tuple[str, list[str]]]:
    """File, and the words of each call of r2ccl-ctl in it."""
    for file in (*SCRIPTS, *MANIFESTS):
        text = file.read_text(encoding="utf-8").replace("\\\n", " ").replace(", ", " ")
        for call in re.findall(r"r2ccl-ctl ([^`|\n\]]+)", text):
            words = call.partition(" -- ")[0].split(" #")[0]
            words = words.replace('"', "") if file in MANIFESTS else words
            yield file.name, shlex.split(words)


def test_commands_and_options_exist() -> None:
    calls = list(used())
    assert len(calls) >= 12
    for file, words in calls:
        command = main.get_command(None, words[0])  # type: ignore[arg-type]
        assert command is not None, (file, words)
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        for word in words[1:]:
            assert not re.match(r"--\w", word) or word in known, (file, words)


# Scripts


def test_torchrun(stage: dict[str, str]) -> None:
    text = run("torchrun.sh", stage, "--", *PERF_ARGS, NODE_RANK="0", GPUS="2", NNODES="1")
    assert "torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1" in text
    assert RIGHT in text
    run("torchrun.sh", stage, "train.py", code=1)  # without NODE_RANK


def test_slurm(stage: dict[str, str]) -> None:
    stage |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77"}
    text = run("slurm.sbatch", stage, "--", *PERF_ARGS)
    assert "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 77" in text
    assert "--rdzv-endpoint node1:29500" in text and RIGHT in text
    assert "warning" in text  # the doctor's: its NICs are loopbacks
    stage["R2CCL_NICS"] = "no-such-nic"
    assert RIGHT not in run("slurm.sbatch", stage, "--", *PERF_ARGS, code=2)


def test_mpirun(stage: dict[str, str]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no `mpirun` (Debian: openmpi-bin)")
    names = "R2CCL_NICS R2CCL_PERF_NCCL MASTER_ADDR MASTER_PORT HOSTNCCL_BOOTSTRAP_ADDR"
    more = " ".join(f"-x {name}" for name in names.split())
    ssh = Path(stage["PATH"].partition(":")[0], "ssh")
    ssh.write_text("#!/bin/sh\neval \"exec $(printf '%s' \"$*\" | sed 's/.*localhost //')\"\n")
    ssh.chmod(0o755)
    text = run("mpirun.sh", stage, *PERF_ARGS, HOSTS="localhost", GPUS="2",
               MPI_ARGS=f"--allow-run-as-root --oversubscribe {more}")  # fmt: skip
    assert "2 ranks" in text and RIGHT in text


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("ray.sh", ["--head", "--port", "6379"], "ray start --block --head --port 6379"),
        ("vllm.sh", ["MODEL", "--headless"],
         "vllm serve MODEL --headless --tensor-parallel-size 16 --nnodes 2 --node-rank 1"),
    ],
)  # fmt: skip
def test_what_opens_nccl_late(
    stage: dict[str, str], name: str, words: list[str], said: str
) -> None:
    text = run(name, stage, *words, NODE_RANK="1")
    assert text.startswith(said)
    assert "R2CCL_DLSYM=1\n" in text and "libr2ccl.so" in text and "R2CCL_JOB=" in text


def test_env_plugin(stage: dict[str, str]) -> None:
    text = run("env-plugin.sh", stage, "env", NCCL_ENV_PLUGIN="/opt/libnccl-env.so")
    assert "NCCL_ENV_PLUGIN=/opt/libnccl-env.so\n" in text and "NCCL_DEBUG=INFO\n" in text
    assert "NCCL_NET_PLUGIN=" in text
    assert run("env-plugin.sh", {**stage, "NCCL_ENV_PLUGIN": ""}, "true", code=1) == ""


# Kubernetes and Prometheus


def documents(file: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="no PyYAML (pip install pyyaml)")
    found = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    assert all(isinstance(one, dict) for one in found)
    return found


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    (rules,) = documents(EXAMPLES / "alerts.yml")
    for rule in rules["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels." in rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda path: path.name)
def test_yaml(file: Path) -> None:
    assert documents(file)


def test_pods_hold_together() -> None:
    """Volumes that are mounted exist, ports are the exporter's, and what is named is there."""
    kinds = []
    for file in EXAMPLES.glob("kubernetes-*.yaml"):
        for document in documents(file):
            kinds.append((document["apiVersion"], document["kind"]))
            assert document["metadata"]["name"]
            spec = document["spec"]
            if document["kind"] == "DaemonSet":
                labels = spec["template"]["metadata"]["labels"]
                assert spec["selector"]["matchLabels"] == labels
                spec = spec["template"]["spec"]
            volumes = {volume["name"] for volume in spec["volumes"]}
            for container in spec["containers"]:
                mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
                assert set(mounts) <= volumes and mounts["shm"] == "/dev/shm"
                assert container["command"][0] == "r2ccl-ctl" and container["image"]
            metrics = next(one for one in spec["containers"] if one["name"] == "metrics")
            assert metrics["ports"][0]["containerPort"] == 9435
            assert metrics["command"][-1] == "0.0.0.0:9435"
    assert sorted(kinds) == [("apps/v1", "DaemonSet"), ("v1", "Pod")]
