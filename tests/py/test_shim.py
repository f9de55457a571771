"""libr2ccl.so under LD_PRELOAD: loading, finding NCCL, what it follows, and a NIC that fails.

Rung 3, on the stand-in and on an NCCL that does nothing. It cannot prove what real NCCL does with
the plugin that the shim brings in: docs/shim.md says which runs there were.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Build, Finished, RunBounded
from segment_bed import until

from r2ccl_ctl import control
from r2ccl_ctl.control import Command, Process

NICS = {"R2CCL_NICS": "127.0.1.1,127.0.2.1", "NCCL_SOCKET_IFNAME": "lo", "R2CCL_LOG": "warn"}


@pytest.fixture(scope="module")
def shim(build: Build) -> Path:
    return build.path / "libr2ccl.so"


@pytest.fixture(scope="module")
def programs(build: Build) -> Path:
    return build.path / "tests/shim"


@pytest.fixture(scope="module")
def noop(build: Build) -> Path:
    return build.path / "tests/noop/libnccl.so.2"


@pytest.fixture(scope="module")
def old(build: Build) -> Path:
    return build.path / "tests/noop-old/libnccl.so.2"


def python(run_bounded: RunBounded, script: str, env: dict[str, str]) -> Finished:
    return run_bounded([sys.executable, "-c", script], env=env)


LOOK = """
import ctypes, os, resource, threading
environment = sorted(item for item in os.environ.items() if item[0] != "LD_PRELOAD")
fds = len(os.listdir("/proc/self/fd"))
tasks = len(os.listdir("/proc/self/task"))
shm = [n for n in os.listdir("/dev/shm") if f".{os.getpid()}." in n]
told = ("SigBlk", "SigIgn", "SigCgt", "Umask", "Seccomp")
status = [line for line in open("/proc/self/status") if line.startswith(told)]
shared = [line for line in open("/proc/self/maps") if "/dev/shm" in line or "memfd" in line]
limits = [resource.getrlimit(n) for n in range(16)]
print(environment, fds, tasks, shm, status, shared, limits, os.listdir(os.environ["HOME"]))
"""


def test_processes_without_nccl_notice_nothing(
    run_bounded: RunBounded, shim: Path, tmp_path: Path
) -> None:
    env = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR")}
    env |= {"R2CCL_DLSYM": "1", "R2CCL_PLAN": "auto"}
    plain = python(run_bounded, LOOK, env)
    preloaded = python(run_bounded, LOOK, {"LD_PRELOAD": str(shim), **env})
    assert preloaded.stdout == plain.stdout
    assert preloaded.stderr == plain.stderr == ""
    shell = run_bounded(["/bin/sh", "-c", "echo $0; exit 3"], env={"LD_PRELOAD": str(shim)}, code=3)
    assert (shell.stdout, shell.stderr) == ("/bin/sh\n", "")


def test_dlsym_of_others_is_untouched(run_bounded: RunBounded, shim: Path) -> None:
    """RTLD_NEXT, RTLD_DEFAULT, errors and odd names behave as without the shim."""
    script = """
import ctypes
lib = ctypes.CDLL(None)
print(lib.getpid() > 0, lib.ncclNothing if hasattr(lib, "ncclNothing") else None)
try:
    ctypes.CDLL("libm.so.6").ncclAllReduceX
except AttributeError as err:
    print(err)
try:
    ctypes.CDLL("libm.so.6").n
except AttributeError as err:
    print(err)
"""
    plain = python(run_bounded, script, {"R2CCL_DLSYM": "1"})
    preloaded = python(run_bounded, script, {"LD_PRELOAD": str(shim), "R2CCL_DLSYM": "1"})
    assert preloaded.stdout == plain.stdout
    assert "undefined symbol: ncclAllReduceX" in plain.stdout


SECURE = """
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

extern char **environ;

static int entries(const char *folder)
{
    DIR *dir = opendir(folder);
    int n = 0;

    while (dir && readdir(dir))
        n++;
    closedir(dir);
    return n;
}

