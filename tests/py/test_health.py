"""NICs come back, flap, are drained and given weights, under two engines on loopback NICs.

Rung 3: real sockets and processes, injected faults, no privileges. Order is taken from the journal
rather than from the clock. It cannot prove what link events do (rung 4).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import health_table
import pytest
from click.testing import CliRunner, Result
from conftest import Build
from failover_bed import Pair, Side, loopback, running_pair, until

from r2ccl_ctl import control, drain
from r2ccl_ctl.cli.main import main
from r2ccl_ctl.control import Command
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.faults import parse_rules
from r2ccl_ctl.rows import PathRow

A, B, C = "127.0.1.1", "127.0.2.1", "127.0.3.1"
LONG = ("--size", "1M", "--conns", 2, "--stall", 20)
SLOW = 100_000_000  # bytes per second of a NIC, so that the job lasts


def order(side: Side, nic: str, *names: str) -> list[str]:
    return [e.event for e in side.named(*names) if e.nic == nic]


def state(side: Side, nic: str) -> str:
    found = control.find_nic(side.snapshot().nics, nic)
    assert found is not None
    return found.state


def sent(side: Side, nic: str) -> int:
    found = control.find_nic(side.snapshot().nics, nic)
    assert found is not None
    return found.tx_bytes


def ramping(side: Side, nic: str) -> list[PathRow]:
    return [p for p in side.snapshot().paths if p.nic == nic and p.state == "ramping"]


def ask(side: Side, verb: str, nic: str, weight: int = 0, *, force: bool = False) -> control.Answer:
    command = Command(verb, nic=nic, weight=weight, force=force)
    return control.send_command(side.segment, command, timeout=10.0)


@pytest.mark.parametrize("kind", ["blackhole", "error"])
@pytest.mark.parametrize("side", ["tx", "rx"])
def test_back_in_order(build: Build, kind: str, side: str) -> None:
    """A NIC that is back is probed, proven by test chunks, ramped, and only then healthy. The NIC
    at the other end is not blamed: it answers on another pair."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="300ms") as pair:
        pair.moving()
        pair.side(side).fail(B, kind)
        until(f"probing: {pair}", lambda: state(pair.side(side), B) == "probing")
        pair.moving()
        pair.side(side).recover(B)
        until(f"healthy: {pair}", lambda: state(pair.side(side), B) == "healthy")
        # The state is shown a moment before the journal has it.
        until(f"told: {pair}", lambda: bool(order(pair.side(side), B, "nic-up")))
        names = ("nic-suspect", "nic-down", "nic-probing", "nic-ramping", "nic-up")
        told = order(pair.side(side), B, *names)
        assert told[0] in ("nic-suspect", "nic-down"), str(pair)
        assert told[-3:] == list(names[2:]), str(pair)  # a verdict may have come before
        other = pair.rx if side == "tx" else pair.tx
        assert not order(other, B, *names[1:]), str(pair)
        until("the path is back", lambda: "back" in [e.cause for e in pair.tx.named("path-up")])
        until("fully", lambda: "at full weight" in [e.cause for e in pair.tx.named("path-healthy")])
        before = sent(pair.tx, B)
        pair.tx.fail(A, "slow", rate=SLOW)
        until("it carries data", lambda: sent(pair.tx, B) > before)
        one = pair.side(side)
        assert one.counter("nic_failures") == one.counter("nic_recoveries") == 1
        for event in (*pair.tx.events(), *pair.rx.events()):
            assert event.cause or not event.event.startswith(("path-", "nic-")), str(event)


