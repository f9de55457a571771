"""docs/json.md names every field that a command prints with --json, and no other, with its type.
Rung 3: commands against C programs with control segments, in which what these leave empty is filled
in. It cannot prove that a meaning is right, and libraries and labs are made up here."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, Build
from segment_bed import StartWriter, Writer, start_writer
from test_cli import built, call, json_lines, load_settings, nobody, plugin, start_writer_outside

from r2ccl_ctl import gpus, hostnics, nodeseg, paths, shim
from r2ccl_ctl.cli import docs, drain_cmds, fault_cmds, lab_cmds, read_cmds
from r2ccl_ctl.cli.act_cmds import ask
from r2ccl_ctl.cli.main import main
from r2ccl_ctl.control import Answer
from r2ccl_ctl.doctor import local
from r2ccl_ctl.gpus import Gpu
from r2ccl_ctl.hostnics import HostNic, HostNics
from r2ccl_ctl.lab.core import Lab
from r2ccl_ctl.lab.spec import LabSpec
from r2ccl_ctl.lab.state import Cut, LabState
from r2ccl_ctl.nodeseg import NodeRow, NodeSegment
from r2ccl_ctl.segment import Segment, layout

__all__ = ["built", "nobody", "start_writer"]

PAGE = ROOT / "docs" / "json.md"
BEHIND = "127.0.2.1"
ASKED = "plan on, plan off, collectives on, collectives off"

# The page


@dataclass(frozen=True)
class Field:
    """A row of a table. kind: its type without the unit."""

    kind: str
    or_null: bool
    meaning: str


Tables = dict[str, dict[str, Field]]


def read_tables(text: str) -> Tables:
    """Heading -> field -> row; rows "fields of [x](#x)" are replaced by those of x."""
    raw: dict[str, list[list[str]]] = {}
    for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        if lines:
            assert heading not in raw, f"'{heading}' stands there twice"
            assert lines[0] == "| field | type | meaning |", heading
            raw[heading] = [[c.strip() for c in line[1:-1].split("|")] for line in lines[2:]]

    def fields(heading: str) -> Iterator[tuple[str, Field]]:
        for name, kind, meaning in raw[heading]:
            if name.startswith("fields of "):
                yield from fields(linked(name)[0])
                continue
            names = re.findall(r"`(\w+)`", name)
            assert names and meaning, f"{heading}: {name}"
            plain = kind.partition(", ")[0]
            field = Field(plain.removesuffix(" or null"), plain.endswith(" or null"), meaning)
            yield from ((one, field) for one in names)

    found: Tables = {}
    for heading in raw:
        found[heading] = {}
        for name, field in fields(heading):
            assert name not in found[heading], f"{heading}: {name} stands there twice"
            found[heading][name] = field
    return found


def linked(cell: str) -> list[str]:
    """The headings that a cell links to."""
    links = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", cell)
    for heading, anchor in links:
        assert anchor == docs.anchor(heading), f"{heading}: its anchor is {docs.anchor(heading)}"
    return [heading for heading, _ in links]


TABLES = read_tables(PAGE.read_text(encoding="utf-8"))


def commands_of(heading: str) -> list[str]:
    """ "plan on, plan off" -> both; with the options that stand there."""
    return heading.partition(":")[0].split(", ")


# Comparing

TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z)?")
PLAIN: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "time": lambda value: isinstance(value, str) and TIME.fullmatch(value) is not None,
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
}


def compare(value: Any, heading: str, tables: Tables, seen: set[str]) -> list[str]:
    """What is wrong with an object that a table describes; `seen` gets the tables that were used
    for it."""
    table = tables[heading]
    seen.add(heading)
    wrong = [f"{heading}: {name} is not named" for name in value if name not in table]
    wrong += [f"{heading}: {name} does not exist" for name in table if name not in value]
    for name in [name for name in table if name in value]:
        wrong += compare_field(value[name], table[name], f"{heading}: {name}", tables, seen)
    return wrong


def compare_field(
    value: Any, field: Field, place: str, tables: Tables, seen: set[str]
) -> list[str]:
    if value is None:
        return [] if field.or_null else [f"{place} is null"]
    if field.kind == "map to text":
        return [] if all(PLAIN["text"](one) for one in value.values()) else [f"{place}: {value}"]
    of_list = field.kind.removeprefix("list of ")
    if isinstance(value, list) != (of_list != field.kind):
        return [f"{place} is no {field.kind}: {value}"]
    wrong = []
    for one in value if isinstance(value, list) else [value]:
        there = linked(field.kind)
        if there:
            wrong += compare(one, nearest(one, there, tables), tables, seen)
        elif not PLAIN[of_list](one):
            wrong.append(f"{place} is no {of_list}: {one!r}")
    return wrong


def nearest(value: dict[str, Any], headings: Sequence[str], tables: Tables) -> str:
    """Of several kinds of objects the one that it is like most."""
    return min(headings, key=lambda heading: len(set(tables[heading]) ^ set(value)))


def reachable(heading: str, tables: Tables) -> set[str]:
    """The tables of all that may stand in such an object."""
    found, left = {heading}, [heading]
    while left:
        for field in tables[left.pop()].values():
            more = [name for name in linked(field.kind) if name not in found]
            found.update(more)
            left += more
    return found


def check(heading: str, *printed: dict[str, Any]) -> None:
    """What a command printed is as its section says, and there was one of each kind of object."""
    assert printed, heading
    seen: set[str] = set()
    wrong = [line for one in printed for line in compare(one, heading, TABLES, seen)]
    assert not wrong, "\n".join(["docs/json.md and the command differ:", *sorted(set(wrong))])
    assert seen == reachable(heading, TABLES), "no such object was printed"


# A segment with something in every table


def put(segment: Segment, at: int, struct_name: str, **values: int | str) -> None:
    """Into the struct that lies there."""
    fields = dict(layout().ffi.typeof(f"struct {struct_name}").fields)
    for name, value in values.items():
        size = layout().ffi.sizeof(fields[name].type)
        raw = value.encode() if isinstance(value, str) else value.to_bytes(size, "little")
        segment.write(at + layout().offset(struct_name, name), raw)


def put_first(segment: Segment, table: str, **values: int | str) -> None:
    """Into the first row of "nics", "peers" or "comms"."""
    put(segment, segment.tables[table].offset, f"r2_seg_{table[:-1]}", **values)


def add_comm(segment: Segment) -> None:
    now = time.monotonic_ns()
    put_first(segment, "comms", id=7, state=2, ranks=2, op=1, op_mono_ns=now, used=1)
    lay, header = layout(), segment.header()
    for first in ("tables", "more"):
        for number, row in enumerate(header[first]):
            if row["kind"] == lay.kinds["comms"]:
                at = lay.offset("r2_seg_header", first) + number * lay.size("r2_seg_table")
                put(segment, at, "r2_seg_table", high=1)


@pytest.fixture
def full(start_writer: StartWriter) -> Writer:
    """Its NIC has a fault, so that something waits; it has a communicator, RDMA and a PCI path."""
    writer = start_writer("--rank", "1")
    call("fail-nic", BEHIND, "--pid", str(writer.pid))
    now = time.monotonic_ns()
    with writer.rows() as segment:
        since, until = now - 18 * 10**9, now + 42 * 10**9
        put_first(segment, "peers", waits_mono_ns=since, gives_up_mono_ns=until)
        path = "/sys/devices/pci0000:15/0000:15:01.0"
        put_first(segment, "nics", rdma_device="mlx5_0", pci_path=path)
        add_comm(segment)
    return writer


def printed(*words: str, code: int = 0) -> dict[str, Any]:
    found = json.loads(call(*words, "--json", code=code).stdout)
    assert isinstance(found, dict)
    return found


# The page and the tool


def test_every_command_with_json_has_a_section() -> None:
    """But for demo and validate, whose pages have it."""
    names = [name.removeprefix("r2ccl-ctl ") for name, command in docs.walk(main, "r2ccl-ctl")
             if any("--json" in option.opts for option in command.params)]  # fmt: skip
    sections = PAGE.read_text(encoding="utf-8").partition("## Objects\n")[0]
    headings = [heading for heading in TABLES if f"\n## {heading}\n" in sections]
    told = {word.partition(" --")[0] for heading in headings for word in commands_of(heading)}
    assert told - {"Errors"} == set(names) - {"demo", "validate"}
    known = dict(docs.walk(main, "r2ccl-ctl"))
    for heading in set(headings) - {"Errors"}:
        for word in commands_of(heading):
            name, dashes, option = word.partition(" --")
            options = [opt for param in known[f"r2ccl-ctl {name}"].params for opt in param.opts]
            assert not dashes or f"--{option}" in options, word


def test_every_object_belongs_to_a_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    objects = text.partition("## Objects\n")[2]
    commands = [heading for heading in TABLES if f"\n### {heading}\n" not in objects]
    used = set().union(*(reachable(heading, TABLES) for heading in commands))
    included = re.findall(r"^\| fields of (\[.*?\)) \|", text, re.MULTILINE)
    assert set(TABLES) == used | {linked(cell)[0] for cell in included}


@pytest.mark.parametrize(
    ("heading", "field", "enum", "prefix"),
    [
        ("NIC", "state", "nic_state", "NIC"), ("NIC", "link", "link", "LINK"),
        ("peer", "state", "peer_state", "PEER"), ("peer", "direction", "direction", "DIR"),
        ("peer", "waits_for", "waits_for", "WAITS_FOR"), ("path", "via", "via", "VIA"),
        ("path", "state", "path_state", "PATH"), ("communicator", "state", "comm_state", "COMM"),
        ("communicator", "op", "collective", "COLL"),
        ("status of a process", "missing_signals", "missing", "MISSING"),
    ],
)  # fmt: skip
def test_every_word_of_a_state_is_named(heading: str, field: str, enum: str, prefix: str) -> None:
    meaning = TABLES[heading][field].meaning
    words = layout().enum(f"r2_seg_{enum}", f"R2_SEG_{prefix}_").values()
    assert not [word for word in words if f"`{word}`" not in meaning]


def test_words_of_verdicts_and_settings_are_named() -> None:
    for heading, field, words in (
        ("node verdict", "verdict", nodeseg.VERDICTS), ("node verdict", "state", nodeseg.STATES),
        ("GPU", "distance", gpus.DISTANCES),
        ("setting", "type", {setting.type for setting in load_settings()}),
    ):  # fmt: skip
        assert not [word for word in words if f"`{word}`" not in TABLES[heading][field].meaning]


# Commands that look


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's process."""
    monkeypatch.setattr(read_cmds, "unreadable", lambda *, gone: {4242: 1000})


