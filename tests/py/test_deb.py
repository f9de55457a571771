"""The Debian package: built without a network, installed, used and removed. Rung 3: in a mount
namespace whose /usr, /var and /etc are overlays, so that this machine keeps nothing of it. It
cannot prove that the package runs on another release than this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Build, RunBounded, missing

pytestmark = pytest.mark.slow

OVERLAYS = """
mount -t tmpfs none upper
for d in usr var etc; do
    mkdir upper/$d upper/work-$d
    mount -t overlay overlay -o lowerdir=/$d,upperdir=$PWD/upper/$d,workdir=$PWD/upper/work-$d /$d
done
exec 3>&1 1>&2
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
"""

SCRAPE = (
    "import urllib.request as r; t = r.urlopen('http://127.0.0.1:39435/metrics').read(); "
    "print('r2ccl_up 1.0' in t.decode())"
)


@pytest.fixture(scope="module")
def package(
    build: Build, run_bounded: RunBounded, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no `dpkg-deb` in PATH (package dpkg)")
    for part in ("librccl-net.so", "nccl/shim.o"):
        if not (build.path / part).is_file():
            missing("build", f"{part}: not there; run `make native`")
    # Neither a proxy nor a name server is of use: nothing may be fetched.
    offline = ["unshare", "-rn"] if os.geteuid() == 0 else []
    made = run_bounded(
        [*offline, ROOT / "mk/deb"], cwd=ROOT, timeout=120,
        env={"BUILD": str(build.path), "PYTHON": sys.executable},
    )  # fmt: skip
    found = re.search(r"in '(dist/.*\.deb)'", made.stdout)
    assert found, made
    place = tmp_path_factory.mktemp("deb") / "r2ccl.deb"
    shutil.copy2(ROOT / found[1], place)
    return place


def field(package: Path, name: str) -> str:
    return subprocess.run(["dpkg-deb", "-f", package, name], capture_output=True, text=True,
                          check=True, timeout=60).stdout.strip()  # fmt: skip


def test_what_is_in_it(package: Path) -> None:
    listing = subprocess.run(["dpkg-deb", "-c", package], capture_output=True, text=True,
                             check=True, timeout=60).stdout.splitlines()  # fmt: skip
    rows = [line.split(maxsplit=5) for line in listing]
    names = {row[5].partition(" -> ")[0].removeprefix(".") for row in rows}
    assert {row[1] for row in rows} == {"root/root"}
    assert not [row for row in rows if row[0][0] != "l" and "w" in (row[0][5], row[0][8])]
    for name in (
        "/usr/bin/r2ccl-ctl", "/usr/lib/r2ccl/libr2ccl.so", "/usr/lib/r2ccl/nccl",
        "/usr/share/man/man1/r2ccl-ctl-status.1.gz",
        "/usr/lib/systemd/system/r2ccl-metrics.service",
        "/usr/share/doc/r2ccl/examples/grafana.json",
        "/usr/share/bash-completion/completions/r2ccl-ctl",
    ):  # fmt: skip
        assert name in names, name
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert re.search(r"libc6 \(>= 2\.\d+\)", field(package, "Depends"))


def test_installed_used_and_removed(package: Path, run_bounded: RunBounded) -> None:
    if os.geteuid() != 0:
        pytest.skip("dpkg installs as root only")
    wanted = re.findall(r"python3(?:-[a-z0-9-]+)?", field(package, "Depends"))
    for name in wanted:
        if subprocess.run(["dpkg-query", "-W", name], capture_output=True).returncode:
            pytest.skip(f"the package depends on {', '.join(wanted)}: {name} is not installed here")
    (package.parent / "upper").mkdir()
    script = f"""{OVERLAYS}
        ip link set lo up
        dpkg -i {package}
        cd /; export HOME=/root
        r2ccl-ctl --version >&3
        r2ccl-ctl config list --changed >/dev/null
        test -f /usr/lib/python3/dist-packages/r2ccl_ctl/__pycache__/control.*.pyc
        LD_PRELOAD=/usr/lib/r2ccl/libr2ccl.so true
        r2ccl-ctl shim path >&3
        r2ccl-ctl demo --json --size 4M --seconds-per-phase 0.6 | tr -d '\\n' >&3; echo >&3
        r2ccl-ctl metrics --listen 127.0.0.1:39435 & server=$!
        for try in $(seq 50); do
            python3 -c "{SCRAPE}" >&3 && break || sleep 0.2
        done
        kill $server
        dpkg -r r2ccl
        find /usr /etc /var/lib/dpkg/info -name '*r2ccl*' >&3
    """
    done = run_bounded(["unshare", "-mn", "bash", "-ec", script], cwd=package.parent, timeout=300,
                       code=None)  # fmt: skip
    if "overlay" in done.stderr and "mount:" in done.stderr:
        pytest.skip(f"no overlay can be mounted here: {done.stderr}")
    assert done.code == 0, done
    version, shim, report, scraped, *left = done.stdout.splitlines()
    assert version.startswith("r2ccl-ctl, version ")
    assert shim == "/usr/lib/python3/dist-packages/r2ccl_ctl/_native/libr2ccl.so"
    found = json.loads(report)
    assert found["wrong"] == 0 and len(found["events"]) >= 4
    assert scraped == "True"
    assert left == [], "files stay when the package is gone"