int main(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    int mapped = 0;

    while (fgets(line, sizeof(line), maps))
        mapped |= strstr(line, "libr2ccl.so") != NULL;
    fclose(maps);
    printf("secure %lu, uid %d, library %d\\n", getauxval(AT_SECURE), (int)geteuid(), mapped);
    printf("%d %d\\n", entries("/proc/self/task"), entries("/proc/self/fd"));
    for (char **e = environ; *e; e++)
        puts(*e);
    return 0;
}
"""


def test_setuid_program_starts(run_bounded: RunBounded, shim: Path, tmp_path: Path) -> None:
    """A setuid program starts as before with the library in it. ld.so would ignore a preload by its
    path there, so the program names the library itself."""
    setpriv, gcc = shutil.which("setpriv"), shutil.which("gcc")
    if os.geteuid() != 0 or setpriv is None or gcc is None:
        pytest.skip("needs root, setpriv (package util-linux) and gcc")
    (tmp_path / "look.c").write_text(SECURE, encoding="utf-8")
    for folder in [tmp_path, *tmp_path.parents][:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    env = {"R2CCL_PLAN": "auto", "R2CCL_DLSYM": "1"}
    words, files = [f"{name}={value}" for name, value in env.items()], os.listdir(tmp_path)
    said = []
    for with_it in (0, 1):
        program = tmp_path / f"look{with_it}"
        link: list[str | Path] = ["-Wl,--no-as-needed", f"-Wl,-rpath,{shim.parent}", shim]
        run_bounded([gcc, "-o", program, tmp_path / "look.c", *(link if with_it else [])])
        program.chmod(0o4755)
        finished = run_bounded(
            [setpriv, "--reuid=65534", "--clear-groups", "env", "-i", *words, program]
        )
        first, rest = finished.stdout.split("\n", 1)
        assert first == f"secure 1, uid 0, library {with_it}"
        assert finished.stderr == ""
        said.append(rest)
    assert said[0] == said[1]
    assert sorted(os.listdir(tmp_path)) == sorted([*files, "look0", "look1"])


ANOTHER = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) { puts("another is loaded"); }
int ncclGetVersion(int *version) { *version = 4711; return 0; }
int ncclCommInitRank(void) { return 1; } /* what makes a library an NCCL */
"""
ASKS = """
#include <stdio.h>
#include <sys/auxv.h>
int ncclGetVersion(int *version);
int main(void)
{
    int version = 0;
    printf("secure %lu\\n", getauxval(AT_SECURE));
    ncclGetVersion(&version);
    printf("version %d\\n", version);
    return 0;
}
"""


