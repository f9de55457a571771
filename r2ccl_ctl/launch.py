"""Start the ranks of a job on this machine or in the nodes of a lab, and keep watch over them.

    job = start(LaunchSpec(argv=["build/r2ccl_perf"], ranks=4, emulate_nodes=2, nics=4))
    code = job.wait(timeout=60)

Every rank is a session of its own and dies with this process. A rank that fails takes the
others with it after a grace period. `Job` may be used from any thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from r2ccl_ctl import elf, jobname, paths
from r2ccl_ctl import env as environment
from r2ccl_ctl.interrupts import Interrupted, signals_interrupt, undisturbed
from r2ccl_ctl.job import (
    NCCL_AUTO,
    NCCL_STANDIN,
    NCCL_SYSTEM,
    Job,
    LaunchError,
    LaunchSpec,
    LaunchUsageError,
    Place,
)
from r2ccl_ctl.lab import DEFAULT_NAME, Lab, LabError, LabUsageError, nsexec
from r2ccl_ctl.ports import Ports, PortsError

NICS_MAX = 16  # R2_MAX_NICS: as many as the plugin takes
RANKS_MAX = 4096  # a slip must not be a process for each number that was typed too much
LONGEST_S = 365 * 24 * 3600
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# Placement and environment: pure


def forget_stdout() -> None:
    """What Python still holds for a stdout that takes nothing would fail again at the exit."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)


def place_ranks(ranks: int, nodes: int, per_node: int) -> list[Place]:
    """Ranks on nodes in blocks, as torchrun and mpirun have it. Spread evenly, the first nodes have
    one more where they cannot all have the same."""
    for option, value in (("--ranks", ranks), ("--per-node", per_node)):
        if value < 0:
            raise LaunchUsageError(f"{option} {value}: give a number above 0")
    if ranks == 0:
        ranks = nodes * (per_node or 1)
    if per_node and ranks > nodes * per_node:
        raise LaunchUsageError(
            f"{ranks} ranks do not fit on {nodes} nodes with {per_node} each: "
            "give fewer ranks, more nodes, or a higher --per-node"
        )
    if ranks > RANKS_MAX:
        raise LaunchUsageError(f"{ranks} ranks: give at most {RANKS_MAX} (--ranks, --per-node)")
    each, more = divmod(ranks, nodes)
    places: list[Place] = []
    for node in range(nodes):
        size = per_node or each + (node < more)
        size = min(size, ranks - len(places))
        places += [Place(len(places) + local, node, local, size) for local in range(size)]
    return places


def empty_nodes(places: Sequence[Place], nodes: int) -> str:
    """Why nodes that are only there for the ranks have none, or ""."""
    empty = nodes - len({place.node for place in places})
    if not empty:
        return ""
    return (
        f"--emulate-nodes {nodes}: {empty} of them would have none of the {len(places)} ranks; "
        "give more ranks (--ranks), fewer nodes, or a lower --per-node"
    )


def split_gpus(gpus: Sequence[str], nodes: int) -> list[list[str]]:
    """The GPUs of each emulated node: disjoint while they last, shared beyond."""
    if not gpus:
        return [[] for _ in range(nodes)]
    if len(gpus) < nodes:
        return [[gpus[i % len(gpus)]] for i in range(nodes)]
    share = len(gpus) // nodes
    return [list(gpus[i * share : (i + 1) * share]) for i in range(nodes)]


