"""What the control segments hold, as metrics for Prometheus.

A series belongs to one process: its labels are job_name, node, rank and pid, and nic or comm beside
them. So no counter is reset by a sibling that ends. A process that has ended
keeps its series, with their last values, for a while (`keep_s`): longer than the time between two
scrapes, so that what happened in a job's last seconds is seen. Then the series end.

Nothing is kept between two collections; every one looks at the segments anew. Any thread may
collect.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from r2ccl_ctl.control import OTHER, Process, Selection, Snapshot, list_processes, unreadable
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.rows import Comm, Nic, Timing, spans
from r2ccl_ctl.segment import SegmentError, layout

KEEP_S = 300.0

# Not `job`: Prometheus gives each series a label of that name itself, the scrape job.
PROCESS = ("job_name", "node", "rank", "pid")
NIC = (*PROCESS, "nic")
COMM = (*PROCESS, "comm", "comm_rank")
TIMING = (*COMM, "op", "up_to_bytes")

# Counter of the process -> (metric, what it counts). In bytes where the name says so.
COUNTERS = {
    "bytes_sent": ("sent_bytes", "Bytes of messages sent"),
    "bytes_received": ("received_bytes", "Bytes of messages received"),
    "messages_sent": ("sent_messages", "Messages sent"),
    "messages_received": ("received_messages", "Messages received"),
    "failovers": ("failovers", "Times that what a lost path carried went on over another one"),
    "replayed_bytes": ("replayed_bytes", "Bytes sent again after a path was lost"),
    "replayed_chunks": ("replayed_chunks", "Chunks sent again after a path was lost"),
    "tail_resent_bytes": ("tail_resent_bytes", "Bytes sent once more over a faster path"),
    "duplicate_chunks": ("duplicate_chunks", "Chunks that had arrived already, dropped"),
    "stale_chunks": ("stale_chunks", "Chunks of a lost path that came late, dropped"),
    "crc_errors": ("wrong_chunks", "Chunks found wrong by their checksum (R2CCL_VERIFY)"),
    "path_failures": ("path_failures", "Times that a path went down"),
    "path_recoveries": ("path_recoveries", "Times that a path came back"),
    "heartbeats_missed": ("heartbeats_missed", "Heartbeats that nobody answered in time"),
    "no_path_waits": ("no_path_waits", "Times that no path to a peer was left"),
    "connections_failed": ("connections_failed", "Connections that ended with an error"),
    "handshakes_rejected": ("handshakes_rejected", "Strangers and broken greetings turned away"),
    "verdicts": ("verdicts", "Verdicts about which NIC is at fault"),
    "journal_dropped": ("journal_dropped", "Events that found no room in the journal"),
    "rows_refused": ("rows_refused", "Peers and paths that found their table full"),
    "timings_dropped": ("collectives_dropped", "Collectives that were to be recorded and are not"),
}
GAUGES = {
    "connections_open": ("connections", "Connections open now"),
    "requests_in_flight": ("requests_in_flight", "Sends and receives under way"),
    "memory_bytes": ("memory_bytes", "Memory of the plugin"),
    "sockets": ("sockets", "Sockets of the plugin"),
    "threads": ("threads", "Threads of the plugin"),
    "peers": ("peers", "Peer processes"),
    "paths_up": ("paths_up", "Paths that carry data"),
    "paths_total": ("paths", "Paths, in whatever state"),
}
NIC_COUNTERS = {
    "tx_bytes": ("nic_transmit_bytes", "Bytes sent over the NIC"),
    "rx_bytes": ("nic_receive_bytes", "Bytes received over the NIC"),
    "tx_chunks": ("nic_transmit_chunks", "Chunks sent over the NIC"),
    "rx_chunks": ("nic_receive_chunks", "Chunks received over the NIC"),
    "failures": ("nic_failures", "Times that the NIC was taken out of use for a failure"),
    "recoveries": ("nic_recoveries", "Times that the NIC came back to its full share"),
    "errors": ("nic_path_failures", "Times that a path of the NIC went down"),
    "replayed_bytes": ("nic_replayed_bytes", "Bytes lost on the NIC and sent again over others"),
    "tx_segments": ("nic_transmit_segments", "Segments that the kernel has sent over the NIC"),
    "retransmits": ("nic_retransmitted_segments", "Segments that the kernel has sent again"),
}
COMM_COUNTERS = {
    "operations": ("comm_operations", "Collectives handed to NCCL"),
    "p2p": ("comm_p2p_operations", "Sends and receives handed to NCCL"),
    "planned": ("comm_planned_operations", "Collectives that ran as a plan says"),
    "bus_bytes": ("comm_bus_bytes", "Bytes of collectives, as nccl-tests counts bus bandwidth"),
}
# Histograms of the process -> (metric, what took so long).
TIMES = {
    "failover": ("failover_seconds", "From a path's loss until others send what it carried"),
    "resume": ("resume_seconds", "From a path's loss until something sent after it has arrived"),
}


@dataclass
class Times:
    """A histogram: labels -> the sum in seconds, and how many in each bucket."""

    text: str
    names: Sequence[str]
    bounds: Sequence[float]
    values: dict[tuple[str, ...], tuple[float, ...]] = field(default_factory=dict)


@dataclass
class Families:
    """The metrics of one collection. A series that comes twice (two rows of one name) is added up:
    Prometheus refuses a page on which one stands twice."""

    _found: dict[str, tuple[str, str, tuple[str, ...], dict[tuple[str, ...], float]]] = field(
        default_factory=dict
    )
    _times: dict[str, Times] = field(default_factory=dict)

    def add(
        self,
        kind: str,
        name: str,
        text: str,
        names: Sequence[str],
        labels: Sequence[str] = (),
        value: float = 0,
        *,
        series: bool = True,
    ) -> None:
        """`series` False: only announce the metric, so that its HELP and TYPE are there."""
        _, _, _, values = self._found.setdefault(name, (kind, text, tuple(names), {}))
        if series:
            key = tuple(labels)
            values[key] = values.get(key, 0) + value

    def add_times(
        self,
        name: str,
        text: str,
        names: Sequence[str],
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        row: Sequence[float] = (),
    ) -> None:
        """A histogram. `row`: the sum in seconds, then how many in each bucket; empty: only
        announce it."""
        values = self._times.setdefault(name, Times(text, names, bounds)).values
        if row:
            before = values.get(tuple(labels), (0,) * len(row))
            values[tuple(labels)] = tuple(map(sum, zip(before, row, strict=True)))

    def _histograms(self) -> Iterator[Metric]:
        for name, times in self._times.items():
            family = HistogramMetricFamily(f"r2ccl_{name}", f"{times.text}.", labels=times.names)
            for labels, (seconds, *counts) in times.values.items():
                ends = [*map(str, times.bounds), "+Inf"]
                buckets = zip(ends, accumulate(counts), strict=True)
                family.add_metric(labels, list(buckets), seconds)
            yield family

    def metrics(self) -> Iterator[Metric]:
        yield from self._histograms()
        for name, (kind, text, names, values) in self._found.items():
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(f"r2ccl_{name}", f"{text}.", labels=names)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family


def words(enum: str, prefix: str) -> list[str]:
    return [word for word in layout().enum(enum, prefix).values() if word != "unknown"]


def process_labels(process: Process) -> tuple[str, ...]:
    rank = "" if process.rank is None else str(process.rank)
    return process.job, process.host, rank, str(process.pid)


def add_process(to: Families, snapshot: Snapshot | None) -> None:
    """A process; None announces its metrics."""
    there = snapshot is not None
    process = snapshot.process if snapshot else None
    labels = process_labels(process) if process else ()

    def gauge(name: str, text: str, value: float, more: Sequence[tuple[str, str]] = ()) -> None:
        names = (*PROCESS, *(name for name, _ in more))
        to.add("gauge", name, text, names, (*labels, *(v for _, v in more)), value, series=there)

    def plain(name: str) -> str:
        return str(getattr(process, name)) if process else ""

    facts = [(name, plain(name)) for name in ("mode", "nccl_version", "plugin_version", "plan")]
    gauge("process_info", "1; the labels say what runs", 1, facts)
    running = bool(process and process.running)
    gauge("process_running", "1: it runs; 0: it has ended or died", running)
    silent = process.silent_s if process else 0
    gauge("process_silent_seconds", "Since its last sign of life; 0 below 3 seconds", silent)
    started = process.created_real_ns / 1e9 if process else 0
    gauge("process_start_time_seconds", "When it started to use R2CCL, since 1970", started)
    waits = (
        len({p.process_id for p in snapshot.peers if waited_for(snapshot, p)}) if snapshot else 0
    )
    gauge("peers_without_path", "Peers that something waits for and no path leads to", waits)
    for key, (name, text) in GAUGES.items():
        gauge(name, text, snapshot.gauges.get(key, 0) if snapshot and running else 0)
    for key, (name, text) in COUNTERS.items():
        value = snapshot.counters.get(key, 0) if snapshot else 0
        to.add("counter", name, text, PROCESS, labels, value, series=there)
    bounds = [us / 1e6 for us in sorted(layout().enum("r2_seg_within", "R2_SEG_WITHIN_"))]
    for key, (name, text) in TIMES.items():
        times = snapshot.times[key] if snapshot else None
        row = (times["us"] / 1e6, *times["count"]) if times else ()
        to.add_times(name, text, PROCESS, bounds, labels, row)


def waited_for(snapshot: Snapshot, peer: object) -> bool:
    since = getattr(peer, "waits_mono_ns", 0)
    return (
        snapshot.process.running
        and 0 < since <= snapshot.mono_ns
        and getattr(peer, "state", "") not in ("gone", "closed")
    )


def add_nic(to: Families, snapshot: Snapshot | None, nic: Nic | None) -> None:
    there = nic is not None
    running = bool(snapshot and snapshot.process.running)
    labels = (*process_labels(snapshot.process), nic.name) if snapshot and nic else ()

    def gauge(name: str, text: str, value: float, more: Sequence[tuple[str, str]] = ()) -> None:
        names = (*NIC, *(name for name, _ in more))
        values = (*labels, *(v for _, v in more))
        to.add("gauge", name, text, names, values, value, series=there and running)

    def plain(name: str) -> str:
        return str(getattr(nic, name)) if nic else ""

    facts = [(name, plain(name)) for name in ("ifname", "addr", "pci_path", "rdma_device")]
    gauge("nic_info", "1; the labels say which NIC it is", 1, facts)
    for word in words("r2_seg_nic_state", "R2_SEG_NIC_"):
        at = bool(nic and nic.state == word)
        gauge(
            "nic_state",
            "1 for the state that the NIC is in, 0 for the others",
            at,
            [("state", word)],
        )
    if nic is None or nic.link != "unknown":
        gauge("nic_link_up", "1: the link is up; 0: it is down", bool(nic and nic.link == "up"))
    gauge(
        "nic_weight_ratio",
        "Share that the NIC may carry, of the fastest one's",
        (nic.weight if nic else 0) / 100,
    )
    gauge(
        "nic_speed_bytes",
        "Speed of the NIC in bytes per second",
        (nic.speed_mbps if nic else 0) * 125000,
    )
    gauge(
        "nic_inflight_bytes",
        "Bytes on the NIC that are not acknowledged yet",
        nic.inflight_bytes if nic else 0,
    )
    gauge("nic_flap_penalty", "Flap damping: the penalty of the NIC", nic.penalty if nic else 0)
    gauge("nic_fault_injected", "1: fail-nic has put a fault on it", bool(nic and nic.fault))
    for key, (name, text) in NIC_COUNTERS.items():
        to.add("counter", name, text, NIC, labels, getattr(nic, key, 0), series=there)


def add_comm(to: Families, snapshot: Snapshot | None, comm: Comm | None) -> None:
    there = comm is not None
    labels: tuple[str, ...] = ()
    if snapshot and comm:
        rank = "" if comm.rank is None else str(comm.rank)
        labels = (*process_labels(snapshot.process), comm.id[:8], rank)
    for key, (name, text) in COMM_COUNTERS.items():
        to.add("counter", name, text, COMM, labels, getattr(comm, key, 0), series=there)


def add_timing(to: Families, snapshot: Snapshot | None, timing: Timing | None) -> None:
    """Times of collectives; None announces them."""
    labels: tuple[str, ...] = ()
    row: tuple[float, ...] = ()
    if snapshot and timing:
        comm = (timing.comm[:8], str(timing.rank))
        labels = (*process_labels(snapshot.process), *comm, timing.op, str(timing.up_to))
        row = (timing.ns / 1e9, *timing.count)
    text = "From a collective's first data on the network to its end"
    to.add_times("collective_seconds", text, TIMING, spans(), labels, row)
    text = (
        "Bytes of the collectives of r2ccl_collective_seconds, as nccl-tests counts bus bandwidth"
    )
    value = timing.bus_bytes if timing else 0
    to.add("counter", "collective_bus_bytes", text, TIMING, labels, value, series=bool(timing))


def wanted_processes(there: Iterable[Process], wanted: Selection, alive_ns: int) -> list[Process]:
    """Those that run, and those that were alive at `alive_ns` or later. Damaged ones, and those of
    another layout, are left out: nobody knows whose they are. Of several with the same labels, as
    after a container's restart or an exec, those that run (containers that share a host's name:
    added up), or the newest."""
    ended: dict[tuple[str, ...], Process] = {}
    running: list[Process] = []
    for process in sorted(there, key=lambda p: p.created_real_ns):
        lives = process.running or max(process.ended_real_ns, process.alive_real_ns) >= alive_ns
        if not wanted.wants(process) or process.state in ("damaged", OTHER) or not lives:
            continue
        if process.running:
            running.append(process)
        else:
            ended[process_labels(process)] = process
    taken = {process_labels(process) for process in running}
    return running + [process for labels, process in ended.items() if labels not in taken]


def collect(
    wanted: Selection,
    *,
    keep_s: float = KEEP_S,
    directory: Path | None = None,
    now_ns: Callable[[], int] = time.time_ns,
) -> list[Metric]:
    """All metrics of the chosen processes, as they are now. Where no process is, or one cannot be
    read, the page still has every HELP and TYPE, and says how many could not be read. Raises
    R2Error where the segments cannot be listed."""
    to = Families()
    shown = 0
    add_process(to, None)
    add_nic(to, None, None)
    add_comm(to, None, None)
    add_timing(to, None, None)
    there = list_processes(dead=True, directory=directory)
    lost = sum(process.state in ("damaged", OTHER) for process in there)
    for process in wanted_processes(there, wanted, now_ns() - int(keep_s * 1e9)):
        try:
            snapshot = process.snapshot()
        except SegmentError:  # it went between the list and the look, or is damaged
            lost += 1
            continue
        shown += snapshot.process.running
        add_process(to, snapshot)
        for nic in snapshot.nics:
            add_nic(to, snapshot, nic)
        for comm in snapshot.comms:
            add_comm(to, snapshot, comm)
        for timing in snapshot.timings:
            add_timing(to, snapshot, timing)
    to.add("gauge", "processes", "Running processes on this page", (), (), shown)
    hidden = lost + len(unreadable(directory=directory))
    text = "Control segments that could not be read: of other users, of another layout, or damaged"
    to.add("gauge", "segments_unreadable", text, (), (), hidden)
    return list(to.metrics())


class R2Collector(Collector):
    """For a registry of prometheus_client. A collection never raises: where the segments cannot be
    listed, the page has `r2ccl_up 0` and nothing else."""

    def __init__(self, wanted: Selection, keep_s: float, directory: Path | None = None) -> None:
        self.wanted = wanted
        self.keep_s = keep_s
        self.directory = directory

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("r2ccl_up", "1: the control segments could be listed.")
        try:
            found = collect(self.wanted, keep_s=self.keep_s, directory=self.directory)
        except (R2Error, OSError):
            found = []
        up.add_metric((), 1 if found else 0)
        yield up
        yield from found


def registry(
    wanted: Selection, keep_s: float = KEEP_S, directory: Path | None = None
) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(R2Collector(wanted, keep_s, directory))
    return made


def page(wanted: Selection, keep_s: float = KEEP_S, directory: Path | None = None) -> bytes:
    """The metrics in Prometheus' text format."""
    return generate_latest(registry(wanted, keep_s, directory))


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, never a part. A link stays one; the mode stays, and
    is 0644 of a new file, whatever the umask: others are to read it. Raises R2Error, of which
    R2UsageError where something else than a file is there, such as a device, or no folder."""
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise R2UsageError(
            f"--output '{path}': there is no folder '{path.parent}'; make it first (mkdir -p)"
        )
    scratch = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        mode = path.stat().st_mode if path.exists() else stat.S_IFREG | 0o644
        if not stat.S_ISREG(mode):
            raise R2UsageError(
                f"--output '{path}' is no regular file: leave out --output for stdout"
            )
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as out:
                out.write(data)
                os.fchmod(descriptor, stat.S_IMODE(mode))
            os.replace(scratch, path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
    except OSError as err:
        raise R2Error(f"--output '{path}' cannot be written: {err.strerror}") from err


def parse_listen(text: str) -> tuple[str, int]:
    """(address, port) of [ADDR:]PORT; an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise R2UsageError(
            f"--listen '{text}': write an IPv6 address in brackets, as in [::1]:9435"
        )
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise R2UsageError(f"--listen '{text}': give [ADDR:]PORT, for example 9435 or 0.0.0.0:9435")
    return host or "127.0.0.1", int(port)


