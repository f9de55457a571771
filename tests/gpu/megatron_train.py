#!/usr/bin/env python3
"""A deterministic GPT training with Megatron-Core: losses and weights can be compared bitwise.

One rank of it, driven by run_ddp.py --program megatron_train.py and started like ddp_train.py. The
model, its parallel layers, the pipeline's schedule, gradient buffers and optimizers are those of
megatron-core (0.16.1 was tried). Its local layer spec needs neither Transformer Engine nor Apex.
--tp and --pp say how many ranks share a layer and how many stages there are; the others are data
parallel, with the distributed optimizer. Prints the same JSON lines as ddp_train.py; the losses are
those of the last stage, averaged over the data-parallel ranks.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import importlib
import json
import math
import os
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# Before CUDA starts: cuBLAS is deterministic only with a fixed workspace, and Megatron counts on
# kernels running in the order in which they were launched.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

torch: Any = None


def core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def make_config(opts: argparse.Namespace) -> Any:
    return core("transformer.transformer_config").TransformerConfig(
        num_layers=opts.layers, hidden_size=opts.dim, num_attention_heads=opts.heads,
        tensor_model_parallel_size=opts.tp, pipeline_model_parallel_size=opts.pp,
        bf16=bool(opts.bf16),
        params_dtype=torch.bfloat16 if opts.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if opts.bf16 else torch.float32,
        hidden_dropout=0.0, attention_dropout=0.0, deterministic_mode=True,
        finalize_model_grads_func=core("distributed.finalize_model_grads").finalize_model_grads,
    )


def make_model(config: Any, opts: argparse.Namespace) -> Any:
    """This rank's part of the model, its gradients in Megatron's buffers. Rotary positions: an
    embedding's backward pass sums in the order of the threads."""
    state = core("parallel_state")
    model = core("models.gpt").GPTModel(
        config=config,
        transformer_layer_spec=core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(),
        vocab_size=opts.vocab, max_sequence_length=opts.tokens,
        pre_process=state.is_pipeline_first_stage(), post_process=state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    ).to(torch.cuda.current_device())
    if opts.bf16:
        model = core("transformer.module").Float16Module(config, model)
    parts = core("distributed")
    model = parts.DistributedDataParallel(
        config,
        parts.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True,
            overlap_grad_reduce=bool(opts.overlap), overlap_param_gather=bool(opts.overlap),
            bucket_size=opts.bucket,
        ),
        model,
    )
    model.broadcast_params()
    if opts.overlap:
        config.no_sync_func = model.no_sync
    return model


def make_optimizer(model: Any, opts: argparse.Namespace) -> Any:
    optimizer = core("optimizer")
    config = optimizer.OptimizerConfig(
        optimizer="adam", lr=opts.lr, weight_decay=0.01, clip_grad=1.0, bf16=bool(opts.bf16),
        params_dtype=torch.bfloat16 if opts.bf16 else torch.float32,
        use_distributed_optimizer=True, overlap_param_gather=bool(opts.overlap),
    )
    return optimizer.get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def batches(opts: argparse.Namespace, step: int) -> Iterator[Any]:
    """The micro-batches of a step: token numbers that rise by a constant, which can be learned.
    The same on all ranks that share a model."""
    state = core("parallel_state")
    replica, replicas = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    for micro in range(opts.micro):
        number = (step * opts.micro + micro) * replicas + replica
        gen = torch.Generator().manual_seed(opts.seed * 1_000_003 + number)
        first = torch.randint(opts.vocab, (opts.batch, 1), generator=gen)
        rise = torch.randint(1, 8, (opts.batch, 1), generator=gen)
        yield (first + rise * torch.arange(opts.tokens + 1)) % opts.vocab


def loss_of(output: Any) -> tuple[Any, dict[str, Any]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
    numbers = next(data).to(torch.cuda.current_device())
    tokens, labels = numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), loss_of