# A host that is this one: what ssh would start there is started here.
HERE = ("--hosts", "here", "--via", "sh -c 'eval \"$1\"'")


def test_ps(full: Writer, others: None) -> None:
    check("ps", printed("ps", "--job", full.job), printed("ps", "--job", full.job, *HERE))


def test_ps_of_what_cannot_be_read(nobody: Path, others: None) -> None:
    (nobody / "r2ccl.0.1.2.3").write_bytes(b"x" * 4096)
    document = printed("ps", "--all")
    assert document["processes"][0]["state"] == "damaged"
    assert not compare(document, "ps", TABLES, set())


def test_communicators(full: Writer, others: None) -> None:
    job = ("--job", full.job)
    documents = printed("ps", "--comms", *job), printed("ps", "--comms", *job, *HERE)
    check("ps --comms, plan show", *documents, printed("plan", "show", *job))


def test_status(full: Writer) -> None:
    document = printed("status", "--job", full.job)
    assert document["processes"][0]["communicators"][0]["op_age_s"] is not None
    assert {nic["rdma_device"] for nic in document["processes"][0]["nics"]} == {"", "mlx5_0"}
    check("status", document, printed("status", "--job", full.job, *HERE))


def test_status_of_what_is_gone(full: Writer) -> None:
    """It waits for nothing any more."""
    full.kill()
    document = printed("status", "--pid", str(full.pid))
    assert not compare(document, "status", TABLES, set())
    assert document["processes"][0]["local_pid"] is None


