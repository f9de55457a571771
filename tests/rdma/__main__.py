"""python -m tests.rdma COMMAND: the RDMA guest (rung 5).

lane [pytest options]   what `make test-rdma` runs; exit code 77 where a part is missing
check                   says whether everything that a guest is made of is there
probe [STEP...]         what soft-RoCE does; one JSON line per step
record                  writes tests/rdma/facts.json anew from the probe; says what changed
run COMMAND             boots two emulated nodes in one guest and runs a shell command there
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.rdma import beds, facts
from tests.rdma.guest import GuestError
from tests.rdma.parts import ROOT, Missing
from tests.rdma.work import Work, prepare

SKIPPED = 77


def probe(work: Work, steps: list[str]) -> int:
    seen, ill = facts.observe(work, *steps)
    for step, value in seen.items():
        print(json.dumps({"step": step, **value}))
    for line in ill:
        print(f"kernel: {line}", file=sys.stderr)
    return 0


def record(work: Work) -> int:
    seen, _ = facts.observe(work)
    broken = facts.broken(seen)
    if broken:
        print("rdma: facts.json stays: what the transport is built on does not hold:")
        print("\n".join(broken))
        return 1
    changed = facts.differences(facts.recorded(), seen)
    facts.record(work, seen)
    print("\n".join(changed) or "the answers are those that were recorded")
    return 0


def run(work: Work, command: str) -> int:
    with beds.one(work.built("run")) as guest:
        done = guest.run(command, 300)
        print(done.out, end="")
        for line in guest.illness():
            print(f"kernel: {line}", file=sys.stderr)
        return done.code


def lane(options: list[str]) -> int:
    words = [sys.executable, "-m", "pytest", "tests/rdma", *options]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


def main(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command not in ("lane", "check", "probe", "record", "run") or command == "run" and not rest:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        work = prepare()
        if command == "probe":
            return probe(work, rest)
        if command == "record":
            return record(work)
        if command == "run":
            return run(work, " ".join(rest))
        if command == "lane":
            return lane(rest)
        print(f"kernel {work.parts.kernel.version}, rdma-core {work.parts.version('libibverbs1')}")
    except Missing as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    except GuestError as error:
        print(f"rdma: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
