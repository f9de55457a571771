"""mk/prose counts long sentences as a reader would, and goes red when there are more. No rung: it
reads text. It cannot prove that short sentences are good ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import ROOT

LONG = " ".join(["word"] * 31)
FITS = " ".join(["word"] * 30)


def count(folder: Path, page: str, allowed: int) -> subprocess.CompletedProcess[str]:
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "mk").mkdir(exist_ok=True)
    (folder / "mk/prose.max").write_text(f"{allowed}\n")
    (folder / "README.md").write_text("# Title\n\nShort.\n")
    (folder / "docs/page.md").write_text(page)
    return subprocess.run(
        [sys.executable, str(ROOT / "mk/prose")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def long_ones(folder: Path, page: str) -> list[str]:
    """FILE:LINE of each long sentence."""
    done = count(folder, page, 99)
    assert done.returncode == 0, done.stderr
    return [line.split(": ")[0] for line in done.stdout.splitlines() if ".md:" in line]


def test_more_than_allowed_is_red(tmp_path: Path) -> None:
    page = f"# Title\n\nShort. {LONG}. {LONG}, the longest.\n"
    done = count(tmp_path, page, 1)
    assert done.returncode == 1 and "2 sentences" in done.stdout
    named = done.stdout.splitlines()[1:]
    assert named[0].startswith("docs/page.md:3: 33 words: word")
    assert named[1].startswith("docs/page.md:3: 31 words: word")
    assert count(tmp_path, page, 2).returncode == 0


def test_fewer_asks_to_lower_the_number(tmp_path: Path) -> None:
    done = count(tmp_path, f"{LONG}.\n", 2)
    assert done.returncode == 0 and "write 1 to mk/prose.max" in done.stdout


def test_ends_of_sentences(tmp_path: Path) -> None:
    assert long_ones(tmp_path, f"{FITS}.\n{FITS}! {FITS}? {FITS} (word.) {FITS}\n") == [
        "docs/page.md:2"  # the last but one has 31 words, with the one in brackets
    ]
    for no_end in ("2.18 ... 2.32", "e.g. word", "file.c word"):
        assert long_ones(tmp_path, f"{FITS[: 5 * 28]}{no_end} word.\n") == ["docs/page.md:1"]


def test_blocks_are_apart(tmp_path: Path) -> None:
    half = " ".join(["word"] * 20)
    assert long_ones(tmp_path, f"{half}\n\n{half}\n\n- {half}\n- {half}\n  1. {half}\n") == []
    assert long_ones(tmp_path, f"{half}:\n\n    code\n\n{half}\n## {half}\n{half}\n") == []
    assert long_ones(tmp_path, f"- {half}\n\n      code\n\n  {half}\n") == []
    assert long_ones(tmp_path, f"Short.\n\n- Short.\n  {half}\n  {half}\n") == ["docs/page.md:4"]


def test_only_prose_counts(tmp_path: Path) -> None:
    assert long_ones(tmp_path, f"```\n{LONG}\n\n{LONG}\n```\n") == []
    assert long_ones(tmp_path, f"Short:\n\n    {LONG}\n    {LONG}\n\n    {LONG}\n") == []
    assert long_ones(tmp_path, f"| {LONG} | {LONG} |\n|---|---|\n") == []
    assert long_ones(tmp_path, f"# {LONG}\n\n<!-- {LONG}\n{LONG} -->\n") == []
    assert long_ones(tmp_path, f"The code `{LONG}` is [one word](docs/page.md).\n") == []
    (tmp_path / "docs/cli.md").write_text(f"{LONG}.\n")
    assert long_ones(tmp_path, "Short.\n") == []
