"""doctor and status through a real sshd, mpirun and Slurm. Two hosts: each a network namespace with
two NICs, /dev/shm and a host name of its own (rung 4). They share this machine's files: it cannot
prove what differs between installations."""

from __future__ import annotations

import json
import os
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
HOSTS = f"""
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
"""
WITH_SSHD = """
for pid in $pid1 $pid2; do
    nsenter -t $pid -n -m -u SSHD -D -E $PWD/sshd.log -h $PWD/hostkey -o UsePAM=no \\
        -o AuthorizedKeysFile=$PWD/key.pub -o StrictModes=no -o PidFile=none 3>&- &
done
until [ "$(ssh -F conf h1 hostname) $(ssh -F conf h2 hostname)" = "h1 h2" ]; do sleep 0.2; done
"""
# Slurm's own daemons, and a job that has both nodes.
WITH_SLURM = """
hostname ctl
mount -t tmpfs none /run
head -c 64 /dev/urandom > munge.key; chmod 400 munge.key
munged --force --key-file=$PWD/munge.key --socket=$PWD/munge.sock --pid-file=$PWD/munge.pid \\
    --log-file=$PWD/munge.log --seed-file=$PWD/munge.seed
mkdir state
cat > slurm.conf <<END
ClusterName=test
SlurmctldHost=ctl(10.0.0.254)
AuthInfo=socket=$PWD/munge.sock
SlurmUser=root
StateSaveLocation=$PWD/state
SlurmdSpoolDir=$PWD/spool-%n
SlurmctldPidFile=$PWD/ctl.pid
SlurmdPidFile=$PWD/%n.pid
SlurmctldLogFile=$PWD/ctl.log
SlurmdLogFile=$PWD/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
NodeName=h1 NodeAddr=10.0.0.1 CPUs=2
NodeName=h2 NodeAddr=10.0.0.2 CPUs=2
PartitionName=all Nodes=h1,h2 Default=YES State=UP
END
export SLURM_CONF=$PWD/slurm.conf
slurmctld
nsenter -t $pid1 -n -m -u slurmd -N h1
nsenter -t $pid2 -n -m -u slurmd -N h2
until sinfo -h | grep -q "2 *idle"; do sleep 0.5; done
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
def folder(tmp_path: Path, build: Build, lab_rights: None) -> Path:
    if subprocess.run(["id", "-u"], capture_output=True, text=True).stdout.strip() != "0":
        pytest.skip("what starts processes for users needs root")
    if subprocess.run(["unshare", "-nmpfu", "true"], capture_output=True).returncode:
        pytest.skip("unshare -nmpfu is refused here")
    return tmp_path


@pytest.fixture
def hosts(folder: Path) -> Path:
    """A folder from which ssh -F conf reaches h1 and h2, and nobody lets it in as stranger."""
    if SSHD is None:
        pytest.skip("no `sshd` (Debian: openssh-server)")
    for name in ("hostkey", "key", "strange"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                       check=True)  # fmt: skip
    (folder / "conf").write_text(CONF.format(folder=folder))
    return folder


def between(
    folder: Path, *words: str, prepare: str = "", start: str = WITH_SSHD, job: str = ""
) -> subprocess.CompletedProcess[str]:
    """r2ccl-ctl beside the two hosts, or in the job that these words start."""
    (folder / "prepare.sh").write_text(HOSTS + start.replace("SSHD", str(SSHD)) + prepare)
    script = f'. ./prepare.sh; set +e; exec {job} "$@" >&3 2>err'
    done = subprocess.run(
        ["unshare", "-nmpfu", "--kill-child", "--mount-proc", "bash", "-ec", script, "bash",
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


@pytest.fixture
def slurm(folder: Path) -> Path:
    """A folder for Slurm's files."""
    for tool in ("munged", "slurmctld", "slurmd", "srun"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"no `{tool}` (Debian: munge, slurm-wlm)")
    return folder


def test_doctor_with_slurm(slurm: Path) -> None:
    """In a job whose own step has all cores of the nodes: the helpers do not wait for them."""
    job = "salloc -N2 --exclusive bash -c 'srun -N2 sleep 100 & sleep 1; \"$@\"' bash"
    words = ("doctor", "--hosts", "h1,h2", "--via", "srun", "--json")
    assert exchanged(between(slurm, *words, start=WITH_SLURM, job=job)) == ALL


def test_peers_with_slurm(slurm: Path) -> None:
    """On a node of the job, and in a shell there that knows of no job. The hosts' names have a
    domain, which those of Slurm lack."""
    rank = f'{program()} --seconds 100 --job a --host $(hostname).dom --rank $1 --peer "$2"'
    (slurm / "rank.sh").write_text(
        f"if [ $(hostname) = h1 ]; then set 0 h2.dom; else set 1 h1.dom; fi\nsleep 100 | {rank}\n"
    )
    (slurm / "job.sh").write_text(
        "srun -N2 sh rank.sh >&2 &\n"
        'step="srun --overlap -N1 -n1"\n'
        "there() { $step -w $1 ls /dev/shm | grep -q r2ccl; }\n"
        "for h in h1 h2; do until there $h; do sleep 0.3; done; done\n"
        '$step -w h1 "$@"\ncode=$?\nsqueue -h -o "queued %i" -t PD\nexit $code\n'
    )
    job = "salloc -N2 --exclusive bash job.sh"
    words = ("--hosts", "peers", "--via", "srun")
    done = between(slurm, "ps", *words, "--json", start=WITH_SLURM, job=job)
    found = [(row["node"], row["rank"]) for row in json.loads(done.stdout)["processes"]]
    assert sorted(found) == [("h1.dom", 0), ("h2.dom", 1)], done
    shutil.rmtree(slurm / "state")
    job += " env -u SLURM_JOB_ID -u SLURM_JOBID"
    done = between(slurm, "status", *words, "--timeout", "2s", start=WITH_SLURM, job=job)
    assert "host h2.dom does not answer: no answer in 2 s: srun: job 2 queued" in done.stdout
    assert "queued 2" not in done.stdout, "the helper's own job is still there"


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


def test_status_of_the_peers(hosts: Path) -> None:
    """The job's process beside the hosts knows h1, and that of h1 knows h2 and a host that is
    gone."""
    job = f"peers-{os.getpid()}"
    writer = f"{program()} --seconds 140 --job {job}"
    writers = f"sleep 140 | {writer} --rank 0 --peer h1 >&2 3>&- &\n" + "".join(
        f"sleep 140 | ssh -F conf {host} {writer} --host {host} --rank {rank} --peer {peer} "
        ">&2 3>&- &\n"
        for host, rank, peer in (("h1", 1, "h2"), ("h2", 2, "h1"), ("h2", 3, "h9"))
    )
    seen = "ssh -F conf h$n ls /dev/shm | grep -q r2ccl"
    until = f"for n in 1 2; do until {seen}; do sleep 0.2; done; done; sleep 2"
    words = ("--hosts", "peers", "--job", job, "--via", WITH_SSH, "--timeout", "60s", "--json")
    done = between(hosts, "status", *words, prepare=f"{writers}{until}\n")
    document = json.loads(done.stdout)
    assert sorted(row["rank"] for row in document["processes"]) == [0, 1, 2, 3], document
    assert [(one["host"], one["processes"]) for one in document["hosts"][1:]] == [
        ("h1", 1), ("h2", 2), ("h9", 0)
    ]  # fmt: skip
    assert "Could not resolve hostname h9" in document["hosts"][3]["error"], document["hosts"]