def test_found_within_a_second(build: Build) -> None:
    """However long it was away, and with fresh resources each time: the time from its recovery to
    the ramp is of the order of the probe interval, the ramp's that of its setting."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="500ms") as pair:
        pair.moving()
        pair.tx.fail(B, "error", for_ms=4000)
        until("it is over", lambda: bool(pair.tx.named("fault-cleared")), 20.0)
        until(f"it is back: {pair}", lambda: bool(order(pair.tx, B, "nic-up")), 20.0)
        over = pair.tx.named("fault-cleared")[0].mono_ns
        ramping = next(e.mono_ns for e in pair.tx.named("nic-ramping") if e.nic == B)
        up = next(e.mono_ns for e in pair.tx.named("nic-up") if e.nic == B)
        assert over < ramping < up
        assert (ramping - over) / 1e9 < 3.0, str(pair)  # about 1 s on a machine with time
        assert 0.45 < (up - ramping) / 1e9 < 3.0, str(pair)


def test_ramp_grows(build: Build) -> None:
    """The share of a NIC that is back grows with its weight."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="12s", R2CCL_GREY=0) as pair:
        for nic in (A, B):
            pair.tx.fail(nic, "slow", rate=SLOW)
        pair.moving()
        pair.tx.fail(B, "error", for_ms=1500)
        until("it is over", lambda: not pair.tx.snapshot().nics[1].fault)
        pair.tx.fail(B, "slow", rate=SLOW)
        until(f"ramping: {pair}", lambda: bool(order(pair.tx, B, "nic-ramping")))
        until(
            f"its path's weight: {pair}",  # shown a moment after its state
            lambda: any(p.weight < 100 for p in ramping(pair.tx, B)),
        )
        early = sent(pair.tx, B), sent(pair.tx, A)
        weights = []
        for _ in range(8):
            weights += [p.weight for p in ramping(pair.tx, B)]
            time.sleep(0.1)
        b, a = sent(pair.tx, B) - early[0], sent(pair.tx, A) - early[1]
        assert weights and weights == sorted(weights) and 0 < weights[0] < 60, (weights, str(pair))
        most = weights[-1] / (100 + weights[-1])  # what its last weight gives it; full: a half
        assert b / (a + b) < most + 0.1, (a, b, weights)
        until(f"up: {pair}", lambda: bool(order(pair.tx, B, "nic-up")), 30.0)
        until(
            f"full weight: {pair}",
            lambda: any(
                p.state == "up" and p.weight == 100 for p in pair.tx.snapshot().paths if p.nic == B
            ),
        )


def fails_often(pair: Pair) -> None:
    """NIC B of the sender, until it is damped or has failed five times."""
    for _ in range(5):
        pair.moving()
        pair.tx.fail(B, "error", for_ms=1500)
        until("it is over", lambda: not pair.tx.snapshot().nics[1].fault, 15.0)
        until(f"back or damped: {pair}", lambda: state(pair.tx, B) in ("healthy", "damped"), 15.0)
        if state(pair.tx, B) == "damped":
            return


def test_flaps_are_damped(build: Build) -> None:
    """A NIC that fails time and again is left alone, says until when, remembers it, and is taken
    back by the operator's word."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="0") as pair:
        fails_often(pair)
        until(f"damped: {pair}", lambda: state(pair.tx, B) == "damped", 15.0)
        nic = pair.tx.snapshot().nics[1]
        assert nic.penalty > 2000
        assert 10 < (nic.reuse_mono_ns - time.monotonic_ns()) / 1e9 < 150
        before = sent(pair.tx, B)
        pair.moving(50)
        time.sleep(1.5)
        assert sent(pair.tx, B) == before
        assert state(pair.tx, A) == "healthy"
        assert order(pair.tx, B, "nic-damped") == ["nic-damped"]
        pair.tx.recover(B)
        until(f"back: {pair}", lambda: state(pair.tx, B) == "healthy", 15.0)
        assert pair.tx.snapshot().nics[1].penalty == 0
        until(f"it carries again: {pair}", lambda: sent(pair.tx, B) > before)


def test_the_last_one_is_not_damped(build: Build) -> None:
    """When the other NIC fails as well, the damped one is taken back at once."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="0") as pair:
        fails_often(pair)
        until(f"damped: {pair}", lambda: state(pair.tx, B) == "damped", 15.0)
        until("it is over", lambda: not pair.tx.snapshot().nics[1].fault, 15.0)
        before = sent(pair.tx, B)
        pair.tx.fail(A, "blackhole")
        until(f"it carries again: {pair}", lambda: sent(pair.tx, B) > before)
        pair.moving(20)


