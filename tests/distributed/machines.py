"""Starts machine.py several times on this machine's loopback and gathers what they say."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oracles.interpreters import Interpreter

MACHINE = Path(__file__).parent / "machine.py"


class Machine:
    """One launcher."""

    def __init__(self, folder: Path, index: int, count: int, options: dict[str, Any]) -> None:
        out = folder / "out"
        out.mkdir(exist_ok=True)
        given = {"index": index, "count": count, "out": str(out), "init_method": f"file://{folder}/run.rdzv", **options}
        environment = {
            **os.environ,
            "PYTHONPATH": f"{MACHINE.parents[2]}:{MACHINE.parents[1]}",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }
        self.index = index
        self.started = time.monotonic()
        name = f"{index}_{time.monotonic_ns()}"
        self._out, self._log = folder / f"out_{name}", folder / f"log_{name}"
        self._log.touch()
        self.process = Interpreter([str(MACHINE), json.dumps(given)], env=environment, outputs=(self._out, self._log))

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ended(self, within: float = 60.0) -> int:
        """Returns the exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"machine {self.index} still runs after {within} s:\n{self.log}") from None

    def output(self) -> str:
        return self._out.read_text()

    def says(self, words: str, within: float = 30.0) -> None:
        """Waits until the log has these words."""
        deadline = time.monotonic() + within
        while words not in self.log:
            assert time.monotonic() < deadline, f"machine {self.index} never said {words!r}:\n{self.log}"
            time.sleep(0.02)


@contextmanager
def machines(folder: Path) -> Iterator[Any]:
    """Gives start(index, count, **options) -> Machine, and leaves none behind."""
    started: list[Machine] = []

    def start(index: int, count: int = 2, **options: Any) -> Machine:
        started.append(Machine(folder, index, count, options))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.process.kill()


def appears(file: Path, within: float = 40.0) -> None:
    deadline = time.monotonic() + within
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never appeared"
        time.sleep(0.02)
