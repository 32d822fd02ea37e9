"""Requests per second and their slowest percent: /decide against an empty route of the same framework.

    python -m tests.benchmarks.serving [--seconds 0.5] [--clients 8] [--repeats 5] [--model BUNDLE]
        [--before CHECKOUT] [--rollout]

One worker each, the same body, and the same clients in one process, which keep their connections. The empty route
checks the same body and answers as many bytes. The two run side by side and are loaded in turns; ratios are of turns
that follow each other, with their median and range. Without a model: CartPole, 64-64 hidden units. With the folder of
an earlier checkout, its /decide takes the place of the empty route. With --rollout, /decide with a rollout of a second
model is measured beside /decide without. Last, rows per second of requests of 1,000 rows beside those of one, in turns.
"""

import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.benchmarks.turns import ROOT, options_of, run, spread, write_config
from tests.helpers.waiting import wait_until

TURNS = 8  # of each server in a repeat
EMPTY = """
import uvicorn
from fastapi import FastAPI
from reagent_lite.serving.bodies import Decision, Decisions, NamedRows
app = FastAPI()
@app.post("/decide")
async def decide(body: NamedRows) -> Decisions:
    one = Decision(decision_id="0123abcd-1234567", action="left", index=0, propensity=0.5)
    return Decisions(decisions=[one], model="0" * 64)
uvicorn.run(app, port={port}, log_config=None, access_log=False)
"""


async def client(port: int, body: bytes, until: float, seconds: list[float]) -> None:
    """Sends requests one after another over one connection and appends how long each took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /decide HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    while time.perf_counter() < until:
        begun = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        await reader.readexactly(int(re.search(rb"content-length: (\d+)", answer)[1]))
        seconds.append(time.perf_counter() - begun)
    writer.close()


async def load(port: int, body: bytes, clients: int, seconds: float) -> list[float]:
    """Returns how long each request took, in seconds."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client(port, body, until, took) for _ in range(clients)))
    return took


def processor_seconds(process: psutil.Process) -> float:
    """Returns what a server and its workers have used so far."""
    return sum(sum(server.cpu_times()[:2]) for server in (process, *process.children(recursive=True)))


@contextmanager
def started(port: int, *command: str, root: Path = ROOT) -> Iterator[tuple[int, psutil.Process]]:
    """A server of a checkout that answers on the port."""
    process = psutil.Popen([sys.executable, *command], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    try:
        wait_until(lambda: port in [each.laddr.port for each in psutil.net_connections() if each.status == "LISTEN"])
        yield port, process
    finally:
        process.terminate()
        process.wait()


def measured(
    sides: Sequence[tuple[int, psutil.Process]], body: bytes, clients: int, seconds: float
) -> list[tuple[float, float, float, float]]:
    """Returns requests per second, median and 99th percentile in ms, and processor time of a request in us, of each."""
    took: list[list[float]] = [[] for _ in sides]
    used = [processor_seconds(process) for _, process in sides]
    for turn in range(TURNS):
        for number in (0, 1) if turn % 2 else (1, 0):
            took[number] += asyncio.run(load(sides[number][0], body, clients, seconds))
    return [
        (
            len(durations) / (TURNS * seconds),
            1e3 * statistics.median(durations),
            1e3 * sorted(durations)[int(len(durations) * 0.99)],
            1e6 * (processor_seconds(process) - before) / len(durations),
        )
        for durations, before, (_, process) in zip(took, used, sides, strict=True)
    ]


def rows_per_second(port: int, row: dict[str, object], clients: int, seconds: float) -> dict[int, float]:
    """Returns the rows that a server decides in a second, by the number of rows in a request."""
    bodies = {count: json.dumps({"rows": [row] * count}).encode() for count in (1, 1000)}
    took: dict[int, list[float]] = {count: [] for count in bodies}
    for _ in range(TURNS):
        for count, body in bodies.items():
            took[count] += asyncio.run(load(port, body, clients, seconds))
    return {count: clients * count / statistics.mean(durations) for count, durations in took.items()}


def a_model(folder: Path, seed: int = 0) -> Path:
    """Trains a model for a moment in simulation."""
    config = write_config(folder, {
        "model_output_path": str(folder), "use_gpu": False, "seed": seed,
        "training": {"layers": [-1, 64, 64, -1], "activations": ["relu", "relu", "linear"]},
        "simulation": {"env": "cartpole_v1", "num_envs": 8, "total_steps": 2000, "warmup_steps": 500,
                       "evaluation_episodes": 2},
    })  # fmt: skip
    run("-m", "workflows.dqn", "--config", config)
    return folder / "model"


if __name__ == "__main__":
    options = options_of(__doc__, seconds=0.5, clients=8, repeats=5, model="", before="", rollout=False)
    features = {str(number): 0.1 * number for number in range(4)}
    row = {"state_features": features, "mdp_id": "7"}
    body = json.dumps({"rows": [row]}).encode()
    with tempfile.TemporaryDirectory() as name:
        model = options.model or a_model(Path(name) / "trained")
        serve = ["-m", "workflows.serve", "--model", str(model)]
        beside = ["-c", EMPTY.format(port=8730)]
        root = ROOT
        if options.before:
            beside = [*serve, "--log", f"{name}/before", "--port", "8730"]
            root = Path(options.before).resolve()
        rollout = []
        if options.rollout:
            beside = [*serve, "--log", f"{name}/before", "--port", "8730"]
            rollout = [f'--set=rollout={{"model": "{a_model(Path(name) / "new", seed=1)}", "shares": [0.5]}}']
        with (
            started(8730, *beside, root=root) as route,
            started(8731, *serve, "--log", f"{name}/log", "--port", "8731", *rollout) as decide,
        ):
            for port, _ in (route, decide):
                asyncio.run(load(port, body, options.clients, 1.0))
            repeats = [
                measured((route, decide), body, options.clients, options.seconds) for _ in range(options.repeats)
            ]
            rates = [rows_per_second(decide[0], row, options.clients, options.seconds) for _ in range(options.repeats)]
    print(f"load {os.getloadavg()[0]:.0f}; medians, and ratios with their range")
    for number, unit in enumerate(
        ("requests/s", "ms, median", "ms, 99th percentile", "us of processor time a request")
    ):
        route_of, decide_of = ([repeat[side][number] for repeat in repeats] for side in (0, 1))
        other = "without rollout" if options.rollout else "before" if options.before else "empty route"
        print(f"{other} {statistics.median(route_of):,.1f}, /decide {statistics.median(decide_of):,.1f} {unit}: "
              f"{spread(decide_of, route_of)}")  # fmt: skip
    single, large = ([rate[count] for rate in rates] for count in (1, 1000))
    print(f"rows/s: one in a request {statistics.median(single):,.0f}, 1,000 {statistics.median(large):,.0f}: "
          f"{spread(large, single)}")  # fmt: skip
