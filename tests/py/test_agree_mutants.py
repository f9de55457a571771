"""The model check of the agreement finds bugs: each mutant of shim/agree/machine.c breaks one rule
of the protocol, and tests/unit/test_agree_model.c, compiled with it, must turn red for the reason
given. The unchanged machine stays green, over more states than the unit test has time for (soak).
Rung 1. It cannot prove that bugs of other kinds are found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HARNESS = [ROOT / "tests/unit/check/check.c", ROOT / "tests/unit/check/main.c"]
MACHINE = ROOT / "shim/agree/machine.c"

SPLIT = "one collective under two plans"
FATES = "two fates of one epoch"
UNPROMISED = "a machine saw a commit that it had not promised"
STUCK = "a wait without end"

# name: (text, what it becomes, what must be found)
MUTANTS = {
    "commits one promise early": (
        "++m->npromises == m->nranks",
        "++m->npromises == m->nranks - 1",
        (UNPROMISED, SPLIT, FATES),
    ),
    "counts a repeated promise twice": (
        "if (m->promises[from / 64] & bit) {",
        "if (0) {",
        (UNPROMISED, SPLIT, FATES),
    ),
    "promises an index that has begun": (
        "next < msg->at",
        "next <= msg->at",
        (SPLIT,),
    ),
    "promises whatever its progress": (
        "next < msg->at &&",
        "true &&",
        (SPLIT,),
    ),
    "guesses the old plan instead of waiting": (
        "m->promise.at <= index ? R2_AGREE_WAIT : R2_AGREE_GO",
        "m->promise.at <= index ? R2_AGREE_GO : R2_AGREE_GO",
        (SPLIT,),
    ),
    "waits one index too late": (
        "m->promise.at <= index ? R2_AGREE_WAIT",
        "m->promise.at < index ? R2_AGREE_WAIT",
        (SPLIT,),
    ),
    "promises after it has said never": (
        "msg->epoch > m->floor &&",
        "true &&",
        (SPLIT, FATES, UNPROMISED),
    ),
    "forgets its never when asked": (
        "        if (m->floor < epoch) {\n            m->floor = epoch;\n        }\n",
        "",
        (SPLIT, FATES, UNPROMISED),
    ),
    "says never to what it has promised": (
        "} else if (m->promise.epoch != epoch) {",
        "} else {",
        (SPLIT, FATES, UNPROMISED),
    ),
    "takes an abort for a commit": (
        "if (committed != promise.epoch) {\n        out->aborted",
        "if (false) {\n        out->aborted",
        (SPLIT, FATES, UNPROMISED),
    ),
    "forgets a commit when the next is proposed": (
        "m->pending[m->npending++] = promise;",
        "m->pending[0] = promise; m->npending = promise.epoch < decided ? 0 : 1;",
        (SPLIT, FATES),
    ),
    "puts a plan in force too early": (
        "m->pending[0].at <= index",
        "m->pending[0].at <= index + 1",
        (SPLIT,),
    ),
    "takes a refusal for the last promise": (
        "        r2_agree_conclude(m, false, out);\n    } else if",
        "        r2_agree_conclude(m, true, out);\n    } else if",
        (SPLIT, FATES, UNPROMISED),
    ),
    "tells nobody what it knows": (
        "if (epoch <= m->decided || m->rank == R2_AGREE_LEADER) {",
        "if (epoch <= m->decided || m->rank == R2_AGREE_LEADER) {\n        return;",
        (STUCK,),
    ),
    "a rank that has not promised keeps silent": (
        "    } else if (m->promise.epoch != epoch) {",
        "    } else if (false) {",
        (STUCK,),
    ),
    "never learns that it was refused": (
        "} else if (m->promise.epoch && m->promise.epoch == epoch &&",
        "} else if (false && m->promise.epoch == epoch &&",
        (STUCK,),
    ),
    "does not learn from a proposal": (
        "        r2_agree_learn(m, msg->decided, msg->committed, out);",
        "        if (msg->type == R2_AGREE_DECISION) {\n"
        "            r2_agree_learn(m, msg->decided, msg->committed, out);\n        }",
        (SPLIT, FATES, UNPROMISED, STUCK),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The explorer, compiled once; mutants are linked to it."""
    made = tmp_path_factory.mktemp("agree") / "model.o"
    compile_c(ROOT / "tests/unit/test_agree_model.c", made)
    return made


def compile_c(source: Path, made: Path) -> None:
    includes = ["-Ishim", "-Inet_plugin", "-Itests/unit"]
    subprocess.run(
        [os.environ.get("CC", "gcc"), "-std=gnu11", "-O2", *includes, "-c", "-o", made, source],
        cwd=ROOT,
        check=True,
        timeout=120,
    )


def explore(model: Path, machine: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    compile_c(machine, tmp_path / "machine.o")
    program = tmp_path / "model"
    subprocess.run(
        [os.environ.get("CC", "gcc"), "-o", program, model, tmp_path / "machine.o", *HARNESS],
        check=True,
        timeout=120,
    )
    return subprocess.run(
        [program, "-t", "400"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "R2_LONG": "1"},
    )


@pytest.mark.soak
def test_two_epochs_and_a_crash(model: Path, tmp_path: Path) -> None:
    finished = explore(model, MACHINE, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "ok   two_epochs" in finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_finds(model: Path, tmp_path: Path, name: str) -> None:
    text, other, wanted = MUTANTS[name]
    source = MACHINE.read_text()
    assert source.count(text) == 1, (
        f"machine.c has changed: {text!r} is there {source.count(text)}x"
    )
    mutant = tmp_path / "machine.c"
    mutant.write_text(source.replace(text, other))
    finished = explore(model, mutant, tmp_path)
    assert finished.returncode == 1, finished.stdout
    assert any(why in finished.stderr for why in wanted), finished.stderr
