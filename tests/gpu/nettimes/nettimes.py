"""What nettimes.c noted: for each size of message, how long it took and who waited for whom.

    python3 tests/gpu/nettimes/nettimes.py DIR [--skip 0.33]

A line for each size, the most frequent first: how many; microseconds from the later one of isend
and irecv until the receiver's test said done (10th, 50th and 90th percentile); the share whose
receive was posted after the send; microseconds from isend until the sender's test said done, of
the calls of isend and irecv (medians). The first third of each connection's messages is left out
(warm-up).
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NOTE = struct.Struct("<QQII")  # struct note


class BadNotes(Exception):
    """The directory has nothing to read; the text says what is missing."""


@dataclass
class Sizes:
    """Of the messages of one size, in microseconds."""

    took: list[float] = field(default_factory=list)
    late: int = 0
    send_done: list[float] = field(default_factory=list)
    isend: list[float] = field(default_factory=list)
    irecv: list[float] = field(default_factory=list)


def read(path: Path) -> list[tuple[int, ...]]:
    """Notes of one side; a rest that is none is left out."""
    data = path.read_bytes()
    return list(NOTE.iter_unpack(data[: len(data) // NOTE.size * NOTE.size]))


def gather(where: Path, skip: float) -> tuple[dict[int, Sizes], int]:
    """By size, and how many connections have both sides' notes."""
    sides: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in where.glob("*.*.*"):
        connection, side, _ = path.name.split(".")
        sides[connection][side] = path
    both = [x for x in sides.values() if len(x) == 2]
    if not both:
        raise BadNotes(
            f"{where}: no connection of which both sides are noted; the job has to close "
            "its communicators, with NETTIMES_OUT set to this directory on all ranks"
        )
    found: dict[int, Sizes] = defaultdict(Sizes)
    for x in both:
        pairs = list(zip(read(x["send"]), read(x["recv"]), strict=False))
        for (posted, done, size, call), (r_posted, r_done, _, r_call) in pairs[
            int(len(pairs) * skip) :
        ]:
            if not (done and r_done):
                continue
            of = found[size]
            of.took.append((r_done - max(posted, r_posted)) / 1e3)
            of.late += r_posted > posted
            of.send_done.append((done - posted) / 1e3)
            of.isend.append(call / 1e3)
            of.irecv.append(r_call / 1e3)
    return found, len(both)


def at(values: Sequence[float], share: float) -> float:
    """The value below which that share of them is."""
    return sorted(values)[int((len(values) - 1) * share)]


def table(found: dict[int, Sizes]) -> list[str]:
    """Lines of text."""
    lines = [
        f"{'bytes':>9} {'messages':>9} {'p10':>8} {'p50':>8} {'p90':>8} {'late':>5} "
        f"{'sent':>8} {'isend':>7} {'irecv':>7}"
    ]
    for size, of in sorted(found.items(), key=lambda x: -len(x[1].took)):
        lines.append(
            f"{size:>9} {len(of.took):>9} {at(of.took, 0.1):>8.1f} {at(of.took, 0.5):>8.1f} "
            f"{at(of.took, 0.9):>8.1f} {of.late / len(of.took):>5.2f} "
            f"{at(of.send_done, 0.5):>8.1f} {at(of.isend, 0.5):>7.2f} {at(of.irecv, 0.5):>7.2f}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1: nothing to read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument(
        "--skip",
        type=float,
        default=0.33,
        help="share of each connection's messages, the first ones, that is left out",
    )
    opts = parser.parse_args(argv)
    if not 0 <= opts.skip < 1:
        parser.error(f"--skip {opts.skip}: give a share, 0 to less than 1")
    try:
        found, connections = gather(opts.dir, opts.skip)
    except BadNotes as err:
        print(f"nettimes: {err}", file=sys.stderr)
        return 1
    print(f"{connections} connections; us")
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
