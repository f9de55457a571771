#!/usr/bin/env python3
"""A small GPT trained with DDP, FSDP or Megatron-Core, whose share of communication can be set.

One rank of it, driven by run_training.py and started as torchrun would. The gradients travel once a
step, after all of its micro-batches: nothing hides the communication. How many micro-batches a step
has is read from the file --control before each step: N; -N is a step of a copy of the model that
does not communicate; 0 ends the job. Rank 0 prints one JSON object a line: each step's time and
loss. Its checkpoints are read again at the start; writing them is no part of a step's time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_train
from ddp_train import emit, make_block, nn, torch


class Embedding(nn.Module):  # type: ignore[misc]
    """Of tokens and their positions."""

    def __init__(self, opts: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(opts.vocab, opts.dim)
        self.position = nn.Embedding(opts.tokens, opts.dim)

    def forward(self, x: Any) -> Any:
        return self.token(x) + self.position.weight


def make_model(opts: argparse.Namespace, device: Any) -> Any:
    torch.manual_seed(opts.seed)
    later = torch.full((opts.tokens, opts.tokens), float("-inf"), device=device).triu(1)
    blocks = [make_block(opts.dim, opts.heads, later) for _ in range(opts.layers)]
    return nn.Sequential(
        Embedding(opts), *blocks, nn.LayerNorm(opts.dim), nn.Linear(opts.dim, opts.vocab)
    ).to(device)


def wrap(model: Any, opts: argparse.Namespace, device: Any) -> Any:
    if opts.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, bucket_cap_mb=4096
        )
    from torch.distributed import fsdp

    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    return fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)


@contextlib.contextmanager
def silent(model: Any) -> Iterator[None]:
    """Gradients stay here. Sharded weights stay gathered: they, too, travel once a step."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        yield
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
    else:
        yield


class Trainer:
    """A model with its optimizer and data."""

    def __init__(self, model: Any, opts: argparse.Namespace, device: Any) -> None:
        self.model, self.opts, self.device = model, opts, device
        self.optim = torch.optim.AdamW(model.parameters(), lr=opts.lr)
        self.data = torch.Generator(device=device)
        self.places = torch.arange(opts.tokens + 1, device=device)

    def batch(self, number: int) -> tuple[Any, Any]:
        """Tokens that rise by a constant, which can be learned; and those that follow them."""
        opts = self.opts
        self.data.manual_seed(opts.seed * 1_000_003 + number)
        first, rise = torch.randint(
            1, opts.vocab, (2, opts.batch, 1), generator=self.data, device=self.device
        )
        numbers = (first + (rise % 8) * self.places) % opts.vocab
        return numbers[:, :-1], numbers[:, 1:]

    def step(self, number: int, micro: int, rank: int, world: int) -> float:
        """Returns this rank's loss."""
        total = torch.zeros((), device=self.device)
        for i in range(micro):
            tokens, wanted = self.batch((number * 1000 + i) * world + rank)
            with contextlib.nullcontext() if i == micro - 1 else silent(self.model):
                found = self.model(tokens).flatten(0, 1)
                loss = nn.functional.cross_entropy(found, wanted.flatten()) / micro
                loss.backward()
            total += loss.detach()
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)
        value = float(total.item())
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return value


class MegatronTrainer:
    """Megatron-Core's GPT of that size, its distributed optimizer and schedule; data parallel."""

    def __init__(self, opts: argparse.Namespace, alone: bool) -> None:
        self.opts = argparse.Namespace(
            **vars(opts), tp=1, pp=1, bf16=1, overlap=0, bucket=2_000_000, micro=1
        )
        config = megatron_train.make_config(self.opts)
        self.model = megatron_train.make_model(config, self.opts)
        self.optim = megatron_train.make_optimizer(self.model, self.opts)
        if alone:  # gradients and weights stay here
            config.finalize_model_grads_func = None
            self.model.start_param_sync = lambda *_args, **_named: None

    def step(self, number: int, micro: int, _rank: int, _world: int) -> float:
        self.opts.micro = micro
        return float(megatron_train.train_step(self.model, self.optim, self.opts, number))


def make_trainer(opts: argparse.Namespace, device: Any, alone: bool) -> Any:
    """alone: one that does not communicate."""
    if opts.parallel == "megatron":
        return MegatronTrainer(opts, alone)
    model = make_model(opts, device)
    return Trainer(model if alone else wrap(model, opts, device), opts, device)


def save(path: Path, trainer: Trainer, step: int) -> None:
    part = path.with_suffix(".part")
    torch.save(
        {"step": step, "model": trainer.model.state_dict(), "optim": trainer.optim.state_dict()},
        part,
    )
    part.rename(path)


def load(path: Path, trainer: Trainer) -> int:
    """The number of steps that the checkpoint has behind it."""
    found = torch.load(path, map_location=trainer.device)
    trainer.model.load_state_dict(found["model"])
    trainer.optim.load_state_dict(found["optim"])
    return int(found["step"])


def train(opts: argparse.Namespace, store: Any, rank: int, world: int) -> None:
    cuda = opts.backend == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    alone, trainer = (make_trainer(opts, device, who) for who in (True, False))
    checkpoint = Path(opts.checkpoint) if opts.checkpoint else None
    step = load(checkpoint, trainer) if checkpoint and checkpoint.exists() else 0
    if rank == 0:
        size = sum(p.numel() * p.element_size() for p in alone.model.parameters())
        emit(event="start", model_bytes=size, tokens=opts.batch * opts.tokens, from_step=step)
    turn = 0
    while True:
        turn += 1
        if rank == 0:
            store.set(f"micro{turn}", Path(opts.control).read_text(encoding="utf-8"))
        micro = int(store.get(f"micro{turn}"))
        if micro == 0:
            return
        began = time.perf_counter()
        who = alone if micro < 0 else trainer
        loss = who.step(step, abs(micro), rank, world)
        took = time.perf_counter() - began
        step += micro > 0
        if rank == 0:
            emit(event="step", step=step, micro=micro, seconds=round(took, 6), loss=round(loss, 4))
        if rank == 0 and checkpoint and micro > 0 and step % opts.every == 0:
            began = time.perf_counter()
            save(checkpoint, trainer, step)
            emit(event="saved", step=step, seconds=round(time.perf_counter() - began, 3))


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--control", required=True, metavar="FILE")
    p.add_argument("--checkpoint", default=None, metavar="FILE", help="with ddp only")
    p.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    p.add_argument("--parallel", choices=("ddp", "fsdp", "megatron"), default="ddp")
    p.add_argument("--dim", type=int, default=512)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocab", type=int, default=1024)
    p.add_argument("--batch", type=int, default=8, help="sequences in a micro-batch")
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    opts = p.parse_args()
    if opts.checkpoint and opts.parallel != "ddp":
        p.error("--checkpoint: with --parallel ddp only")
    return opts


def main() -> None:
    opts = parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_float32_matmul_precision("high")
    if opts.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, world, rank == 0)
    torch.distributed.init_process_group(opts.backend, store=store, rank=rank, world_size=world)
    if opts.parallel == "megatron":
        megatron_train.begin(opts.seed)
    train(opts, store, rank, world)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
