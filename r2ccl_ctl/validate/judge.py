"""From the record of a run to a verdict. Pure. What is not shown is unknown, never passed.

Bytes per NIC are the kernel's (or the HCA's) counters: R2CCL's own word is not evidence for R2CCL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from r2ccl_ctl.control import Process
from r2ccl_ctl.demo.evidence import Outcome, innocent_downs, judge_failure, judge_recovery
from r2ccl_ctl.journal import Event
from r2ccl_ctl.validate.cases import ENDS, Case

PASSED, SLOW, FAILED, UNKNOWN, SKIPPED = "passed", "slow", "failed", "unknown", "skipped"
CODES = {PASSED: 0, SLOW: 1, FAILED: 2, UNKNOWN: 3}
WORST = (FAILED, UNKNOWN, SLOW, PASSED)

CARRIES = 0.1  # of an equal share: less before a fault, and the fault proves nothing
QUIET = 0.05  # of what it carried: a NIC that has failed, or is drained, sends no more than this
RETURNS = 0.01  # of what it carried: it is in use again
SLOWED = 0.5  # of what it carried: a slow NIC has to be given less than this
SHARE = 0.6  # of the bandwidth that the remaining NICs could give
BESIDE_REFERENCE = 0.7  # of the bandwidth without R2CCL
SETTLE_NS = 200_000_000
LEAST_NS = 300_000_000
WHOLE = 2  # collectives that a bandwidth is made of

Samples = Sequence[Any]  # [ns, {counter: [tx, rx]}], in the order of time


@dataclass
class Result:
    """One case. reasons: why it did not pass. nics: bytes per second of each NIC of the first host
    before, while and after it had failed; None where the time was too short."""

    name: str
    title: str
    status: str = PASSED
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    nics: list[dict[str, Any]] = field(default_factory=list)
    proves: str = ""  # as its case

    def say(self, status: str, reason: str) -> None:
        self.reasons.append(reason)
        if WORST.index(status) < WORST.index(self.status):
            self.status = status

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


# Counters


def source_of(host: Mapping[str, Any], samples: Samples, nic: str) -> list[str]:
    """The counters of a NIC: its interface's, and its RDMA port's."""
    row = next((n for n in host["nics"] if nic in (n["name"], n["ifname"])), None)
    names = [row["ifname"], f"{row['rdma']}:{row['rdma_port']}"] if row else []
    known = samples[-1][1] if samples else {}
    return [name for name in names if name in known]


def rate(samples: Samples, source: Sequence[str], begin_ns: int, end_ns: int) -> float | None:
    """Bytes sent per second between two times; None where that cannot be told."""
    inside = [s for s in samples if begin_ns <= s[0] <= end_ns]
    if not source or len(inside) < 2 or inside[-1][0] - inside[0][0] < LEAST_NS:
        return None
    sent = sum(inside[-1][1][name][0] - inside[0][1][name][0] for name in source)
    return float(sent / ((inside[-1][0] - inside[0][0]) / 1e9))


# The record as objects


def events_of(record: Mapping[str, Any]) -> list[Event]:
    known = {name: Process.from_dict(row) for name, row in record["processes"].items()}
    found = [
        Event(process=known[row["process"]], **{k: v for k, v in row.items() if k != "process"})
        for row in record["events"]
    ]
    words = {"pull": "fault-injected", "plug": "fault-cleared"}  # no rank injected that
    for step in record["steps"]:
        if step["verb"] in words and known:
            process = next(iter(known.values()))
            found.append(
                Event(
                    process,
                    -1,
                    0,
                    step["asked_ns"],
                    words[step["verb"]],
                    step["nic"],
                    "",
                    "",
                    0,
                    0,
                    0,
                    0,
                    step["fault"],
                )
            )
    return sorted(found, key=lambda event: event.mono_ns)


def bandwidth(record: Mapping[str, Any], begin_ns: int, end_ns: int) -> float | None:
    """Bytes per second of the collectives that lie in between."""
    inside = [w for w in record["windows"] if w["begin_ns"] >= begin_ns and w["end_ns"] <= end_ns]
    seconds = sum(w["seconds"] for w in inside)
    return float(sum(w["bytes"] for w in inside) / seconds) if seconds else None


def bus_factor(record: Mapping[str, Any]) -> float:
    setup = record["inputs"]["setup"]
    ranks = setup["per_node"] * len(setup["hosts"])
    return float(2 * (ranks - 1) / ranks)


def margin(record: Mapping[str, Any]) -> int:
    """How much times of different hosts may differ."""
    return 2 * max((host["error_ns"] for host in record["hosts"]), default=0) + 1_000_000


def end_of(record: Mapping[str, Any], step: Mapping[str, Any]) -> Any:
    """The step that undoes this one; None if there was none yet."""
    return next(
        (
            s
            for s in record["steps"]
            if s["verb"] == ENDS[step["verb"]]
            and s["nic"] == step["nic"]
            and s["asked_ns"] > step["asked_ns"]
        ),
        None,
    )


def failures(record: Mapping[str, Any]) -> list[Any]:
    return [s for s in record["steps"] if s["verb"] in ("fail", "pull")]


def returned(record: Mapping[str, Any]) -> bool:
    """Every NIC that was given back has its paths again."""
    events = events_of(record)
    lost = margin(record)
    for step in failures(record):
        back = end_of(record, step)
        if back is None:
            continue
        found = judge_recovery(
            events, step["nic"], step["asked_ns"] - lost, back["asked_ns"] - lost
        )
        if found.missing:
            return False
    return True


def carries_again(record: Mapping[str, Any]) -> bool:
    """Every NIC that was given back sends more than a trace, by the kernel's counters."""
    host, samples = record["hosts"][0], record["samples"][0]
    for step in record["steps"]:
        if step["verb"] not in ENDS.values():
            continue
        source = source_of(host, samples, step["nic"])
        begin = record["windows"][0]["end_ns"]
        before = rate(samples, source, begin, record["steps"][0]["asked_ns"])
        after = rate(samples, source, step["done_ns"], samples[-1][0] if samples else 0)
        if before and (after is None or after < 2 * RETURNS * before):
            return False
    return True


