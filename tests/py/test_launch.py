"""Ranks started, watched and ended. Rung 3, the lab's part rung 4. It cannot prove that NCCL
likes what it is given."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import ROOT

from r2ccl_ctl import launch, paths
from r2ccl_ctl.job import Job, LaunchSpec, LaunchUsageError
from r2ccl_ctl.lab import Lab, LabSpec

SHOW_ENV = "import json, os; print(json.dumps(dict(os.environ)))"
TOOL = [sys.executable, "-c", "from r2ccl_ctl.cli.launch_cmds import launch; launch()"]


def spec(argv: Sequence[str], **more: object) -> LaunchSpec:
    """A job that needs nothing built."""
    return LaunchSpec(argv=argv, **{"plugin": "none", "nccl": "system", **more})  # type: ignore[arg-type]


def shell(script: str, **more: object) -> LaunchSpec:
    return spec(["sh", "-c", script], **more)


def tool(*args: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOOL, "--plugin", "none", "--nccl", "system", *args],
        cwd=ROOT,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def environments(job: Job) -> list[dict[str, str]]:
    assert job.wait(30) == 0
    return [json.loads(rank.output) for rank in job.ranks]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def ends(pid: int, within: float) -> bool:
    end = time.monotonic() + within
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


@pytest.mark.parametrize(
    ("ranks", "nodes", "per_node", "expected"),
    [
        (4, 2, 0, [0, 0, 1, 1]),
        (5, 2, 0, [0, 0, 0, 1, 1]),
        (0, 3, 2, [0, 0, 1, 1, 2, 2]),
        (0, 2, 0, [0, 1]),
        (3, 2, 2, [0, 0, 1]),
        (1, 1, 0, [0]),
        (4, 3, 0, [0, 0, 1, 2]),
        (6, 4, 0, [0, 0, 1, 1, 2, 3]),
        (2, 3, 0, [0, 1]),
    ],
)
def test_places(ranks: int, nodes: int, per_node: int, expected: list[int]) -> None:
    places = launch.place_ranks(ranks, nodes, per_node)
    assert [p.node for p in places] == expected
    assert [p.rank for p in places] == list(range(len(expected)))
    for place in places:
        mates = [p for p in places if p.node == place.node]
        assert place.local_size == len(mates)
        assert place.local_rank == mates.index(place)


def test_places_that_do_not_fit() -> None:
    with pytest.raises(LaunchUsageError, match="--per-node"):
        launch.place_ranks(5, 2, 2)
    with pytest.raises(LaunchUsageError):
        launch.place_ranks(-1, 1, 0)


def test_gpus_are_split() -> None:
    assert launch.split_gpus(["0", "1", "2", "3"], 2) == [["0", "1"], ["2", "3"]]
    assert launch.split_gpus(["4", "5", "6"], 2) == [["4"], ["5"]]
    assert launch.split_gpus(["0", "1"], 4) == [["0"], ["1"], ["0"], ["1"]]
    assert launch.split_gpus([], 2) == [[], []]
    assert launch.visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ["2", "3"]
    assert launch.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize("item", ["A", "=b", "1A=b", "A B=c"])
def test_bad_env(item: str) -> None:
    with pytest.raises(LaunchUsageError, match=re.escape(item)):
        launch.parse_env([item])


def test_env_items() -> None:
    assert launch.parse_env(["A=b=c", "D="]) == {"A": "b=c", "D": ""}


def test_environment_of_emulated_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("R2CCL_NICS", "stale")
    with launch.start(
        spec(
            [sys.executable, "-c", SHOW_ENV],
            ranks=4,
            emulate_nodes=2,
            nics=3,
            job="j7",
            env={"FOO": "bar", "NCCL_SOCKET_IFNAME": "mine"},
        ),
        echo=False,
    ) as job:
        found = environments(job)
    assert [e["RANK"] for e in found] == ["0", "1", "2", "3"]
    assert [e["R2CCL_RANK"] for e in found] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in found] == ["0", "1", "0", "1"]
    assert [e["NCCL_HOSTID"] for e in found] == ["node0", "node0", "node1", "node1"]
    assert [e["R2CCL_NODE_NAME"] for e in found] == [e["NCCL_HOSTID"] for e in found]
    assert [e["R2CCL_NICS"] for e in found][1:3] == [
        "127.0.1.1,127.0.2.1,127.0.3.1",
        "127.0.1.2,127.0.2.2,127.0.3.2",
    ]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == ["0,1", "0,1", "2,3", "2,3"]
    for env in found:
        assert env["WORLD_SIZE"] == env["R2CCL_NRANKS"] == "4"
        assert env["LOCAL_WORLD_SIZE"] == "2" and env["R2CCL_JOB"] == "j7"
        assert env["FOO"] == "bar" and env["NCCL_SOCKET_IFNAME"] == "mine"
        assert env["NCCL_NET_PLUGIN"] == "none"
        host, port = env["R2CCL_RENDEZVOUS"].split(":")
        assert host == env["MASTER_ADDR"] == "127.0.0.1"
        assert port != env["MASTER_PORT"] and 0 < int(port) < 65536
    assert len({(e["R2CCL_RENDEZVOUS"], e["MASTER_PORT"]) for e in found}) == 1


def test_one_node_is_left_as_it_is() -> None:
    """A single node keeps the machine's own NICs, host identity and GPUs."""
    with launch.start(spec([sys.executable, "-c", SHOW_ENV], ranks=2), echo=False) as job:
        for env in environments(job):
            assert not {"NCCL_HOSTID", "R2CCL_NICS", "NCCL_SOCKET_IFNAME"} & set(env)


