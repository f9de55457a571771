"""doctor and status through a real sshd, and doctor through a real mpirun. Two hosts: each a
network namespace with two NICs, /dev/shm and a host name of its own (rung 4). They share this
machine's files: it cannot prove what differs between installations."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build
from segment_bed import program
from test_doctor import CABLES

from r2ccl_ctl.doctor.finding import Finding

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
WITH_SSH = "ssh -F conf -o BatchMode=yes -o ConnectTimeout=5"

# Two hosts; a bridge for each of their NICs. The one of the first NICs has an address of ours.
NETWORK = f"""
exec 3>&1 1>&2
cat > host.sh <<END
hostname h\\$1
mount -t tmpfs none /dev/shm
mount -t tmpfs none /run
mkdir -p /run/sshd
exec sleep 200
END
for host in 1 2; do
    unshare -nmu sh host.sh $host 3>&- & eval pid$host=$!
done
{CABLES}
ip link set lo up
ip addr add 10.0.0.254/24 dev br0
for pid in $pid1 $pid2; do
    nsenter -t $pid -n -m -u SSHD -D -E $PWD/sshd.log -h $PWD/hostkey -o UsePAM=no \\
        -o AuthorizedKeysFile=$PWD/key.pub -o StrictModes=no -o PidFile=none 3>&- &
done
until [ "$(ssh -F conf h1 hostname) $(ssh -F conf h2 hostname)" = "h1 h2" ]; do sleep 0.2; done
"""
CONF = """
Host h1 stranger
    HostName 10.0.0.1
Host h2
    HostName 10.0.0.2
Host stranger
    IdentityFile {folder}/strange
Host h1 h2
    IdentityFile {folder}/key
Host *
    User root
    IdentitiesOnly yes
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""


@pytest.fixture
def hosts(tmp_path: Path, build: Build, lab_rights: None) -> Path:
    """A folder from which ssh -F conf reaches h1 and h2, and nobody lets it in as stranger."""
    if SSHD is None:
        pytest.skip("no `sshd` (Debian: openssh-server)")
    if subprocess.run(["id", "-u"], capture_output=True, text=True).stdout.strip() != "0":
        pytest.skip("sshd changes users: needs root")
    if subprocess.run(["unshare", "-nmpf", "true"], capture_output=True).returncode:
        pytest.skip("unshare -nmpf is refused here")
    for name in ("hostkey", "key", "strange"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name],
                       check=True)  # fmt: skip
    (tmp_path / "conf").write_text(CONF.format(folder=tmp_path))
    return tmp_path


def between(folder: Path, *words: str, prepare: str = "") -> subprocess.CompletedProcess[str]:
    """r2ccl-ctl beside the two hosts."""
    (folder / "prepare.sh").write_text(NETWORK.replace("SSHD", str(SSHD)) + prepare)
    script = '. ./prepare.sh; set +e; exec "$@" >&3 2>err'
    done = subprocess.run(
        ["unshare", "-nmpf", "--kill-child", "--mount-proc", "bash", "-ec", script, "bash",
         "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "r2ccl_ctl", *words],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.stdout, f"{done.stderr}\n{(folder / 'err').read_text()}"
    return done


def exchanged(done: subprocess.CompletedProcess[str]) -> list[str]:
    found = [Finding(**row) for row in json.loads(done.stdout)["findings"]]
    return sorted(f"{one.node} {one.evidence.split()[0]} {one.severity}"
                  for one in found if one.check == "exchange")  # fmt: skip


ALL = ["h1 eth0 ok", "h1 eth1 ok", "h2 eth0 ok", "h2 eth1 ok"]


def test_doctor(hosts: Path) -> None:
    done = between(hosts, "doctor", "--hosts", "h1,h2", "--via", WITH_SSH, "--json")
    assert exchanged(done) == ALL
    assert done.returncode in (0, 1)


def test_doctor_where_ssh_is_refused(hosts: Path) -> None:
    done = between(hosts, "doctor", "--hosts", "h1,stranger", "--via", WITH_SSH, "--json")
    rows = [row for row in json.loads(done.stdout)["findings"] if row["check"] == "unknown"]
    assert [row["node"] for row in rows] == ["stranger"]
    assert "Permission denied (publickey" in rows[0]["evidence"]
    assert "`ssh -F conf -o BatchMode=yes -o ConnectTimeout=5 stranger true`" in rows[0]["remedy"]
    assert done.returncode == 3


def test_doctor_with_mpirun(hosts: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no `mpirun` (Debian: openmpi-bin)")
    via = f"mpirun --allow-run-as-root --mca plm_rsh_agent 'ssh -F {hosts}/conf'"
    assert exchanged(between(hosts, "doctor", "--hosts", "h1,h2", "--via", via, "--json")) == ALL


def test_status(hosts: Path) -> None:
    """Each host has its own processes; one that does not answer is told within its time."""
    writers = "".join(
        f"sleep 140 | ssh -F conf h{n} {program()} --seconds 140 --job a --rank {n} >&2 3>&- &\n"
        for n in (1, 2)
    )
    seen = "ssh -F conf h$n ls /dev/shm | grep -q r2ccl"
    until = f"for n in 1 2; do until {seen}; do sleep 0.2; done; done"
    words = ["--hosts", "h1,h2,10.0.0.77", "--via", WITH_SSH, "--timeout", "60s"]
    done = between(hosts, "status", *words, "--json", prepare=f"{writers}{until}\n")
    document = json.loads(done.stdout)
    assert sorted(row["rank"] for row in document["processes"]) == [1, 2], document
    assert [(one["host"], one["processes"]) for one in document["hosts"]] == [
        ("h1", 1), ("h2", 1), ("10.0.0.77", 0)
    ]  # fmt: skip
    assert "timed out" in document["hosts"][2]["error"] or "route" in document["hosts"][2]["error"]
    done = between(hosts, "status", *words, "--check", prepare=f"{writers}{until}\n")
    assert done.returncode == 3 and "host 10.0.0.77 does not answer" in done.stdout
