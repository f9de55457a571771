"""What an NCCL application's environment needs so that it loads and uses the plugin."""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from r2ccl_ctl import jobname, paths, settings_view
from r2ccl_ctl.errors import R2Error, R2UsageError

NCCL_CHOICES = ("system", "standin")
# NCCL 2.27.3 to 2.29.7 forget the plugin's name when they unload it with the last communicator, and
# the next communicator silently goes without: never unload.
KEEP_LOADED = {"NCCL_NET_PLUGIN_REF_COUNT": "1"}
SYSTEM_CONF = Path("/etc/nccl.conf")
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")


def application_env(
    base: Mapping[str, str],
    *,
    nccl: str = "system",
    by_name: bool = False,
    job: str = "",
    nics: str = "",
    preload: bool = False,
) -> dict[str, str]:
    """The variables to set, over `base`.

    nccl: system (what the application links), or standin (the CPU stand-in for NCCL).
    by_name: name the plugin "r2ccl" and lead the loader to it, as NCCL up to 2.20 wants it.
    preload: also put the shim before NCCL (LD_PRELOAD).
    """
    if nccl not in NCCL_CHOICES:
        raise R2UsageError(f"--nccl {nccl}: choose {' or '.join(NCCL_CHOICES)}")
    plugin = paths.plugin_path()
    found = {"NCCL_NET_PLUGIN": "r2ccl" if by_name else str(plugin)}
    found.update(KEEP_LOADED)
    library_dirs = [str(plugin.parent)] if by_name else []
    if nccl == "standin":
        library_dirs.insert(0, str(paths.standin_dir()))
    for folder in library_dirs:
        if re.search("[:;]", folder):
            raise R2Error(
                f"'{folder}' cannot stand in LD_LIBRARY_PATH, where : and ; divide folders. Name "
                "it by a link without them in R2CCL_BUILD_DIR"
            )
    if library_dirs:
        found["LD_LIBRARY_PATH"] = prepend(library_dirs, base.get("LD_LIBRARY_PATH", ""))
    if preload:
        shim = str(paths.shim_path())
        if re.search(r"[\s:]", shim):
            raise R2Error(
                f"'{shim}' cannot be preloaded: the loader takes blanks and colons in LD_PRELOAD "
                "for ends of names. Name the folder by a link without them in R2CCL_BUILD_DIR"
            )
        found["LD_PRELOAD"] = prepend([shim], base.get("LD_PRELOAD", ""))
    if job:
        found["R2CCL_JOB"] = jobname.checked(job, "--job")
    else:
        jobname.checked(base.get("R2CCL_JOB", ""), "R2CCL_JOB")
    if nics:
        found["R2CCL_NICS"] = nics
    return found


def prepend(folders: Sequence[str], path: str) -> str:
    """`folders` before what `path` holds already, each once."""
    rest = [part for part in path.split(os.pathsep) if part and part not in folders]
    return os.pathsep.join([*folders, *rest])


def default_job(base: Mapping[str, str], command: Sequence[str]) -> str:
    """A job's name where none is given: the caller's, the scheduler's (then the plugin takes it
    itself: ""), or one made of the command."""
    if base.get("R2CCL_JOB") or any(base.get(name) for name in _JOB_VARIABLES):
        return ""
    end = f"-{secrets.token_hex(2)}"
    program = os.fsencode(Path(command[0]).name)
    return os.fsdecode(jobname.start_of(program, jobname.MOST - len(end))) + end


def hindrances(base: Mapping[str, str]) -> list[str]:
    """What in the caller's environment keeps NCCL from using the plugin."""
    found = []
    net = base.get("NCCL_NET", "")
    if net and net.lower() != "r2ccl":
        found.append(f"NCCL_NET={net} makes NCCL ignore R2CCL: unset it")
    mode, place, remedy = base.get("R2CCL_MODE") or base.get("R2CC_MODE") or "", "", "unset it"
    if not mode:
        mode, file = settings_view.from_file("R2CCL_MODE")
        place, remedy = f" in {file}", "take it out"
    if mode.lower() in ("0", "off"):
        found.append(f"R2CCL_MODE={mode}{place} switches R2CCL off: {remedy}")
    return found


def hindrances_in_files(base: Mapping[str, str]) -> list[str]:
    """The same in NCCL's configuration files here."""
    filed = None if "NCCL_NET" in base else _from_files(base, "NCCL_NET")
    if not filed or not filed[0] or filed[0].lower() == "r2ccl":
        return []
    return [f"NCCL_NET={filed[0]} in {filed[1]} makes NCCL ignore R2CCL: take it out"]


def _from_files(base: Mapping[str, str], name: str) -> tuple[str, Path] | None:
    """What NCCL will take from its configuration files, and which, unless the environment has it:
    its first line in the user's file, else in the system's (shim/real/conf.c reads them too)."""
    own = base.get("NCCL_CONF_FILE") or (f"{base['HOME']}/.nccl.conf" if "HOME" in base else "")
    for path in (Path(own), SYSTEM_CONF):  # an empty one is this folder, and no file
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        except OSError:
            continue
        for line in text.splitlines():
            key, there, value = line.partition("=")
            if there and key == name:
                return value, path
    return None


def warnings(base: Mapping[str, str]) -> list[str]:
    """All of these, and what is not heeded."""
    found = hindrances(base) + hindrances_in_files(base)
    plugin = base.get("NCCL_NET_PLUGIN", "")
    if plugin:
        found.append(f"NCCL_NET_PLUGIN={plugin} is replaced")
    return found


def shell_lines(variables: Mapping[str, str]) -> list[str]:
    """For eval "$(r2ccl-ctl env)"."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