def shown(record: Mapping[str, Any]) -> bool:
    """The faults under way have lasted long enough to be judged."""
    events, settled = events_of(record), 0
    for step in record["steps"]:
        if step["verb"] in ("fail", "pull") and step["fault"] != "slow":
            if end_of(record, step) is not None:
                continue
            outcome = _outcome(record, step, events)
            if not outcome.paths or outcome.settled_ns is None and outcome.replayed_bytes:
                return False
            settled = max(settled, outcome.settled_ns or 0)
        settled = max(settled, step["done_ns"])
    whole = [w for w in record["windows"] if w["begin_ns"] >= settled]
    last = record["samples"][0][-1][0] if record["samples"][0] else 0
    return len(whole) >= WHOLE and last - settled > 2 * LEAST_NS + SETTLE_NS


# Verdicts


def judge(case: Case, record: Mapping[str, Any]) -> Result:
    """One case."""
    found = Result(case.name, case.title, proves=case.proves)
    _values(found, record)
    if not record.get("complete"):
        found.say(UNKNOWN, "; ".join(record["problems"]) or "the case did not run to its end")
    elif record["problems"]:
        found.say(FAILED, "; ".join(record["problems"]))
        for rank, text in record["words"].items():
            last = [line.strip() for line in text.splitlines() if line.strip()][-2:]
            found.notes.append(f"rank {rank} said: {' | '.join(last)}")
    if record["problems"] and not record["windows"]:
        return found  # it did not begin: what is missing then is no other reason
    if case.program != "r2ccl_perf":
        _nccl_tests(found, record)
    setup = record["inputs"]["setup"]
    ranks = setup["per_node"] * len(setup["hosts"])
    if case.r2ccl and len(record["processes"]) < ranks:
        seen = len(record["processes"])
        found.say(UNKNOWN, f"of {ranks} ranks {seen} have a control segment: did they use R2CCL?")
    if not case.r2ccl and record["processes"]:
        found.say(UNKNOWN, "R2CCL was in use where it should not have been")
    if found.status in (PASSED, SLOW) and case.proves:
        {"failover": _failover, "flap": _flap, "slow": _slow, "drain": _drain}[case.proves](
            found, record
        )
    if case.proves:
        _innocent(found, record)
    return found


