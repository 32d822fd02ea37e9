"""Processes of several machines on this one: each node is a working folder of its own, so that one relative path means
other files on every node, as one absolute path does on machines with disks of their own."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from oracles.interpreters import Interpreter
from oracles.runs import ROOT, Run


def run_nodes(
    folders: Sequence[Path], arguments: Sequence[str], *, processes: Sequence[int] | None = None, timeout: float = 240
) -> list[Run]:
    """Runs a Python command in every process of every node, and returns how they ended, in order of their ranks.

    A process that waits for one that failed is ended.

    Args:
        folders: working folder of each node.
        arguments: of the interpreter.
        processes: of each node; one each where absent.
        timeout: seconds until all must have ended.
    """
    counts = processes or [1] * len(folders)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": str(sum(counts)), "GROUP_WORLD_SIZE": str(len(folders)), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }  # fmt: skip
    started = []
    for node, (folder, count) in enumerate(zip(folders, counts, strict=True)):
        for local in range(count):
            place = {"RANK": len(started), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node}
            environment = common | {name: str(value) for name, value in place.items()}
            environment["XDG_CACHE_HOME"] = str(folder / "cache")
            started.append(Interpreter(arguments, cwd=folder, env=environment))
    ended = []
    for process in started:
        try:
            out, err = process.communicate(timeout=30 if any(run.code for run in ended) else timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        ended.append(Run(process.returncode, out, err))
    return ended
