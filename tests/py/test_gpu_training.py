"""tests/gpu/run_training.py without a GPU: its figures, its order of jobs, how it leads a job. Rung
1. It cannot prove what a training takes."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

GPU = ROOT / "tests" / "gpu"
sys.path.insert(0, str(GPU))
figures: Any = importlib.import_module("training_figures")
run_training: Any = importlib.import_module("run_training")

# In gpt_train.py's place: a step of N micro-batches takes N ms, and 5 ms more with communication.
JOB = """
import json, sys, time, pathlib
control = pathlib.Path(sys.argv[sys.argv.index("--control") + 1])
saved = pathlib.Path(sys.argv[-1]) if "--checkpoint" in sys.argv else None
step = int(saved.read_text()) if saved and saved.exists() else 0
print("no JSON")
print(json.dumps({"event": "start", "tokens": 100, "from_step": step}), flush=True)
while micro := int(control.read_text()):
    time.sleep(0.001 * abs(micro))
    step += micro > 0
    seconds = (abs(micro) + (5 if micro > 0 else 0)) / 1000
    print(json.dumps({"event": "step", "step": step, "micro": micro, "seconds": seconds,
                      "loss": 1.0}), flush=True)
    if saved and micro > 0 and step % 20 == 0:
        saved.write_text(str(step))
        print(json.dumps({"event": "saved", "seconds": 0.25}), flush=True)
