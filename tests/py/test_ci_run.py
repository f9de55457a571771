"""What .ci/run compiles ahead, beside the lanes before: in a tree of its own, with lanes that wait
for what they are to see. Rung 3. It cannot prove that it saves time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from conftest import ROOT, Finished, RunBounded
from segment_bed import until

WAITS = "timeout 60 sh -c 'until [ -e {0} ]; do sleep 0.1; done'"


def tree(folder: Path, makefile: str, *lanes: str) -> list[str | Path]:
    """What runs .ci/run there, with these commands as lanes."""
    (folder / ".ci").mkdir()
    (folder / "docs").mkdir()
    shutil.copy2(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "Makefile").write_text(makefile)
    rows = [f"| lane{i} | ci | yes | 1 | 2 | `{c}` | it |" for i, c in enumerate(lanes)]
    (folder / "docs/testing.md").write_text(
        "\n".join(["<!-- lanes -->", "", *rows, "", "<!-- end of lanes -->", ""])
    )
    return [folder / ".ci/run", "--no-install"]


def ci(folder: Path, run: RunBounded, makefile: str, *lanes: str) -> Finished:
    return run(tree(folder, makefile, *lanes), cwd=folder, timeout=200, code=None)


def test_compiles_beside_a_lane(tmp_path: Path, run_bounded: RunBounded) -> None:
    """The first lane ends only when the build of the last one is there."""
    makefile = "native:\n\t@touch built-$(SAN)\ntest-c: native\n\t@touch ran-$(SAN)\n"
    lanes = (WAITS.format("built-tsan"), "make test-c SAN=asan", "make test-c SAN=tsan")
    done = ci(tmp_path, run_bounded, makefile, *lanes)
    assert done.code == 0, done
    assert "3 passed, 0 failed, 0 skipped" in done.stdout
    assert {path.name for path in tmp_path.glob("ran-*")} == {"ran-asan", "ran-tsan"}


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
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
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
