"""The parts that the RDMA guest is assembled from, without booting it. Rung 1: it cannot prove that
a kernel likes what comes out; tests/rdma does."""

from __future__ import annotations

import io
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rdma import facts, parts
from tests.rdma.image import Cpio
from tests.rdma.parts import Archive, Missing


def test_cpio_reads_back(tmp_path: Path) -> None:
    cpio = shutil.which("cpio")
    if cpio is None:
        pytest.skip("no cpio in PATH")
    stream = io.BytesIO()
    archive = Cpio(stream)
    archive.file("a/b/c", b"12345", 0o640)
    archive.file("a/b/c", b"twice: the first stays")
    archive.link("a/link", "b/c")
    archive.folder("a/empty")
    archive.close()
    subprocess.run(
        [cpio, "-i", "--quiet"], input=stream.getvalue(), cwd=tmp_path, check=True, timeout=20
    )
    assert (tmp_path / "a/b/c").read_bytes() == b"12345"
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "a/link").resolve() == (tmp_path / "a/b/c").resolve()
    assert (tmp_path / "a/empty").is_dir()


def test_cpio_is_aligned() -> None:
    """Each header and each file begins at a multiple of four bytes."""
    stream = io.BytesIO()
    archive = Cpio(stream)
    for size in range(6):
        archive.file("f" * (size + 1), b"x" * size)
        assert len(stream.getvalue()) % 4 == 0
    data = stream.getvalue()
    at = count = 0
    while at < len(data):
        assert data[at : at + 6] == b"070701"
        size, name = (int(data[at + i : at + i + 8], 16) for i in (54, 94))
        at = (at + 110 + name + 3) // 4 * 4
        at = (at + size + 3) // 4 * 4
        count += 1
    assert count == 6


def test_modules_come_after_what_they_need() -> None:
    needs = {"rxe": ["udp", "core"], "uverbs": ["core"], "udp": ["udp6"], "core": [], "udp6": []}
    order = parts.module_order(["uverbs", "rxe"], needs.__getitem__)
    assert sorted(order) == sorted(needs)
    for name, others in needs.items():
        assert all(order.index(other) < order.index(name) for other in others), order


def test_module_depends_are_read() -> None:
    data = b"\x7fELF..\0license=GPL\0depends=ib_core,ip6-udp-tunnel\0name=rdma_rxe\0"
    assert parts.module_depends(data) == ["ib_core", "ip6_udp_tunnel"]
    assert parts.module_depends(b"\0depends=\0") == []


def test_missing_parts_say_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(Missing, match="qemu-system-x86"):
        parts.gather(tmp_path)
    with pytest.raises(Missing, match="apt-get"):
        Archive(tmp_path)


def test_lines_of_the_probe_are_compared() -> None:
    text = 'noise\n{"step": "a", "facts": {"x": 1, "y": true}, "ms": {"t": 2.5}}\n{"step": "b", '
    steps = facts.parse(text)
    assert list(steps) == ["a"]
    assert facts.differences({"a": {"facts": {"x": 1, "y": True}}}, steps) == []
    lines = facts.differences({"a": {"facts": {"x": 2, "z": 0}}}, steps)
    assert [line.split(":")[0] for line in lines] == ["a.x", "a.y", "a.z"]


def test_other_answers_say_what_to_do(tmp_path: Path) -> None:
    """Recorded on another kernel: record anew. On this one: ask those steps once more."""
    file = tmp_path / "facts.json"
    file.write_text('{"kernel": "6.1.1", "rdma-core": "44.0", "steps": {}}')
    changed = ["b.x: 1 expected, 2 seen", "a.y: True expected, False seen", "b.z: 1 expected"]
    newer = facts.advice(changed, {"kernel": "6.1.2", "rdma-core": "44.0"}, file)
    assert "kernel 6.1.2" in newer and "kernel 6.1.1" in newer
    assert "python -m tests.rdma record" in newer and "commit facts.json" in newer
    assert newer.splitlines()[1:] == changed
    same = facts.advice(changed, {"kernel": "6.1.1", "rdma-core": "44.0"}, file)
    assert "python -m tests.rdma probe a b`" in same and "record`" not in same
