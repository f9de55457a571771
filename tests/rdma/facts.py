"""What the probe observed, and how two tables of observations are compared.

facts.json holds what soft-RoCE of the kernel named in it does, one object per step. The same steps
over another library must say the same, but for differences that are listed with their reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rdma import beds
from tests.rdma.guest import Guest, GuestError
from tests.rdma.work import Work

FILE = Path(__file__).with_name("facts.json")
PROBE_SECONDS = 240.0
NOT_ASKED = "not asked"

# Of these the fence and the answers to a failure are made; they hold on any kernel.
PROMISES: dict[str, dict[str, object]] = {
    "write_imm": {"memory_right": True, "receiver_opcode": "RECV_RDMA_WITH_IMM"},
    "order": {"receives_in_order": True, "memory_right": True},
    "write_then_send": {"in_order": True, "chunk_complete_when_told": True},
    "read_behind_write": {"read_sees_the_write": True, "all_succeed": True, "in_order": True},
    "drain": {"all_receives_come_back": True, "flushed": 16},
    "drain_marker": {"all_posted_before_come_back": True},
    "late_write_err": {"memory_changed_afterwards": False, "all_drained_each_time": True},
    "late_write_destroy": {"memory_changed_afterwards": False},
    "dereg": {"memory_untouched": True},
    "dereg_busy": {"memory_changed_after_it_returned": False, "refused": False},
    "sender_err": {"all_sends_come_back": True, "sender_never_knows_less": True},
    "down_sender": {"all_receives_come_back": True, "all_sends_come_back": True},
    "down_receiver": {"all_receives_come_back": True, "all_sends_come_back": True},
    "lost_acks": {"memory_right": True, "receiver_completions": 1},
    "short_hole": {"once_and_in_order": True},
    "loss": {"memory_right": True},
}

Steps = dict[str, dict[str, Any]]


def ask(guest: Guest, *steps: str) -> Steps:
    """Runs the probe on rail 0 of a guest that is bed `one`."""
    command = "/r2ccl/probe --a rxe_a0 --b rxe_b0 --act /r2ccl/act"
    done = guest.run(f"{command} {' '.join(steps)}", PROBE_SECONDS)
    found = parse(done.out)
    if done.code != 0:
        raise GuestError(f"probe ended with {done.code} after {list(found)[-1:]}: {done.out}")
    return found


def observe(work: Work, *steps: str) -> tuple[Steps, list[str]]:
    """The probe's steps in a guest of their own, and what ails the kernel afterwards."""
    with beds.one(work.built("probe")) as guest:
        return ask(guest, *steps), guest.illness()


def parse(text: str) -> Steps:
    """The probe's JSON lines by step; a line that was cut off is left out."""
    found: Steps = {}
    for line in text.splitlines():
        if line.startswith('{"step"') and line.endswith("}"):
            value = json.loads(line)
            found[value.pop("step")] = value
    return found


def differences(wanted: Steps, seen: Steps) -> list[str]:
    """One line per fact in which `seen` is not as `wanted`; steps not in `seen` do not count."""
    lines: list[str] = []
    for step in seen:
        left = wanted.get(step, {}).get("facts", {})
        right = seen[step].get("facts", {})
        for name in sorted({*left, *right}):
            want, got = left.get(name), right.get(name)
            if want != got and NOT_ASKED not in (want, got):
                lines.append(f"{step}.{name}: {want!r} expected, {got!r} seen")
    return lines


def broken(seen: Steps) -> list[str]:
    """One line per promise that does not hold, steps that are missing included."""
    return [
        f"{step}.{name} is {seen.get(step, {}).get('facts', {}).get(name)!r}, not {value!r}"
        for step, promises in PROMISES.items()
        for name, value in promises.items()
        if seen.get(step, {}).get("facts", {}).get(name) != value
    ]


def recorded() -> Steps:
    steps = json.loads(FILE.read_text(encoding="utf-8"))["steps"]
    assert isinstance(steps, dict)
    return steps


def versions(work: Work) -> dict[str, str]:
    return {
        "kernel": work.parts.kernel.version,
        "rdma-core": work.parts.version("libibverbs1"),
    }


def advice(changed: list[str], here: dict[str, str], file: Path = FILE) -> str:
    """What differs, and what to do about it: on other versions than those recorded, or on these."""
    then = json.loads(file.read_text(encoding="utf-8"))
    names = ", ".join(f"{name} {here[name]}" for name in here)
    steps = " ".join(sorted({line.split(".")[0] for line in changed}))
    if any(then.get(name) != here[name] for name in here):
        was = ", ".join(f"{name} {then.get(name)}" for name in here)
        what = (
            f"{file.name} was recorded on {was}: see what each line means for docs/rdma.md, run"
            f" `python -m tests.rdma record`, and commit {file.name}"
        )
    else:
        what = (
            f"{file.name} was recorded on these versions: it is chance, or a busy machine; see"
            f" whether `python -m tests.rdma probe {steps}` says so again"
        )
    return "\n".join([f"soft-RoCE answers otherwise than recorded ({names}). {what}", *changed])


def record(work: Work, seen: Steps) -> None:
    """Writes facts.json anew."""
    value = {
        **versions(work),
        "steps": {step: {"facts": seen[step].get("facts", {})} for step in seen},
    }
    FILE.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