def loopback_nics(node: int, nics: int) -> str:
    """R2CCL_NICS of an emulated node: 127.0.1.1,127.0.2.1,... for node 0, 127.0.1.2,... next."""
    return ",".join(f"127.0.{r + 1}.{node + 1}" for r in range(nics))


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES where it is set, else the numbers of this machine's NVIDIA GPUs."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part for part in (p.strip() for p in named.split(",")) if part and part != "-1"]
    try:
        found = [n for n in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", n)]
    except OSError:
        return []
    return [str(i) for i in range(len(found))]


def parse_env(items: Sequence[str]) -> dict[str, str]:
    """`K=V` arguments as a dictionary."""
    out = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or _ENV_NAME.fullmatch(key) is None:
            raise LaunchUsageError(f"--env '{item}': give NAME=VALUE")
        out[key] = value
    return out


# Where the native parts are


@dataclass(frozen=True)
class Natives:
    """What LD_LIBRARY_PATH, NCCL_NET_PLUGIN and PATH of the ranks will name."""

    nccl_dir: str | None
    nccl_plugin: str | None
    bin_dir: str | None


def find_natives(spec: LaunchSpec, gpus: int) -> Natives:
    """Resolve `nccl` and `plugin`; an error says what is not built."""
    perf: Path | None = None
    with contextlib.suppress(paths.NotBuiltError):
        perf = paths.perf_path()
    return Natives(_nccl_dir(spec.nccl, gpus), _plugin(spec), str(perf.parent) if perf else None)


def _nccl_dir(nccl: str, gpus: int) -> str | None:
    """The folder for LD_LIBRARY_PATH; None where the system's NCCL is to be used."""
    if nccl == NCCL_SYSTEM or (nccl == NCCL_AUTO and gpus):
        return None
    if nccl == NCCL_STANDIN:
        return str(paths.standin_dir())
    if nccl == NCCL_AUTO:
        try:
            return str(paths.standin_dir())
        except paths.NotBuiltError:
            return None
    given = Path(nccl).resolve()
    if not given.exists():
        raise LaunchUsageError(
            f"--nccl '{nccl}': no such file or folder; give standin, system, or the path of a "
            "libnccl.so.2 or of its folder"
        )
    folder = given if given.is_dir() else given.parent
    if not (folder / "libnccl.so.2").exists():
        raise LaunchUsageError(
            f"--nccl '{nccl}': there is no libnccl.so.2 in {folder}, which is the name that "
            "programs ask for; give its path, or make a link of that name"
        )
    return str(folder)


def _plugin(spec: LaunchSpec) -> str | None:
    """NCCL_NET_PLUGIN of the ranks; None where --env says it."""
    if "NCCL_NET_PLUGIN" in spec.env:
        return None
    if not spec.plugin:
        return str(paths.plugin_path())
    if spec.plugin == "none":
        return "none"
    if not Path(spec.plugin).is_file():
        raise LaunchUsageError(f"--plugin '{spec.plugin}': no such file; give a path, or none")
    try:  # NCCL would use its own transports, and say nothing
        elf.exported_functions(Path(spec.plugin))
    except elf.ElfError as err:
        raise LaunchUsageError(f"--plugin: {err}; give a net plugin, or none") from None
    return str(Path(spec.plugin).resolve())


# Beds: where ranks run


@dataclass(frozen=True)
class Bed:
    """The nodes that a job runs on.

    host_ids: NCCL_HOSTID of each node, "" to leave it. node_names: R2CCL_NODE_NAME of each, ""
    where it has a host name of its own. nics: R2CCL_NICS of each node, "" to
    leave it. socket_ifname: NCCL_SOCKET_IFNAME, "" to leave it. address: of node 0, for
    rendezvous. wrap(node, argv): the command line that runs argv there and dies with its parent.
    ports(n): so many of node 0, the caller's until it closes them.
    """

    nodes: int
    host_ids: list[str]
    node_names: list[str]
    nics: list[str]
    socket_ifname: str
    address: str
    wrap: Callable[[int, list[str]], list[str]]
    ports: Callable[[int], Ports]


def local_bed(spec: LaunchSpec) -> Bed:
    """This machine, as one node or as several on loopback."""
    nodes = spec.emulate_nodes
    if not 1 <= nodes <= 250:
        raise LaunchUsageError(f"--emulate-nodes {nodes}: give 1 to 250")
    if not 0 <= spec.nics <= NICS_MAX:
        raise LaunchUsageError(
            f"--nics {spec.nics}: give 1 to {NICS_MAX}, the most that R2CCL takes of a node"
        )
    nics = spec.nics or (1 if nodes > 1 else 0)

    def wrap(node: int, argv: list[str]) -> list[str]:
        return nsexec.argv_for({"deathsig": int(signal.SIGKILL), "parent": os.getpid()}, argv)

    names = [f"node{i}" if nodes > 1 else "" for i in range(nodes)]
    return Bed(
        nodes=nodes,
        node_names=names,
        host_ids=names,
        nics=[loopback_nics(i, nics) for i in range(nodes)],
        socket_ifname="lo" if nodes > 1 else "",
        address="127.0.0.1",
        wrap=wrap,
        ports=Ports,
    )


def lab_bed(lab: Lab) -> Bed:
    """The nodes of a lab."""
    address = lab.address("n0", "mgmt0")

    def wrap(node: int, argv: list[str]) -> list[str]:
        return nsexec.argv_for(lab.plan(lab.nodes[node], signal.SIGKILL), argv)

    return Bed(
        nodes=len(lab.nodes),
        host_ids=[f"{lab.name}-{n}" for n in lab.nodes],
        node_names=[""] * len(lab.nodes),
        nics=[",".join(lab.nics(n)) for n in lab.nodes],
        socket_ifname="mgmt0",
        address=address,
        wrap=wrap,
        ports=lambda count: lab.call_in("n0", lambda: Ports(count)),
    )


@dataclass(frozen=True)
class Meeting:
    """By what the ranks of one start find each other, and nobody else: the job's name, a token that
    no other start has, how many they are, and two ports of node 0 (torchrun's and ours)."""

    job: str
    token: str
    size: int
    ports: Sequence[int]


def rank_env(
    spec: LaunchSpec,
    bed: Bed,
    place: Place,
    meeting: Meeting,
    natives: Natives,
    base: Mapping[str, str],
    gpus: Sequence[str],
) -> dict[str, str]:
    """The environment of one rank: the caller's, then ours, then --env."""
    env = dict(base)
    env.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(meeting.size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_size),
        MASTER_ADDR=bed.address,
        MASTER_PORT=str(meeting.ports[0]),
        R2CCL_RANK=str(place.rank),
        R2CCL_NRANKS=str(meeting.size),
        R2CCL_RENDEZVOUS=f"{bed.address}:{meeting.ports[1]}",
        R2CCL_RENDEZVOUS_TOKEN=meeting.token,
        R2CCL_JOB=meeting.job,
    )
    if bed.host_ids[place.node]:
        env["NCCL_HOSTID"] = bed.host_ids[place.node]
    if bed.node_names[place.node]:
        env["R2CCL_NODE_NAME"] = bed.node_names[place.node]
    if bed.nics[place.node]:
        env["R2CCL_NICS"] = bed.nics[place.node]
    if bed.socket_ifname:
        env["NCCL_SOCKET_IFNAME"] = bed.socket_ifname
    if natives.nccl_plugin:
        env["NCCL_NET_PLUGIN"] = natives.nccl_plugin
    if natives.nccl_plugin != "none":
        env.update(environment.KEEP_LOADED)
    if natives.nccl_dir:
        env["LD_LIBRARY_PATH"] = _prepend(natives.nccl_dir, base.get("LD_LIBRARY_PATH"))
    if natives.bin_dir:
        env["PATH"] = f"{base.get('PATH', os.defpath)}{os.pathsep}{natives.bin_dir}"
    if gpus and bed.nodes > 1:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    env.update(spec.env)
    jobname.checked(env.get("R2CCL_JOB", ""), "R2CCL_JOB")
    return env


