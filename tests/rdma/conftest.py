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
    with beds.one(work.built("one")) as guest:
        bed = Bed("one", {"a": guest, "b": guest})
        yield bed


@pytest.fixture(scope="session")
def booted_two(work: Work) -> Iterator[Bed]:
    a, b = beds.two(work.built("two"))
    with a, b:
        yield Bed("two", {"a": a, "b": b})


def mended(bed: Bed) -> Iterator[Bed]:
    """A bed that the test may break; its kernel must be well afterwards."""
    ill = len(bed.illness())
    yield bed
    bed.mend()
    assert not bed.illness()[ill:], f"the guest's kernel: {bed.illness()[ill:]}"


@pytest.fixture
def one(booted_one: Bed) -> Iterator[Bed]:
    """Two emulated nodes in one guest."""
    yield from mended(booted_one)


@pytest.fixture
def two(booted_two: Bed) -> Iterator[Bed]:
    """Two guests of one node each."""
    yield from mended(booted_two)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is asked of the stand-in comes last, when its answers are there."""
    items.sort(key=lambda item: item.path.name == "test_conformance.py")