def test_natives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built is named to the ranks; what is not is an error that says so."""
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(tmp_path))
    with pytest.raises(paths.NotBuiltError, match="net plugin"):
        launch.start(LaunchSpec(argv=["true"]), echo=False)
    with pytest.raises(paths.NotBuiltError, match="stand-in"):
        launch.start(spec(["true"], nccl="standin"), echo=False)
    for name in ("libnccl-net-r2ccl.so", "r2ccl_perf", "hostnccl/libnccl.so.2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    with launch.start(
        LaunchSpec(argv=[sys.executable, "-c", SHOW_ENV], nccl="standin"), echo=False
    ) as job:
        (env,) = environments(job)
    assert env["NCCL_NET_PLUGIN"] == str(tmp_path / "libnccl-net-r2ccl.so")
    assert env["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path / "hostnccl")
    assert env["PATH"].split(":")[-1] == str(tmp_path)
    with pytest.raises(LaunchUsageError, match="no such file"):
        launch.start(LaunchSpec(argv=["true"], nccl="/no/such"), echo=False)
    with pytest.raises(LaunchUsageError, match="no such file"):
        launch.start(LaunchSpec(argv=["true"], plugin="/no/such"), echo=False)
    with pytest.raises(LaunchUsageError, match="--plugin: .* is no shared library"):
        launch.start(LaunchSpec(argv=["true"], plugin=__file__), echo=False)


def test_lines_are_whole_and_prefixed() -> None:
    done = tool(
        "-n", "3", "--", "sh", "-c", "for i in 1 2 3; do echo o$i; echo e$i >&2; done; printf p"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{rank}] {word}" for rank in range(3) for word in ("o1", "o2", "o3", "p")
    )
    assert sorted(done.stderr.splitlines()) == sorted(
        f"[{rank}] e{i}" for rank in range(3) for i in (1, 2, 3)
    )
    bare = tool("-n", "2", "--no-prefix", "--", "echo", "x")
    assert bare.stdout == "x\nx\n"


def test_output_is_kept() -> None:
    with launch.start(shell("seq 1 50000; echo é"), echo=False) as job:
        assert job.wait(30) == 0
    lines = job.ranks[0].output.splitlines()
    assert len(lines) == 20000 and lines[-2:] == ["50000", "é"]


def test_exit_code_is_the_first_failure() -> None:
    script = "[ $RANK = 2 ] && exit 9; sleep 0.4; [ $RANK = 0 ] && exit 5; exit 0"
    with launch.start(shell(script, ranks=3), echo=False) as job:
        assert job.wait(20) == 9
    assert [r.code for r in job.ranks] == [5, 0, 9]


def test_death_by_signal() -> None:
    with launch.start(shell("kill -9 $$"), echo=False) as job:
        assert job.wait(20) == 137


def test_grace_then_term_then_kill(tmp_path: Path) -> None:
    """Rank 0 fails; rank 1 heeds SIGTERM, rank 2 does not: both get their grace first."""
    script = f"""cd {tmp_path}
    case $RANK in
        0) until [ -e 1 ] && [ -e 2 ]; do sleep 0.05; done; exit 3;;
        1) trap 'echo bye; exit 0' TERM;;
        2) trap '' TERM;;
    esac
    touch $RANK
    while :; do sleep 0.05; done"""
    started = time.monotonic()
    job = launch.start(shell(script, ranks=3, grace=0.5, kill_after=0.4), echo=False)
    assert job.wait(20) == 3
    assert 0.85 < time.monotonic() - started < 10
    assert [r.code for r in job.ranks] == [3, 0, 137]
    assert "bye\n" in job.ranks[1].output


def test_success_waits_for_all() -> None:
    script = "[ $RANK = 1 ] && sleep 0.5; echo done"
    with launch.start(shell(script, ranks=2, grace=0.01), echo=False) as job:
        assert job.wait(20) == 0
    assert [r.output for r in job.ranks] == ["done\n", "done\n"]


def test_timeout() -> None:
    job = launch.start(shell("exec sleep 60", ranks=2, timeout=0.3), echo=False)
    assert job.wait(20) == 124 and job.timed_out
    assert not any(alive(r.pid) for r in job.ranks)
    done = tool("--timeout", "0.3", "--", "sleep", "60")
    assert done.returncode == 124 and "still running" in done.stderr


def test_wait_can_time_out_and_go_on() -> None:
    with launch.start(shell("sleep 0.6"), echo=False) as job:
        with pytest.raises(TimeoutError):
            job.wait(0.05)
        assert job.running
        assert job.wait(20) == 0


def test_kill_ends_stragglers_too() -> None:
    """Grandchildren that ignore SIGTERM and keep the pipe open neither live on nor delay us."""
    script = "(trap '' TERM; echo $$; exec sh -c 'echo $$; exec sleep 60') & wait"
    job = launch.start(shell(script, ranks=2), echo=False)
    end = time.monotonic() + 10
    while any(len(r.output.split()) < 2 for r in job.ranks) and time.monotonic() < end:
        time.sleep(0.01)
    pids = [int(word) for rank in job.ranks for word in rank.output.split()]
    assert len(pids) == 4 and all(alive(pid) for pid in pids)
    started = time.monotonic()
    assert job.kill() != 0
    assert time.monotonic() - started < 4
    assert all(ends(pid, 2) for pid in pids)
    job.kill()  # once more changes nothing


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    """A launcher with two ranks that print their pids and then sleep."""
    script = "echo pid $$; exec sleep 60"
    argv = [*TOOL, "--plugin", "none", "--nccl", "system", "-n", "2", "--", "sh", "-c", script]
    proc = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield proc
    proc.kill()
    proc.communicate(timeout=10)


def rank_pids(launcher: subprocess.Popen[str]) -> list[int]:
    assert launcher.stdout is not None
    return [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGHUP, 129),
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_ranks_die_with_the_launcher(
    launcher: subprocess.Popen[str], number: signal.Signals, code: int
) -> None:
    pids = rank_pids(launcher)
    launcher.send_signal(number)
    assert launcher.wait(10) == code
    assert all(ends(pid, 3) for pid in pids)


def test_started_from_a_short_lived_thread() -> None:
    """Ranks die with the process, not with the thread that happened to call start()."""
    import threading

    jobs: list[Job] = []
    starter = threading.Thread(
        target=lambda: jobs.append(launch.start(shell("sleep 0.5; echo ok"), echo=False))
    )
    starter.start()
    starter.join(10)
    assert jobs[0].wait(20) == 0 and jobs[0].ranks[0].output == "ok\n"


def test_no_descriptors_or_threads_are_left() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    launch.start(shell("true", ranks=2), echo=False).wait(20)
    before = count()
    for _ in range(3):
        launch.start(shell("true", ranks=3), echo=False).wait(20)
    end = time.monotonic() + 5
    while count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert count() <= before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-n", "2", "--", "no-such-program"], "no-such-program"),
        (["--env", "A", "--", "true"], "--env 'A'"),
        (["-n", "3", "--per-node", "1", "--", "true"], "--per-node"),
        (["--lab", "nosuch", "--", "true"], "no lab 'nosuch'"),
        (["--lab", "--nics", "2", "--", "true"], "--lab"),
        (["--emulate-nodes", "0", "--", "true"], "--emulate-nodes 0"),
        (["--emulate-nodes", "3", "-n", "2", "--", "true"], "--emulate-nodes 3: 1 of them would"),
        (
            ["--emulate-nodes", "2", "-n", "2", "--per-node", "2", "--", "true"],
            "none of the 2 ranks",
        ),
        (["--nics", "999", "--", "true"], "--nics 999"),
        (["--nccl", "/no/such", "--", "true"], "/no/such"),
        ([], "COMMAND"),
    ],
)
def test_usage_errors(args: list[str], words: str) -> None:
    done = tool(*args)
    assert done.returncode == 2, done
    assert words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.lab
def test_ranks_in_a_lab(lab_admin: None) -> None:
    """Each rank in its node: host name, NICs, identity; they reach rank 0 over mgmt0."""
    script = """
