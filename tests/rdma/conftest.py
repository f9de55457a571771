"""Fixtures of the RDMA guest's tests (rung 5)."""

from __future__ import annotations

import pytest

from tests.rdma.parts import Missing
from tests.rdma.work import Work, prepare


@pytest.fixture(scope="session")
def work() -> Work:
    """What guests are booted from; skips with the reason where a part is missing."""
    try:
        return prepare()
    except Missing as reason:
        pytest.skip(str(reason))
