"""Where a program that is to be started has its NCCL, and whether the shim can stand before it."""

from __future__ import annotations

import mmap
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from r2ccl_ctl.doctor.finding import Finding
from r2ccl_ctl.elf import ElfError, defined_functions, has_loader

ANSWER_S = 20.0
FUNCTION = "ncclAllReduce"
# Variables that NCCL reads: its text stays in a program that was stripped of its symbols.
WORDS = (b"\0NCCL_NET_PLUGIN\0", b"\0NCCL_TOPO_FILE\0")
_TORCH = "import importlib.util as u; print(getattr(u.find_spec('torch'), 'origin', None) or '')"


def check_program(command: Sequence[str]) -> list[Finding]:
    """Of a command to be started; nothing without one."""
    if not command:
        return []
    found = shutil.which(command[0])
    if found is None:
        return [Finding("error", "program", f"{command[0]} is not found, or cannot be run")]
    program = Path(found).resolve()
    if _is_script(program):
        interpreter = _interpreter(program)
        if interpreter is None:
            return [Finding("note", "program", f"{program} is a script: its programs are not seen")]
        program = interpreter
    return judge(program, libraries(program) + torch_libraries(program))


def judge(program: Path, others: Sequence[Path]) -> list[Finding]:
    """others: the libraries that it loads."""
    try:
        loader = has_loader(program)
    except ElfError as err:
        return [Finding("note", "program", str(err))]
    out = []
    inside = [file for file in (program, *others) if has_nccl(file)]
    if program.stat().st_mode & 0o6000:
        text = f"{program} is setuid or setgid: the loader ignores LD_PRELOAD for it"
        out.append(Finding("warning", "program", text, "start it as the user that it becomes"))
    if inside and inside[0] == program and not loader:
        text = f"{program} has NCCL in itself and no dynamic loader: it loads neither the plugin "
        return [*out, Finding("error", "program", text + "nor the shim", "link it dynamically")]
    for file in inside:
        text = f"{file} has NCCL linked in statically: LD_PRELOAD cannot stand before it"
        remedy = "link it with libnccl.so for `ps --comms` and R2CCL_PLAN; the plugin works without"
        out.append(Finding("warning", "program", text, remedy))
    out += [Finding("ok", "program", f"{program.name} loads {f}") for f in others if is_nccl(f)]
    if not out:
        text = f"neither {program} nor its libraries have NCCL: what it opens later is not seen"
        out.append(Finding("note", "program", text))
    return out


def is_nccl(file: Path) -> bool:
    return re.match(r"libnccl\.so", file.name) is not None


def has_nccl(file: Path) -> bool:
    """NCCL's own code is in it, and it is not NCCL's library."""
    if is_nccl(file):
        return False
    try:
        if FUNCTION in defined_functions(file):
            return True
        with file.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return all(data.find(word) >= 0 for word in WORDS)
    except (ElfError, OSError, ValueError):
        return False


def libraries(program: Path) -> list[Path]:
    """What the loader would load with it."""
    said = _output(["ldd", str(program)])
    return [Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+)", said, re.MULTILINE)]


def torch_libraries(program: Path) -> list[Path]:
    """PyTorch opens its libraries only when it is imported."""
    if not program.name.startswith("python"):
        return []
    origin = _output([str(program), "-c", _TORCH]).strip()
    if not origin:
        return []
    library = Path(origin).parent / "lib/libtorch_cuda.so"
    return [library, *_of_nccl(libraries(library))] if library.is_file() else []


def _of_nccl(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if is_nccl(file)]


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _is_script(file: Path) -> bool:
    with file.open("rb") as raw:
        return raw.read(2) == b"#!"


def _interpreter(script: Path) -> Path | None:
    """Of a script in Python, as torchrun is; None of another one."""
    with script.open("rb") as raw:
        words = raw.readline(256)[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "env":
        words = words[1:]
    found = shutil.which(words[0]) if words else None
    return Path(found) if found and Path(found).name.startswith("python") else None