import json, os, socket
master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(master) as server:
        server.settimeout(10)
        for _ in range(3):
            server.accept()[0].close()
else:
    for _ in range(100):
        try:
            socket.create_connection(master, timeout=5).close()
            break
        except ConnectionRefusedError:
            import time
            time.sleep(0.05)
nics = " ".join(sorted(os.listdir("/sys/class/net")))
print(json.dumps({**os.environ, "host": socket.gethostname(), "nics": nics}))
"""
    with Lab.up(LabSpec(name=f"l{os.getpid()}", nics=(2, 3))) as lab:
        job = launch.start(
            spec([sys.executable, "-c", script], lab=lab.name, per_node=2, timeout=20), echo=False
        )
        found = environments(job)
    assert [e["host"] for e in found] == ["n0", "n0", "n1", "n1"]
    assert [e["NCCL_HOSTID"] for e in found][::2] == [f"{lab.name}-n0", f"{lab.name}-n1"]
    assert [e["R2CCL_NICS"] for e in found][::2] == ["nic0,nic1", "nic0,nic1,nic2"]
    assert found[3]["nics"].split() == ["lo", "mgmt0", "nic0", "nic1", "nic2"]
    assert {e["NCCL_SOCKET_IFNAME"] for e in found} == {"mgmt0"}
    assert {e["MASTER_ADDR"] for e in found} == {"10.250.0.1"}
