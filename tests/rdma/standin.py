"""The probe over the stand-in for libibverbs: started early, asked late. It sleeps for most of its
time, in which a guest boots."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.rdma import facts
from tests.rdma.work import build_folder

FAULTS = Path(__file__).with_name("fake_act.py")
SECONDS = 240.0


class StandIn:
    def __init__(self, out: IO[str]) -> None:
        build = build_folder()
        library, probe = build / "fakeverbs" / "libibverbs.so.1", build / "rdma" / "probe"
        self.missing = next((file for file in (library, probe) if not file.exists()), None)
        self.command = [str(probe), "--lib", str(library), "--a", "fv0", "--b", "fv1"]
        self.command += ["--act", str(FAULTS)]
        self.out = out  # a file: a pipe would hold the probe up until somebody reads
        self.process = self.start() if self.missing is None else None

    def start(self, *steps: str) -> subprocess.Popen[str]:
        """The probe, asked for these steps, or for all."""
        self.steps = steps
        self.out.seek(0)
        self.out.truncate()
        return subprocess.Popen(
            [*self.command, *steps],
            env={**os.environ, "R2_FAKEVERBS": "fv0=127.0.1.1,fv1=127.0.2.1"},
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def answers_again(self, *steps: str) -> facts.Steps:
        """Asks for these steps anew; the first asking must be over."""
        assert self.process is not None and self.process.poll() is not None
        self.process = self.start(*steps)
        return self.answers()

    def answers(self) -> facts.Steps:
        if self.process is None:
            pytest.skip(f"no {self.missing}: libibverbs-dev's headers were missing in the build")
        code = self.process.wait(SECONDS)
        if code:  # beside guests that boot a step can take too long for it
            print("the probe is asked again, after:", self.said()[-4000:])
            self.process = self.start(*self.steps)
            code = self.process.wait(SECONDS)
        assert code == 0, f"the probe ended with {code}: {self.said()[-4000:]}"
        return facts.parse(self.said())

    def said(self) -> str:
        self.out.seek(0)
        return self.out.read()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
