"""Lets megatron_train.py run on CPUs, to try the script where there is no GPU.

Megatron-Core asks for CUDA by name in many places. install() makes `cuda` mean the CPU in this
process: where tensors are made and moved to, what their type is called, random states, streams.
Numbers differ from a GPU's, and nothing of NCCL takes part.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

torch: Any = importlib.import_module("torch")
overrides: Any = importlib.import_module("torch.overrides")
CPU = torch.device("cpu")


def on_cpu(device: Any) -> Any:
    return CPU if str(device).startswith("cuda") else device


class CudaMeansCpu(overrides.TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *(on_cpu(arg) if isinstance(arg, str) else arg for arg in args[1:]))
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


class NoStream:
    """Work on a CPU is done when the call returns."""

    def wait_stream(self, _other: Any) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    """Of the calling thread, for the rest of its life: torch's modes belong to threads, and on CPUs
    backward passes run in the thread that asks for them."""
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *_args: None
    cuda.current_stream = cuda.default_stream = cuda.Stream = lambda *_args, **_kw: NoStream()
    cuda.stream = lambda *_args: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_args, **_kw: torch.get_rng_state()
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_args, **_kw: torch.get_rng_state()
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # that both states are one
    random._set_cuda_rng_state = lambda state, *_args, **_kw: torch.set_rng_state(state)
    CudaMeansCpu().__enter__()