@pytest.mark.parametrize("mode", [0o755, 0o4755], ids=["plain", "setuid"])
def test_setuid_program_takes_no_library_by_name(
    run_bounded: RunBounded, shim: Path, tmp_path: Path, mode: int
) -> None:
    """R2CCL_REAL_NCCL is its caller's: a program with other rights does not load what it names."""
    setpriv, gcc = shutil.which("setpriv"), shutil.which("gcc")
    if os.geteuid() != 0 or setpriv is None or gcc is None:
        pytest.skip("needs root, setpriv (package util-linux) and gcc")
    for name, text in (("another.c", ANOTHER), ("asks.c", ASKS)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for folder in [tmp_path, *tmp_path.parents][:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    another, program = tmp_path / "another.so", tmp_path / "asks"
    run_bounded([gcc, "-shared", "-fPIC", "-o", another, tmp_path / "another.c"])
    link: list[str | Path] = ["-Wl,--no-as-needed", f"-Wl,-rpath,{shim.parent}", shim]
    run_bounded([gcc, "-o", program, tmp_path / "asks.c", *link])
    program.chmod(mode)
    words = [f"R2CCL_REAL_NCCL={another}", f"PATH={os.environ['PATH']}"]
    done = run_bounded([setpriv, "--reuid=65534", "--clear-groups", "env", "-i", *words, program])
    secure = int(mode == 0o4755)
    assert f"secure {secure}\n" in done.stdout
    assert ("another is loaded" in done.stdout) == (not secure), done
    assert f"version {0 if secure else 4711}\n" in done.stdout, done


@pytest.mark.parametrize("how", ["linked", "rtld-local", "named", "searched"])
def test_job_runs_over_the_plugin(
    run_bounded: RunBounded, shim: Path, programs: Path, build: Build, tmp_path: Path, how: str
) -> None:
    """Linked with NCCL; in a library that was opened with RTLD_LOCAL, as PyTorch is; and with the
    shim in NCCL's place, preloaded or found first in LD_LIBRARY_PATH."""
    env = {**NICS, "LD_PRELOAD": str(shim), "NCCL_DEBUG": "INFO"}
    command: list[str | Path] = [programs / "linked", "run"]
    if how == "rtld-local":
        command = [programs / "host", programs / "libjob.so", "run"]
    if how == "named":
        env["LD_PRELOAD"] = f"{build.path}/nccl/libnccl.so.2"
        env["LD_LIBRARY_PATH"] = str(build.host_nccl)
    if how == "searched":
        del env["LD_PRELOAD"]
        command[0] = shutil.copy(programs / "linked", tmp_path)  # its RPATH, looked at first: gone
        env["LD_LIBRARY_PATH"] = f"{build.path}/nccl:{build.host_nccl}"
    finished = run_bounded(command, env=env)
    assert finished.stdout == "ok\n"
    assert "Using network R2CCL, 2 devices" in finished.stderr
    assert "WARN" not in finished.stderr


OPENS = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
version = ctypes.c_int()
comms = (ctypes.c_void_p * 2)()
print(lib.ncclGetVersion(ctypes.byref(version)), version.value)
print(lib.ncclCommInitAll(comms, 2, None))
for comm in comms:
    lib.ncclCommDestroy(ctypes.c_void_p(comm))
"""


@pytest.mark.parametrize("where", ["", "path"])
def test_program_that_opens_nccl_itself(
    run_bounded: RunBounded, build: Build, shim: Path, where: str
) -> None:
    """As vLLM and CuPy do: by SONAME or by path, functions taken with dlsym. The NCCL's calls of
    its own functions, which the linker leads to the wrappers, must not count as the program's."""
    base = {**NICS, "LD_PRELOAD": str(shim), "R2CCL_LOG": "info", "NCCL_DEBUG": "INFO"}
    base["LD_LIBRARY_PATH"] = str(build.host_nccl)
    base["HOSTNCCL_SOCKET_ADDRS"] = "127.0.1.1"
    name = build.host_nccl / "libnccl.so.2" if where else "libnccl.so.2"
    command: list[str | Path] = [sys.executable, "-c", OPENS, name]
    reached = run_bounded(command, env={**base, "R2CCL_DLSYM": "1"})
    assert reached.stdout == "0 22809\n0\n"
    assert reached.stderr.count("net plugin:") == 1
    assert "Using network R2CCL" in reached.stderr
    alone = run_bounded(command, env=base)
    assert alone.stdout == "0 22809\n0\n"
    assert "net plugin:" not in alone.stderr, "without R2CCL_DLSYM it must be left alone"


FORKS = """
import ctypes, os, sys, time
from r2ccl_ctl import control
lib = ctypes.CDLL(sys.argv[1])
comms = (ctypes.c_void_p * 2)()
lib.ncclCommInitAll, lib.ncclCommDestroy
if sys.argv[2] == "asks":
    lib.ncclGetVersion(ctypes.byref(ctypes.c_int()))
child = os.fork()
if child == 0:
    failed = lib.ncclCommInitAll(comms, 2, None)
    end = time.monotonic() + 10
    seen = 0
    while seen < 2 and time.monotonic() < end:
        seen = len(control.find(os.getpid()).snapshot().comms)
    print(failed, seen, flush=True)
    for comm in comms:
        lib.ncclCommDestroy(ctypes.c_void_p(comm))
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("before", ["looks", "asks"])
def test_forks_before_it_uses_nccl(
    run_bounded: RunBounded, build: Build, shim: Path, before: str
) -> None:
    """A parent that looked functions up, or asked for the version, forks the process that uses
    NCCL: that one is no inert copy, it has the plugin and is seen."""
    env = {**NICS, "LD_PRELOAD": str(shim), "R2CCL_DLSYM": "1", "R2CCL_LOG": "info"}
    env |= {"NCCL_DEBUG": "INFO", "HOSTNCCL_SOCKET_ADDRS": "127.0.1.1"}
    library = build.host_nccl / "libnccl.so.2"
    finished = run_bounded([sys.executable, "-c", FORKS, library, before], env=env)
    assert finished.stdout == "0 2\n0\n"
    assert finished.stderr.count("net plugin:") == 1
    assert "Using network R2CCL" in finished.stderr


def test_preloaded_in_vain(run_bounded: RunBounded, build: Build, shim: Path) -> None:
    """The plugin is named and the shim preloaded, but the program's calls go past it."""
    env = {**NICS, "LD_PRELOAD": str(shim), "NCCL_NET_PLUGIN": str(build.plugin)}
    env["NCCL_DEBUG"] = "WARN"
    command: list[str | Path] = [sys.executable, "-c", OPENS, build.host_nccl / "libnccl.so.2"]
    vain = run_bounded(command, env=env)
    assert vain.stdout == "0 22809\n0\n"
    assert vain.stderr.count("NCCL calls do not come through it") == 1
    reached = run_bounded(command, env={**env, "R2CCL_DLSYM": "1"})
    assert "do not come through it" not in reached.stderr


TWO = """
import ctypes, sys
for path in sys.argv[1:]:
    version = ctypes.c_int()
    print(ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version)), version.value)
"""


def test_two_nccls(run_bounded: RunBounded, build: Build, shim: Path, noop: Path) -> None:
    """Each caller reaches the one that it asked for, whichever comes first."""
    host = build.host_nccl / "libnccl.so.2"
    env = {**NICS, "LD_PRELOAD": str(shim), "R2CCL_DLSYM": "1"}
    for order, versions in (
        ((host, noop), "0 22809\n0 23203\n"),
        ((noop, host), "0 23203\n0 22809\n"),
    ):
        finished = run_bounded([sys.executable, "-c", TWO, *order], env=env)
        assert finished.stdout == versions


def test_override(run_bounded: RunBounded, shim: Path, programs: Path, noop: Path) -> None:
    env = {**NICS, "LD_PRELOAD": str(shim)}
    linked: list[str | Path] = [programs / "linked", "version"]
    assert run_bounded(linked, env=env).stdout == "22809\n"
    finished = run_bounded(linked, env={**env, "R2CCL_REAL_NCCL": str(noop)})
    assert finished.stdout == "23203\n"
    finished = run_bounded(linked, env={**env, "R2CCL_REAL_NCCL": "/nowhere/libnccl.so.2"})
    assert finished.stdout == "22809\n"
    assert finished.stderr.count("R2CCL_REAL_NCCL=/nowhere/libnccl.so.2 cannot be loaded") == 1
    finished = run_bounded(linked, env={**env, "R2CCL_REAL_NCCL": "libm.so.6"})
    assert "libm.so.6 is no NCCL" in finished.stderr


CALLS = """
import ctypes
lib = ctypes.CDLL(None)
version = ctypes.c_int()
for _ in range(3):
    print(lib.ncclGetVersion(ctypes.byref(version)), lib.ncclGroupStart())
lib.ncclGetErrorString.restype = ctypes.c_char_p
print(lib.ncclGetErrorString(1))
"""


BYPASSES = """
import ctypes

class Config(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint),
                *((name, ctypes.c_int) for name in ("blocking", "cga", "least", "most")),
                ("net", ctypes.c_char_p), ("share", ctypes.c_int), ("traffic", ctypes.c_int),
                ("name", ctypes.c_char_p), ("collnet", ctypes.c_int), ("cta", ctypes.c_int),
                ("shrink", ctypes.c_int)]

class Id(ctypes.Structure):
    _fields_ = [("text", ctypes.c_byte * 128)]

lib = ctypes.CDLL(None)
for _ in range(2):
    ident, comm = Id(), ctypes.c_void_p()
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 23203, 1, 0, 0, 0, b"Socket", 0, 0, b"c", 1)
    lib.ncclGetUniqueId(ctypes.byref(ident))
    print(lib.ncclCommInitRankConfig(ctypes.byref(comm), 1, ident, 0, ctypes.byref(config)))
    nothing, size = ctypes.c_void_p(), ctypes.c_size_t(0)
    print(lib.ncclPutSignal(nothing, size, 0, 0, nothing, size, 0, 0, 0, comm, nothing))
    print(lib.ncclSignal(0, 0, 0, 0, comm, nothing))
    print(lib.ncclDevCommCreate(comm, nothing, nothing))
    print(lib.ncclCommDestroy(comm))
"""


def test_what_goes_around_the_plugin_is_said_once(
    run_bounded: RunBounded, shim: Path, noop: Path
) -> None:
    env = {**NICS, "LD_PRELOAD": str(shim), "R2CCL_REAL_NCCL": str(noop)}
    env |= {"NCCL_COLLNET_ENABLE": "1", "NCCL_GIN_ENABLE": "1"}
    finished = python(run_bounded, BYPASSES, env)
    assert finished.stdout == "0\n" * 10, finished
    for words in (
        "NCCL_COLLNET_ENABLE=1: reductions in the switches (SHARP)",
        "NCCL_GIN_ENABLE=1",
        "asks for the network Socket (netName)",
        "asks for reductions in the switches (collnetEnable)",
        "one-sided communication (ncclPutSignal) bypasses",
        "one-sided communication (ncclSignal) bypasses",
        "device-initiated communication (ncclDevCommCreate) bypasses",
    ):
        assert finished.stderr.count(words) == 1, (words, finished.stderr)
    assert finished.stderr.count("WARN") == 7, finished.stderr
    quiet = python(run_bounded, BYPASSES, {**env, "R2CCL_MODE": "0"})
    assert quiet.stdout == finished.stdout and "WARN" not in quiet.stderr


def test_no_nccl(run_bounded: RunBounded, shim: Path) -> None:
    finished = python(run_bounded, CALLS, {"LD_PRELOAD": str(shim)})
    assert finished.stdout == "2 2\n" * 3 + "b'NCCL is not loaded'\n"
    assert finished.stderr.count("no NCCL is loaded") == 1


@pytest.mark.parametrize("more", [{}, {"R2CCL_ALLREDUCE": "direct"}, {"R2CCL_PLAN": "auto"}])
def test_nccl_that_is_too_old(
    run_bounded: RunBounded, shim: Path, old: Path, more: dict[str, str]
) -> None:
    env = {"LD_PRELOAD": str(shim), "R2CCL_REAL_NCCL": str(old), "R2CCL_LOG": "info"} | more
    finished = python(run_bounded, CALLS, env)
    assert finished.stdout.startswith("0 5\n" * 3)
    assert finished.stderr.count("is too old for R2CCL, which needs 2.18") == 1
    assert finished.stderr.count("ncclGroupStart was called, but the NCCL in use") == 1
    assert "net plugin:" not in finished.stderr


@pytest.mark.parametrize(
    ("variable", "value", "network"),
    [
        ("NCCL_NET_PLUGIN", "none", "Socket"),
        ("NCCL_NET_PLUGIN", "other,another", "Socket"),
        ("NCCL_NET", "Socket", "Socket"),
        ("NCCL_NET", "r2ccl", "R2CCL"),
        ("NCCL_NET_PLUGIN", "libnccl-net.so", "R2CCL"),
    ],
)
def test_the_users_choice_wins(
    run_bounded: RunBounded, shim: Path, programs: Path, variable: str, value: str, network: str
) -> None:
    env = {**NICS, "LD_PRELOAD": str(shim), "NCCL_DEBUG": "INFO", variable: value}
    env["HOSTNCCL_SOCKET_ADDRS"] = "127.0.1.1"
    finished = run_bounded([programs / "linked", "run"], env=env)
    assert f"Using network {network}" in finished.stderr
    warned = finished.stderr.count(f"WARN NET/R2CCL: {variable}={value} is set")
    assert warned == (1 if network == "Socket" else 0)


def test_the_users_choice_in_nccls_file(
    run_bounded: RunBounded, shim: Path, programs: Path, tmp_path: Path
) -> None:
    """What NCCL will put into the environment is seen before it has."""
    conf = tmp_path / "conf"
    conf.write_text("NCCL_COLLNET_ENABLE=1\nNCCL_NET=Socket\n")
    env = {**NICS, "LD_PRELOAD": str(shim), "R2CCL_LOG": "info", "NCCL_CONF_FILE": str(conf)}
    env |= {"HOSTNCCL_SOCKET_ADDRS": "127.0.1.1", "NCCL_DEBUG": "INFO"}
    finished = run_bounded([programs / "linked", "run"], env=env)
    assert finished.stderr.count(f"WARN NET/R2CCL: NCCL_NET=Socket is set in {conf}, so") == 1
    assert finished.stderr.count("WARN") == 1 and "net plugin:" not in finished.stderr
    finished = run_bounded([programs / "linked", "run"], env={**env, "NCCL_NET": "R2CCL"})
    assert "Using network R2CCL" in finished.stderr, "the environment has the last word"
    assert f"WARN NET/R2CCL: NCCL_COLLNET_ENABLE=1 in {conf}: reductions" in finished.stderr
    assert finished.stderr.count("WARN") == 1


def test_a_plugin_without_a_name(run_bounded: RunBounded, shim: Path, programs: Path) -> None:
    """NCCL 2.27 and later load none then."""
    env = {**NICS, "LD_PRELOAD": str(shim), "R2CCL_LOG": "info", "NCCL_NET_PLUGIN": ""}
    env["HOSTNCCL_SOCKET_ADDRS"] = "127.0.1.1"
    finished = run_bounded([programs / "linked", "run"], env=env)
    assert finished.stderr.count("NCCL_NET_PLUGIN= is set, so NCCL uses none and not") == 1
    assert "net plugin:" not in finished.stderr


def test_the_users_own_plugin_path(
    run_bounded: RunBounded, build: Build, shim: Path, programs: Path
) -> None:
    env = {**NICS, "LD_PRELOAD": str(shim), "NCCL_DEBUG": "INFO"}
    env["NCCL_NET_PLUGIN"] = str(build.plugin)
    finished = run_bounded([programs / "linked", "run"], env=env)
    assert "Using network R2CCL" in finished.stderr
    assert "WARN" not in finished.stderr


def test_off_means_off(run_bounded: RunBounded, shim: Path, programs: Path) -> None:
    env = {**NICS, "LD_PRELOAD": str(shim), "NCCL_DEBUG": "INFO", "R2CCL_LOG": "info"}
    env |= {"R2CCL_MODE": "0", "HOSTNCCL_SOCKET_ADDRS": "127.0.1.1"}
    finished = run_bounded([programs / "linked", "run"], env=env)
    assert finished.stdout == "ok\n"
    assert "Using network Socket" in finished.stderr
    assert "net plugin:" not in finished.stderr


def test_run_with_preload(run_bounded: RunBounded, tool: Path, programs: Path, shim: Path) -> None:
    """`run --preload` adds the shim to what `run` sets."""
    shown = json.loads(run_bounded([tool, "env", "--preload", "--json"]).stdout)["env"]
    assert shown["LD_PRELOAD"] == str(shim)
    assert shown["NCCL_NET_PLUGIN"].endswith("libnccl-net-r2ccl.so")
    finished = run_bounded(
        [tool, "run", "--preload", "--", programs / "linked", "run"],
        env={**NICS, "NCCL_DEBUG": "INFO", "R2CCL_LOG": "info"},
    )
    assert finished.stdout == "ok\n"
    assert "Using network R2CCL" in finished.stderr
    assert "net plugin:" in finished.stderr


@pytest.mark.parametrize("what", ["abort", "fork", "nonblocking"])
@pytest.mark.parametrize("plan", ["off", "auto"])
def test_abort_fork_and_nonblocking(
    run_bounded: RunBounded, shim: Path, programs: Path, what: str, plan: str
) -> None:
    """These communicators have no plans, which is said where plans are asked for, and once."""
    env = {**NICS, "LD_PRELOAD": str(shim), "R2CCL_PLAN": plan}
    finished = run_bounded([programs / "linked", what], env=env)
    assert finished.stdout == "ok\n"
    why = "it is non-blocking" if what == "nonblocking" else "it was made by ncclCommInitAll"
    assert finished.stderr.count("\n") == finished.stderr.count(why) == (plan != "off")


def test_many_generations(run_bounded: RunBounded, shim: Path, programs: Path) -> None:
    env = {**NICS, "LD_PRELOAD": str(shim)}
    finished = run_bounded([programs / "linked", "generations", "30"], env=env, timeout=120)
    assert finished.stdout == "ok\n"
    assert finished.stderr == ""


@contextmanager
def started(program: list[Path | str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(word) for word in program],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def own(pid: int) -> list[Process]:
    return [process for process in control.list_processes() if process.pid == pid]


def test_communicators_are_seen(
    run_bounded: RunBounded, shim: Path, programs: Path, tool: Path
) -> None:
    env = {**NICS, "LD_PRELOAD": str(shim)}
    with started([programs / "linked", "hold"], env) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        (seen,) = own(process.pid)
        assert seen.running, "the shim's descriptor must not end the sign of life"
        until(lambda: [c.operations for c in seen.snapshot().comms] == [3, 3], "both are shown")
        (seen,) = own(process.pid)
        comms = seen.snapshot().comms
        assert [comm.rank for comm in comms] == [0, 1]
        assert {comm.ranks for comm in comms} == {2}
        assert {comm.state for comm in comms} == {"ready"}
        assert {comm.op for comm in comms} == {"all-reduce"}
        assert {comm.op_bytes for comm in comms} == {4 * 65536}
        assert not any(comm.calling for comm in comms)
        assert len({comm.id for comm in comms}) == 1
        assert seen.comms == 2
        listed = run_bounded([tool, "ps", "--comms", "--pid", str(process.pid), "--json"]).stdout
        assert [row["operations"] for row in json.loads(listed)["communicators"]] == [3, 3]
        status = run_bounded([tool, "status", "--pid", str(process.pid)], env={"COLUMNS": "200"})
        assert "all-reduce of 256.0 KiB" in status.stdout
        process.stdin.close()
        assert process.stdout.read() == "ok\n"
        assert process.wait(timeout=20) == 0
    gone = control.find(process.pid).snapshot()
    assert gone.comms == [], "destroyed communicators leave their rows"


def test_nic_fails_in_the_middle(shim: Path, programs: Path) -> None:
    """With nothing but LD_PRELOAD: results stay exact, traffic goes on."""
    env = {**NICS, "LD_PRELOAD": str(shim)}
    with started([programs / "linked", "traffic", "6"], env) as process:
        until(lambda: own(process.pid) and own(process.pid)[0].snapshot().nics, "NICs")
        time.sleep(0.7)
        (seen,) = own(process.pid)
        answer = control.send_command(
            seen, Command("fail-nic", nic="127.0.1.1", fault="blackhole", direction="both")
        )
        assert answer.ok, answer.text
        until(lambda: seen.snapshot().counters["failovers"], "the failover")
        before = seen.snapshot().comms[0].operations
        until(lambda: seen.snapshot().comms[0].operations > before + 20, "traffic afterwards")
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    assert "rounds" in out
    assert out.endswith("ok\n")
