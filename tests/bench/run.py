#!/usr/bin/env python3
"""All benchmarks: every figure beside its baseline, measured in turn in the same run.

\b
    make bench                                    everything, about an hour on 2 cores
    make bench BENCH_ARGS=--smoke                 seconds of each, to see that the harness works
    .venv/bin/python tests/bench/run.py --only resume --runs 20
    .venv/bin/python tests/bench/run.py --only cost --nccl WHERE/nvidia/nccl/lib   real NCCL

Prints tables, and writes them with date, machine, versions and load to a JSON file. Exit code 1: a
benchmark could not be carried out, was interrupted, values were wrong, or a result was faster than
its bound. 77: nothing could run here. --smoke says nothing about speed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import completion
import cost
import flap
import grey
import growth
import heartbeat
import instructions
import locate
import overhead
import recording
import resume
import shaped
import shim_cost
import unshaped
from figures import SCHEMA, MeasurementWrong, Section, text_table
from rig import BenchError, Cores, Options, hardware_class, machine

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.lab import netns

SKIPPED = 77
INTERRUPTED = "interrupted: the figures so far"
CALM = 0.1  # of the cores may others use


def _resume(options: Options, section: Section) -> None:
    resume.run(options, section)
    completion.run(options, section)


SECTIONS: dict[str, tuple[str, Callable[[Options, Section], None]]] = {
    "shaped": (shaped.TITLE, shaped.run),
    "unshaped": (unshaped.TITLE, unshaped.run),
    "resume": (resume.TITLE, _resume),
    "locate": (locate.TITLE, locate.run),
    "cost": (cost.TITLE, cost.run),
    "growth": (growth.TITLE, growth.run),
    "start": (growth.START_TITLE, growth.run_start),
    "grey": (grey.TITLE, grey.run),
    "flap": (flap.FLAP_TITLE, flap.run_flap),
    "ramp": (flap.RAMP_TITLE, flap.run_ramp),
    "heartbeat": (heartbeat.TITLE, heartbeat.run),
    "overhead": (overhead.TITLE, overhead.run),
    "recording": (recording.TITLE, recording.run),
    "shim_cost": (shim_cost.TITLE, shim_cost.run),
    "instructions": (instructions.TITLE, instructions.run),
}
NEEDS_LAB = (
    "shaped",
    "unshaped",
    "resume",
    "locate",
    "cost",
    "grey",
    "flap",
    "ramp",
)


def needs_lab(name: str, options: Options) -> bool:
    return name in NEEDS_LAB and (name, options.parts) != ("resume", (completion.PART,))


def no_figures(name: str, options: Options) -> str:
    """Why there are none, as far as that is known."""
    if not options.parts:
        return "no figures"
    has = ", ".join(dict.fromkeys(options.asked))
    return f"--part {', '.join(options.parts)}: {name} has {has or 'no parts'}"


def run_section(name: str, options: Options) -> Section:
    """One benchmark; what went wrong is in its errors."""
    title, work = SECTIONS[name]
    section = Section(name, title)
    if needs_lab(name, options) and not netns.has_admin():
        section.skipped = "making network namespaces needs root"
        return section
    began, load, cores = time.monotonic(), os.getloadavg()[0], Cores()
    options.asked.clear()
    try:
        work(options, section)
    except (MeasurementWrong, R2Error, OSError) as err:
        section.errors.append(str(err))
    except KeyboardInterrupt:
        section.errors.append(INTERRUPTED)
    for row in section.rows:
        section.errors += row.problems()
    if not (section.rows or section.errors):
        section.errors.append(no_figures(name, options))
    if options.smoke:
        for row in section.rows:
            row.target = None
    section.seconds = time.monotonic() - began
    section.load = (load, os.getloadavg()[0])
    section.others = cores.others()
    return section


def print_section(section: Section) -> None:
    print(f"\n== {section.title}")
    if section.skipped:
        print(f"skipped: {section.skipped}")
        return
    if section.rows:
        print(text_table(section.rows))
    for note in section.notes:
        print(f"note: {note}")
    for error in section.errors:
        print(f"ERROR: {error}")
    before, after = section.load
    print(
        f"{section.seconds:.0f} s, load average {before:.1f} before, {after:.1f} after", flush=True
    )


def document(sections: Sequence[Section], options: Options, began: datetime) -> dict[str, Any]:
    """The JSON file."""
    found = machine()
    others = max((section.others for section in sections), default=0.0)
    return {
        "schema": SCHEMA,
        "date": began.isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "smoke": options.smoke,
        "hardware": hardware_class(found),
        "machine": found,
        "load": [section.load for section in sections],
        "others_max": round(others, 3),
        "calm": others <= CALM,
        "niceness": os.nice(0),
        "sections": [section.as_dict() for section in sections],
    }


def exit_code(sections: Sequence[Section]) -> int:
    if any(section.errors for section in sections):
        return 1
    return SKIPPED if all(section.skipped for section in sections) else 0


def _nccl(context: object, option: object, given: str) -> str:
    """Known to be wrong before an hour has gone by."""
    if given != "standin" and not Path(given, "libnccl.so.2").exists():
        raise click.BadParameter(f"{given} holds no libnccl.so.2; give the folder of one")
    return given


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--smoke", is_flag=True, help="Seconds of each; says nothing about speed.")
@click.option("--only", multiple=True, type=click.Choice(list(SECTIONS)), help="These alone.")
@click.option(
    "--runs",
    default=100,
    type=click.IntRange(1),
    show_default=True,
    help="Faults of each kind for `resume` and `locate`.",
)
@click.option(
    "--repetitions",
    default=5,
    type=click.IntRange(1),
    show_default=True,
    help="Interleaved repetitions of unshaped measurements.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Where to write all figures (default: bench/results.json of the build folder).",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    help="Of `resume` (carrier, silent, silent-tx, silent-rx, reset, completion), `grey` (slow, "
    "follow, lossy), `locate` (rail-only, one-subnet), `shaped` and `cost` (a lab's name, as its "
    "rows begin with) or `growth` and `start` (a number of processes), these alone.",
)
@click.option(
    "--nccl",
    default="standin",
    metavar="DIR",
    callback=_nccl,
    help="`cost`: the folder of the libnccl.so.2 to measure with; ranks share the GPUs there are.",
)
def main(
    smoke: bool,
    only: tuple[str, ...],
    runs: int,
    repetitions: int,
    json_path: Path | None,
    parts: tuple[str, ...],
    nccl: str,
) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # labs are taken down
    began = datetime.now(timezone.utc)
    options = Options(smoke=smoke, runs=runs, repetitions=repetitions, parts=parts, nccl=nccl)
    sections: list[Section] = []
    for name in only or SECTIONS:
        section = run_section(name, options)
        sections.append(section)
        print_section(section)
        if INTERRUPTED in section.errors:
            break
    _finish(sections, options, began, json_path)
    raise SystemExit(exit_code(sections))


def _finish(
    sections: Sequence[Section], options: Options, began: datetime, json_path: Path | None
) -> None:
    """Also after an interruption: what there is by then."""
    report = document(sections, options, began)
    if not report["calm"] and not options.smoke:
        print(
            f"\nOther programs used up to {report['others_max']:.0%} of the cores: provisional.",
            file=sys.stderr,
        )
    name = "smoke.json" if options.smoke else "results.json"
    path = json_path or paths.native_dir() / "bench" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=True) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except BenchError as err:
        print(f"bench: {err}", file=sys.stderr)
        sys.exit(1)