@pytest.mark.parametrize("side", ["tx", "rx"])
def test_drain_loses_nothing(build: Build, side: str) -> None:
    """Under traffic both ways, of small and large messages: nothing is replayed, no path fails,
    and afterwards not a byte is on the NIC until it is given back."""
    words = ("--size", "2M", "--random-sizes", "--conns", 2, "--stall", 20)
    with running_pair(build.path, *words, "--bidir", nics=loopback(2), R2CCL_RAMP="200ms") as pair:
        one = pair.side(side)
        for each in pair.sides:
            for nic in (A, B):
                each.fail(nic, "slow", rate=SLOW)
        until("both are used", lambda: sent(one, B) > 10 << 20)
        answer = ask(one, "drain-nic", B)
        assert answer.ok, answer
        (found,) = drain.wait([(one.segment, B)], 20.0)
        assert found.done and "safe" in found.text, f"{found} {pair}"
        assert order(one, B, "nic-drained") == ["nic-drained"]
        for other in pair.sides:
            assert not other.named("path-down", "nic-down", "replay"), str(pair)
            assert other.counter("replayed_bytes") == 0
        assert not [p for p in one.snapshot().paths if p.nic == B and p.state != "drained"]
        before = sent(one, B)
        pair.moving(50)
        assert sent(one, B) == before
        assert ask(one, "undrain-nic", B).ok
        until(f"back: {pair}", lambda: state(one, B) == "healthy", 15.0)
        until("it is used again", lambda: sent(one, B) > before)
        pair.moving(50)


def test_drain_of_the_last_one(build: Build) -> None:
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="0") as pair:
        pair.moving()
        assert ask(pair.tx, "drain-nic", A).ok
        answer = ask(pair.tx, "drain-nic", B)
        assert not answer.ok and "last usable NIC" in answer.text and "--force" in answer.text
        (found,) = drain.wait([(pair.tx.segment, A)], 20.0)
        assert found.done, str(pair)
        assert ask(pair.tx, "drain-nic", B, force=True).ok
        (found,) = drain.wait([(pair.tx.segment, B)], 20.0)
        assert found.done, str(pair)
        stalled = pair.rx.counter("messages_received")
        time.sleep(0.3)
        assert pair.rx.counter("messages_received") == stalled
        assert ask(pair.tx, "undrain-nic", A).ok
        pair.moving(50)
        assert not pair.tx.named("replay"), str(pair)


def test_drain_of_the_last_that_works(build: Build) -> None:
    """The other NIC has a link, and nobody answers over it."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="0") as pair:
        pair.moving()
        pair.tx.fail(A, "blackhole")
        until(f"probing: {pair}", lambda: state(pair.tx, A) in ("probing", "failed"))
        answer = ask(pair.tx, "drain-nic", B)
        assert not answer.ok and "no other one has a path to" in answer.text, f"{answer} {pair}"
        pair.moving()
        pair.tx.recover(A)
        until(f"back: {pair}", lambda: state(pair.tx, A) == "healthy", 15.0)
        assert ask(pair.tx, "drain-nic", B).ok
        pair.moving(50)


@pytest.mark.parametrize("side", ["tx", "rx"])
def test_warm_spare(build: Build, side: str) -> None:
    """Weight 0, of either end: open, watched and unused; it takes over when the other one dies."""
    with running_pair(build.path, *LONG, nics=loopback(2)) as pair:
        pair.moving()
        assert ask(pair.side(side), "set-weight", B, 0).ok
        assert pair.side(side).snapshot().nics[1].weight == 0
        time.sleep(0.3)
        before = sent(pair.tx, B)
        pair.moving(50)
        assert sent(pair.tx, B) - before < 100_000  # words, no data
        assert any(p.nic == B and p.state == "up" for p in pair.tx.snapshot().paths)
        pair.tx.fail(A, "blackhole")
        until(f"it takes over: {pair}", lambda: sent(pair.tx, B) - before > 10 << 20)
        assert pair.side(side).named("weight")


def test_a_warm_spare_is_back(build: Build) -> None:
    """At no weight: the journal does not say that it is back at its full one."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="300ms") as pair:
        pair.moving()
        assert ask(pair.tx, "set-weight", B, 0).ok
        pair.tx.fail(B, "blackhole")
        until(f"probing: {pair}", lambda: state(pair.tx, B) == "probing")
        pair.tx.recover(B)
        until(f"healthy: {pair}", lambda: state(pair.tx, B) == "healthy")
        up = [e.cause for e in pair.tx.named("nic-up") if e.nic == B]
        assert up[-1:] == ["works again, and stands by at weight 0"], str(pair)


