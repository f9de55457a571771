"""The rules of Chrome's trace event format, as far as a written file can break them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
METADATA = {
    "process_name": ("name", str), "thread_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int), "thread_sort_index": ("sort_index", int),
}  # fmt: skip
NEEDED = {  # besides name, pid and tid
    "B": ("cat", "ts"), "E": ("ts",), "X": ("cat", "ts", "dur"), "i": ("cat", "ts", "s"),
    "b": ("cat", "ts", "id2"), "n": ("cat", "ts", "id2"), "e": ("cat", "ts", "id2"),
    "C": ("ts", "args"), "M": ("args",),
}  # fmt: skip


def problems(text: str) -> list[str]:
    """What is wrong with a trace; nothing if it is right."""

    def no_constant(word: str) -> float:
        raise ValueError(f"{word} is no JSON")

    try:
        found = json.loads(text, parse_constant=no_constant)
    except ValueError as err:
        return [str(err)]
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        return ["no object with a list `traceEvents`"]
    said = []
    if found.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        said.append("displayTimeUnit is ms or ns")
    rows = found["traceEvents"]
    said += [f"event {i}: {text}" for i, row in enumerate(rows) for text in _fields(row)]
    if said:
        return said
    timed = sorted((row for row in rows if "ts" in row), key=lambda row: row["ts"])
    said += [*_names(rows), *_counters(rows)]
    said += _spans(timed, "B", "E", lambda row: (row["pid"], row["tid"]))
    said += _spans(timed, "b", "e", lambda row: (row["pid"], row["cat"], row["id2"]["local"]))
    return said


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _local(value: object) -> object:
    return value.get("local") if isinstance(value, dict) and set(value) == {"local"} else None


def _fields(row: Row) -> Iterator[str]:
    """What one event has to have."""
    kind = row.get("ph")
    if kind not in NEEDED:
        yield f"ph {kind!r} is not known"
        return
    absent = {"name", "pid", "tid", *NEEDED[kind]} - set(row)
    if absent:
        yield f"{kind} lacks {', '.join(sorted(absent))}"
        return
    if not row["name"] or not isinstance(row["name"], str):
        yield "name is no text"
    if not _whole(row["pid"]) or not _whole(row["tid"]):
        yield "pid and tid are whole numbers"
    for word in ("ts", "dur"):
        if word in row and not (_number(row[word]) and row[word] >= 0):
            yield f"{word} is a time of 0 or more"
    if "cat" in row and (not row["cat"] or not isinstance(row["cat"], str)):
        yield "cat is no text"
    if "id2" in row and not isinstance(_local(row["id2"]), str):
        yield "id2.local is a text: without it Perfetto shows the span beside all processes"
    if not isinstance(row.get("args", {}), dict):
        yield "args is no object"
    elif kind == "C" and not (row["args"] and all(map(_number, row["args"].values()))):
        yield "a counter's args are numbers"
    elif kind == "M":
        key, sort = METADATA.get(row["name"], ("", str))
        if not key or set(row["args"]) != {key} or not isinstance(row["args"][key], sort):
            yield f"no metadata event: {row['name']} {row['args']}"
    if kind == "i" and row["s"] not in ("g", "p", "t"):
        yield "s is g, p or t"


def _names(rows: list[Row]) -> Iterator[str]:
    """Each process, and each thread with events of its own, has one name."""
    named = [(row["pid"], row["tid"], row["name"]) for row in rows if row["ph"] == "M"]
    if len(named) != len(set(named)):
        yield "a name is given twice"
    processes = {pid for pid, _, name in named if name == "process_name"}
    threads = {(pid, tid) for pid, tid, name in named if name == "thread_name"}
    for pid in sorted({row["pid"] for row in rows} - processes):
        yield f"process {pid} has no name"
    used = {(row["pid"], row["tid"]) for row in rows if row["ph"] not in ("M", "C")}
    for pid, tid in sorted(used - threads):
        yield f"thread {tid} of process {pid} has no name"


def _counters(rows: list[Row]) -> Iterator[str]:
    """A counter's samples come in the order of time, one at a time, with the same args."""
    last: dict[tuple[int, str], Row] = {}
    for row in rows:
        if row["ph"] != "C":
            continue
        before = last.get((row["pid"], row["name"]))
        if before and row["ts"] <= before["ts"]:
            yield f"counter {row['name']}: {row['ts']} comes after {before['ts']}"
        if before and set(row["args"]) != set(before["args"]):
            yield f"counter {row['name']}: its args change"
        last[row["pid"], row["name"]] = row


def _spans(timed: list[Row], begin: str, end: str, place: Callable[[Row], Any]) -> Iterator[str]:
    """What begins last in a place ends first, and everything ends."""
    open_: dict[Any, list[str]] = {}
    for row in timed:
        if row["ph"] == begin:
            open_.setdefault(place(row), []).append(row["name"])
        elif row["ph"] == end:
            stack = open_.get(place(row)) or [""]
            if stack.pop() != row["name"]:
                yield f"{row['name']} ends, and is not what has begun last"
    yield from (f"{name} does not end" for stack in open_.values() for name in stack)
