"""Fixtures of the RDMA guest's tests (rung 5)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.rdma import beds
from tests.rdma.parts import Missing
from tests.rdma.ranks import Bed
from tests.rdma.standin import StandIn
from tests.rdma.work import Work, prepare


@pytest.fixture(scope="session")
def work() -> Work:
    """What guests are booted from; skips with the reason where a part is missing."""
    try:
        return prepare()
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def standin() -> Iterator[StandIn]:
    with tempfile.TemporaryFile("w+") as out:
        asked = StandIn(out)
        try:
            yield asked
        finally:
            asked.close()


@pytest.fixture(scope="session")
def booted_one(request: pytest.FixtureRequest, work: Work) -> Iterator[Bed]:
    if any("standin" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("standin")  # runs while the guest boots
    bed = Bed("one", {})
    boot(bed, work)
    yield bed
    bed.guest("a0").close()


def boot(bed: Bed, work: Work) -> None:
    """Boots bed `one`, also in place of a guest whose kernel stands still."""
    guest = beds.one(work.built("one"))
    bed.nodes = {"a": guest, "b": guest}
    bed.removals.clear()


@pytest.fixture(scope="session")
def booted_two(work: Work) -> Iterator[Bed]:
    a, b = beds.two(work.built("two"))
    with a, b:
        yield Bed("two", {"a": a, "b": b})


def mended(bed: Bed) -> Iterator[Bed]:
    """A bed that the test may break; its kernel must be well afterwards."""
    ill = len(bed.illness())
    yield bed
    if any(guest.dead for guest in bed.guests()):
        return  # the test has failed by it
    bed.mend()
    assert not bed.illness()[ill:], f"the guest's kernel: {bed.illness()[ill:]}"


@pytest.fixture
def one(booted_one: Bed, work: Work) -> Iterator[Bed]:
    """Two emulated nodes in one guest."""
    if booted_one.guest("a0").dead:
        boot(booted_one, work)
    yield from mended(booted_one)


@pytest.fixture
def two(booted_two: Bed) -> Iterator[Bed]:
    """Two guests of one node each."""
    yield from mended(booted_two)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is asked of the stand-in comes last, when its answers are there."""
    items.sort(key=lambda item: item.path.name == "test_conformance.py")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of tests that passed at a later try only: what failed at first."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("-", f"failed and tried again: {report.nodeid}")
        for line in report.longreprtext.splitlines()[-60:]:
            terminalreporter.write_line(line[:400])
