"""Machines of a run, simulated on this machine: launchers with small workers instead of training, and their logs.

Workers are forked from their launcher before it has threads, so torch is already imported.

python machines.py '{"index": 0, "count": 2, "init_method": "file:///...", "work": "kill", ...}'
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from oracles.interpreters import Interpreter
from oracles.waiting import wait_until

from reagent_lite import console
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.console import logging_to_stderr
from reagent_lite.distributed import launcher
from reagent_lite.distributed.group import ProcessRanks, attempt_here, joined
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.rendezvous import Rendezvous
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.distributed.worker import end_with_parent, is_worker, report_failure, report_model_saved
from reagent_lite.errors import DataError, Preempted, ReagentLiteError
from reagent_lite.files import FolderIdentity

ONE = Declaration(node=0, host="here", pid=1, processes=1, device="cpu")
PYTHONPATH = f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}"
SETTINGS = {"interface": "lo", "heartbeat_seconds": 0.3, "lost_after_seconds": 2.0, "join_timeout_seconds": 60.0}


class Machine:
    """A launcher, as a process that writes its output to files."""

    def __init__(self, folder: Path, index: int, count: int, options: dict[str, Any]) -> None:
        out = folder / "out"
        out.mkdir(exist_ok=True)
        given = {"index": index, "count": count, "out": str(out), "init_method": f"file://{folder}/run.rdzv", **options}
        variables = {"PYTHONPATH": PYTHONPATH, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        self.index = index
        name = f"{index}_{time.monotonic_ns()}"
        self._files = folder / f"out_{name}", folder / f"log_{name}"
        self.process = Interpreter([__file__, json.dumps(given)], env=os.environ | variables, outputs=self._files)

    @property
    def log(self) -> str:
        return self._files[1].read_text() if self._files[1].exists() else ""

    @property
    def output(self) -> str:
        return self._files[0].read_text()

    def ended(self, within: float = 60.0) -> int:
        """Returns the exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"machine {self.index} still runs after {within} s:\n{self.log}") from None

    def logs(self, words: str) -> None:
        """Waits until the log has these words."""
        wait_until(lambda: words in self.log, lambda: f"machine {self.index} never logged {words!r}:\n{self.log}")


Start = Callable[..., Machine]


@contextmanager
def machines(folder: Path) -> Iterator[Start]:
    """Yields start(index, count, **options) -> Machine, and ends all machines afterwards."""
    started: list[Machine] = []

    def start(index: int, count: int = 2, **options: Any) -> Machine:
        started.append(Machine(folder, index, count, options))
        return started[-1]

    try:
        yield start
    finally:
        for machine in started:
            machine.process.kill()


def all_end(machines: list[Machine], code: int) -> None:
    """Asserts that all machines end with the exit code."""
    codes = [machine.ended(120.0) for machine in machines]
    assert codes == [code] * len(machines), "\n".join(machine.log for machine in machines)


def appears(file: Path) -> None:
    wait_until(file.exists, lambda: f"{file} never appeared")


def working(start: Start, folder: Path, **options: Any) -> list[Machine]:
    """Starts two machines, and returns them when their workers take steps."""
    both = [start(index, **options) for index in (0, 1)]
    for rank in (0, 1):
        appears(folder / "out" / f"step_{rank}")
    return both


class Fork:
    """A worker, with the part of subprocess.Popen that a launcher uses."""

    waiting: ClassVar[list[tuple[int, int]]] = []  # process, and the pipe that it reads its variables from

    @classmethod
    def prepare(cls, count: int) -> bool:
        """Makes workers that wait until the launcher starts them. Returns whether this process is a started worker."""
        for _ in range(count):
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                for pipe in (writing, *(pipe for _, pipe in cls.waiting)):
                    os.close(pipe)
                given = json.loads(os.fdopen(reading).readline() or os._exit(0))  # type: ignore[func-returns-value]
                os.environ.update(given["env"])
                os.dup2(1 if given["stdout"] is None else given["stdout"], 1)
                return True
            os.close(reading)
            cls.waiting.append((pid, writing))
        return False

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: int | None) -> None:
        self.pid, pipe = self.waiting.pop()
        self.returncode: int | None = None
        os.write(pipe, json.dumps({"env": env, "stdout": stdout}).encode())
        os.close(pipe)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        wait_until(lambda: self.poll() is not None, seconds=seconds)