def _prepend(folder: str, path: str | None) -> str:
    return f"{folder}{os.pathsep}{path}" if path else folder


def start(spec: LaunchSpec, *, echo: bool = True) -> Job:
    """Start the ranks. With echo their lines go to our stdout and stderr, and what keeps them from
    using R2CCL as it was meant to our stderr."""
    if not spec.argv:
        raise LaunchUsageError("no command: give it after --")
    for option, seconds in (("--timeout", spec.timeout), ("--grace", spec.grace)):
        if seconds is not None and not 0 <= seconds <= LONGEST_S:
            raise LaunchUsageError(f"{option} {seconds:g}: give up to {LONGEST_S} seconds, a year")
    base = os.environ
    given_as = "--job" if spec.job else "R2CCL_JOB"
    name = jobname.checked(spec.job or base.get("R2CCL_JOB", ""), given_as)
    name = name or f"job-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as undo:
        with _open_bed(spec) as bed:
            places = place_ranks(spec.ranks, bed.nodes, spec.per_node)
            if spec.lab is None and (why := empty_nodes(places, bed.nodes)):
                raise LaunchUsageError(why)
            gpus = visible_gpus(base)
            shares = split_gpus(gpus, max(p.node for p in places) + 1)
            natives = find_natives(spec, len(gpus))
            held = undo.enter_context(bed.ports(2))
            meeting = Meeting(name, secrets.token_hex(16), len(places), held.numbers)
            commands = []
            for place in places:
                env = rank_env(spec, bed, place, meeting, natives, base, shares[place.node])
                commands.append((bed.wrap(place.node, _program(spec.argv, env)), env))
        if echo:
            for warning in warnings(spec, bed, base):
                print(f"warning: {warning}", file=sys.stderr)
        job = Job(spec, name, commands, places, echo, held)
        undo.pop_all()  # they are the job's now
    return job


