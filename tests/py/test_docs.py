"""The documents tell the truth: every command and setting is described, every name that they use
exists, and code blocks marked <!-- run --> do run. Rung 3 at most; it cannot prove good prose."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from conftest import ROOT, TOOL, Build, RunBounded, source_files

SETTINGS_DEF = ROOT / "net_plugin" / "settings" / "settings.def"
SETTINGS_DOC = ROOT / "docs" / "settings.md"
CLI_DOC = ROOT / "docs" / "cli.md"

NAME = re.compile(r"\bR2CCL?_[A-Z][A-Z0-9_]*\b")
ROW = re.compile(r"^R2_(SETTING|FOREIGN|ALIAS|GONE|OTHER)\(([^\n]*)", re.MULTILINE)
BLOCK = re.compile(r"<!-- run(?P<how>[^>]*?) -->\s*\n```[a-z]*\n(?P<body>.*?)\n```", re.DOTALL)
RUNG = re.compile(r"\bno rung\b|\brungs?[\s*]+\d", re.IGNORECASE)  # * begins a comment's next line


def documents() -> list[Path]:
    found = sorted((ROOT / "docs").glob("**/*.md"))
    readme = ROOT / "README.md"
    return [readme, *found] if readme.exists() else found


def setting_names() -> dict[str, str]:
    """Name of each row of settings.def -> kind of row."""
    names: dict[str, str] = {}
    for kind, rest in ROW.findall(SETTINGS_DEF.read_text(encoding="utf-8")):
        quoted = re.findall(r'"([^"]*)"', rest)
        if quoted:
            names[quoted[0]] = kind
    return names


def test_settings_table_is_readable() -> None:
    names = setting_names()
    assert "R2CCL_MODE" in names and names.get("R2CC_MODE") == "ALIAS", names


def test_every_setting_is_documented() -> None:
    text = SETTINGS_DOC.read_text(encoding="utf-8")
    absent = [
        name
        for name, kind in setting_names().items()
        if kind not in ("GONE", "OTHER") and name not in text
    ]
    assert not absent, f"docs/settings.md says nothing about {', '.join(absent)}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_names_in_documents_exist(path: Path) -> None:
    known = {name for name, kind in setting_names().items() if kind != "GONE"}
    named = set(NAME.findall(path.read_text(encoding="utf-8"))) - known
    families = {n for n in named if n.endswith("_") and any(k.startswith(n) for k in known)}
    unknown = sorted(named - families)  # `R2CC_FAILED_*` is a family
    assert not unknown, f"{path.name} names what settings.def does not have: {', '.join(unknown)}"


def test_names_in_code_exist() -> None:
    """The plugin warns of R2CCL_ variables that settings.def does not know: those that other
    parts of R2CCL read must stand there too, as R2_OTHER rows."""
    known = {name for name, kind in setting_names().items() if kind != "GONE"}
    unknown: dict[str, str] = {}
    for folder in ("net_plugin", "r2ccl_ctl", "tests/perf", "tests/hostnccl", "tests/gpu"):
        for path in sorted((ROOT / folder).rglob("*.[chp]*")):
            if path.suffix in (".c", ".h", ".py"):
                for name in re.findall(r'"(R2CCL?_[A-Z][A-Z0-9_]*)"', path.read_text("utf-8")):
                    if name not in known:
                        unknown[name] = str(path.relative_to(ROOT))
    assert not unknown, f"settings.def has no row for {unknown}"


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    dead = [
        link
        for link in links
        if not re.match(r"[a-z]+:", link) and not (path.parent / link).exists()
    ]
    assert not dead, f"{path.name} links to files that do not exist: {', '.join(dead)}"


def commands(group: click.Group, prefix: str = "r2ccl-ctl") -> list[tuple[str, click.Command]]:
    """Every command and sub-command that a user sees, with its full name."""
    found: list[tuple[str, click.Command]] = []
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if command is None or command.hidden:
            continue
        full = f"{prefix} {name}"
        found.append((full, command))
        if isinstance(command, click.Group):
            found.extend(commands(command, full))
    return found


def test_every_command_is_documented() -> None:
    from r2ccl_ctl.cli.main import main

    assert isinstance(main, click.Group)
    text = CLI_DOC.read_text(encoding="utf-8")
    listed = commands(main)
    assert listed
    absent = [full for full, _ in listed if full not in text]
    assert not absent, f"docs/cli.md says nothing about {', '.join(absent)}"


def test_every_option_is_documented() -> None:
    from r2ccl_ctl.cli.main import main

    assert isinstance(main, click.Group)
    text = CLI_DOC.read_text(encoding="utf-8")
    absent = [
        f"{full} {option.opts[-1]}"
        for full, command in commands(main)
        for option in command.params
        if isinstance(option, click.Option)
        and not option.hidden
        and not any(re.search(rf"{re.escape(opt)}\b", text) for opt in option.opts)
    ]
    assert not absent, f"docs/cli.md says nothing about {', '.join(absent)}"


def test_every_event_of_the_journal_is_documented() -> None:
    """Those that somebody writes, by the names that an operator reads; no others."""
    where = [*(ROOT / "net_plugin").rglob("*.c"), *(ROOT / "shim").rglob("*.c")]
    used = {e for f in where for e in re.findall(r"R2_EV_([A-Z_]+)", f.read_text())} - {"NONE"}
    text = (ROOT / "docs" / "failures.md").read_text().split("## The journal")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) == {
        event.lower().replace("_", "-") for event in used
    }


def test_commands_in_documents_exist() -> None:
    from r2ccl_ctl.cli.main import main

    assert isinstance(main, click.Group)
    known = set(main.list_commands(click.Context(main)))
    wrong = []
    for path in documents():
        for word in re.findall(
            r"^\s*(?:\$ |\.venv/bin/)?r2ccl-ctl ([a-z][a-z-]*)", path.read_text("utf-8"), re.M
        ):
            if word not in known:
                wrong.append(f"{path.name}: r2ccl-ctl {word}")
    assert not wrong, f"no such command: {', '.join(wrong)}"


def runnable_blocks() -> list[object]:
    """Code blocks after <!-- run --> (or <!-- run 120s -->: with another limit than 60 s)."""
    found: list[object] = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            limit = re.search(r"(\d+)s", match["how"])
            seconds = float(limit[1]) if limit else 60.0
            found.append(pytest.param(match["body"], seconds, id=f"{path.name}:{line}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("body", "seconds"), runnable_blocks())
def test_marked_blocks_run(
    body: str, seconds: float, build: Build, tmp_path: Path, run_bounded: RunBounded
) -> None:
    assert build.plugin.is_file()
    script = re.sub(r"^\$ ", "", body, flags=re.MULTILINE)
    path = f"{TOOL.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    run_bounded(
        ["bash", "-euo", "pipefail", "-c", script],
        timeout=seconds,
        cwd=ROOT,
        env={"PATH": path, "TMPDIR": str(tmp_path)},
    )


def test_lanes_table_is_sound() -> None:
    """One row per lane, with a limit; what ci needs fits into its 35 minutes."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    table = text.split("<!-- lanes -->")[1].split("<!-- end of lanes -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ][2:]
    names = [row[0] for row in rows]
    assert len(names) == len(set(names))
    for name, assigned, required, minutes, limit, command, proves in rows:
        assert assigned in ("ci", "soak"), name
        assert required in ("yes", "no"), name
        assert 0 < int(minutes) <= int(limit), name
        assert re.fullmatch(r"`[^`|]+`", command) and proves, name
    needed = {"build", "lint", "c-asan", "c-tsan", "test", "bench-smoke", "demo"}
    required_ci = {row[0] for row in rows if row[1] == "ci" and row[2] == "yes"}
    assert needed <= required_ci
    assert sum(int(row[3]) for row in rows if row[1] == "ci") <= 35


