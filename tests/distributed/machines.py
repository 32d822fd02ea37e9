"""Machines of a run, simulated on this machine: launchers with small workers instead of training, and their logs.

python -m distributed.machines '{"index": 0, "count": 2, "init_method": "file:///...", "work": "kill", ...}'
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from helpers.interpreters import FORKED_WORKERS, Interpreter
from helpers.waiting import wait_until

from reagent_lite import console
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.console import logging_to_stderr
from reagent_lite.distributed import launcher
from reagent_lite.distributed import meeting as rendezvous_module
from reagent_lite.distributed.declarations import Declaration
from reagent_lite.distributed.group import ProcessRanks, attempt_here, join_group
from reagent_lite.distributed.meeting import Rendezvous
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.worker import end_with_parent, is_worker, report_failure, report_model_saved
from reagent_lite.errors import DataError, Preempted, ReagentLiteError
from reagent_lite.folder_identity import FolderIdentity

ONE = Declaration(node=0, host="here", pid=1, processes=1, device="cpu")
PYTHONPATH = f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}"
MODULE = ("-m", "distributed.machines")
SETTINGS = {"interface": "lo", "heartbeat_seconds": 0.3, "lost_after_seconds": 2.0, "join_timeout_seconds": 60.0}


class Machine(Interpreter):
    """A launcher, as a process that writes its output to files."""

    def __init__(self, folder: Path, index: int, count: int, options: dict[str, Any]) -> None:
        out = folder / "out"
        out.mkdir(exist_ok=True)
        given = {"index": index, "count": count, "out": str(out), "init_method": f"file://{folder}/run.rdzv", **options}
        variables = {"PYTHONPATH": PYTHONPATH, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        super().__init__([*MODULE, json.dumps(given)], env={**os.environ, **variables, FORKED_WORKERS: "1"})
        self.index = index

    def ended(self, within: float = 60.0) -> int:
        """Returns the exit code."""
        wait_until(lambda: self.poll() is not None, lambda: f"machine {self.index} still runs:\n{self.said}", within)
        return self.wait()

    def logs(self, words: str) -> None:
        """Waits until the log has these words."""
        wait_until(lambda: words in self.said, lambda: f"machine {self.index} never logged {words!r}:\n{self.said}")


Start = Callable[..., Machine]


@contextmanager
def machines(folder: Path) -> Iterator[Start]:
    """Yields start(index, count, **options) -> Machine, and ends all machines afterwards."""
    with ExitStack() as stack:
        yield lambda index, count=2, **options: stack.enter_context(closing(Machine(folder, index, count, options)))


def all_end(machines: list[Machine], code: int) -> None:
    """Asserts that all machines end with the exit code."""
    codes = [machine.ended(120.0) for machine in machines]
    assert codes == [code] * len(machines), "\n".join(machine.said for machine in machines)


def working(start: Start, folder: Path, sign: str = "step", **options: Any) -> list[Machine]:
    """Starts two machines, and returns them when their workers take steps, or with the sign "pid" have begun."""
    both = [start(index, **options) for index in (0, 1)]
    for rank in (0, 1):
        wait_until((folder / "out" / f"{sign}_{rank}").exists, lambda: "\n".join(machine.said for machine in both))
    return both


def main(options: dict[str, Any]) -> None:
    """Runs a launcher."""
    node = Node(options["index"], options["count"])
    processes = options.get("processes", 1)
    rendezvous = Rendezvous(
        node=node,
        init_method=options["init_method"],
        settings=RendezvousConfig(**{**SETTINGS, **options.get("settings", {})}),
        declaration=Declaration(
            node=node.index, host=options.get("host", f"host{node.index}"), pid=os.getpid(),
            processes=processes, device="cpu",
            **{key: options[key] for key in ("versions", "config", "problem", "job") if key in options},
        ),
        force=options.get("force", False),
    )  # fmt: skip
    rendezvous.preflight()
    folder = FolderIdentity.of(Path(options["folder"], options.get("output", "."))) if "folder" in options else None
    rendezvous_module._OTHER_JOB_SECONDS = 1.0
    console._MOST_FOLDER_SECONDS = options.get("away", console._MOST_FOLDER_SECONDS)
    command = [options.get("python", sys.executable), *MODULE, json.dumps(options)]
    launcher.launch(command, processes, rendezvous, restarts=options.get("restarts", 0), folder=folder)


def work(options: dict[str, Any]) -> None:
    """Sums over ranks `steps` times, or until a file `end` is there.

    The victim fails as `work` says after step 3 of the first attempt.
    """
    end_with_parent()
    position = ProcessRanks.read()
    assert position is not None
    task, steps, out = options.get("work", "sum"), options.get("steps", 1), Path(options["out"])
    victim = position.rank == options.get("victim", 1)
    (out / f"pid_{position.rank}").write_text(str(os.getpid()))
    if task == "late start" and victim:
        time.sleep(60)
    with join_group(position, torch.device("cpu"), timeout_seconds=60) as group:
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
        place = f"node {position.node} of {position.num_nodes} local {position.local_rank}"
        line = f"{int(total[0])} attempt {attempt_here()} {place}"
        (out / f"sum_{position.rank}").write_text(line)
        if position.rank == 0:
            report_model_saved()
        group.barrier()
        if task == "late end" and victim:
            fail("kill", options)
        if task == "late signal" and victim:
            os._exit(Preempted.exit_code)  # at once, before rank 0 is known to have lost its connection
        group.barrier()
    print(line)


def fail(task: str, options: dict[str, Any]) -> None:
    match task:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "unmount":
            folder = Path(options["folder"])
            if "output" in options:
                (folder / options["output"]).mkdir()
                FolderIdentity.mark(folder / options["output"])
            folder.rename(f"{folder}.gone")
            folder.mkdir()
            fail("kill", options)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":  # on its way out, after it has reported why
            report_failure(DataError(()), "file.json:3: expected a number, got text")
            fail("sleep", options)
        case "sleep":
            time.sleep(100)


if __name__ == "__main__":
    try:
        with logging_to_stderr():
            (work if is_worker() else main)(json.loads(sys.argv[1]))
    except (Exception, Preempted) as error:
        if is_worker():
            report_failure(error, str(error) if isinstance(error, ReagentLiteError) else repr(error))
        elif isinstance(error, ReagentLiteError | Preempted):
            print(error, file=sys.stderr)
        else:
            raise
        sys.exit(getattr(error, "exit_code", 4))