def test_a_silent_rank(full: Writer) -> None:
    """An entry of `waits` without a NIC has all fields, too."""
    os.kill(full.pid, signal.SIGSTOP)
    with Segment(full.path, write=True) as segment:
        put_first(segment, "peers", waits_mono_ns=0)
        put_first(segment, "comms", op_mono_ns=0)
        put(segment, 0, "r2_seg_header", alive_mono_ns=time.monotonic_ns() - 5 * 10**9)
    document = printed("ps", "--comms", "--pid", str(full.pid))
    (row,) = document["communicators"]
    assert row["op_age_s"] is None and row["silent_s"] >= 5
    assert [(wait["kind"], wait["peer"]) for wait in row["waits"]] == [("silent", None)]
    assert not compare(document, "ps --comms, plan show", TABLES, set())


def test_nics(full: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [Gpu(0, "H100", "0000:18:00.0", "/sys/devices/pci0000:15/0000:15:02.0", 0)]
    row = NodeRow("eth0", "10.0.0.1", "failed", "local NIC", ["10.0.0.2"], "said so", 9, "aa", 1,
                  time.monotonic_ns(), time.time_ns())  # fmt: skip
    shared = NodeSegment("r2ccl-node.0.1.0", Path("/dev/shm"), 0, "node-a", 1, True, 1, [row])
    monkeypatch.setattr(gpus, "list_gpus", lambda: there)
    monkeypatch.setattr(nodeseg, "list_segments", lambda: [shared])
    check("nics", printed("nics", "--job", full.job))


def test_config(monkeypatch: pytest.MonkeyPatch) -> None:
    load_settings()
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(plugin().parent))
    check("config explain, config list", printed("config", "explain", "chunk"))
    check("doctor, config check", printed("config", "check"))