def _values(found: Result, record: Mapping[str, Any]) -> None:
    windows = record["windows"]
    wrong = sum(max(w["wrong"], 0) for w in windows)
    unchecked = sum(w["wrong"] < 0 for w in windows)
    begin = windows[0]["end_ns"] if windows else 0
    speed = bandwidth(record, begin, 1 << 62)
    found.figures = {
        "collectives": len(windows),
        "wrong": wrong,
        "unchecked": unchecked,
        "bytes": sum(w["bytes"] for w in windows),
        "algbw_gbs": _gb(speed),
        "busbw_gbs": _gb(speed and speed * bus_factor(record)),
        "longest_s": max((w["seconds"] for w in windows), default=None),
    }
    if wrong:
        found.say(FAILED, f"{wrong} values are wrong")
    if unchecked:
        found.say(UNKNOWN, f"{unchecked} collectives were not checked")
    if len(windows) < 2 and not record["problems"]:
        found.say(UNKNOWN, "fewer than two collectives ended")


def _gb(speed: float | None) -> float | None:
    return None if speed is None else round(speed / 1e9, 6)


def _nccl_tests(found: Result, record: Mapping[str, Any]) -> None:
    """Its own word about the whole run."""
    from r2ccl_ctl.validate.nccltests import parse

    out = parse(record["output"].splitlines())
    found.figures["nccl_tests_busbw_gbs"] = out.busbw
    found.figures["out_of_bounds"] = out.out_of_bounds
    if out.out_of_bounds:
        found.say(FAILED, f"nccl-tests counts {out.out_of_bounds} values out of bounds")
    elif out.problems:
        found.say(UNKNOWN, f"its output cannot be trusted: {out.problems[0]}")


def _table(found: Result, record: Mapping[str, Any], spans: Mapping[str, tuple[int, int]]) -> None:
    """Bytes per second of each NIC of the first host in the time spans."""
    host, samples = record["hosts"][0], record["samples"][0]
    for row in host["nics"]:
        source = source_of(host, samples, row["name"])
        found.nics.append(
            {"nic": row["name"], "counters": source}
            | {name: rate(samples, source, *span) for name, span in spans.items()}
        )


def _carried(found: Result, nic: str) -> float | None:
    """What the NIC carried before, or None: then nothing can be shown with it."""
    row = next((r for r in found.nics if r["nic"] == nic), None)
    rates = [r["before"] for r in found.nics if r["before"] is not None]
    if row is None or row["before"] is None:
        found.say(UNKNOWN, f"the kernel's counters of {nic} say nothing")
        return None
    if row["before"] < CARRIES * sum(rates) / len(rates) or not row["before"]:
        found.say(UNKNOWN, f"{nic} carried nothing before: its failure shows nothing")
        return None
    return float(row["before"])


def _outcome(record: Mapping[str, Any], step: Any, events: list[Event]) -> Outcome:
    return judge_failure(events, step["nic"], step["fault"], step["asked_ns"] - margin(record))


def _failover(found: Result, record: Mapping[str, Any]) -> None:
    events, lost = events_of(record), margin(record)
    fails = failures(record)
    begin = record["windows"][0]["end_ns"]
    resumed, detected, replayed = [], [], 0
    settled = begin
    for step in fails:
        nic = step["nic"]
        outcome = _outcome(record, step, events)
        missing = [m for m in outcome.missing if not (outcome.paths and "replayed" in m)]
        if outcome.missing and not missing:
            found.notes.append(f"{nic}: nothing was in flight on it")
        for text in missing:
            found.say(FAILED, text)
        back = end_of(record, step)
        _quiet(found, record, nic, step, outcome, back)
        detected.append(outcome.detect_ms or 0.0)
        if outcome.resume_ms is not None:
            resumed.append(outcome.resume_ms)
        replayed += outcome.replayed_bytes
        settled = max(settled, outcome.settled_ns or step["asked_ns"])
        again = judge_recovery(events, nic, step["asked_ns"] - lost, back["asked_ns"] - lost)
        for text in again.missing:
            found.say(FAILED, text)
    if fails[-1]["returning"]:
        _while_returning(found, record, events)
    found.figures |= {
        "detect_ms": round(max(detected), 3),
        "resume_ms": round(max(resumed), 3) if resumed else None,
        "replayed_bytes": replayed,
    }
    if not fails[-1]["returning"]:
        until = min(s["asked_ns"] for s in record["steps"] if s["verb"] in ENDS.values())
        _speed(found, record, begin, fails[0], settled, until, len(fails))


