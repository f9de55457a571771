"""The tables of docs/failures.md, made from net_plugin/engine/core/health.def.

`.venv/bin/python tests/py/health_table.py` prints them.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEF = ROOT / "net_plugin" / "engine" / "core" / "health.def"


def _rows(macro: str) -> list[tuple[str, ...]]:
    text = DEF.read_text()
    found = re.findall(rf"^{macro}\(([^\n]*)\)", text, re.MULTILINE)
    return [tuple(part.strip().strip('"') for part in row.split(",", 3)) for row in found]


def states() -> list[str]:
    lines = ["| state | carries job data | meaning |", "|---|---|---|"]
    for _, word, carries, meaning in _rows("R2_STATE"):
        lines.append(f"| {word} | {'yes' if carries == '1' else 'no'} | {meaning} |")
    return lines


def events() -> list[str]:
    lines = ["| event | meaning |", "|---|---|"]
    for _, word, *meaning in _rows("R2_EVENT"):
        text = ", ".join(part.strip('"') for part in meaning)
        lines.append(f"| {word} | {text} |")
    return lines


def transitions() -> list[str]:
    names = {name: word for name, word, *_ in _rows("R2_STATE")}
    words = {name: word for name, word, *_ in _rows("R2_EVENT")}
    next_of = {(state, event): after for state, event, after in _rows("R2_NEXT")}
    lines = ["| | " + " | ".join(words.values()) + " |", "|---" * (len(words) + 1) + "|"]
    for state, word in names.items():
        cells = [names.get(next_of.get((state, event), ""), "") for event in words]
        lines.append(f"| **{word}** | " + " | ".join(cells) + " |")
    return lines


def tables() -> str:
    return "\n\n".join("\n".join(part()) for part in (states, events, transitions))


if __name__ == "__main__":
    print(tables())