def only_metrics(app: Any) -> Callable[..., Iterable[bytes]]:
    """The library's application answers every address with the metrics; a typing error in a scrape
    job should not work until somebody corrects the exporter."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO") or "/"
        if path == "/metrics":
            found: Iterable[bytes] = app(environ, start_response)
            return found
        status, text = ("200 OK", "R2CCL") if path == "/" else ("404 Not Found", "nothing is here")
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}: metrics are at /metrics\n".encode()]

    return answer


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Server6(Server):
    address_family = socket.AF_INET6


class Quiet(WSGIRequestHandler):
    """A scrape is no news."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(wanted: Selection, address: str, port: int, keep_s: float = KEEP_S) -> WSGIServer:
    """Answer scrapes in threads of its own, until `shutdown`. Raises R2Error when the port is taken
    or the address is not this machine's."""
    try:
        app = only_metrics(make_wsgi_app(registry(wanted, keep_s)))
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        kind = Server6 if found[0][0] == socket.AF_INET6 else Server
        server = make_server(str(found[0][4][0]), port, app, kind, Quiet)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    except (socket.gaierror, UnicodeError) as err:
        why = getattr(err, "strerror", "") or "not a name"
        raise R2UsageError(f"--listen: '{address}' is no address: {why}") from err
    except OSError as err:
        raise R2Error(
            f"--listen: {address} port {port} cannot be had: {err.strerror}; give another one"
        ) from err
    return server
