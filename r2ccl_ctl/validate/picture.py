"""One case as SVG: the bandwidth of the collectives above, the first host's NICs below."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from r2ccl_ctl.demo.picture import BACK, COLOURS, LOST
from r2ccl_ctl.validate.judge import bus_factor, source_of

PLATE = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8}
BIN_NS = 250_000_000


def draw(record: Mapping[str, Any]) -> str:
    """The picture as an svg element; "" if matplotlib is not there or nothing ran."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return ""
    if not record["windows"]:
        return ""
    with pyplot.rc_context({"svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, sharex=True, figsize=(9.5, 4.0), height_ratios=(3, 2), layout="constrained"
        )
        start = record["windows"][0]["begin_ns"]
        end = record["windows"][-1]["end_ns"]
        _collectives(record, upper, start)
        _nics(record, lower, start, end)
        for axes in (upper, lower):
            _steps(record, axes, start, words=axes is upper)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylim(bottom=0)
        lower.set_xlim(0, max((end - start) / 1e9, 0.1))
        lower.set_xlabel("seconds")
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :].strip()


def _collectives(record: Mapping[str, Any], axes: Any, start: int) -> None:
    """Each as a bar from its begin to its end, as high as its bandwidth."""
    factor = bus_factor(record)
    rows = [w for w in record["windows"] if w["seconds"] > 0]
    begin = [(w["begin_ns"] - start) / 1e9 for w in rows]
    width = [(w["end_ns"] - w["begin_ns"]) / 1e9 for w in rows]
    speed = [w["bytes"] / w["seconds"] / 1e9 * factor for w in rows]
    axes.bar(begin, speed, width, align="edge", color="#9db8d9", edgecolor="#4c72b0", linewidth=0.5)
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_ylim(0, max(speed, default=1.0) * 1.35)


def nic_rates(
    record: Mapping[str, Any], start: int, end: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Bytes per second that each NIC of the first host sent, in steps: the kernel's counters."""
    host, samples = record["hosts"][0], record["samples"][0]
    sources = {n["name"]: source_of(host, samples, n["name"]) for n in host["nics"]}
    times: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in sources}
    last = None
    for ns, row in samples:
        if not start <= ns <= end:
            continue
        if last is not None and ns - last[0] < BIN_NS:
            continue
        if last is not None:
            times.append((ns - start) / 1e9)
            for name, source in sources.items():
                sent = sum(row[c][0] - last[1][c][0] for c in source if c in last[1])
                rates[name].append(max(0.0, sent / ((ns - last[0]) / 1e9)))
        last = (ns, row)
    return times, rates


def _nics(record: Mapping[str, Any], axes: Any, start: int, end: int) -> None:
    times, rates = nic_rates(record, start, end)
    if not times:
        return
    names = list(rates)
    top = max((rate for row in rates.values() for rate in row), default=0.0)
    unit, word = (1e9, "Gbit/s") if top * 8 >= 1e9 else (1e6, "Mbit/s")
    axes.stackplot(
        times,
        [[rate * 8 / unit for rate in rates[name]] for name in names],
        labels=names,
        colors=[COLOURS[i % len(COLOURS)] for i in range(len(names))],
        step="pre",
        alpha=0.85,
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5),
                fontsize=8, frameon=False)  # fmt: skip
    axes.set_ylabel(f"sent, {word}")


def _steps(record: Mapping[str, Any], axes: Any, start: int, *, words: bool) -> None:
    last, row = -1e9, 0
    span = max(1.0, (record["windows"][-1]["end_ns"] - start) / 1e9)
    for step in record["steps"]:
        at = (step["asked_ns"] - start) / 1e9
        colour = LOST if step["verb"] in ("fail", "drain", "pull") else BACK
        axes.axvline(at, color=colour, linewidth=1.2, linestyle="--")
        if words:
            text = " ".join(filter(None, (step["verb"], step["nic"], step["fault"])))
            row = (row + 1) % 3 if at - last < 0.17 * span else 0
            last = at
            axes.annotate(text, (at, 0.99 - 0.11 * row), xycoords=("data", "axes fraction"),
                          xytext=(4, 0), textcoords="offset points", va="top", fontsize=8,
                          color=colour,
                          bbox=PLATE)  # fmt: skip