def _quiet(
    found: Result, record: Mapping[str, Any], nic: str, step: Any, outcome: Outcome, back: Any
) -> None:
    """The kernel's counters: the NIC carried, then was silent, then carried again."""
    others = [
        s["asked_ns"]
        for s in record["steps"]
        if s["verb"] in ("fail", "pull") and s["asked_ns"] < step["asked_ns"]
    ]
    from_ns = max([record["windows"][0]["end_ns"], *others])
    silent = max(outcome.settled_ns or 0, step["done_ns"]) + SETTLE_NS
    last = record["windows"][-1]["end_ns"]
    spans = {
        "before": (from_ns, step["asked_ns"]),
        "failed": (silent, back["asked_ns"]),
        "after": (back["done_ns"], last),
    }
    rows = Result("", "")
    _table(rows, record, spans)
    before = _carried(rows, nic)
    for reason in rows.reasons:
        found.say(UNKNOWN, reason)
    row = next(r for r in rows.nics if r["nic"] == nic)
    found.nics = [r for r in found.nics or rows.nics if r["nic"] != nic]
    found.nics.append(row)
    found.nics.sort(key=lambda r: str(r["nic"]))
    if before is None:
        return
    if row["failed"] is None:
        found.say(UNKNOWN, f"{nic} was away too shortly for the kernel's counters")
    elif row["failed"] > QUIET * before:
        found.say(
            FAILED,
            f"{nic} still sent {row['failed'] / before:.0%} of before while it had "
            "failed: it was not that NIC, or it was still used",
        )
    if row["after"] is not None and row["after"] < RETURNS * before:
        found.say(FAILED, f"{nic} was given back and carried nothing again")


def _while_returning(found: Result, record: Mapping[str, Any], events: list[Event]) -> None:
    """The second NIC failed before the first one was fully back."""
    second = next(s for s in record["steps"] if s["returning"])
    first = next(s for s in record["steps"] if s["verb"] == "recover")
    whole = [
        e.mono_ns
        for e in events
        if e.event in ("nic-up", "nic-healthy")
        and e.nic == first["nic"]
        and e.process.host == record["hosts"][0]["host"]
        and e.mono_ns >= first["asked_ns"]
    ]
    if whole and min(whole) < second["asked_ns"]:
        found.say(UNKNOWN, f"{first['nic']} was fully back before {second['nic']} failed")


def _speed(
    found: Result,
    record: Mapping[str, Any],
    begin: int,
    fail: Any,
    settled: int,
    until: int,
    lost: int,
) -> None:
    """Bandwidth with the NICs that are left, beside that of before."""
    before = bandwidth(record, begin, fail["asked_ns"])
    during = bandwidth(record, settled, until)
    count = len(record["hosts"][0]["nics"])
    expected = (count - lost) / count
    found.figures |= {
        "before_gbs": _gb(before),
        "during_gbs": _gb(during),
        "expected_share": round(expected, 4),
    }
    if before is None or during is None:
        found.say(
            UNKNOWN,
            "too few collectives ended before or during the failure: "
            "give a smaller --size or more --seconds",
        )
        return
    share = during / before
    found.figures["share"] = round(share, 4)
    if share < SHARE * expected:
        found.say(
            SLOW, f"{share:.0%} of the bandwidth is left, where the NICs could give {expected:.0%}"
        )


def _flap(found: Result, record: Mapping[str, Any]) -> None:
    events, lost = events_of(record), margin(record)
    fails = failures(record)
    nic = fails[0]["nic"]
    last = record["windows"][-1]["end_ns"]
    _table(
        found,
        record,
        {
            "before": (record["windows"][0]["end_ns"], fails[0]["asked_ns"]),
            "failed": (fails[0]["done_ns"], fails[-1]["done_ns"]),
            "after": (fails[-1]["done_ns"], last),
        },
    )
    _carried(found, nic)
    injected = {
        step["asked_ns"]
        for step in fails
        for e in events
        if e.event == "fault-injected"
        and e.nic == nic
        and -lost <= e.mono_ns - step["asked_ns"] <= 2 * 10**9
    }
    if len(injected) < len(fails):
        found.say(UNKNOWN, f"of {len(fails)} failures the journals show {len(injected)}")
    downs = [e for e in events if e.event == "path-down" and nic in (e.nic, e.remote_nic)]
    if not downs:
        found.say(FAILED, f"no rank noticed that {nic} failed")
    if not bandwidth(record, fails[-1]["done_ns"], last):
        found.say(FAILED, "no collective ended after the last failure")
    found.figures |= {
        "failures": len(injected),
        "paths_lost": len(downs),
        "replayed_bytes": sum(e.bytes for e in events if e.event == "replay"),
    }


