#!/usr/bin/env python3
"""Megatron-LM's own pretrain_gpt.py, unchanged, with losses and weights that can be compared.

One rank of it, driven by run_ddp.py --program megatron_lm.py, with a checkout of Megatron-LM on
PYTHONPATH (that of 2026-08-22, d98e8a6, was run). Its script, arguments, training loop, data and
optimizer are what runs, on mock data and with the local layer spec. So neither Transformer Engine
nor Apex is needed; only the function that trains one step is watched, for the loss it returns and
the weights it leaves. Prints the same JSON lines as ddp_train.py; the losses are summed over the
ranks that know one. Arguments of pretrain_gpt.py may follow ours.

On a GPU only. The data's helpers are compiled by Megatron-LM with make and pybind11, unless
the checkout's megatron/core/datasets holds them already (megatron-core's wheel has them, too).
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("NCCL_ALGO", "Ring")  # --deterministic-mode asks for one
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

FIXED = (
    "--mock-data --tokenizer-type NullTokenizer --transformer-impl local --bf16 "
    "--deterministic-mode --position-embedding-type rope --hidden-dropout 0 --attention-dropout "
    "0 --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-bias-gelu-fusion --use-distributed-optimizer --lr 1e-3 "
    "--lr-decay-style constant --eval-iters 0 --eval-interval 1000000 --log-interval 10 "
    "--num-workers 0 --distributed-timeout-minutes 5 --no-save-optim --no-save-rng"
)


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def weights_digest(parts: Any) -> str:
    digest = hashlib.sha256()
    torch: Any = importlib.import_module("torch")
    for part in parts:
        for name, value in sorted(part.named_parameters()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Watch:
    """Stands around Megatron-LM's train_step."""

    def __init__(self, step: Callable[..., Any], opts: argparse.Namespace) -> None:
        self.step, self.opts = step, opts
        self.done = 0
        self.losses = hashlib.sha256()
        self.model: Any = None
        self.began = time.monotonic()

    def __call__(self, *args: Any, **named: Any) -> Any:
        torch: Any = importlib.import_module("torch")
        found = self.step(*args, **named)
        self.model = args[2]
        self.done += 1
        total = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
        for value in found[0].values():  # empty on all stages but the last
            total += torch.as_tensor(value, device=total.device).double().flatten()[0]
        torch.distributed.all_reduce(total)
        loss = float(total.item())
        self.losses.update(struct.pack("<d", loss))
        if torch.distributed.get_rank() == 0:
            emit(event="step", step=self.done, loss=loss.hex())
        return found

    def end(self) -> None:
        emit(event="end", rank=int(os.environ["RANK"]), steps=self.done,
             losses=self.losses.hexdigest(), weights=weights_digest(self.model),
             seconds=round(time.monotonic() - self.began, 3))


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--backend", choices=("nccl",), default="nccl")
    p.add_argument("--tp", type=int, default=1, help="ranks that share every layer")
    p.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    p.add_argument("--overlap", type=int, default=0,
                   help="1: gradients and weights travel while the ranks compute")
    p.add_argument("--dim", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--batch", type=int, default=4, help="sequences in a micro-batch")
    p.add_argument("--micro", type=int, default=2, help="micro-batches in a step")
    return p.parse_known_args()


def script_args(opts: argparse.Namespace, more: list[str]) -> list[str]:
    replicas = int(os.environ["WORLD_SIZE"]) // (opts.tp * opts.pp)
    return [
        *FIXED.split(), "--train-iters", str(opts.steps), "--vocab-size", "4096",
        "--num-layers", str(opts.layers), "--hidden-size", str(opts.dim),
        "--num-attention-heads", "8", "--seq-length", str(opts.tokens),
        "--max-position-embeddings", str(opts.tokens), "--micro-batch-size", str(opts.batch),
        "--global-batch-size", str(opts.batch * opts.micro * replicas),
        "--tensor-model-parallel-size", str(opts.tp),
        "--pipeline-model-parallel-size", str(opts.pp),
        *(["--overlap-grad-reduce", "--overlap-param-gather"] if opts.overlap else []), *more,
    ]


def helpers_are_there(root: Path) -> bool:
    return bool(glob.glob(str(root / "megatron/core/datasets/helpers_cpp*.so")))


def main() -> int:
    opts, more = parse_args()
    spec = importlib.util.find_spec("pretrain_gpt")
    if spec is None or spec.origin is None:
        print("megatron_lm: pretrain_gpt.py is not on PYTHONPATH: name a checkout of Megatron-LM "
              f"there (it is '{os.environ.get('PYTHONPATH', '')}')", file=sys.stderr)
        return 2
    script = Path(spec.origin)
    root = script.parent
    sys.path.insert(0, str(root))
    if helpers_are_there(root):
        utils: Any = importlib.import_module("megatron.core.datasets.utils")
        utils.compile_helpers = lambda: None
    training: Any = importlib.import_module("megatron.training.training")
    watch = training.train_step = Watch(training.train_step, opts)
    if os.environ["RANK"] == "0":
        torch: Any = importlib.import_module("torch")
        emit(event="start", world=int(os.environ["WORLD_SIZE"]), tp=opts.tp, pp=opts.pp,
             megatron=str(importlib.import_module("megatron.core").__version__),
             torch=str(torch.__version__), nccl=list(torch.cuda.nccl.version()))
    sys.argv = [str(script), *script_args(opts, more)]
    runpy.run_path(str(script), run_name="__main__")
    watch.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
