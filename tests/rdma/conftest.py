"""Fixtures of the RDMA guest's tests (rung 5)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rdma import beds
from tests.rdma.parts import Missing
from tests.rdma.ranks import Bed
from tests.rdma.work import Work, prepare


@pytest.fixture(scope="session")
def work() -> Work:
    """What guests are booted from; skips with the reason where a part is missing."""
    try:
        return prepare()
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def booted_one(work: Work) -> Iterator[Bed]:
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