def main(options: dict[str, Any]) -> None:
    """Runs a launcher and its workers."""
    processes = options.get("processes", 1)
    restarts = options.get("restarts", 0)
    if "python" not in options:
        launcher.subprocess = SimpleNamespace(Popen=Fork, TimeoutExpired=())  # type: ignore[attr-defined]
        if Fork.prepare(processes * (restarts + 1)):
            return work(options)
    node = Node(options["index"], options["count"])
    rendezvous = Rendezvous(
        node=node,
        init_method=options["init_method"],
        settings=RendezvousConfig(**{**SETTINGS, **options.get("settings", {})}),
        declaration=Declaration(
            node=node.index, host=options.get("host", f"host{node.index}"), pid=os.getpid(),
            processes=processes, device="cpu", versions=options.get("versions", {}),
            config=options.get("config", {}), problem=options.get("problem", ""), job=options.get("job", ""),
        ),
        force=options.get("force", False),
    )  # fmt: skip
    rendezvous.preflight()
    command = [options.get("python", sys.executable), __file__, json.dumps(options)]
    folder = FolderIdentity.of(Path(options["folder"], options.get("output", "."))) if "folder" in options else None
    console._MOST_FOLDER_SECONDS = options.get("away", console._MOST_FOLDER_SECONDS)
    launcher.launch(command, processes, rendezvous, restarts=restarts, folder=folder)


def work(options: dict[str, Any]) -> None:
    """Sums over ranks `steps` times, or until a file `end` is there.

    The victim fails as `work` says after step 3 of the first attempt.
    """
    end_with_parent()
    position = ProcessRanks.read()
    assert position is not None
    task = options.get("work", "sum")
    out = Path(options["out"])
    steps = options.get("steps", 1)
    victim = position.rank == options.get("victim", 1)
    (out / f"pid_{position.rank}").write_text(str(os.getpid()))
    if task == "late start" and victim:
        time.sleep(60)
    with joined(position, torch.device("cpu"), timeout_seconds=60) as group:
        stops: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
        with group.waiting_at_most(options.get("wait", 60), then=60):
            for step in range(steps):
                group.enter_collective(step)
                total = group.all_reduce(torch.tensor([position.rank + 1, len(stops), (out / "end").exists()]))
                if total[1]:
                    group.barrier()
                    sys.exit(Preempted.exit_code)
                if victim and step == 3 and attempt_here() == 0:
                    fail(task, options)
                time.sleep(0.05 if steps > 1 else 0)
                (out / f"step_{position.rank}").write_text(str(step))
                if total[2]:
                    break
        node = f"node {position.node} of {position.num_nodes} local {position.local_rank}"
        line = f"{int(total[0])} attempt {attempt_here()} {node}"
        (out / f"sum_{position.rank}").write_text(line)
        if position.rank == 0:
            report_model_saved()
        group.barrier()
        if task == "late end" and victim:
            fail("kill", options)
        if task == "late signal" and victim:
            sys.exit(Preempted.exit_code)
        group.barrier()
    print(line)


def fail(task: str, options: dict[str, Any]) -> None:
    if task == "unmount":
        if "output" in options:
            Path(options["folder"], options["output"]).mkdir()
            FolderIdentity.marked(Path(options["folder"], options["output"]))
        Path(options["folder"]).rename(f"{options['folder']}.gone")
        Path(options["folder"]).mkdir()
    if task in ("kill", "unmount"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif task == "sleep":
        time.sleep(100)
    elif task == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif task == "hang":  # on its way out, after it has reported why
        report_failure(DataError(()), "file.json:3: expected a number, got text")
        time.sleep(100)


if __name__ == "__main__":
    try:
        with logging_to_stderr():
            main(json.loads(sys.argv[1]))
    except (Exception, Preempted) as error:
        if is_worker():
            report_failure(error, str(error) if isinstance(error, ReagentLiteError) else repr(error))
        elif isinstance(error, ReagentLiteError | Preempted):
            print(error, file=sys.stderr)
        else:
            raise
        sys.exit(getattr(error, "exit_code", 4))