def test_weight_limits_the_share(build: Build) -> None:
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_GREY=0) as pair:
        for nic in (A, B):
            pair.tx.fail(nic, "slow", rate=SLOW)
        pair.moving()
        assert not ask(pair.tx, "set-weight", B, 101).ok
        assert ask(pair.tx, "set-weight", B, 25).ok
        time.sleep(0.5)
        before = sent(pair.tx, A), sent(pair.tx, B)
        pair.moving(100)
        a, b = sent(pair.tx, A) - before[0], sent(pair.tx, B) - before[1]
        assert 0.05 < b / (a + b) < 0.35, (a, b)  # a fifth, and not a half


def test_orderly_end_is_quiet(build: Build) -> None:
    """The journal of a job that ends well has no failures, and tells both NICs of a path."""
    words = ("--size", "64K", "--conns", 2)
    with running_pair(build.path, *words, nics=loopback(2)) as pair:
        pair.moving(200)
        pair.finish()
        for side in pair.sides:
            assert not side.named("path-down", "replay", "nic-suspect", "nic-down"), str(pair)
            assert side.named("path-up")
            assert all(e.remote_nic for e in side.named("path-up")), str(pair)


def test_a_fault_is_cleared_once(build: Build) -> None:
    with running_pair(build.path, *LONG, nics=loopback(2)) as pair:
        pair.moving()
        pair.tx.fail(B, "slow", rate=SLOW)
        pair.tx.recover(B)
        pair.tx.recover(B)  # nothing is left to clear
        pair.tx.fail(B, "slow", rate=SLOW, for_ms=50)
        until("it is over", lambda: len(pair.tx.named("fault-cleared")) == 2)
        time.sleep(0.2)
        assert [e.cause for e in pair.tx.named("fault-cleared")] == ["operator", "over"]


