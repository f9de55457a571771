"""Where the native parts are: a checkout's build folder, or the wheel's r2ccl_ctl/_native.

R2CCL_BUILD_DIR names another folder with the same files, for both.
"""

from __future__ import annotations

import os
from pathlib import Path

from r2ccl_ctl.errors import R2Error

PLUGIN = "libnccl-net-r2ccl.so"
SHIM = "libr2ccl.so"
NAMED_SHIM = "nccl/libnccl.so.2"
SHIM_OBJECT = "nccl/shim.o"
STUBS_HEADER = "raw.h"
STANDIN = "hostnccl/libnccl.so.2"
PERF = "r2ccl_perf"
HEADER = "segment.h"

_PACKAGE = Path(__file__).resolve().parent
_NATIVE = _PACKAGE / "_native"
_HEADER_IN_SOURCES = Path("net_plugin") / "control" / HEADER


class NotBuiltError(R2Error):
    """A native part is not where it should be."""


def checkout() -> Path | None:
    """The root of the sources that this package runs from, or None when it was installed."""
    root = _PACKAGE.parent
    if (root / "Makefile").is_file() and (root / _HEADER_IN_SOURCES).is_file():
        return root
    return None


def native_dir() -> Path:
    """The folder that holds the native parts, whether it exists or not."""
    override = os.environ.get("R2CCL_BUILD_DIR")
    if override:
        return Path(override).absolute()
    root = checkout()
    return root / "build" if root is not None else _NATIVE


def _remedy() -> str:
    override = os.environ.get("R2CCL_BUILD_DIR")
    if override:
        return f"R2CCL_BUILD_DIR={override} names another folder: correct or unset it"
    if checkout() is not None:
        return "build it first: r2ccl-ctl build (or `make native`)"
    return "this installation lacks its native parts: install the wheel again, or `make` a checkout"


def _find(name: str, what: str) -> Path:
    path = native_dir() / name
    if not path.is_file():
        raise NotBuiltError(f"{what} is not at {path}: {_remedy()}")
    return path


def plugin_path() -> Path:
    """The net plugin, absolute."""
    return _find(PLUGIN, "the net plugin")


def shim_path() -> Path:
    """libr2ccl.so, for LD_PRELOAD, absolute."""
    return _find(SHIM, "the shim")


def named_shim_path() -> Path:
    """The shim as a libnccl.so.2, for programs that open NCCL by path or by name."""
    return _find(NAMED_SHIM, "the shim with NCCL's name")


def shim_object() -> Path:
    """All of the shim with NCCL's name as one object file."""
    return _find(SHIM_OBJECT, "the shim's object file")


def stubs_header() -> Path:
    """raw.h, which has the code of a function that is only passed on."""
    root = checkout()
    if root is not None:
        return root / "shim" / "api" / STUBS_HEADER
    return _find(STUBS_HEADER, "the header of passed-on functions")


def standin_dir() -> Path:
    """The folder with the stand-in's libnccl.so.2, for LD_LIBRARY_PATH."""
    return _find(STANDIN, "the CPU stand-in for NCCL").parent


def perf_path() -> Path:
    """The benchmark program."""
    return _find(PERF, "r2ccl_perf")


def segment_header() -> Path:
    """segment.h, which describes the control segment: needs no build in a checkout."""
    root = checkout()
    if root is not None:
        return root / _HEADER_IN_SOURCES
    return _find(HEADER, "the layout of the control segment")
