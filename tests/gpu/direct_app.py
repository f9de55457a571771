"""AllReduce on GPUs as R2CCL_ALLREDUCE says, with the driver and NCCL through ctypes: no PyTorch.

Starts WORLD ranks on this machine, each a node of its own or --per-node of them (NCCL_HOSTID), on
GPUs in turn, over loopback NICs. Each rank checks that work before an AllReduce on its stream is
seen by it, and that work behind it sees its result. It also checks several operations and two
communicators under way at once, in place and on the default stream, and memory freed meanwhile.
Then it times sizes. One JSON line of rank 0 has the times.

    python3 tests/gpu/direct_app.py --world 2 --build build [--nccl PATH] [--sizes 1M,64M]
    R2CCL_ALLREDUCE=direct python3 tests/gpu/direct_app.py ...
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLOAT, SUM = 7, 0
MIB = 1 << 20


def size_of(text: str) -> int:
    units = {"K": 1 << 10, "M": MIB, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def find_nccl(path: str) -> str:
    places = [
        f"{folder}/nvidia/nccl/lib/libnccl.so.2" for folder in sys.path if folder
    ] + glob.glob("/usr/lib/*/libnccl.so.2")
    found = [place for place in [path, *places] if place and Path(place).is_file()]
    if not found:
        raise SystemExit("no libnccl.so.2: --nccl PATH")
    return found[0]


class Failed(Exception):
    pass


class Library:
    """Functions whose result is 0 or an error."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)

    def __call__(self, name: str, *args: object) -> None:
        rc = getattr(self.lib, name)(*args)
        if rc:
            raise Failed(f"{name}: {rc}")


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Rank:
    def __init__(self, rank: int, world: int, nccl: str, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self.cu = Library("libcuda.so.1")
        self.cu("cuInit", 0)
        count, context = ctypes.c_int(), ctypes.c_void_p()
        self.cu("cuDeviceGetCount", ctypes.byref(count))
        device = rank % count.value
        self.cu("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.cu("cuCtxSetCurrent", context)
        self.nccl = Library(nccl)
        self.ids = 0

    def alloc(self, size: int) -> ctypes.c_uint64:
        memory = ctypes.c_uint64()
        self.cu("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        return memory

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.cu("cuStreamCreate", ctypes.byref(stream), 1)
        return stream

    def comm(self) -> ctypes.c_void_p:
        self.ids += 1
        file, uid, comm = self.folder / f"id{self.ids}", Id(), ctypes.c_void_p()
        if self.rank == 0:
            self.nccl("ncclGetUniqueId", ctypes.byref(uid))
            file.with_suffix(".part").write_bytes(bytes(uid))
            file.with_suffix(".part").rename(file)
        until = time.monotonic() + 60
        while not file.exists():
            if time.monotonic() > until:
                raise Failed("no id")
            time.sleep(0.01)
        uid = Id.from_buffer_copy(file.read_bytes())
        self.nccl("ncclCommInitRank", ctypes.byref(comm), self.world, uid, self.rank)
        return comm

    def reduce(
        self,
        comm: ctypes.c_void_p,
        source: int,
        to: int,
        count: int,
        stream: ctypes.c_void_p | None,
    ) -> None:
        self.nccl(
            "ncclAllReduce",
            ctypes.c_void_p(source),
            ctypes.c_void_p(to),
            ctypes.c_size_t(count),
            FLOAT,
            SUM,
            comm,
            stream,
        )

    def sync(self, stream: ctypes.c_void_p | None) -> None:
        self.cu("cuStreamSynchronize", stream)

    def bits(self, value: float) -> ctypes.c_uint:
        return ctypes.c_uint.from_buffer_copy(ctypes.c_float(value))

    def set(self, to: int, value: float, count: int, stream: ctypes.c_void_p | None) -> None:
        self.cu(
            "cuMemsetD32Async",
            ctypes.c_uint64(to),
            self.bits(value),
            ctypes.c_size_t(count),
            stream,
        )

    def expect(self, memory: int, value: float, count: int, what: str) -> None:
        host = (ctypes.c_float * count)()
        self.cu("cuMemcpyDtoH_v2", host, ctypes.c_uint64(memory), ctypes.c_size_t(4 * count))
        want = bytes(ctypes.c_float(value)) * count
        if bytes(host) != want:
            wrong = [i for i in range(count) if host[i] != value]
            raise Failed(
                f"rank {self.rank}, {what}: {len(wrong)} of {count} wrong, "
                f"first [{wrong[0]}] = {host[wrong[0]]}, not {value}"
            )

    # ---- checks

    def total(self, turn: int) -> float:
        return float(sum(r + 1 + turn for r in range(self.world)))

    def check_order(self, comm: ctypes.c_void_p, stream: ctypes.c_void_p | None, what: str) -> None:
        """Set, reduce, copy away, ten times without a wait."""
        turns, count = 10, MIB + 3
        place, kept = self.alloc(4 * count).value, self.alloc(4 * count * turns).value
        for turn in range(turns):
            self.set(place, self.rank + 1.0 + turn, count, stream)
            self.reduce(comm, place, place, count, stream)
            self.cu(
                "cuMemcpyDtoDAsync_v2",
                ctypes.c_uint64(kept + 4 * count * turn),
                ctypes.c_uint64(place),
                ctypes.c_size_t(4 * count),
                stream,
            )
        self.sync(stream)
        for turn in range(turns):
            self.expect(kept + 4 * count * turn, self.total(turn), count, f"{what}, turn {turn}")
        self.cu("cuMemFree_v2", ctypes.c_uint64(place))
        self.cu("cuMemFree_v2", ctypes.c_uint64(kept))

    def check_two(self, comms: list[ctypes.c_void_p], streams: list[ctypes.c_void_p]) -> None:
        """Two communicators on two streams at once."""
        count = 4 * MIB
        memory = [self.alloc(4 * count).value for _ in comms]
        for turn in range(5):
            for place, comm, stream in zip(memory, comms, streams, strict=True):
                self.set(place, self.rank + 1.0 + turn, count, stream)
                self.reduce(comm, place, place, count, stream)
        for place, stream in zip(memory, streams, strict=True):
            self.sync(stream)
            self.expect(place, self.total(4), count, "two communicators")
            self.cu("cuMemFree_v2", ctypes.c_uint64(place))

    def check_free(self, comm: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        """The driver waits for all streams before it frees memory, and holds its lock meanwhile."""
        count = 16 * MIB
        place = self.alloc(4 * count).value
        self.set(place, self.rank + 1.0, count, stream)
        for _ in range(3):
            spare = self.alloc(MIB)
            self.reduce(comm, place, place, count, stream)
            self.cu("cuMemFree_v2", spare)
            self.set(place, self.rank + 1.0, count, stream)
        self.reduce(comm, place, place, count, stream)
        self.sync(stream)
        self.expect(place, self.total(0), count, "memory freed meanwhile")
        self.cu("cuMemFree_v2", ctypes.c_uint64(place))

    def time(self, comm: ctypes.c_void_p, stream: ctypes.c_void_p, size: int, iters: int) -> float:
        count = size // 4
        source, to = self.alloc(size).value, self.alloc(size).value
        self.set(source, self.rank + 1.0, count, stream)
        self.reduce(comm, source, to, count, stream)
        self.sync(stream)
        begun = time.monotonic()
        for _ in range(iters):
            self.reduce(comm, source, to, count, stream)
        self.sync(stream)
        took = (time.monotonic() - begun) / iters
        self.expect(to, self.total(0), min(count, MIB), "timed")
        self.cu("cuMemFree_v2", ctypes.c_uint64(source))
        self.cu("cuMemFree_v2", ctypes.c_uint64(to))
        return took


def run(args: argparse.Namespace, rank: int) -> None:
    me = Rank(rank, args.world, args.nccl, Path(args.folder))
    comms, streams = [me.comm(), me.comm()], [me.stream(), me.stream()]
    me.check_order(comms[0], streams[0], "own stream")
    me.check_order(comms[0], None, "default stream")
    me.check_two(comms, streams)
    me.check_free(comms[0], streams[0])
    times = {
        size: me.time(comms[0], streams[0], size_of(size), args.iters)
        for size in args.sizes.split(",")
    }
    for comm in comms:
        me.nccl("ncclCommDestroy", comm)
    if rank == 0:
        shown = {size: round(took * 1e3, 3) for size, took in times.items()}
        mode = os.environ.get("R2CCL_ALLREDUCE", "stock")
        print(
            json.dumps({"mode": mode, "world": args.world, "per_node": args.per_node, "ms": shown}),
            flush=True,
        )


def start(args: argparse.Namespace, rank: int) -> subprocess.Popen[bytes]:
    node = rank // args.per_node
    nics = ",".join(f"127.0.{nic + 1}.{node + 1}" for nic in range(args.nics))
    env = os.environ | {
        "LD_PRELOAD": str(Path(args.build).resolve() / "libr2ccl.so"),
        "R2CCL_DLSYM": "1",
        "R2CCL_REAL_NCCL": args.nccl,
        "R2CCL_NICS": nics,
        "NCCL_HOSTID": f"direct{node}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
    }
    words = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)]
    return subprocess.Popen([*words, "--folder", args.folder, "--nccl", args.nccl], env=env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=1, help="ranks of a node")
    parser.add_argument("--build", default="build")
    parser.add_argument("--nccl", default="")
    parser.add_argument("--nics", type=int, default=2)
    parser.add_argument("--sizes", default="1M,8M,64M,256M")
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--folder", default="")
    args = parser.parse_args()
    if args.rank >= 0:
        run(args, args.rank)
        return 0
    args.nccl = find_nccl(args.nccl)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = folder
        ranks = [start(args, rank) for rank in range(args.world)]
        until, worst = time.monotonic() + args.timeout, 0
        for child in ranks:
            try:
                worst = max(worst, abs(child.wait(max(0.1, until - time.monotonic()))))
            except subprocess.TimeoutExpired:
                print("timed out", file=sys.stderr)
                worst = 124
                break
        for child in ranks:
            child.kill()
            child.wait()
    return worst


if __name__ == "__main__":
    sys.exit(main())