@pytest.mark.usefixtures("build")
def test_topo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(plugin().parent))
    nics = tuple(
        HostNic(f"eth{i}", f"eth{i}", "10.0.0.1", 24, 1500, 0, 0, "", "", 0, 100, i, True, False)
        for i in range(2)
    )
    monkeypatch.setattr(hostnics, "load", lambda: HostNics(nics, {}, ""))
    monkeypatch.setattr(gpus, "list_gpus", lambda: [Gpu(0, "H100", "0000:18:00.0", "", 0)])
    check("topo", printed("topo"))


@pytest.mark.usefixtures("build")
def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "load", lambda: HostNics((), {}, "none"))
    check("doctor, config check", printed("doctor", code=2))


def test_journal(full: Writer) -> None:
    check("journal", *json_lines(call("journal", "--job", full.job, "--json").stdout))


def test_plan_predict(build: Build) -> None:
    words = ["plan", "predict", "--nodes", "4", "--nics", "2", "--rate", "4gbit"]
    documents = [printed(*words), printed(*words, "--fail", "1:0")]
    assert [document["chosen"] for document in documents] == ["stock", "direct"]
    check("plan predict", *documents)


def test_simulate(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(build.path))
    if not (paths.native_dir() / "r2ccl_simulate").is_file():
        pytest.skip("build/r2ccl_simulate is missing: SimGrid was not there (libsimgrid-dev)")
    words = ["simulate", "--nodes", "4", "--patterns", "1", "--rails"]
    check("simulate", printed(*words), printed(*words, "--model", "7B"))


# Commands that change something


def test_answers(full: Writer) -> None:
    """Also of a process that refuses."""
    job = ["--job", full.job]
    for words, code in (
        (["fail-nic", "127.0.1.1"], 0), (["recover-nic", "127.0.1.1"], 0),
        (["set-weight", "127.0.1.1", "50"], 0), (["drain-nic", "127.0.1.1"], 1),
        (["drain-nic", "127.0.1.1", "--wait"], 1), (["undrain-nic", "127.0.1.1"], 1),
    ):  # fmt: skip
        document = printed(*words, *job, code=code)
        heading = "fail-nic, recover-nic, drain-nic, undrain-nic, set-weight"
        assert not compare(document, heading, TABLES, set())
        assert [answer["code"] < 0 for answer in document["answers"]] == [bool(code)]


