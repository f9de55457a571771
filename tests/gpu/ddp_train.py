#!/usr/bin/env python3
"""A deterministic PyTorch DDP training loop whose every loss and weight can be compared bitwise.

One rank of it: start it with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as
torchrun or run_ddp.py does. A small transformer of some tens of MB, so that the gradient buckets
of DDP cross the network in every step. It prints one JSON object a line: each step (rank 0), and
at the end of every rank the SHA-256 of all its losses and of its weights.

The inputs are random vectors and attention is spelled out: embeddings and fused attention have
backward passes whose sums depend on the order of the threads.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import os
import struct
import sys
import time
from typing import Any

# Before CUDA starts: cuBLAS is deterministic only with a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

torch: Any = importlib.import_module("torch")
nn: Any = torch.nn


def make_block(dim: int, heads: int, mask: Any = None) -> Any:
    class Block(nn.Module):  # type: ignore[misc]
        """Pre-norm transformer block with attention in plain matrix products."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            q, k, v = (
                part.reshape(b, t, heads, dim // heads).transpose(1, 2)
                for part in self.qkv(self.norm1(x)).split(dim, dim=2)
            )
            found = q @ k.transpose(2, 3) * (dim // heads) ** -0.5
            att = torch.softmax(found if mask is None else found + mask, dim=3)
            x = x + self.out((att @ v).transpose(1, 2).reshape(b, t, dim))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))

    return Block()


def make_model(opts: argparse.Namespace) -> Any:
    torch.manual_seed(opts.seed)
    blocks = [make_block(opts.dim, opts.heads) for _ in range(opts.layers)]
    return nn.Sequential(nn.Linear(opts.dim, opts.dim), *blocks, nn.LayerNorm(opts.dim),
                         nn.Linear(opts.dim, opts.dim))


def weights_digest(model: Any) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        digest.update(name.encode())
        own = value.detach().to_local() if hasattr(value, "to_local") else value.detach()
        digest.update(own.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def wrap(model: Any, opts: argparse.Namespace, device: Any) -> Any:
    """DDP (AllReduce), or FSDP (AllGather and ReduceScatter) with one unit per block: the one that
    wraps (fsdp), or the one that shards in place (fsdp2)."""
    if opts.parallel == "ddp":
        group = None
        if opts.split:  # a communicator that PyTorch splits off, since init_process_group has one
            group = torch.distributed.new_group(list(range(torch.distributed.get_world_size())))
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device else None, bucket_cap_mb=opts.bucket_mb,
            process_group=group,
        )
    if opts.parallel == "fsdp2":
        shard = importlib.import_module("torch.distributed.fsdp").fully_shard
        for part in model:
            if len(list(part.children())) > 1:
                shard(part)
        return shard(model)
    fsdp = importlib.import_module("torch.distributed.fsdp")
    policy = importlib.import_module("torch.distributed.fsdp.wrap").ModuleWrapPolicy
    blocks = {type(part) for part in model if isinstance(part, nn.Module) and len(list(
        part.children())) > 1}
    return fsdp.FullyShardedDataParallel(model, device_id=device, use_orig_params=True,
                                         auto_wrap_policy=policy(blocks))


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def train(opts: argparse.Namespace) -> None:
    dist = torch.distributed
    rank, world = dist.get_rank(), dist.get_world_size()
    cuda = opts.backend == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    model = make_model(opts).to(device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    ddp = wrap(model, opts, device if cuda else None)
    optim = torch.optim.SGD(ddp.parameters(), lr=1e-2, momentum=0.9)
    losses = hashlib.sha256()
    if rank == 0:
        emit(event="start", model_bytes=size, world=world, torch=str(torch.__version__),
             nccl=list(torch.cuda.nccl.version()) if cuda else None)
    began = time.monotonic()
    for step in range(opts.steps):
        if step == opts.stall and rank == world - 1:
            time.sleep(3600)
        gen = torch.Generator().manual_seed(opts.seed * 1_000_003 + step * world + rank)
        x = torch.randn(opts.batch, opts.tokens, opts.dim, generator=gen).to(device)
        target = torch.roll(x, 1, dims=1)
        optim.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(ddp(x), target)
        loss.backward()
        optim.step()
        value = float(loss.item())
        losses.update(struct.pack("<d", value))
        if rank == 0:
            emit(event="step", step=step + 1, loss=value.hex())
        if (step + 1) % opts.report == 0:
            emit(event="report", rank=rank, step=step + 1, losses=losses.hexdigest(),
                 weights=weights_digest(model))
    emit(event="end", rank=rank, steps=opts.steps, losses=losses.hexdigest(),
         weights=weights_digest(model), seconds=round(time.monotonic() - began, 3))


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--report", type=int, default=50, help="digests every so many steps")
    p.add_argument("--dim", type=int, default=768)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--bucket-mb", type=int, default=16)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--parallel", choices=("ddp", "fsdp", "fsdp2"), default="ddp")
    p.add_argument("--split", type=int, default=0,
                   help="1: DDP on a group whose communicator is split off (ncclCommSplit)")
    p.add_argument("--deterministic", type=int, default=1,
                   help="0: not asked of PyTorch, which then sets NCCL_ALGO: no plans")
    p.add_argument("--stall", type=int, default=-1, help="the last rank stops at this step")
    p.add_argument("--limit", type=float, default=600, help="seconds an operation may take")
    p.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    return p.parse_args()


def main() -> int:
    opts = parse_args()
    torch.use_deterministic_algorithms(bool(opts.deterministic))
    if opts.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.benchmark = False
    more = {}
    if opts.split and opts.backend == "nccl":  # connects at once; groups are split off
        more["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(
        opts.backend, timeout=datetime.timedelta(seconds=opts.limit), **more)
    train(opts)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
