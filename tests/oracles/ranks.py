"""Processes of one run, started as a launcher starts them, without one."""

import os
import socket
from pathlib import Path

from oracles.interpreters import Interpreter

ROOT = Path(__file__).resolve().parents[2]


def start_ranks(
    world: int,
    arguments: list[str],
    folder: Path,
    *,
    nodes: int = 1,
    places: list[Path] | None = None,
    **environment: str,
) -> list[Interpreter]:
    """Starts python with the arguments once for each rank; what they print goes to folder/err_<rank>.

    Args:
        world: how many.
        arguments: after the interpreter.
        folder: where they write.
        nodes: machines that they say they are on.
        places: working directory of each node; None is the folder.
        environment: more variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    local = world // nodes
    kernels = {"REAGENT_LITE_CACHE": str(folder.parent / "kernels"), "XDG_CACHE_HOME": str(folder / "cache")}
    processes = []
    for rank in range(world):
        numbers = {
            "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": rank // local, "GROUP_WORLD_SIZE": nodes, "MASTER_PORT": port,
        }  # fmt: skip
        variables = {
            **os.environ, **kernels, **{name: str(value) for name, value in numbers.items()}, "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT), **environment,
        }  # fmt: skip
        place = folder if places is None else places[rank // local]
        place.mkdir(exist_ok=True)
        outputs = (folder / f"out_{rank}", folder / f"err_{rank}")
        processes.append(Interpreter(arguments, env=variables, cwd=place, outputs=outputs))
    return processes


def end_ranks(processes: list[Interpreter], seconds: float = 120) -> list[int]:
    """Returns their exit codes; ends those that take longer."""
    try:
        return [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