def test_drain_with_wait(full: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = [("127.0.1.1", Answer(full.process, True, ""))]
    monkeypatch.setattr(drain_cmds, "ask", lambda *words: agreed)
    words = ["drain-nic", "127.0.1.1", "--wait", "--job", full.job]
    check("drain-nic --wait", printed(*words, code=1))


def test_plan(full: Writer) -> None:
    for word in ("off", "on"):
        check(ASKED, printed("plan", word, "--job", full.job))


def test_collectives(full: Writer) -> None:
    for word in ("on", "off"):
        check(ASKED, printed("collectives", word, "--job", full.job))
    check("collectives show", printed("collectives", "show", "--job", full.job))


def test_faults_apply(full: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rule is interrupted while it is under way."""
    rules = tmp_path / "rules"
    rules.write_text("127.0.1.1 slow=1gbit after=1M for=1h\n127.0.1.1 error\n")
    words = ["faults", "apply", str(rules), "--job", full.job, "--json"]
    for line in json_lines(call(*words, "--check").stdout):
        check("faults apply --check", line)
    asked = []

    def interrupted(*more: Any) -> Any:
        asked.append(more)
        if len(asked) > 1:
            raise KeyboardInterrupt
        return ask(*more)

    monkeypatch.setattr(fault_cmds, "ask", interrupted)
    first, end = json_lines(call(*words, code=130).stdout)
    check("faults apply", first)
    assert len(end["standing"]) == len(end["under_way"]) == 1
    check("faults apply: the end", end)


def test_gc(start_writer: StartWriter, nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = start_writer_outside(start_writer, monkeypatch)
    (nobody / writer.path.name).write_bytes(writer.path.read_bytes())
    (nobody / "r2ccl-node.0.1.00000000").write_bytes(b"x" * 4096)
    for words in (["--dry-run"], []):
        document = printed("gc", "--all", *words)
        assert [len(row) > 5 for row in document["removed"]] == [False, True]
        check("gc", document)


# Commands around a job


def test_config_list(monkeypatch: pytest.MonkeyPatch) -> None:
    load_settings()
    monkeypatch.setenv("R2CCL_BUILD_DIR", str(plugin().parent))
    check("config explain, config list", printed("config", "list"))


def test_env(built: Path) -> None:
    check("env", printed("env"))


def test_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "lacking", lambda nccl: ["ncclNew"])
    check("shim lacks", printed("shim", "lacks", "--nccl", "libnccl.so.2"))
    check("shim check", printed("shim", "check", "--pid", str(os.getpid())))


def made_up_lab() -> Lab:
    """Lab.status asks the kernel through these; without a lab they answer for it."""
    state = LabState.fresh(LabSpec(nodes=2, nics=(1,), rates=(None,), name="made-up"))
    state.nics[0]["nic0"].link = "carrier"
    state.cuts = {Cut("nic0", 0, 1)}
    lab = Lab.__new__(Lab)
    lab.__dict__.update(
        spec=state.spec,
        _store=SimpleNamespace(load=lambda: state),
        _fabric=SimpleNamespace(links=lambda where: {}),
        _dir=SimpleNamespace(pids=lambda names: [7]),
        _call=lambda function: function(),
        close=lambda: None,
    )
    return lab


def test_lab_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_cmds, "_load", lambda name: made_up_lab())
    document = printed("lab", "status")
    assert document["nodes"][0]["nics"][1]["faults"] == ["carrier-down"]
    check("lab status", document)


@pytest.mark.parametrize(("words", "code"), [("status --job nosuch", 1), ("nics --nosuch", 2)])
def test_errors(words: str, code: int) -> None:
    check("Errors", printed(*words.split(), code=code))
