"""What is booted: the guest's image with the project's programs, and the beds made from it."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tests.rdma import beds, image, parts
from tests.rdma.parts import ROOT, STORE, Missing

OLD_SECONDS = 3600
PROGRAMS = {
    "r2ccl/probe": "rdma/probe",
    "r2ccl/r2ccl_perf": "r2ccl_perf",
    "r2ccl/libnccl-net-r2ccl.so": "libnccl-net-r2ccl.so",
    "r2ccl/hostnccl/libnccl.so.2": "hostnccl/libnccl.so.2",
}


@dataclass(frozen=True)
class Work:
    """Everything that is needed to boot; `folder` takes consoles and logs."""

    parts: parts.Parts
    initramfs: Path
    folder: Path

    def built(self, name: str) -> beds.Built:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return beds.Built(self.parts, self.initramfs, folder)


def build_folder() -> Path:
    return (ROOT / os.environ.get("R2CCL_BUILD_DIR", "build")).resolve()


def prepare() -> Work:
    """Gathers the parts and writes the image, again only when one of its files changed."""
    given = parts.gather()
    build = build_folder()
    agent = build / "rdma" / "agent"
    absent = [name for name in (*PROGRAMS.values(), "rdma/agent") if not (build / name).exists()]
    if absent:
        raise Missing(f"{build} lacks {', '.join(absent)}: run `make rdma-programs`")
    folder = STORE / "run"
    folder.mkdir(parents=True, exist_ok=True)
    act = folder / "act"
    act.write_text(beds.act_script(0))
    act.chmod(0o755)
    programs = {name: build / path for name, path in PROGRAMS.items()}
    programs["r2ccl/act"] = act
    stamp = hashlib.sha256()
    for path in (agent, *programs.values(), *sorted(Path(__file__).parent.glob("*.py"))):
        stamp.update(path.read_bytes())
    stamp.update(str(given).encode())
    initramfs = folder / f"initramfs-{stamp.hexdigest()[:16]}"
    if not initramfs.exists():
        for old in folder.glob("initramfs-*"):
            if time.time() - old.stat().st_mtime > OLD_SECONDS:  # else a guest may be booting it
                old.unlink()
        image.write(given, agent, programs, initramfs)
    return Work(given, initramfs, folder)