def _slow(found: Result, record: Mapping[str, Any]) -> None:
    fail = next(s for s in record["steps"] if s["verb"] == "fail")
    back = end_of(record, fail)
    begin = record["windows"][0]["end_ns"]
    settled = min(fail["done_ns"] + 1_500_000_000, (fail["done_ns"] + back["asked_ns"]) // 2)
    _table(
        found,
        record,
        {
            "before": (begin, fail["asked_ns"]),
            "failed": (settled, back["asked_ns"]),
            "after": (back["done_ns"], record["windows"][-1]["end_ns"]),
        },
    )
    if not any(
        e["event"] == "fault-injected" and e["nic"] == fail["nic"] for e in record["events"]
    ):
        found.say(UNKNOWN, f"no rank's journal shows that {fail['nic']} became slow")
    before = _carried(found, fail["nic"])
    row = next(r for r in found.nics if r["nic"] == fail["nic"])
    if before is not None and row["failed"] is not None and row["failed"] > SLOWED * before:
        found.say(FAILED, f"{fail['nic']} still sent {row['failed'] / before:.0%} of before")
    _speed(found, record, begin, fail, settled, back["asked_ns"], 1)


def _drain(found: Result, record: Mapping[str, Any]) -> None:
    events = events_of(record)
    drain = next(s for s in record["steps"] if s["verb"] == "drain")
    nic, since = drain["nic"], drain["asked_ns"] - margin(record)
    back = end_of(record, drain)
    here = record["hosts"][0]["host"]
    done = {
        e.process.name: e.mono_ns
        for e in events
        if e.event == "nic-drained" and e.nic == nic and since <= e.mono_ns < back["asked_ns"]
    }
    ranks = [n for n, p in record["processes"].items() if p["host"] == here]
    if absent := [n for n in ranks if n not in done]:
        found.say(FAILED, f"{nic} was not drained in {len(absent)} of {len(ranks)} ranks")
    settled = max(done.values(), default=drain["done_ns"])
    begin, last = record["windows"][0]["end_ns"], record["windows"][-1]["end_ns"]
    _table(
        found,
        record,
        {
            "before": (begin, drain["asked_ns"]),
            "failed": (settled + SETTLE_NS, back["asked_ns"]),
            "after": (back["done_ns"], last),
        },
    )
    before = _carried(found, nic)
    row = next(r for r in found.nics if r["nic"] == nic)
    if before is not None and row["failed"] is not None and row["failed"] > QUIET * before:
        found.say(FAILED, f"{nic} still sent {row['failed'] / before:.0%} of before when drained")
    if before is not None and row["failed"] is None:
        found.say(UNKNOWN, f"{nic} was drained too shortly for the kernel's counters")
    lost = [
        e
        for e in events
        if e.event in ("path-down", "replay")
        and e.mono_ns >= since
        and nic in (e.nic, e.remote_nic)
    ]
    if lost:
        found.say(FAILED, f"the drain was not smooth: {len(lost)} paths were lost or sent again")
    found.figures["drained_ms"] = round((settled - drain["asked_ns"]) / 1e6, 3)
    _speed(found, record, begin, drain, settled, back["asked_ns"], 1)


def _innocent(found: Result, record: Mapping[str, Any]) -> None:
    nics = {step["nic"] for step in record["steps"]}
    downs = innocent_downs(events_of(record), nics)
    if downs:
        found.say(SLOW, f"{downs} paths of other NICs were lost too: see the events")


def beside_reference(results: Mapping[str, Result]) -> None:
    """R2CCL without faults beside the same run without R2CCL."""
    for prefix in ("", "nccl-tests-"):
        ours, theirs = results.get(f"{prefix}none"), results.get(f"{prefix}reference")
        if ours is None or theirs is None:
            continue
        a, b = ours.figures.get("busbw_gbs"), theirs.figures.get("busbw_gbs")
        if a and b:
            ours.figures["beside_reference"] = round(a / b, 4)
            if a / b < BESIDE_REFERENCE:
                ours.say(SLOW, f"{a / b:.0%} of the bandwidth without R2CCL")


def verdict(results: Sequence[Result]) -> str:
    """The worst; unknown where nothing that proves a failover ran."""
    ran = [r for r in results if r.status != SKIPPED]
    if not ran:
        return UNKNOWN
    worst = next(word for word in WORST if any(r.status == word for r in ran))
    return UNKNOWN if worst == PASSED and not any(r.proves for r in ran) else worst
