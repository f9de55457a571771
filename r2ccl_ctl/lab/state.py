"""What is remembered about a lab between commands: one JSON file and one lock per lab."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r2ccl_ctl.lab.spec import MGMT, LabError, LabSpec, check_name

SCHEMA = 1
LOCK_TIMEOUT_S = 30.0


@dataclass
class NicState:
    """Rate and faults of one NIC. Losses are percent; 100 is a silent black hole."""

    rate: int | None = None
    link: str = "up"
    loss_tx: float = 0.0
    loss_rx: float = 0.0

    @property
    def healthy(self) -> bool:
        return self.link == "up" and self.loss_tx == 0 and self.loss_rx == 0

    def heal(self) -> None:
        self.link, self.loss_tx, self.loss_rx = "up", 0.0, 0.0

    def faults(self) -> list[str]:
        """The faults in words, in the terms of fail-link's options."""
        words = [] if self.link == "up" else [f"{self.link}-down"]
        for direction, loss in self._losses():
            words.append(f"silent-{direction}" if loss >= 100 else f"loss-{direction}={loss:g}%")
        return words

    def _losses(self) -> list[tuple[str, float]]:
        if self.loss_tx == self.loss_rx and self.loss_tx > 0:
            return [("both", self.loss_tx)]
        return [(d, v) for d, v in (("tx", self.loss_tx), ("rx", self.loss_rx)) if v > 0]


@dataclass(frozen=True, order=True)
class Cut:
    """Two nodes that cannot reach each other over one rail (or mgmt0)."""

    nic: str
    a: int
    b: int


@dataclass
class LabState:
    """The whole memory of one lab."""

    spec: LabSpec
    phase: str = "building"
    created: float = field(default_factory=time.time)
    holder: list[int] | None = None
    nics: list[dict[str, NicState]] = field(default_factory=list)
    cuts: set[Cut] = field(default_factory=set)
    dead_rails: set[str] = field(default_factory=set)

    @classmethod
    def fresh(cls, spec: LabSpec) -> LabState:
        nics = []
        for node in range(spec.nodes):
            table = {MGMT: NicState()}
            for r, nic in enumerate(spec.nic_names(node)):
                table[nic] = NicState(rate=spec.rate_of(r))
            nics.append(table)
        return cls(spec=spec, nics=nics)

    def to_json(self) -> dict[str, Any]:
        spec = dataclasses.asdict(self.spec)
        del spec["nic_counts"]
        return {
            "schema": SCHEMA,
            "spec": spec,
            "phase": self.phase,
            "created": self.created,
            "holder": self.holder,
            "nics": [{n: dataclasses.asdict(s) for n, s in t.items()} for t in self.nics],
            "cuts": [dataclasses.asdict(c) for c in sorted(self.cuts)],
            "dead_rails": sorted(self.dead_rails),
        }

    @classmethod
    def from_json(cls, data: Any) -> LabState:
        if not isinstance(data, dict):
            raise LabError("not a JSON object")
        if data.get("schema") != SCHEMA:
            raise LabError(f"schema {data.get('schema')} (this tool speaks {SCHEMA})")
        spec = dict(data["spec"])
        spec["nics"], spec["rates"] = tuple(spec["nics"]), tuple(spec["rates"])
        created = float(data["created"])
        time.gmtime(created)  # a time that no calendar holds
        return cls(
            spec=LabSpec(**spec),
            phase=str(data["phase"]),
            created=created,
            holder=data["holder"],
            nics=[{n: NicState(**s) for n, s in t.items()} for t in data["nics"]],
            cuts={Cut(**c) for c in data["cuts"]},
            dead_rails={str(rail) for rail in data.get("dead_rails", [])},
        )


def state_dir() -> Path:
    """Where labs are remembered: R2CCL_LAB_DIR, else /run as root, else the user's run-time dir."""
    named = os.environ.get("R2CCL_LAB_DIR")
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return Path("/run/r2ccl-lab")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "r2ccl-lab"
    return Path(f"/tmp/r2ccl-lab-{os.geteuid()}")


class Store:
    """The files of one lab. Call load and save only while holding lock()."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self.name = name
        self.dir = directory or state_dir()
        self.json_path = self.dir / f"{name}.json"
        self.hosts_path = self.dir / f"{name}.hosts"
        self.lock_path = self.dir / f"{name}.lock"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One lab command at a time; waits up to 30 s for the other to finish."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            fd = self._open_lock()
            if _try_lock(fd) and self._is_current(fd):
                break
            os.close(fd)
            if time.monotonic() > deadline:
                raise LabError(
                    f"another command has held lab '{self.name}' for {LOCK_TIMEOUT_S:.0f} s "
                    f"(lock {self.lock_path}): wait for it, or end it"
                )
            time.sleep(0.002)
        try:
            yield
        finally:
            os.close(fd)

    def _is_current(self, fd: int) -> bool:
        """False when the lock file was removed while we waited for it."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.lock_path))
        except FileNotFoundError:
            return False

    def _open_lock(self) -> int:
        try:
            self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.dir.stat().st_uid != os.geteuid():
                raise LabError(f"{self.dir} belongs to another user: set R2CCL_LAB_DIR")
            return os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as err:
            raise LabError(
                f"cannot use the lab's state directory {self.dir}: {err.strerror}; "
                "set R2CCL_LAB_DIR to a directory that you may write"
            ) from err

    def exists(self) -> bool:
        return self.json_path.exists()

    def load(self) -> LabState | None:
        """The remembered state; None when there is none."""
        if self.json_path.exists() and not self.json_path.is_file():
            raise LabError(f"{self.json_path} is no file: remove it")  # reading may never end
        try:
            return LabState.from_json(json.loads(self.json_path.read_text()))
        except FileNotFoundError:
            return None
        except OSError as err:
            raise LabError(
                f"{self.json_path} cannot be read: {err.strerror}; if the lab is another user's, "
                "use sudo, or set R2CCL_LAB_DIR to a directory of your own"
            ) from err
        except (
            OverflowError,
            RecursionError,
            LabError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as err:
            raise LabError(
                f"{self.json_path} cannot be read ({err}): `r2ccl-ctl lab down --name {self.name}` "
                "removes the lab and the file"
            ) from err

    def save(self, state: LabState) -> None:
        temporary = self.json_path.with_suffix(".new")
        temporary.write_text(json.dumps(state.to_json(), indent=1) + "\n")
        temporary.replace(self.json_path)

    def remove(self) -> None:
        """Forget the lab; the lock file goes last, the directory when it is empty."""
        for path in (self.json_path, self.json_path.with_suffix(".new"), self.hosts_path):
            path.unlink(missing_ok=True)
        self.lock_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.dir.rmdir()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def known_labs() -> list[str]:
    """The names of the labs that are remembered."""
    return sorted(p.stem for p in state_dir().glob("*.json"))


def known_nics(name: str) -> dict[str, list[str]]:
    """The NICs of each node of a lab as they are remembered, with mgmt0; without a lab of one's own
    none. Waits for nothing: neither for the lock, nor for what is no file."""
    check_name(name)
    store = Store(name)
    if not store.json_path.is_file() or store.dir.stat().st_uid != os.geteuid():
        return {}
    state = store.load()
    found = {}
    for i, table in enumerate(state.nics if state else []):
        found[f"n{i}"] = [*(nic for nic in table if nic != MGMT), MGMT]
    return found
