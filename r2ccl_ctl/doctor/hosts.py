"""Checks between hosts: helpers started through the user's ssh, srun or mpirun exchange bytes."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r2ccl_ctl.doctor.finding import Finding
from r2ccl_ctl.doctor.local import network
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.hostnics import HostNic
from r2ccl_ctl.units import show_rate

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"
LOOK_S = 90.0
SEND_S = 0.4
ANSWER_S = 20.0
ALL_PAIRS = 8  # hosts; of more, each one exchanges bytes with the next one only
LOSSY = 0.01
SLOW = 0.5  # of the median


def parse_hosts(names: str, hostfile: Path | None) -> list[str]:
    """Of --hosts a,b and of a file with a host at the start of each line (slots=N may follow)."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    if hostfile is not None:
        try:
            text = hostfile.read_text(encoding="utf-8")
        except OSError as err:
            raise R2UsageError(f"--hostfile {hostfile}: {err.strerror}") from err
        lines = (line.partition("#")[0].split() for line in text.splitlines())
        found += [words[0].partition(":")[0] for words in lines if words]
    for name in found:
        if name.startswith("-"):
            raise R2UsageError(f"'{name}' is no host name")
    return list(dict.fromkeys(found))


AGENT = "r2ccl_ctl.doctor.agent"


def argv_for(via: str, host: str, env: Mapping[str, str], module: str = AGENT) -> list[str]:
    """The command that starts a helper on a host."""
    starter = shlex.split(via)
    if not starter:
        raise R2UsageError("--via is empty: give ssh, srun or mpirun")
    package = str(Path(__file__).resolve().parents[2])
    passed = {n: v for n, v in env.items() if n.startswith(("NCCL_", "R2CCL_", "R2CC_"))}
    passed["PYTHONPATH"] = package
    for name in ("LD_LIBRARY_PATH",):
        if env.get(name):
            passed[name] = env[name]
    agent = ["env", *(f"{n}={v}" for n, v in passed.items())]
    agent += [sys.executable, "-m", module]
    kind = Path(starter[0]).name
    if kind == "srun":
        return [*starter, "-N1", "-n1", "-w", host, *agent]
    if kind in ("mpirun", "mpiexec"):
        return [*starter, "-n", "1", "--host", host, *agent]
    return [*starter, host, shlex.join(agent)]


class NoAnswer(Exception):
    """A helper did not answer."""