def test_invariants_name_tests_that_exist() -> None:
    """Each name with an underscore in the column of tests: a file, or a case of some file."""
    files = [path for path in (ROOT / "tests").rglob("*") if path.suffix in (".c", ".py")]
    names = {path.name for path in files} | {path.stem.removeprefix("test_") for path in files}
    for path in files:
        found = re.findall(
            r"\b(?:TEST|PROCESSES)\((\w+)|\b(\w+)\(", path.read_text(encoding="utf-8")
        )
        names |= {(case or word).removeprefix("test_") for case, word in found}
    lines = (ROOT / "docs/invariants.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
    assert len(rows) >= 18 and all(len(row) == 4 for row in rows)
    absent = [
        word
        for row in rows
        for word in re.findall(r"[a-z0-9]\w*_\w+(?:\.py)?", row[2])
        if word not in names
    ]
    assert not absent, f"docs/invariants.md names no test or case: {', '.join(absent)}"


def test_invariants_are_called_by_their_names() -> None:
    text = (ROOT / "docs/invariants.md").read_text(encoding="utf-8")
    names = {name.lower() for name in re.findall(r"^\| \*\*(.*?)\.\*\*", text, re.MULTILINE)}
    assert len(names) == 18
    unknown = {
        f"{path}: {name}"
        for path in source_files()
        if path.suffix in (".c", ".h", ".py", ".md") and path.name != "test_docs.py"
        for found in re.findall(r'invariant\s+"([^"]+)"', (ROOT / path).read_text(encoding="utf-8"))
        if (name := re.sub(r"\s+\*?\s*", " ", found).lower()) not in names
    }
    assert not unknown, unknown


def test_every_test_names_its_rung() -> None:
    """In its first lines; docs/testing.md has the table. One that is on none says "no rung"."""
    tests = [*(ROOT / "tests/unit").glob("test_*.c"), *(ROOT / "tests/py").glob("test_*.py")]
    assert tests
    silent = [
        path.name
        for path in sorted(tests)
        if not RUNG.search("\n".join(path.read_text(encoding="utf-8").splitlines()[:20]))
    ]
    assert not silent, f"no rung in the first 20 lines of {', '.join(silent)}"


def test_words_of_the_tree() -> None:
    """No unfinished ends, and no checks that cannot fail, in what git would track."""
    words = "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "NotImplemented" + "Error"])
    pattern = re.compile(rf"\b({words})\b|assert Tr" + r"ue\b|\|\| tr" + r"ue$", re.MULTILINE)
    slips = []
    for name in source_files():
        if name.suffix in (".c", ".h", ".py", ".md", ".sh", ".def", ""):
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            slips += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert not slips, slips
