"""What .ci/run compiles ahead, beside the lanes before: in a tree of its own, with lanes that wait
for what they are to see. Rung 3. It cannot prove that it saves time."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, Finished, RunBounded
from segment_bed import until

WAITS = "timeout 60 sh -c 'until [ -e {0} ]; do sleep 0.1; done'"


# Notes how it was called, and starts the program with the priority of everything else: what is idle
# may stand still for longer than any bound here, where others use the machine.
CHRT = '#!/bin/sh\necho "$1 $2" >>{0}/chrt.log\nshift 2\nexec "$@"\n'


def environment(folder: Path) -> dict[str, str]:
    """A machine without a quota, on which idle is no priority."""
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "CI_CGROUPS": str(folder / "cgroups")}


def tree(folder: Path, makefile: str, *lanes: str) -> list[str | Path]:
    """What runs .ci/run there, with these commands as lanes."""
    (folder / ".ci").mkdir()
    (folder / "docs").mkdir()
    (folder / "bin").mkdir()
    (folder / "bin/chrt").write_text(CHRT.format(folder))
    (folder / "bin/chrt").chmod(0o755)
    shutil.copy2(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "Makefile").write_text(makefile)
    rows = [f"| lane{i} | ci | yes | 1 | 2 | `{c}` | it |" for i, c in enumerate(lanes)]
    (folder / "docs/testing.md").write_text(
        "\n".join(["<!-- lanes -->", "", *rows, "", "<!-- end of lanes -->", ""])
    )
    return [folder / ".ci/run", "--no-install"]


def ci(folder: Path, run: RunBounded, makefile: str, *lanes: str) -> Finished:
    words = tree(folder, makefile, *lanes)
    return run(words, cwd=folder, timeout=200, code=None, env=environment(folder))


def test_compiles_beside_a_lane(tmp_path: Path, run_bounded: RunBounded) -> None:
    """The first lane ends only when the build of the last one is there."""
    makefile = "native:\n\t@touch built-$(SAN)\ntest-c: native\n\t@touch ran-$(SAN)\n"
    lanes = (WAITS.format("built-tsan"), "make test-c SAN=asan", "make test-c SAN=tsan")
    done = ci(tmp_path, run_bounded, makefile, *lanes)
    assert done.code == 0, done
    assert "3 passed, 0 failed, 0 skipped" in done.stdout
    assert {path.name for path in tmp_path.glob("ran-*")} == {"ran-asan", "ran-tsan"}
    assert set((tmp_path / "chrt.log").read_text().splitlines()) == {"--idle 0"}


def test_skipped_by_way_of_make(tmp_path: Path, run_bounded: RunBounded) -> None:
    """A recipe's 77 is make's 2: what it lacks is said; where it is required it is a failure."""
    makefile = "lacks:\n\t@echo no compiler here; exit 77\nbroken:\n\t@exit 78\n"
    words = tree(tmp_path, makefile, "true", "make lacks")
    table = tmp_path / "docs/testing.md"
    table.write_text(table.read_text().replace("lane1 | ci | yes", "lane1 | ci | no"))
    done = run_bounded(words, cwd=tmp_path, timeout=60, env=environment(tmp_path))
    assert "1 passed, 0 failed, 1 skipped" in done.stdout, done
    assert "no compiler here" in done.stdout, done
    table.write_text(table.read_text().replace("lane1 | ci | no", "lane1 | ci | yes"))
    done = run_bounded(words, cwd=tmp_path, timeout=60, code=1, env=environment(tmp_path))
    assert "required, but skipped: no compiler here" in done.stdout, done
    table.write_text(table.read_text().replace("make lacks", "make broken"))
    done = run_bounded(words, cwd=tmp_path, timeout=60, code=1, env=environment(tmp_path))
    assert "1 passed, 1 failed, 0 skipped" in done.stdout, done


def test_a_lane_goes_on_with_what_is_not_ready(tmp_path: Path, run_bounded: RunBounded) -> None:
    """What is compiled ahead hangs: it is ended, and what it had half done is made anew."""
    makefile = (
        "native: x.o\n"
        "x.o:\n"
        "\t@if [ -e go ]; then ! kill -0 $$(cat pid) && echo whole >$@; \\\n"
        "\telse echo half >$@; echo $$$$ >pid; exec sleep 300; fi\n"
        "test-c: native\n"
        "\t@grep whole x.o\n"
    )
    lanes = (WAITS.format("pid") + "; touch go", "make test-c SAN=asan", "grep whole x.o")
    done = ci(tmp_path, run_bounded, makefile, *lanes)
    assert done.code == 0, done
    assert "3 passed, 0 failed, 0 skipped" in done.stdout


def test_a_lane_waits_for_all_that_was_compiling(tmp_path: Path, run_bounded: RunBounded) -> None:
    """A compiler outlives make, which was told to end, by a second."""
    makefile = (
        "native:\n"
        '\t@sh -c \'trap "sleep 1; touch late; exit" TERM; touch up; \\\n'
        "\twhile :; do sleep 0.05; done' & exec sleep 300\n"
        "test-c:\n"
        "\t@test -e late\n"
    )
    done = ci(tmp_path, run_bounded, makefile, WAITS.format("up"), "make test-c SAN=asan")
    assert done.code == 0, done


@pytest.mark.parametrize(
    ("file", "text"),
    [("cpu.max", "50000 100000\n"), ("cpu/cpu.cfs_quota_us", "50000\n")],
    ids=["v2", "v1"],
)
def test_nothing_is_compiled_of_a_quota(
    tmp_path: Path, run_bounded: RunBounded, file: str, text: str
) -> None:
    quota = tmp_path / "cgroups" / file
    quota.parent.mkdir(parents=True)
    quota.write_text(text)
    if quota.parent.name == "cpu":
        (quota.parent / "cpu.cfs_period_us").write_text("100000\n")
    if not has_cgroup(quota.parent.name):
        pytest.skip("this kernel gives processes no cgroup of that version")
    makefile = "native:\n\t@touch ahead\ntest-c:\n"
    done = ci(tmp_path, run_bounded, makefile, "test ! -e ahead", "make test-c SAN=asan")
    assert done.code == 0, done
    said = (tmp_path / "build/ci/ahead.log").read_text()
    assert said == "nothing is compiled ahead: the CPU quota is 50000 us of each 100000 us\n"


def has_cgroup(folder: str) -> bool:
    """Whether there is one whose quota is looked for in that folder."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        names = line.split(":", 2)[1]
        if ("cpu" in names.split(",")) if folder == "cpu" else not names:
            return True
    return False


