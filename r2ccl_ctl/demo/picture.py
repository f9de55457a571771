"""Bandwidth over time as a PNG: the AllReduces above, node 0's NICs below, events marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from r2ccl_ctl.demo.report import Report
from r2ccl_ctl.units import show_bytes, show_rate

if TYPE_CHECKING:
    from r2ccl_ctl.demo.feeds import Sample

LETTER = 0.0066  # width of one in the labels, of the axes' width
BIN_S = 0.5
LOST, BACK = "#c0392b", "#1e8449"
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")


def save_picture(report: Report) -> None:
    """Draw into the report's folder; without matplotlib the report says so."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as err:
        report.picture_problem = f"matplotlib cannot be imported ({err}): pip install matplotlib"
        return
    if not report.windows:
        report.picture_problem = "no AllReduce has ended"
        return
    path = report.folder / "bandwidth.png"
    figure = draw(report, pyplot)
    try:
        figure.savefig(path, dpi=120)
    except OSError as err:
        report.picture_problem = f"{path}: {err.strerror or err}"
    else:
        report.picture = path
    finally:
        pyplot.close(figure)


def draw(report: Report, pyplot: Any) -> Any:
    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(10, 6.2), height_ratios=(3, 2), layout="constrained"
    )
    figure.suptitle(f"R2CCL: {report.spec.headline()}", fontsize=11)
    _allreduces(report, upper)
    _nics(report, lower)
    for axes in (upper, lower):
        _events(report, axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    _labels(report, upper)
    lower.set_xlabel("seconds")
    lower.set_xlim(*_span(report))
    figure.supxlabel(
        f"wrong = {report.wrong} of {report.values_checked:,} values. Loopback NICs and a CPU "
        "stand-in for NCCL: what a failure does to a job, no measure of NICs.",
        fontsize=8,
        color="#555555",
    )
    return figure


def _span(report: Report) -> tuple[float, float]:
    """From a little before the first phase to the end of the last one."""
    if not report.phases:
        return 0.0, report.seconds(report.ended_ns)
    first = report.seconds(report.phases[0].begin_ns)
    return first, report.seconds(report.phases[-1].end_ns)


def _allreduces(report: Report, axes: Any) -> None:
    """Each AllReduce as a bar from its begin to its end, as high as its bandwidth."""
    begin = [report.seconds(w.begin_ns) for w in report.windows]
    width = [report.seconds(w.end_ns) - b for w, b in zip(report.windows, begin, strict=True)]
    height = [w.algbw_gbs for w in report.windows]
    axes.bar(
        begin, height, width, align="edge", color="#9db8d9", edgecolor="#4c72b0", linewidth=0.8
    )
    for result in report.phases:
        algbw = report.algbw_gbs(result)
        if algbw is None:
            continue
        start = report.seconds(max(result.begin_ns, result.settled_ns))
        end = report.seconds(result.end_ns)
        axes.hlines(algbw, start, end, color="#1f3a5f", linewidth=1.8)
        share = report.share(result)
        text = f"{algbw:.3f} GB/s" + (f" ({share:.0%})" if share is not None else "")
        axes.annotate(
            f"{result.phase.title}\n{text}",
            ((start + end) / 2, max([algbw, *(w.algbw_gbs for w in result.whole(report.windows))])),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
        )
    start, end = _span(report)
    seen = [w.algbw_gbs for w in report.windows if start <= report.seconds(w.end_ns) <= end]
    axes.set_ylim(0, max(seen, default=1.0) * 1.5)
    axes.set_ylabel("AllReduce, GB/s")


def nic_rates(samples: list[Sample], step_s: float = BIN_S) -> tuple[list[int], dict[str, Any]]:
    """Mean rates (bytes per second) in steps: the ends of the steps in ns, and NIC -> rates."""
    ends: list[int] = []
    rates: dict[str, list[float]] = {nic: [] for nic in (samples[-1].sent if samples else {})}
    last = samples[0] if samples else None
    for sample in samples:
        if last is None or sample.mono_ns - last.mono_ns < step_s * 1e9:
            continue
        span = (sample.mono_ns - last.mono_ns) / 1e9
        ends.append(sample.mono_ns)
        for nic, found in rates.items():
            found.append(max(0.0, sample.sent[nic] - last.sent.get(nic, 0)) / span)
        last = sample
    return ends, rates


def _nics(report: Report, axes: Any) -> None:
    """What each NIC of node 0 sends, one upon the other."""
    ends, rates = nic_rates(report.samples)
    if not ends:
        return
    times = [report.seconds(ns) for ns in ends]
    names = sorted(rates, key=lambda nic: [int(part) for part in nic.split(".")])
    axes.stackplot(
        times,
        [[rate * 8 / 1e6 for rate in rates[nic]] for nic in names],
        labels=names,
        colors=[COLOURS[i % len(COLOURS)] for i in range(len(names))],
        step="pre",
        alpha=0.85,
    )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8
    )
    whole = report.spec.nic_rate * report.spec.nics * report.spec.ranks_per_node
    if whole:
        axes.axhline(whole * 8 / 1e6, color="#555555", linewidth=0.8, linestyle=":")
        axes.set_title(
            f"dotted: {report.spec.nics} NICs x {report.spec.ranks_per_node} ranks x "
            f"{show_rate(report.spec.nic_rate)}",
            fontsize=8,
            loc="right",
            color="#555555",
        )
    axes.set_ylabel("sent by node 0, Mbit/s")


def _events(report: Report, axes: Any) -> None:
    for deed in report.deeds:
        failed = deed.action.verb == "fail"
        axes.axvline(
            report.seconds(deed.outcome.began_ns or deed.asked_ns),
            color=LOST if failed else BACK,
            linewidth=1.4,
            linestyle="--",
        )


def _labels(report: Report, axes: Any) -> None:
    """Beside each line what was done and what came of it; below the text before where that would
    reach into it."""
    free, row, lines = -1e9, 0, 0
    start, end = _span(report)
    for deed in report.deeds:
        at = report.seconds(deed.outcome.began_ns or deed.asked_ns)
        row = row + lines if at < free else 0
        failed = deed.action.verb == "fail"
        text = f"{deed.action.verb} {deed.action.nic}"
        if deed.outcome.resume_ms is not None:
            text += "\nresumed" if failed else ": in use"
            text += f" after {deed.outcome.resume_ms:.0f} ms"
        if failed and deed.outcome.replayed_bytes:
            text += f"\n{show_bytes(deed.outcome.replayed_bytes)} replayed"
        lines = text.count("\n") + 1
        free = at + max(map(len, text.split("\n"))) * LETTER * (end - start)
        axes.annotate(
            text,
            (at, 0.99 - 0.05 * row),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=LOST if failed else BACK,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0},
        )
