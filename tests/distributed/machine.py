"""One machine of a run, for the tests of the rendezvous: a launcher, and small workers in place of training.

python machine.py '{"index": 0, "count": 2, "init_method": "file:///...", "work": "sum", ...}'
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.console import logging_to_stderr
from reagent_lite.distributed.group import Place, joined
from reagent_lite.distributed.launcher import LaunchError, launch
from reagent_lite.distributed.nodes import Node
from reagent_lite.distributed.rendezvous import Rendezvous
from reagent_lite.distributed.verdict import Declaration
from reagent_lite.distributed.workers import end_with_parent, is_worker, report_failure, tell_model_stands
from reagent_lite.errors import DataError, Preempted, Problem, ReagentLiteError
from reagent_lite.files import FolderIdentity

SETTINGS = {"interface": "lo", "heartbeat_seconds": 0.3, "lost_after_seconds": 3.0, "join_timeout_seconds": 60.0}


def main(options: dict[str, Any]) -> None:
    node = Node(options["index"], options["count"])
    rendezvous = Rendezvous(
        node=node,
        init_method=options["init_method"],
        settings=RendezvousConfig(**{**SETTINGS, **options.get("settings", {})}),
        declaration=Declaration(
            node=node.index, host=options.get("host", f"host{node.index}"), pid=os.getpid(),
            processes=options.get("processes", 1), device="cpu", versions=options.get("versions", {}),
            gpus=options.get("gpus", ()), config=options.get("config", {}), problem=options.get("problem", ""),
        ),
        force=options.get("force", False),
    )  # fmt: skip
    rendezvous.preflight()
    if "publish_after" in options:
        print("about to join", file=sys.stderr, flush=True)
        time.sleep(options["publish_after"])
    command = [options.get("python", sys.executable), __file__, json.dumps(options)]
    folder = FolderIdentity.of(Path(options["folder"])) if "folder" in options else None
    launch(command, options.get("processes", 1), rendezvous, restarts=options.get("restarts", 0), folder=folder)


def work(options: dict[str, Any]) -> None:
    """Sums ranks once, then many times; the task says what goes wrong, and when."""
    end_with_parent()
    place = Place.read()
    assert place is not None
    task, out = options.get("work", "sum"), Path(options["out"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (out / f"pid_{place.rank}").write_text(str(os.getpid()))
    if task == "late start" and place.rank == options.get("victim", 1):
        time.sleep(60)
    with joined(place, torch.device("cpu"), timeout_seconds=60) as group:
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        group.wait_at_most(options.get("wait", 60))
        for step in range(options.get("steps", 1)):
            group.entering(step)
            total = group.sum(torch.tensor([place.rank + 1, len(told)]))
            if total[1]:
                group.barrier()
                sys.exit(75)
            if place.rank == options.get("victim", 1) and step == 3 and attempt == 0:
                fail(task, options)
            if options.get("steps", 1) > 1:
                time.sleep(0.05)
            (out / f"step_{place.rank}").write_text(str(step))
        line = f"{int(total[0])} attempt {attempt} node {place.node} of {place.num_nodes} local {place.local_rank}"
        (out / f"sum_{place.rank}").write_text(line)
        if place.rank == 0:
            tell_model_stands()
        group.barrier()
        if task == "late end" and place.rank == options.get("victim", 1):
            fail("kill", options)
        group.barrier()
    if place.rank == 0:
        print(line)


def fail(task: str, options: dict[str, Any]) -> None:
    if task == "unmount":
        Path(options["folder"]).rename(f"{options['folder']}.gone")
        Path(options["folder"]).mkdir()
    if task in ("kill", "unmount"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif task == "sleep":
        time.sleep(100)
    elif task == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif task == "raise":
        raise DataError(Problem("file.json:3", "a number", "text"))
    elif task == "hang":  # on its way out, after it has said why
        report_failure(DataError(()), "file.json:3: expected a number, got text")
        time.sleep(100)
    elif task == "crash":
        raise ValueError("something unexpected")


if __name__ == "__main__":
    try:
        with logging_to_stderr():
            (work if is_worker() else main)(json.loads(sys.argv[1]))
    except LaunchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except (ReagentLiteError, Preempted) as error:
        if is_worker():
            report_failure(error, str(error))
        else:
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if not is_worker():
            raise
        report_failure(error, repr(error))
        sys.exit(4)