@pytest.mark.parametrize("text", ["max 100000\n", "100000000 100000\n"])
def test_a_quota_of_all_cores_is_none(tmp_path: Path, run_bounded: RunBounded, text: str) -> None:
    (tmp_path / "cgroups").mkdir()
    (tmp_path / "cgroups/cpu.max").write_text(text)
    makefile = "native:\n\t@touch built\ntest-c:\n"
    done = ci(tmp_path, run_bounded, makefile, WAITS.format("built"), "make test-c SAN=asan")
    assert done.code == 0, done


# What names the groups of a process, and what the group's files say of a quota.
NO_QUOTA = {
    "missing": ("missing", "50000\n"),
    "folder": ("folder", "50000\n"),
    "empty-line": ("\n", "50000\n"),
    "short": ("0:nothing\n", "50000\n"),
    "relative": ("0::a\n", ""),
    "gone": ("3:cpu:/no/such\n\n", ""),
    "empty": ("0::/a\n", ""),
    "no-period": ("0::/a\n", "50000\n"),
    "words": ("0::/a\n", "most of it\n"),
    "too-much": ("0::/a\n", "9" * 40 + " 1\n"),
    "v1-no-period": ("3:cpu,cpuacct:/a\n", "50000\n"),
}


@pytest.mark.parametrize(("group", "text"), NO_QUOTA.values(), ids=NO_QUOTA)
def test_what_is_no_quota_ends_nothing(
    tmp_path: Path, run_bounded: RunBounded, group: str, text: str
) -> None:
    """No such file, one that cannot be read, and whatever it or the group's files may say."""
    member = tmp_path / "member"
    if group == "folder":
        member.mkdir()
    elif group != "missing":
        member.write_text(group)
    for file in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        for at in ("", "a"):
            quota = tmp_path / "cgroups" / Path(file).parent / at / Path(file).name
            quota.parent.mkdir(parents=True, exist_ok=True)
            quota.write_text(text)
    words = tree(tmp_path, "native:\ntest-c:\n", "true", "make test-c SAN=asan")
    env = {**environment(tmp_path), "CI_CGROUP": str(member)}
    done = run_bounded(words, cwd=tmp_path, timeout=200, code=None, env=env)
    assert done.code == 0, done
    assert "2 passed, 0 failed" in done.stdout, done
    said = (tmp_path / "build/ci/ahead.log").read_text().replace(str(tmp_path), "")
    assert "quota" not in said and "error" not in said, said


