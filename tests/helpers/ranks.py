"""Processes of one run, started as a launcher starts them, without one; on several machines, all of them this one.

Each machine is a working folder of its own, so that one relative path means other files on every machine, as one
absolute path does on machines with disks of their own.
"""

import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.interpreters import Interpreter, python_path
from helpers.runs import ROOT, Run, end


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start_ranks(
    arguments: Sequence[str], folders: Sequence[Path], processes: Sequence[int] | None = None, **environment: str
) -> list[Interpreter]:
    """Starts python with the arguments once for each rank; returns them in order of their ranks.

    Args:
        arguments: after the interpreter.
        folders: working folder of each machine, made where it is not there.
        processes: of each machine; one each where absent.
        environment: more variables.
    """
    counts = processes or [1] * len(folders)
    common = {
        **os.environ, "WORLD_SIZE": str(sum(counts)), "GROUP_WORLD_SIZE": str(len(folders)), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": python_path(ROOT, ROOT / "tests"), **environment,
    }  # fmt: skip
    started: list[Interpreter] = []
    for node, (folder, count) in enumerate(zip(folders, counts, strict=True)):
        folder.mkdir(exist_ok=True)
        for local in range(count):
            of_rank = {"RANK": len(started), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node,
                       "XDG_CACHE_HOME": folder / "cache"}  # fmt: skip
            variables = common | {name: str(value) for name, value in of_rank.items()}
            started.append(Interpreter(arguments, cwd=folder, env=variables))
    return started


def end_ranks(processes: Sequence[Interpreter], seconds: float = 500) -> list[Run]:
    """Waits, and returns how they ended; ends those that take longer, or wait for one that has failed."""
    ended: list[Run] = []
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(30 if any(run.code for run in ended) else seconds)
        process.kill()
        ended.append(end(process))
    return ended


def run_ranks(arguments: Sequence[str], folders: Sequence[Path], processes: Sequence[int] | None = None) -> list[Run]:
    """Runs python with the arguments once for each rank, and returns how they ended."""
    return end_ranks(start_ranks(arguments, folders, processes))


def call_on_ranks(
    function: Callable[..., Any], arguments: Sequence[str], folders: Sequence[Path],
    processes: Sequence[int] | None = None,
) -> list[Run]:  # fmt: skip
    """Calls function(group, *arguments) once on each rank; `outcome` of a run is what it returned, as JSON."""
    program = str(Path(__file__).with_name("on_ranks.py"))
    return run_ranks([program, function.__code__.co_filename, function.__name__, *arguments], folders, processes)
