#!/usr/bin/env python3
"""All benchmarks: every figure beside its baseline, measured in turn in the same run.

    make bench                                    everything, about an hour on 2 cores
    make bench BENCH_ARGS=--smoke                 seconds of each, to see that the harness works
    .venv/bin/python tests/bench/run.py --only resume --runs 20
    .venv/bin/python tests/bench/run.py --only locate --slice 200 --add-to FILE    a part
    .venv/bin/python tests/bench/run.py --only cost --nccl WHERE/nvidia/nccl/lib   real NCCL

Prints tables, and writes them with date, machine, versions and load to a JSON file. Exit code 1: a
benchmark could not be carried out, values were wrong, or a result was faster than its bound; with
--strict also a missed target. 77: nothing could run here. Ended by a signal (128 and its number) or
by --slice (124), the tables hold what there is by then. --smoke says nothing about speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import completion
import cost
import cutoff
import flap
import grey
import growth
import heartbeat
import instructions
import known
import locate
import overhead
import recording
import resume
import shaped
import shim_cost
import unshaped
from figures import SCHEMA, MeasurementWrong, Row, Section, markdown_table, text_table
from rig import BenchError, Cores, Options, hardware_class, machine

from r2ccl_ctl import paths
from r2ccl_ctl.errors import R2Error
from r2ccl_ctl.lab import netns

SKIPPED = 77
CALM = 0.1  # of the cores may others use


def _resume(options: Options, section: Section) -> None:
    until = options.slice_end()
    resume.run(options, section, until)
    completion.run(options, section, until)


SECTIONS: dict[str, tuple[str, Callable[[Options, Section], None]]] = {
    "shaped": (shaped.TITLE, shaped.run),
    "unshaped": (unshaped.TITLE, unshaped.run),
    "resume": (resume.TITLE, _resume),
    "known": (known.TITLE, known.run),
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
    "known",
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
    except cutoff.CutOff:
        pass
    section.cut = cutoff.by_signal() or section.cut
    for row in section.rows:
        section.errors += row.problems()
    if not (section.rows or section.errors or section.cut):
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
    if section.cut:
        what = "the figures so far" if section.rows else "no figures yet"
        print(f"CUT OFF by {section.cut}: {what}")
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


def markdown(report: dict[str, Any], sections: Sequence[Section]) -> str:
    """The report as Markdown."""
    lines = [
        f"{report['date']}, {report['hardware']}, {report['machine']['kernel']}, commit "
        f"{report['machine']['commit']}, `{report['command']}`, niceness {report['niceness']}; "
        f"other programs used up to {report['others_max']:.0%} of the cores."
    ]
    for section in sections:
        if section.rows:
            lines += ["", f"### {section.title}", "", markdown_table(section.rows)]
            lines += [f"\n{note}" for note in section.notes]
            lines += [f"\nCut off by {section.cut}: the figures so far."] if section.cut else []
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)


def exit_code(sections: Sequence[Section], strict: bool) -> int:
    if cutoff.caught:
        return 128 + cutoff.caught[0]
    if any(section.errors for section in sections):
        return 1
    missed: list[Row] = [row for section in sections for row in section.missed()]
    if strict and missed:
        print(f"missed: {'; '.join(row.name for row in missed)}", file=sys.stderr)
        return 1
    if any(section.cut for section in sections):
        return cutoff.TIME_CODE
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
    help="Faults of each kind for `resume`, `known` and `locate`.",
)
@click.option(
    "--repetitions",
    default=5,
    type=click.IntRange(1),
    show_default=True,
    help="Interleaved repetitions of unshaped measurements.",
)
@click.option(
    "--slice",
    "slice_s",
    type=click.FloatRange(1),
    help="Seconds after which `resume`, `known` and `locate` begin no more faults.",
)
@click.option(
    "--add-to",
    type=click.Path(path_type=Path, dir_okay=False),
    help="`locate`, `known`: cases so far; those of this run are added, up to --runs of each kind.",
)
@click.option("--seed", type=int, help="`locate`: which NICs and nodes (default: any).")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Where to write all figures (default: bench/results.json of the build folder).",
)
@click.option(
    "--markdown",
    "markdown_path",
    type=click.Path(path_type=Path),
    help="Write the tables as Markdown as well.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    help="Of `resume` (carrier, silent, silent-tx, silent-rx, reset, completion), `grey` (slow, "
    "lossy, follow), `locate` (rail-only, one-subnet), `shaped` and `cost` (a lab's name, as its "
    "rows begin with) or `growth` and `start` (a number of processes), these alone.",
)
@click.option(
    "--nccl",
    default="standin",
    metavar="DIR",
    callback=_nccl,
    help="`cost`: the folder of the libnccl.so.2 to measure with; ranks share the GPUs there are.",
)
@click.option("--strict", is_flag=True, help="A missed target is a failure.")
def main(
    smoke: bool,
    only: tuple[str, ...],
    runs: int,
    repetitions: int,
    slice_s: float | None,
    add_to: Path | None,
    seed: int | None,
    json_path: Path | None,
    markdown_path: Path | None,
    parts: tuple[str, ...],
    nccl: str,
    strict: bool,
) -> None:
    cutoff.listen()
    began = datetime.now(timezone.utc)
    options = Options(
        smoke=smoke,
        runs=runs,
        repetitions=repetitions,
        parts=parts,
        slice_s=slice_s,
        add_to=add_to,
        seed=seed,
        nccl=nccl,
    )
    sections: list[Section] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _finish(sections, options, began, json_path, markdown_path))
        with contextlib.suppress(cutoff.CutOff):
            for name in only or SECTIONS:
                section = run_section(name, options)
                sections.append(section)
                print_section(section)
                if cutoff.caught:
                    break
    raise SystemExit(exit_code(sections, strict and not smoke))


def _finish(
    sections: Sequence[Section],
    options: Options,
    began: datetime,
    json_path: Path | None,
    markdown_path: Path | None,
) -> None:
    """Also after an interruption: what there is by then."""
    report = document(sections, options, began)
    if not report["calm"] and not options.smoke:
        print(
            f"\nOther programs used up to {report['others_max']:.0%} of the cores: provisional.",
            file=sys.stderr,
        )
    name = "smoke.json" if options.smoke else "results.json"
    text = json.dumps(report, indent=1, allow_nan=True) + "\n"
    _write(json_path or paths.native_dir() / "bench" / name, text)
    if markdown_path:
        _write(markdown_path, markdown(report, sections))


if __name__ == "__main__":
    try:
        main()
    except BenchError as err:
        print(f"bench: {err}", file=sys.stderr)
        sys.exit(1)
