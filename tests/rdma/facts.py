"""What the probe observed, and how two tables of observations are compared.

facts.json holds what soft-RoCE of the kernel named in it does, one object per step. The same steps
over another library must say the same, but for differences that are listed with their reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rdma import beds
from tests.rdma.guest import GuestError
from tests.rdma.work import Work

FILE = Path(__file__).with_name("facts.json")
PROBE_SECONDS = 240.0
NOT_ASKED = "not asked"

Steps = dict[str, dict[str, Any]]


def observe(work: Work, *steps: str) -> tuple[Steps, list[str]]:
    """Runs the probe on rail 0 of bed `one`. Its steps, and what ails the kernel afterwards."""
    with beds.one(work.built("probe")) as guest:
        command = "/r2ccl/probe --a rxe_a0 --b rxe_b0 --act /r2ccl/act"
        done = guest.run(f"{command} {' '.join(steps)}", PROBE_SECONDS)
        found = parse(done.out)
        if done.code != 0:
            raise GuestError(f"probe ended with {done.code} after {list(found)[-1:]}: {done.out}")
        return found, guest.illness()


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


def recorded() -> Steps:
    steps = json.loads(FILE.read_text(encoding="utf-8"))["steps"]
    assert isinstance(steps, dict)
    return steps


def record(work: Work, seen: Steps) -> None:
    """Writes facts.json anew."""
    value = {
        "kernel": work.parts.kernel.version,
        "rdma-core": work.parts.version("libibverbs1"),
        "steps": {step: {"facts": seen[step].get("facts", {})} for step in seen},
    }
    FILE.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