"""


def cell(mode: str, state: str, lost: int, seconds: list[float], **more: Any) -> Any:
    words = {"nodes": 2, "nics": 4, "asked": 30, "micro": 7, "compute": 0.07, "tokens": 1000}
    return figures.Cell(mode=mode, state=state, lost=lost, seconds=seconds, **words | more)


def test_overheads_are_of_the_same_bed_share_and_mode() -> None:
    found = figures.rows(
        [
            cell("balance", "healthy", 0, [0.1, 0.09, 0.3]),
            cell("balance", "1 of 4 lost", 1, [0.11]),
            cell("balance", "2 of 4 lost", 2, [0.12]),
            cell("sockets", "healthy", 0, [0.098]),
            cell("fastsocket", "healthy", 0, [0.08]),
            cell("balance", "healthy", 0, [0.5], asked=60),
            cell("direct", "1 of 4 lost", 1, [0.5]),
            cell("sockets", "healthy", 0, [0.01], nodes=4),
        ]
    )
    healthy, one, two, sockets, _, alone, direct, _ = found
    assert healthy["step_ms"] == 100 and healthy["p95_ms"] == 300 and healthy["share"] == 0.3
    assert healthy["tokens_s"] == 1000 * 7 * 2 / 0.1
    assert healthy["to_other"] == 0.25 and healthy["overhead"] is None
    assert sockets["to_other"] is None and alone["to_other"] is None
    assert (one["overhead"], one["bound"]) == (0.1, 0.1)
    assert (two["overhead"], two["bound"]) == (0.2, 0.3)
    assert direct["overhead"] is None and direct["bound"] is None


def test_percentile() -> None:
    assert cell("x", "healthy", 0, [float(i) for i in range(1, 21)]).p95 == 19.0
    assert cell("x", "healthy", 0, [3.0]).p95 == 3.0


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_micro_batches_bring_the_share(share: float) -> None:
    each, fixed, travel = 0.004, 0.002, 0.05
    micro = figures.micro_for(share, travel, fixed + each, fixed + 8 * each)
    assert travel / (travel + fixed + micro * each) == pytest.approx(share, abs=0.02)
    assert figures.micro_for(0.6, 0.001, 0.01, 0.08) == 1


def test_a_curve_has_few_points_and_no_steps_without_communication() -> None:
    steps = [{"micro": 2, "loss": 9 - i / 100} for i in range(500)]
    steps.insert(3, {"micro": -2, "loss": 99.0})
    found = figures.curve(steps, 1_000_000)
    assert found["loss"][0] == 9 and max(found["loss"]) == 9
    assert len(found["loss"]) <= figures.POINTS and found["tokens"][1] - found["tokens"][0] == 6
    assert figures.curve([], 0) == {"tokens": [], "loss": []}


def test_the_tables_name_every_figure() -> None:
    lines = figures.markdown(
        {
            "parallel": "ddp",
            "gpus": 1,
            "cores": 16,
            "node_rate": 8e9,
            "rows": figures.rows(
                [
                    cell("balance", "healthy", 0, [0.1]),
                    cell("balance", "1 of 4 lost", 1, [0.11]),
                    cell("sockets", "healthy", 0, [0.1]),
                ]
            ),
            "stalls": [
                {
                    "nodes": 2,
                    "nics": 4,
                    "mode": "migrate",
                    "usual_s": 0.1,
                    "slowest_s": 0.2,
                    "next_step_s": 0.15,
                }
            ],
            "restarts": [
                {
                    "nodes": 2,
                    "nics": 2,
                    "mode": "sockets",
                    "steps_after_loss": 0,
                    "first_step_s": 12.5,
                    "steps_lost": 7,
                    "caught_up_s": 14,
                    "checkpoint_s": 0.3,
                }
            ],
        }
    )
    assert "| 2 x 4 | balance | healthy | 30.0 % | 100.0, 100.0 | 140000 | 0.0 % |  |  |" in lines
    assert any("(30 %) | 110.0, 110.0 | 127273 |  | 10.0 % | 10.0 % |" in line for line in lines)
    assert any("0.15 s after the loss" in line for line in lines)
    assert any("12.5 s after the kill, 7 lost steps" in line for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        ["--jobs", "2x1:balance"],
        ["--jobs", "2:balance"],
        ["--jobs", "2x2"],
        ["--jobs", "2x2:balance+"],
        ["--shares", "60,zero"],
        ["--shares", "100"],
        ["--jobs", "2x2:balance+off"],
    ],
)
def test_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_training.parse_args(words)
    assert ended.value.code == 2


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GPU_COUNT", "0")
    assert run_training.main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_jobs_run_in_the_order_given() -> None:
    opts = run_training.parse_args(["--jobs", "2x4:balance+sockets-4x2,4x2:direct"])
    assert opts.jobs == [("2x4", ["balance", "sockets-4x2"]), ("4x2", ["direct"])]
    assert run_training.mode_of("sockets-4x2").base == "sockets"
    assert run_training.mode_of("direct").base == "preload"


class Bed:
    """Processes of this machine, and NICs that are only noted."""

    nodes, nics, master_addr, nic_prefix, oob = 2, 2, "127.0.0.1", "nic", "lo"

    def __init__(self) -> None:
        self.done: list[tuple[str, int, int]] = []

    def command(self, _node: int, argv: list[str]) -> list[str]:
        return [sys.executable, "-c", JOB, *argv]

    def fail(self, node: int, nic: int, _kind: str) -> None:
        self.done.append(("fail", node, nic))

    def recover(self, node: int, nic: int) -> None:
        self.done.append(("up", node, nic))


def setup_of(bed: Bed, ends: float) -> Any:
    opts = run_training.parse_args(["--backend", "gloo", "--shares", "50,30,10", "--steps", "10"])
    return run_training.Setup(bed, opts, ends, True)


def test_a_job_is_led_through_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_training, "OTHERS_SETTLE_S", 0.05)
    monkeypatch.setattr(run_training, "FLAP_S", 0.02)
    bed, found = Bed(), run_training.Found()
    setup = setup_of(bed, time.monotonic() + 60)
    run_training.our_job(setup, "balance", found)
    assert found.problems == []
    assert setup.micro == {50: 5, 30: 12, 10: 45}
    assert [(c.state, c.asked) for c in found.cells] == [
        *(("healthy", share) for share in (50, 30, 10)),
        *(("1 of 2 lost", share) for share in (50, 30, 10)),
        ("flap", 30),
    ]
    first = found.cells[0]
    assert first.compute == pytest.approx(0.005) and first.step == pytest.approx(0.01)
    assert bed.done[0] == ("fail", 1, 1) and bed.done[-1] == ("up", 1, 1) and len(bed.done) > 4
    (stall,) = found.stalls
    assert 0 < stall["next_step_s"] < 5 and stall["usual_s"] == 0.01
    json.dumps(figures.rows(found.cells))


def test_other_transports_are_killed_and_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_training, "HANG_S", 0.1)
    bed, found = Bed(), run_training.Found()
    run_training.other_job(setup_of(bed, time.monotonic() + 60), "sockets-4x2", found)
    (restart,) = found.restarts
    assert 0 < restart["steps_lost"] < 40 and restart["checkpoint_s"] == 0.25
    assert 0 < restart["steps_after_loss"] < 30  # processes of this machine do not miss a NIC
    assert 0 < restart["first_step_s"] < restart["caught_up_s"]
    assert [c.state for c in found.cells] == ["healthy"] * 3 + ["restarted, 1 of 2 lost"] * 3
    assert bed.done == [("fail", 1, 1), ("up", 1, 1)] and len(found.curves) == 1


def test_what_was_measured_stays_when_the_time_is_up() -> None:
    bed, found = Bed(), run_training.Found()
    with pytest.raises(run_training.TimeUp):
        run_training.our_job(setup_of(bed, time.monotonic() + 2.5), "balance", found)
    assert found.problems == [] and found.curves[0]["loss"]
    assert len([x for x in bed.done if x[0] == "fail"]) <= len(bed.done) / 2


def test_a_job_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bed, found, ran = Bed(), run_training.Found(), []
    monkeypatch.setattr(Bed, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(run_training, "lab_bed", lambda *_, rate: contextlib.nullcontext(bed))
    monkeypatch.setattr(run_training, "other_job", lambda _setup, mode, _found: ran.append(mode))
    opts = run_training.parse_args(["--backend", "gloo", "--jobs", "2x2:balance+sockets"])
    run_training.all_beds(opts, 8, found)
    (problem,) = found.problems
    assert "2x2, balance: a rank ended while waiting for the first step, codes [" in problem
    assert ran == ["sockets"]


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures: Any = importlib.import_module("pictures")
    small = {"nics": 8, "size": 8 << 20, "used": 1.0}
    retention = {
        "standin": False,
        "gpus": 1,
        "nodes": 2,
        "cores": 16,
        "rows": [
            small | {"op": "all_reduce", "share": 0.87, "of_left": 0.994},
            small | {"op": "broadcast", "share": 1.3, "of_left": 1.486},
        ],
    }
    training = {
        "parallel": "ddp",
        "gpus": 1,
        "cores": 16,
        "node_rate": 8e9,
        "stalls": [],
        "restarts": [],
        "rows": figures.rows(
            [cell("balance", "healthy", 0, [0.1]), cell("balance", "1 of 4 lost", 1, [0.11])]
        ),
        "curves": [{"nodes": 2, "nics": 4, "mode": "balance", "tokens": [1, 2], "loss": [7, 6]}],
    }
    again = training | {"parallel": "fsdp"}
    (tmp_path / "again.json").write_text(json.dumps(again), encoding="utf-8")
    for kind, result, line in (
        (
            "retention",
            retention,
            "| all_reduce | 8 | 0.870, 0.994 |\n| broadcast | 8 | no figure |",
        ),
        ("training", training, "(30 %) | 110.0, 110.0 |"),
    ):
        (tmp_path / "in.json").write_text(json.dumps(result), encoding="utf-8")
        to = tmp_path / f"{kind}.png"
        more = [str(tmp_path / "again.json")] if kind == "training" else []
        assert pictures.main([kind, str(tmp_path / "in.json"), *more, "--to", str(to)]) == 0
        assert line in capsys.readouterr().out and to.stat().st_size > 5000
    (tmp_path / "in.json").write_text('{"rows": []}', encoding="utf-8")
    assert pictures.main(["training", str(tmp_path / "in.json"), "--to", str(to)]) == 2
    assert "no rows" in capsys.readouterr().err
