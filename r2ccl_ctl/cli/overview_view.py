"""Jobs on one screen, and what several hosts answered, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from r2ccl_ctl import verdict
from r2ccl_ctl.cli.common import add_row, table
from r2ccl_ctl.gather import HostLook
from r2ccl_ctl.overview import Job, Row
from r2ccl_ctl.units import show_bytes, show_rate

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

STYLES = ("green", "yellow", "red", "magenta")
NAMED = 4  # hosts and processes with their reasons in a line
COLUMNS = (">RANK", "NODE", ">PID", "HEALTH", ">NICS", ">TX", ">RX", ">FAILS", ">REPLAYED",
           ">BEHIND", "WHY")  # fmt: skip
LEAST = 6  # lines; where there are fewer, a screen is no use


def host_dicts(hosts: Sequence[HostLook]) -> list[dict[str, Any]]:
    return [
        {"host": one.host, "error": one.error, "processes": len(one.snapshots),
         "problems": one.problems}
        for one in hosts
    ]  # fmt: skip


def host_texts(host: HostLook) -> list[str]:
    """What is not known of it."""
    found = [f"host {host.host} does not answer: {host.error}"] if host.error else []
    return found + [f"host {host.host}: {text}" for text in host.problems]


def host_lines(hosts: Sequence[HostLook]) -> list[Text]:
    from rich.text import Text

    silent = [host for host in hosts if host.error]
    count = number(len(hosts), "host", "s")
    lines = [Text(f"{count}, {len(silent)} without an answer")] if hosts else []
    texts = [text for host in hosts for text in host_texts(host)]
    lines += [Text(text, style="red") for text in texts[:NAMED]]
    return lines + ([Text(f"and {len(texts) - NAMED} more")] if len(texts) > NAMED else [])


def with_hosts(hosts: Sequence[HostLook], view: RenderableType) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(*host_lines(hosts), Text(), view) if hosts else view


def number(count: int, word: str, plural: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else plural)


def health(code: int) -> Text:
    from rich.text import Text

    return Text(verdict.WORDS[code].lower(), style=STYLES[code])


def job_title(job: Job) -> Text:
    from rich.text import Text

    ranks = max((row.snapshot.process.ranks or 0 for row in job.rows), default=0)
    count = f"{len(job.rows)} of {ranks} ranks" if ranks else number(len(job.rows), "process", "es")
    rates = f"tx {show_rate(sum(r.tx for r in job.rows)) or '-'}"
    rates += f", rx {show_rate(sum(r.rx for r in job.rows)) or '-'}"
    nodes = number(job.nodes, "node", "s")
    title = Text(f"job {job.name or '(without a name)'}  ", style="bold")
    return title.append_text(health(job.code)).append(f"  {count} on {nodes}, {rates}")


def cells(row: Row) -> tuple[object, ...]:
    snapshot = row.snapshot
    process = snapshot.process
    states = Counter(nic.state for nic in snapshot.nics)
    replayed = snapshot.counters["replayed_bytes"]
    why = row.reasons[0].text if row.reasons else ""
    more = f"; and {len(row.reasons) - 1} more" if len(row.reasons) > 1 else ""
    return (
        "-" if process.rank is None else process.rank,
        process.host,
        process.pid,
        health(row.code),
        f"{states['healthy']}/{len(snapshot.nics)}",
        show_rate(row.tx) or "-",
        show_rate(row.rx) or "-",
        row.failures,
        show_bytes(replayed) if replayed else "-",
        row.behind or "-",
        why + more,
    )


def overview_view(
    jobs: Sequence[Job], hosts: Sequence[HostLook], lines: int | None = None
) -> RenderableType:
    """Hosts without an answer, then the jobs. lines: how many there is room for; of what comes
    after them the number is told."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = list(host_lines(hosts))
    left = None if lines is None else max(lines, LEAST) - len(parts) - 1
    hidden = 0
    for job in jobs:
        room = len(job.rows) if left is None else max(left - 3, 0)
        shown = job.rows[:room]
        hidden += len(job.rows) - len(shown)
        if not shown:
            continue
        rows = table(*COLUMNS)
        for row in shown:
            add_row(rows, *cells(row))
        blank = [Text()] if parts else []
        parts += [*blank, job_title(job), Padding(rows, (0, 0, 0, 2), expand=False)]
        left = None if left is None else left - 3 - len(shown)
    if not jobs:
        parts.append(Text("no process to show"))
    if hidden:
        parts.append(Text(f"and {number(hidden, 'more process', 'es')}"))
    return Group(*parts)
