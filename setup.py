"""The native build in wheels: `make artefacts`, then its outputs go into r2ccl_ctl/_native/.

An editable install copies nothing: there r2ccl-ctl uses the checkout's build/ folder.
mk/wheels names a build that it made and its platform: R2CCL_WHEEL_NATIVE, R2CCL_WHEEL_PLATFORM.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
NATIVE = "r2ccl_ctl/_native"

# From the native build folder, or from the source tree.
BUILT = (
    "libnccl-net-r2ccl.so",
    "librccl-net.so",
    "libr2ccl.so",
    "nccl/libnccl.so.2",
    "nccl/shim.o",
    "hostnccl/libnccl.so.2",
    "r2ccl_perf",
)
SOURCES = ("net_plugin/control/segment.h", "shim/api/raw.h")


class BuildWithNative(build_py):
    """build_py that also builds and packs the native artefacts."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.pack(self.build_native())

    def build_native(self) -> Path:
        made = os.environ.get("R2CCL_WHEEL_NATIVE")
        if made:
            return Path(made)
        out = HERE / "build" / "wheel"
        command = ["make", "-C", str(HERE), "artefacts", f"B={out}"]
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise SystemExit("make not found: install make and gcc to build R2CCL") from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{' '.join(command)} failed with code {error.returncode}") from None
        return out

    def pack(self, out: Path) -> None:
        target = Path(self.build_lib) / NATIVE
        for name in BUILT:
            copy(out / name, target / name)
        for name in SOURCES:
            copy(HERE / name, target / Path(name).name)


def copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise SystemExit(f"{source} is missing: the native build did not make it")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


class PlatformWheel(bdist_wheel):
    """Tagged for this platform and any Python 3: the native code does not know Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        platform = os.environ.get("R2CCL_WHEEL_PLATFORM")
        return ("py3", "none", platform or super().get_tag()[2])


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    distclass=BinaryDistribution,
    cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel},
    options={"build": {"build_base": "build/python"}},
)
