"""Faults as people write them: blackhole, error, slow=100mbit, loss=1%; and files of them.

A file has one rule per line, in the words of fail-nic:

    # NIC  KIND        options
    eth1   blackhole   direction=rx for=500ms
    eth2   slow=100mbit after=1G at=2s
    eth3   error       ops=1000
    eth1   recover     at=5s

`at` is when the rule is applied, counted from the start; rules without one come first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from r2ccl_ctl.control import Command
from r2ccl_ctl.errors import R2UsageError, plain
from r2ccl_ctl.units import parse_duration, parse_percent, parse_rate, parse_size

KINDS = "blackhole|error|slow=RATE|loss=PCT"
KINDS_HELP = (
    "blackhole: bytes vanish, nobody is told; error: connections are reset; "
    "slow: at most RATE (100mbit, 10MB/s); loss: PCT of pieces of 64 KiB come 200 ms late."
)
DIRECTIONS = ("tx", "rx", "both")
KEYS = ("nic", "kind", "direction", "after", "ops", "for", "at")
MAX_RULES = 10_000
MAX_AT_S = 24 * 3600.0


def parse_kind(text: str) -> tuple[str, int, int]:
    """(kind, bytes per second of slow, parts per million of loss). segment.h says at `r2_seg_fault`
    what a new kind needs."""
    kind, equals, value = text.partition("=")
    if kind in ("blackhole", "error") and not equals:
        return kind, 0, 0
    if kind == "slow" and value:
        return kind, parse_rate(value), 0
    if kind == "loss" and value:
        return kind, 0, parse_percent(value)
    raise R2UsageError(
        f"'{text}' is no kind of fault: give blackhole, error, slow=RATE (slow=100mbit) or "
        "loss=PCT (loss=1)"
    )


def parse_ops(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
        raise R2UsageError(f"ops={text}: give a number of sends and receives, at least 1")
    return int(text)


def parse_for(text: str) -> int:
    """Milliseconds of --for."""
    for_ms = round(parse_duration(text) * 1000)
    if for_ms < 1:
        raise R2UsageError(f"'{text}' is too short: at least 1ms")
    return for_ms


@dataclass(frozen=True)
class Rule:
    """One line: what to do to a NIC, `at_s` seconds after the start. No kind: recover it."""

    nic: str
    kind: str
    direction: str = "both"
    after: str | None = None
    ops: str | None = None
    duration: str | None = None
    at_s: float = 0.0
    line: int = 0

    def command(self, nic: str) -> Command:
        """For a process that calls the NIC so."""
        if self.kind == "recover":
            return Command("recover-nic", nic=nic)
        fault, rate, loss_ppm = parse_kind(self.kind)
        return Command(
            "fail-nic",
            nic=nic,
            fault=fault,
            direction=self.direction,
            rate=rate,
            loss_ppm=loss_ppm,
            after_bytes=parse_size(self.after) if self.after else 0,
            after_ops=parse_ops(self.ops) if self.ops else 0,
            for_ms=parse_for(self.duration) if self.duration else 0,
        )

    def __str__(self) -> str:
        more = {
            "direction": self.direction,
            "after": self.after,
            "ops": self.ops,
            "for": self.duration,
        }
        words = [f"{k}={v}" for k, v in more.items() if v and self.kind != "recover"]
        return plain(" ".join([self.nic, self.kind, *words]))


def parse_rule(text: str, line: int = 0) -> Rule:
    """`NIC KIND [direction=D] [after=BYTES] [ops=N] [for=DURATION] [at=DURATION]`, in any order
    after the first two; these may be written as nic= and kind=, too."""
    words = text.split()
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            if place > 1 or KEYS[place] in found:
                raise R2UsageError(
                    f"'{word}' is none of {', '.join(f'{key}=' for key in KEYS)}: a rule is "
                    "NIC KIND [direction=] [after=] [ops=] [for=] [at=]"
                )
            key, value = KEYS[place], word
        if key in found:
            raise R2UsageError(f"'{word}': {key} is given twice")
        if not value:
            raise R2UsageError(f"'{word}': {key} is empty")
        found[key] = value
    if "nic" not in found or "kind" not in found:
        raise R2UsageError(f"'{text}' lacks a NIC or a kind of fault")
    direction = found.get("direction", "both")
    if direction not in DIRECTIONS:
        raise R2UsageError(f"direction={direction}: give {', '.join(DIRECTIONS)}")
    at_s = parse_duration(found["at"]) if "at" in found else 0.0
    if at_s > MAX_AT_S:
        raise R2UsageError(f"at={found['at']}: at most 24h")
    extra = [key for key in ("direction", "after", "ops", "for") if key in found]
    if found["kind"] == "recover" and extra:
        raise R2UsageError(f"'{text}': recover takes no {extra[0]}=")
    rule = Rule(
        found["nic"],
        found["kind"],
        direction,
        found.get("after"),
        found.get("ops"),
        found.get("for"),
        at_s,
        line,
    )
    rule.command(rule.nic)  # kind, sizes and times are looked at before anything is done
    return rule


def parse_rules(lines: Iterable[str], name: str = "rules") -> list[Rule]:
    """The rules of a file, in the order in which they are to be applied."""
    rules: list[Rule] = []
    for number, line in enumerate(lines, 1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        try:
            rules.append(parse_rule(text, number))
        except R2UsageError as err:
            raise R2UsageError(f"{name}:{number}: {err}") from err
        if len(rules) > MAX_RULES:
            raise R2UsageError(f"{name}: more than {MAX_RULES} rules")
    if not rules:
        raise R2UsageError(f"{name} has no rules: a line is for example 'eth1 blackhole for=1s'")
    return sorted(rules, key=lambda rule: rule.at_s)


def read_rules(path: Path) -> list[Rule]:
    """Of a file; `-` is standard input."""
    stdin = str(path) == "-"
    name = "standard input" if stdin else str(path)
    if stdin and sys.stdin is None:
        raise R2UsageError("standard input is closed")
    try:
        data = sys.stdin.buffer.read() if stdin else path.read_bytes()
        text = data.decode("utf-8")
    except OSError as err:
        raise R2UsageError(f"{name} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise R2UsageError(f"{name} is no text in UTF-8: {err}") from err
    return parse_rules(text.splitlines(), name)