@contextlib.contextmanager
def _open_bed(spec: LaunchSpec) -> Iterator[Bed]:
    """Where the ranks are to run; errors of a lab in our words."""
    try:
        if spec.lab is None:
            yield local_bed(spec)
            return
        lab = Lab.load(spec.lab)
        try:
            yield lab_bed(lab)
        finally:
            lab.close()
    except LabUsageError as err:
        raise LaunchUsageError(str(err)) from err
    except (LabError, PortsError) as err:
        raise LaunchError(str(err)) from err


def warnings(spec: LaunchSpec, bed: Bed, base: Mapping[str, str]) -> list[str]:
    """What in the caller's environment and --env keeps the ranks from using R2CCL, and what of it
    they do not get."""
    merged = {**base, **spec.env}
    if "NCCL_NET_PLUGIN" in spec.env:  # it was meant
        merged.pop("NCCL_NET_PLUGIN")
    found = [] if spec.plugin == "none" else environment.warnings(merged)
    nics = base.get("R2CCL_NICS", "")
    if nics and bed.nics[0] and "R2CCL_NICS" not in spec.env:
        found.append(
            f"R2CCL_NICS={nics} is replaced by {bed.nics[0]} (of the first node): the NICs are "
            "those of the emulated nodes; --env R2CCL_NICS=... sets it for every rank"
        )
    return found


def _program(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The command with its program found in PATH, before anything is started."""
    found = shutil.which(argv[0], path=env.get("PATH"))
    if found is None:
        why = "no such file" if os.sep in argv[0] else "no such program in PATH"
        if os.sep in argv[0] and os.path.exists(argv[0]):
            why = "a folder" if os.path.isdir(argv[0]) else "not executable (chmod +x?)"
        raise LaunchUsageError(f"cannot run '{argv[0]}': {why}")
    return [found, *argv[1:]]


def run(spec: LaunchSpec) -> int:
    """Start the ranks, wait for them, end them on Ctrl-C, SIGTERM or when the terminal is gone;
    the exit code. A signal that the caller ignores (nohup) stays ignored."""
    with signals_interrupt():
        job: Job | None = None
        try:
            job = start(spec)
            code = job.wait()
        except Interrupted as err:
            with undisturbed():  # the end is bounded: a second Ctrl-C must not leave ranks behind
                if job is not None:
                    job.kill()
                with contextlib.suppress(OSError):  # the terminal may be gone
                    print("launch: interrupted; the job is ended", file=sys.stderr, flush=True)
                return 128 + err.number
    if any(rank.unshown for rank in job.ranks):
        forget_stdout()
    for rank in job.ranks:
        if rank.unshown:
            print(
                f"launch: output of rank {rank.place.rank} is lost: {rank.unshown}", file=sys.stderr
            )
    if job.timed_out:
        print(f"launch: still running after {spec.timeout:g} s, ended", file=sys.stderr)
    elif code != 0:
        first = min((r for r in job.ranks if r.code), key=lambda r: r.ended_at or 0)
        print(f"launch: rank {first.place.rank} ended with {first.code}", file=sys.stderr)
    return code


__all__ = ["DEFAULT_NAME", "Job", "LaunchError", "LaunchSpec", "LaunchUsageError", "run", "start"]
