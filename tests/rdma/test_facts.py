"""What the verbs transport depends on, asked of soft-RoCE: facts.json is what docs/rdma.md tells.
Rung 5: it cannot prove what an HCA does."""

from __future__ import annotations

import os
import warnings

from tests.rdma import facts
from tests.rdma.work import Work


def test_facts_of_soft_roce(work: Work) -> None:
    """What the transport is built on holds; all else is as recorded (a warning outside of soak)."""
    seen, _ = facts.observe(work)
    broken = facts.broken(seen)
    assert not broken, "\n".join(broken)
    changed = facts.differences(facts.recorded(), seen)
    text = facts.advice(changed, facts.versions(work))
    if changed and not os.environ.get("RDMA_SOAK"):
        warnings.warn(text, stacklevel=1)
    else:
        assert not changed, text