def cli(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_commands(build: Build, tmp_path: Path) -> None:
    """The same by the commands: exit codes and words."""
    with running_pair(build.path, *LONG, nics=loopback(2), R2CCL_RAMP="0") as pair:
        pair.moving()
        pid = ("--pid", str(pair.tx.pid))
        done = cli("drain-nic", B, *pid, "--wait")
        assert done.exit_code == 0 and "safe to unplug" in done.stdout, done.output
        done = cli("drain-nic", A, *pid, "--wait")
        assert done.exit_code == 1 and "last usable NIC" in done.stderr, done.output
        done = cli("undrain-nic", B, *pid)
        assert done.exit_code == 0, done.output
        until("back", lambda: state(pair.tx, B) == "healthy", 15.0)
        assert cli("set-weight", B, "101", *pid).exit_code == 2
        assert cli("set-weight", B, "30", *pid).exit_code == 0
        rules = tmp_path / "rules"
        rules.write_text(f"{B} error for=200ms  # short\n\n{A} slow=1gbit\n{A} recover at=0.3s\n")
        done = cli("faults", "apply", str(rules), *pid)
        assert done.exit_code == 0, done.output
        told = [(e.event, e.nic) for e in pair.tx.named("fault-injected", "fault-cleared")]
        assert ("fault-injected", B) in told and ("fault-cleared", A) in told, told
        rules.write_text("127.0.9.9 error\n")
        done = cli("faults", "apply", str(rules), *pid)
        assert done.exit_code == 1 and "127.0.9.9" in done.stderr, done.output
        injected = pair.tx.named("fault-injected")
        done = cli("faults", "apply", str(rules), *pid, "--check")
        assert done.exit_code == 1 and f"line 1: no NIC '127.0.9.9'. NICs: {A}" in done.stderr
        rules.write_text(f"{B} blackhole\n")
        assert cli("faults", "apply", str(rules), *pid, "--check").exit_code == 0
        assert cli("faults", "apply", str(rules), "--pid", "1", "--check").exit_code == 1
        assert pair.tx.named("fault-injected") == injected, "--check is to change nothing"
        rules.write_text("eth1 blackhole\neth1 sideways\n")
        done = cli("faults", "apply", str(rules), *pid)
        assert done.exit_code == 2 and f"{rules}:2" in done.stderr, done.output
        pair.moving()


def test_rules() -> None:
    """What a file of rules may say, and how its mistakes are told."""
    rules = parse_rules(
        ["# faults", "", "eth1 blackhole direction=rx at=2s for=500ms  # late", "eth2 slow=100mbit"]
    )
    assert [(r.nic, r.kind, r.at_s, r.line) for r in rules] == [
        ("eth2", "slow=100mbit", 0.0, 4),
        ("eth1", "blackhole", 2.0, 3),
    ]
    command = rules[1].command("127.0.1.1")
    assert (command.direction, command.for_ms, command.nic) == ("rx", 500, "127.0.1.1")
    (rule,) = parse_rules(["kind=loss=1% nic=eth0 after=1M"])
    assert (rule.command("x").loss_ppm, rule.command("x").after_bytes) == (10_000, 1 << 20)
    (rule,) = parse_rules(["eth1 error ops=1000"])
    assert rule.command("x").after_ops == 1000 and str(rule) == "eth1 error direction=both ops=1000"
    for text, says in [
        ("eth1 error ops=0", "at least 1"),
        ("eth1 error ops=1e3", "at least 1"),
        ("eth1 recover ops=3", "recover takes no"),
        ("eth1", "lacks"),
        ("eth1 sideways", "no kind of fault"),
        ("eth1 error nic=eth2", "twice"),
        ("eth1 error soon", "none of"),
        ("eth1 error at=", "empty"),
        ("eth1 error direction=up", "direction=up"),
        ("eth1 error for=0s", "at least 1ms"),
        ("eth1 recover for=1s", "recover takes no"),
        ("eth1 error at=30h", "at most 24h"),
        ("", "no rules"),
    ]:
        with pytest.raises(R2UsageError, match=says):
            parse_rules([text], "file")


def test_a_rule_that_begins_at_an_operation(build: Build, tmp_path: Path) -> None:
    """`ops=` of `faults apply`: nothing happens before that many sends and receives."""
    rules = tmp_path / "rules"
    words = ("--size", "64K", "--conns", 1, "--outstanding", 1, "--stall", 20)
    with running_pair(build.path, *words, nics=loopback(2)) as pair:
        pair.moving()
        pid = str(pair.tx.segment.pid)
        for number in (10**9, 30):
            rules.write_text(f"127.0.2.1 blackhole ops={number}\n")
            argv = [sys.executable, "-m", "r2ccl_ctl", "faults", "apply", str(rules), "--pid", pid]
            subprocess.run(argv, check=True, timeout=30, capture_output=True)
            if number == 10**9:
                pair.moving(60)
                fault = {nic.name: nic.fault for nic in pair.tx.snapshot().nics}["127.0.2.1"]
                assert fault == "blackhole both (armed)"
        until(
            f"it begins: {pair}",
            lambda: (
                {n.name: n.fault for n in pair.tx.snapshot().nics}["127.0.2.1"] == "blackhole both"
            ),
        )
        pair.finish()


def test_table_in_the_document() -> None:
    """docs/failures.md has the state machine's table as the code has it."""
    text = (health_table.ROOT / "docs" / "failures.md").read_text()
    inside = text.split("<!-- health tables -->")[1].split("<!-- end of health tables -->")[0]
    hint = "run tests/py/health_table.py and put what it prints into docs/failures.md"
    assert inside.strip() == health_table.tables(), hint