def train_step(model: Any, optim: Any, opts: argparse.Namespace, step: int) -> float:
    """Returns the loss, the same number on all ranks."""
    state = core("parallel_state")
    model.zero_grad_buffer()
    optim.zero_grad()
    schedule = core("pipeline_parallel.schedules").get_forward_backward_func()
    found = schedule(forward_step_func=forward_step, data_iterator=batches(opts, step),
                     model=[model], num_microbatches=opts.micro, seq_length=opts.tokens,
                     micro_batch_size=opts.batch, forward_only=False)
    done, _norm, _zeros = optim.step()
    if not done:
        raise RuntimeError(f"step {step + 1}: the optimizer found gradients that are not finite")
    total = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
    for one in found:  # empty on all stages but the last
        total += one["loss"]
    torch.distributed.all_reduce(total)
    parts: int = opts.micro * opts.tp * state.get_data_parallel_world_size()
    loss = float(total.item()) / parts
    if not math.isfinite(loss):  # any two runs would agree on it
        raise RuntimeError(f"step {step + 1}: the loss is {loss}; try a smaller --lr")
    return loss


def weights_digest(model: Any, overlap: bool) -> str:
    """Of this rank's weights as the next step would use them."""
    if overlap:  # they are gathered when that step asks for them
        model.disable_forward_pre_hook()
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if overlap:
        model.enable_forward_pre_hook()
    return digest.hexdigest()


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def train(opts: argparse.Namespace, version: str) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = make_config(opts)
    model = make_model(config, opts)
    optim = make_optimizer(model, opts)
    digest = functools.partial(weights_digest, model, bool(opts.overlap))
    if rank == 0:
        emit(event="start", world=world, tp=opts.tp, pp=opts.pp, dp=world // (opts.tp * opts.pp),
             model_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
             megatron=version, torch=str(torch.__version__),
             nccl=list(torch.cuda.nccl.version()))
    losses = hashlib.sha256()
    began = time.monotonic()
    for step in range(opts.steps):
        loss = train_step(model, optim, opts, step)
        losses.update(struct.pack("<d", loss))
        if rank == 0:
            emit(event="step", step=step + 1, loss=loss.hex())
        if (step + 1) % opts.report == 0:
            emit(event="report", rank=rank, step=step + 1, losses=losses.hexdigest(),
                 weights=digest())
    emit(event="end", rank=rank, steps=opts.steps, losses=losses.hexdigest(), weights=digest(),
         last_loss=loss, seconds=round(time.monotonic() - began, 3))


def begin(seed: int, tp: int = 1, pp: int = 1, minutes: int = 10) -> None:
    """Megatron's groups; torch.distributed runs already."""
    global torch
    torch = importlib.import_module("torch")
    core("parallel_state").initialize_model_parallel(
        tp, pp, create_gloo_process_groups=False, distributed_timeout_minutes=minutes)
    core("tensor_parallel").model_parallel_cuda_manual_seed(seed)


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--report", type=int, default=20, help="digests every so many steps")
    p.add_argument("--tp", type=int, default=1, help="ranks that share every layer")
    p.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    p.add_argument("--overlap", type=int, default=0,
                   help="1: gradients and weights travel while the ranks compute")
    p.add_argument("--bf16", type=int, default=1, help="0: everything in float32")
    p.add_argument("--dim", type=int, default=512)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--batch", type=int, default=4, help="sequences in a micro-batch")
    p.add_argument("--micro", type=int, default=2, help="micro-batches in a step")
    p.add_argument("--bucket", type=int, default=2_000_000,
                   help="parameters in a bucket of gradients")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--limit", type=float, default=600, help="seconds an operation may take")
    p.add_argument("--backend", choices=("nccl",), default="nccl")
    return p.parse_args()


def main() -> int:
    global torch
    opts = parse_args()
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
    try:
        torch = importlib.import_module("torch")
        version = str(importlib.import_module("megatron.core").__version__)
    except ModuleNotFoundError as err:
        print(f"megatron_train: {err}: install torch, and megatron-core (0.16.1 was tried)",
              file=sys.stderr)
        return 2
    world = int(os.environ["WORLD_SIZE"])
    if world % (opts.tp * opts.pp):
        print(f"megatron_train: --tp {opts.tp} times --pp {opts.pp} does not divide the {world} "
              "ranks", file=sys.stderr)
        return 2
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(opts.seed)
    torch.distributed.init_process_group(
        opts.backend, timeout=datetime.timedelta(seconds=opts.limit))
    begin(opts.seed, opts.tp, opts.pp, max(1, int(opts.limit / 60)))
    train(opts, version)
    core("parallel_state").destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