@dataclass
class Helper:
    """A helper process on a host."""

    host: str
    popen: subprocess.Popen[str]
    lines: queue.Queue[str] = field(default_factory=queue.Queue)
    nics: list[HostNic] = field(default_factory=list)
    version: str = ""
    token: str = ""
    places: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, host: str, via: str, module: str = AGENT) -> Helper:
        return cls.of(host, argv_for(via, host, os.environ, module))

    @classmethod
    def of(cls, host: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Helper:
        """The helper that argv starts. Ctrl-C at the terminal does not reach it."""
        try:
            popen = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", env=env, start_new_session=True,
            )  # fmt: skip
        except OSError as err:
            raise R2UsageError(f"--via: {argv[0]} cannot be run: {err.strerror}") from err
        helper = cls(host, popen)
        threading.Thread(target=helper._read, daemon=True).start()
        return helper

    def _read(self) -> None:
        assert self.popen.stdout
        for line in self.popen.stdout:
            if line.startswith("{"):  # a login shell may greet first
                self.lines.put(line)
        self.lines.put("")

    def ask(self, timeout: float, **request: Any) -> dict[str, Any]:
        assert self.popen.stdin
        try:
            print(json.dumps(request), file=self.popen.stdin, flush=True)
        except OSError:
            raise NoAnswer(self._last_words()) from None
        return self.receive(timeout)

    def receive(self, timeout: float) -> dict[str, Any]:
        """The next answer."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            raise NoAnswer(f"no answer in {timeout:g} s") from None
        if not line:
            raise NoAnswer(self._last_words())
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def _last_words(self) -> str:
        try:
            self.popen.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its output ended"
        assert self.popen.stderr
        said = self.popen.stderr.read().strip().splitlines()
        return f"it ended with code {self.popen.returncode}" + (f": {said[-1]}" if said else "")

    def stop(self) -> None:
        if self.popen.stdin:
            try:
                self.popen.stdin.close()
            except OSError:
                pass
        try:
            self.popen.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


def check(hosts: Sequence[str], via: str) -> list[Finding]:
    """All findings about these hosts and the network between them."""
    helpers = [Helper.start(host, via) for host in hosts]
    found: list[Finding] = []
    try:
        with ThreadPoolExecutor(max_workers=len(helpers)) as pool:
            for lines in pool.map(lambda helper: _look(helper, via), helpers):
                found += lines
            ready = [helper for helper in helpers if helper.places]
            found += compare(ready)
            for step in range(1, len(ready) if len(ready) <= ALL_PAIRS else 2):
                work = [(one, ready[(i + step) % len(ready)]) for i, one in enumerate(ready)]
                for lines in pool.map(lambda pair: _exchange(*pair), work):
                    found += lines
        if len(ready) > ALL_PAIRS:
            text = f"of {len(ready)} hosts each one exchanged bytes with the next one only"
            found.append(Finding("note", "exchange", text))
    finally:
        for helper in helpers:
            helper.stop()
    return found


def _look(helper: Helper, via: str) -> list[Finding]:
    try:
        seen = helper.ask(LOOK_S, do="look")
        helper.nics = [HostNic(**row) for row in seen["nics"]]
        helper.version = seen["version"]
        listening = helper.ask(ANSWER_S, do="listen")
    except NoAnswer as err:
        starter = shlex.split(via)[0]
        remedy = f"try `{starter} {helper.host} true`; R2CCL has to be at the same place there"
        text = f"the helper on {helper.host} could not be asked: {err}"
        return [Finding("error", "unknown", text, remedy, helper.host)]
    found = [Finding(**{**row, "node": helper.host}) for row in seen["findings"]]
    helper.token, helper.places = listening["token"], listening["places"]
    for nic, place in zip(helper.nics, helper.places, strict=True):
        if place["error"]:
            text = f"{nic.name} cannot listen: {place['error']}"
            remedy = "widen R2CCL_PORT_RANGE, or end what uses its ports"
            found.append(Finding("error", "listen", text, remedy, helper.host))
    return found


def compare(helpers: Sequence[Helper]) -> list[Finding]:
    """What should be the same on all hosts, beside the first one."""
    if len(helpers) < 2:
        return []
    first, found = helpers[0], []

    def differ(check: str, helper: Helper, what: str, a: object, b: object, remedy: str) -> None:
        if a != b:
            text = f"{what}: {first.host} has {a}, {helper.host} has {b}"
            found.append(Finding("warning", check, text, remedy, helper.host))

    for one in helpers[1:]:
        a, b = first.nics, one.nics
        differ("versions", one, "versions of R2CCL", first.version, one.version, "install the same")
        differ("nics", one, "number of NICs", len(a), len(b), "set R2CCL_NICS on each host")
        differ("families", one, "address families", families(a), families(b),
               "set NCCL_SOCKET_FAMILY")  # fmt: skip
        for x, y in zip(a, b, strict=False):
            what = f"MTU of {x.name} and {y.name}"
            differ("mtu", one, what, x.mtu, y.mtu, f"ip link set dev {y.ifname} mtu {x.mtu}")
        nets = {network(nic) for nic in a}
        for nic in b:
            if nets and network(nic) not in nets:
                text = f"{nic.name} is in {network(nic)}; {first.host} has no NIC in it"
                remedy = "routes must lead there; else give it an address of a common subnet"
                found.append(Finding("note", "subnet", text, remedy, one.host))
    return found


def families(nics: Sequence[HostNic]) -> str:
    return "/".join(sorted({"IPv6" if ":" in nic.addr else "IPv4" for nic in nics})) or "none"


def partner(nic: HostNic, index: int, there: Sequence[HostNic]) -> int | None:
    """The NIC of the other host that it is paired with: the same subnet, else the same number."""
    same = [i for i, other in enumerate(there) if (":" in other.addr) == (":" in nic.addr)]
    near = [i for i in same if network(there[i]) == network(nic)]
    choice = near or same
    return min(choice, key=lambda i: (i - index % len(there)) % len(there), default=None)


def _exchange(a: Helper, b: Helper) -> list[Finding]:
    """From every NIC of a to its partner at b."""
    found, rates = [], []
    for index, nic in enumerate(a.nics):
        other = partner(nic, index, b.nics)
        if other is None or not b.places[other]["port"]:
            continue
        peer = b.nics[other]
        name = f"{nic.name} to {b.host} {peer.name} ({peer.addr} port {b.places[other]['port']})"
        try:
            said = a.ask(ANSWER_S, do="send", nic=index, addr=peer.addr, token=b.token,
                         port=b.places[other]["port"], seconds=SEND_S)  # fmt: skip
        except NoAnswer as err:
            found.append(Finding("error", "unknown", f"{name}: {err}", node=a.host))
            break
        found.append(judge(name, nic, said, a.host))
        if not said["error"]:
            rates.append((said["rate"], name))
    middle = sorted(rate for rate, _ in rates)[len(rates) // 2] if rates else 0
    for rate, name in rates:
        if rate < SLOW * middle:
            text = f"{name}: {show_rate(rate)}, where the median is {show_rate(middle)}"
            found.append(Finding("warning", "rate", text, "check its link speed", a.host))
    return found


def judge(name: str, nic: HostNic, said: dict[str, Any], node: str) -> Finding:
    """One exchange as a finding."""
    error = said["error"]
    if error and said["stage"] == "connect":
        remedy = "check the cable, the routes and the firewall (R2CCL_PORT_RANGE)"
        return Finding("error", "exchange", f"{name}: no connection: {error}", remedy, node)
    if error:
        remedy = f"check that the switch passes an MTU of {nic.mtu}: ping -M do -s {nic.mtu - 28}"
        return Finding("error", "exchange", f"{name}: connected, but {error}", remedy, node)
    text = f"{name}: {show_rate(said['rate'])}, segments of {said['mss']} bytes"
    if said["loss"] > LOSSY:
        text += f", {said['loss']:.1%} sent again"
        return Finding("warning", "loss", text, "look for errors in ethtool -S", node)
    return Finding("ok", "exchange", text, "", node)