def test_ahead_of_nothing(tmp_path: Path, run_bounded: RunBounded) -> None:
    """The plain tests are no reason to: others use their build folder."""
    makefile = "native:\n\t@touch ahead\ntest-c:\n"
    done = ci(tmp_path, run_bounded, makefile, "sleep 1", "make test-c", "test ! -e ahead")
    assert done.code == 0, done


def test_ended_with_all_that_runs(tmp_path: Path) -> None:
    """SIGTERM ends it soon, with the lane and with what is compiled ahead."""
    makefile = "native:\n\t@echo $$$$ >ahead; exec sleep 300\n"
    words = tree(tmp_path, makefile, "echo $$ >lane; exec sleep 300", "make test-c SAN=asan")
    files = [tmp_path / "lane", tmp_path / "ahead"]
    env = {**os.environ, **environment(tmp_path)}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: all(file.exists() and file.read_text() for file in files), "both", 60)
            process.terminate()
            assert process.wait(60) == 143
        finally:
            process.kill()
    until(lambda: all(ended(int(file.read_text())) for file in files), "the end of both", 60)


def ended(pid: int) -> bool:
    """Gone, or not yet waited for by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_c_tests_whose_time_is_over(tmp_path: Path, run_bounded: RunBounded) -> None:
    """As a lane's limit ends them: what was red is shown all the same, and nothing goes on."""
    programs = tmp_path / "build/tests/unit"
    programs.mkdir(parents=True)
    red, hangs, pid = programs / "test_red", programs / "test_hangs", tmp_path / "pid"
    red.write_text("#!/bin/sh\necho the first byte is lost\nexit 2\n")
    hangs.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec sleep 300\n")
    for program in (red, hangs):
        program.chmod(0o755)
    # As .ci/run starts a lane; its limit comes once there is something to be cut off.
    judged = tmp_path / "build/tests/log/test_red.result"
    both = f"[ -s {pid} ] && [ -e {judged} ]"
    script = f"(until {both}; do sleep 0.1; done; sleep 1; kill $$) & exec timeout 100 "
    words = ["sh", "-c", script + f"bash -c '{ROOT}/mk/run-c-tests red hangs; :'"]
    env = {"BUILD": str(tmp_path / "build"), "SAN": ""}
    done = run_bounded(words, cwd=tmp_path, timeout=80, code=None, env={**os.environ, **env})
    assert "| the first byte is lost" in done.stdout, done
    assert "cut off, 0 passed, 1 failed, 0 skipped; under way: test_hangs" in done.stdout, done
    until(lambda: ended(int(pid.read_text())), "the end of the test that hung", 30)
