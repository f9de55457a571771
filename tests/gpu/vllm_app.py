#!/usr/bin/env python3
"""vLLM itself, unchanged, with tokens and log-probabilities that can be compared.

One rank of it, driven by run_ddp.py --program vllm_app.py --variants dlopen (or named, with --train
so=BUILD/nccl/libnccl.so.2): vLLM's engine with its executor for launchers from outside, tensor or
pipeline parallel over all ranks. A Llama of random weights, no tokenizer and no download. A step is
one call of LLM.generate: a batch of prompts that differ from step to step, read and continued
greedily; its "loss" is a digest of the tokens and their log-probabilities, and so is what stands
for weights at the end. vLLM's own all-reduce inside a node is off, since the emulated nodes share
this machine. With --graph 1 the continuation runs under CUDA graphs, with the AllReduces in them.
Prints the same JSON lines as ddp_train.py. On a GPU only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

VOCAB = 4096
SETTINGS = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


def emit(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def vllm_is_there(program: str) -> bool:
    """Says what is missing, if it is."""
    if importlib.util.find_spec("vllm") is not None:
        return True
    print(f"{program}: {sys.executable} has no module vllm: install it (0.24.0 was run), or name "
          "its folder in PYTHONPATH", file=sys.stderr)
    return False


def set_environment(**more: str) -> None:
    """What vLLM is to find in its environment, where nobody has said otherwise."""
    own = {"GLOO_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "mgmt0")}
    for name, value in {**SETTINGS, **own, **more}.items():
        os.environ.setdefault(name, value)


def write_model(folder: Path, opts: argparse.Namespace) -> None:
    """A Llama as its configuration; the weights are made by vLLM (load_format dummy)."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": opts.dim, "intermediate_size": 2 * opts.dim, "vocab_size": VOCAB,
        "num_hidden_layers": opts.layers, "num_attention_heads": opts.dim // 64,
        "num_key_value_heads": opts.dim // 128, "head_dim": 64, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def graphs(opts: argparse.Namespace) -> dict[str, Any]:
    """vLLM's compilation_config: CUDA graphs of the continuation, nothing compiled."""
    sizes = [opts.batch]
    if opts.until:  # the batch follows the load
        sizes = [1 << k for k in range(opts.batch.bit_length())]
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def make_engine(folder: Path, opts: argparse.Namespace) -> Any:
    vllm: Any = importlib.import_module("vllm")
    how: dict[str, Any] = {"compilation_config": graphs(opts)} if opts.graph else {
        "enforce_eager": True}
    return vllm.LLM(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", seed=1,
        tensor_parallel_size=opts.tp, pipeline_parallel_size=opts.pp,
        distributed_executor_backend="external_launcher", disable_custom_all_reduce=True,
        attention_backend=opts.attention, enable_prefix_caching=False, async_scheduling=False,
        max_model_len=opts.tokens + opts.answer + 16, max_num_seqs=opts.batch,
        max_num_batched_tokens=max(2048, opts.batch * opts.tokens),
        gpu_memory_utilization=0.2, kv_cache_memory_bytes=1 << 30, **how)


def prompt(opts: argparse.Namespace, step: int, number: int = 0) -> list[int]:
    """The token numbers of a step's prompt."""
    return [3 + (step * 7919 + number * 613 + k * 31) % (VOCAB - 3) for k in range(opts.tokens)]


def digest_of(answer: Iterable[tuple[int, float]]) -> str:
    """Of the numbers of all tokens and the bits of their log-probabilities."""
    return hashlib.sha256(b"".join(struct.pack("<id", *pair) for pair in answer)).hexdigest()


def generated(outputs: Any) -> Iterator[tuple[int, float]]:
    """Each token that LLM.generate gave, and its log-probability, in the order of the prompts."""
    for output in outputs:
        answer = output.outputs[0]
        for token, likely in zip(answer.token_ids, answer.logprobs, strict=True):
            yield token, likely[token].logprob


def parse_args(text: str | None = __doc__, batch: int = 16,
               tokens: int = 256) -> argparse.Namespace:
    """text: what --help says."""
    p = argparse.ArgumentParser(description=text,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--backend", choices=("nccl",), default="nccl")
    p.add_argument("--tp", type=int, default=0, help="default: all ranks")
    p.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    p.add_argument("--graph", type=int, default=1, help="0: without CUDA graphs")
    p.add_argument("--attention", default="TRITON_ATTN", help="vLLM's attention backend")
    p.add_argument("--so", default="", help="what VLLM_NCCL_SO_PATH is to name")
    p.add_argument("--dim", type=int, default=1024)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--batch", type=int, default=batch)
    p.add_argument("--tokens", type=int, default=tokens, help="of a prompt")
    p.add_argument("--answer", type=int, default=16, help="tokens that are generated")
    p.add_argument("--until", default="", metavar="FILE",
                   help="vllm_serve.py: serve others until this file is there")
    opts = p.parse_args()
    opts.tp = opts.tp or int(os.environ["WORLD_SIZE"]) // opts.pp
    if opts.so:
        os.environ["VLLM_NCCL_SO_PATH"] = opts.so
    return opts


def main() -> int:
    opts = parse_args()
    if not vllm_is_there("vllm_app"):
        return 2
    set_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_HOST_IP=os.environ["MASTER_ADDR"])
    rank = int(os.environ["RANK"])
    vllm: Any = importlib.import_module("vllm")
    torch: Any = importlib.import_module("torch")
    how = vllm.SamplingParams(temperature=0.0, max_tokens=opts.answer, min_tokens=opts.answer,
                              ignore_eos=True, logprobs=1, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), opts)
        engine = make_engine(Path(folder), opts)
        if rank == 0:
            emit(event="start", world=int(os.environ["WORLD_SIZE"]), tp=opts.tp, pp=opts.pp,
                 vllm=str(vllm.__version__), torch=str(torch.__version__), graph=opts.graph,
                 nccl=list(torch.cuda.nccl.version()))
        began, everything = time.monotonic(), hashlib.sha256()
        for step in range(opts.steps):
            asked = [{"prompt_token_ids": prompt(opts, step, i)} for i in range(opts.batch)]
            text = digest_of(generated(engine.generate(asked, how, use_tqdm=False)))
            everything.update(text.encode())
            if rank == 0:
                emit(event="step", step=step + 1, loss=text)
    emit(event="end", rank=rank, steps=opts.steps, losses=everything.hexdigest(), weights="none",
         seconds=round(time.monotonic() - began, 3))
    return 0


if __name__ == "__main__":
    sys.exit(main())
