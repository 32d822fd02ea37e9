"""Requests per second and their slowest percent: /decide against an empty route of the same framework.

    python -m tests.benchmarks.serving [--seconds 4] [--clients 8] [--repeats 3] [--model BUNDLE]

One worker each, the same body, and the same clients in one process, which keep their connections. The empty route
checks the same body and answers as many bytes. The two take turns; medians are printed. Without a model: CartPole,
64-64 hidden units.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMPTY = """
import uvicorn
from fastapi import FastAPI
from reagent_lite.serving.bodies import Decision, Decisions, NamedRows
app = FastAPI()
@app.post("/decide")
async def decide(body: NamedRows) -> Decisions:
    one = Decision(decision_id="0-20261123T000000000000-1", action="left", index=0, propensity=0.5)
    return Decisions(decisions=[one], model="0" * 64)
uvicorn.run(app, port={port}, log_config=None, access_log=False)
"""


async def client(port: int, body: bytes, until: float, seconds: list[float]) -> None:
    """Sends requests one after another over one connection and appends how long each took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /decide HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    while time.perf_counter() < until:
        begun = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = re.search(rb"content-length: (\d+)", answer)
        assert length is not None
        await reader.readexactly(int(length[1]))
        seconds.append(time.perf_counter() - begun)
    writer.close()


def load(port: int, body: bytes, clients: int, seconds: float) -> tuple[float, float, float]:
    """Returns requests per second, median and 99th percentile in ms."""

    async def all_clients() -> list[float]:
        found: list[float] = []
        until = time.perf_counter() + seconds
        await asyncio.gather(*(client(port, body, until, found) for _ in range(clients)))
        return sorted(found)

    found = asyncio.run(all_clients())
    return len(found) / seconds, 1e3 * found[len(found) // 2], 1e3 * found[int(len(found) * 0.99)]


@contextmanager
def started(command: list[str], port: int) -> Iterator[None]:
    """A server that answers on the port."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        while True:
            time.sleep(0.2)
            assert process.poll() is None
            try:
                asyncio.run(_connect(port))
                break
            except OSError:
                continue
        yield
    finally:
        process.terminate()
        process.wait()


async def _connect(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


def a_model(folder: Path) -> Path:
    """Trains a model for a moment in simulation."""
    tree = {"model_output_path": str(folder), "use_gpu": False,
            "training": {"layers": [-1, 64, 64, -1], "activations": ["relu", "relu", "linear"]},
            "simulation": {"env": "cartpole_v1", "num_envs": 8, "total_steps": 2000, "warmup_steps": 500,
                           "evaluation_episodes": 2}}  # fmt: skip
    config = folder / "config.json"
    folder.mkdir()
    config.write_text(json.dumps(tree))
    subprocess.run([sys.executable, "-m", "workflows.dqn", "--config", str(config)], check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return folder / "model"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    rows = [{"state_features": {str(one): 0.1 * one for one in range(4)}, "mdp_id": "7", "sequence_number": 3}]
    body = json.dumps({"rows": rows}).encode()
    with tempfile.TemporaryDirectory() as name:
        model = options.model or a_model(Path(name) / "trained")
        log = ["--log", f"{name}/log", "--port", "8731"]
        commands = {"empty route": (["-c", EMPTY.format(port=8730)], 8730),
                    "/decide": (["-m", "workflows.serve", "--model", str(model), *log], 8731)}  # fmt: skip
        found: dict[str, list[tuple[float, float, float]]] = {one: [] for one in commands}
        for _ in range(options.repeats):
            for one, (command, port) in commands.items():
                with started(command, port):
                    load(port, body, options.clients, 1.0)
                    found[one].append(load(port, body, options.clients, options.seconds))
        medians = {
            one: [statistics.median(column) for column in zip(*runs, strict=True)] for one, runs in found.items()
        }
        for one, (rate, middle, slow) in medians.items():
            print(f"{one}: {rate:,.0f} requests/s, median {middle:.2f} ms, 99th percentile {slow:.2f} ms")
        empty, decide = medians["empty route"], medians["/decide"]
        print(
            f"ratio: {decide[0] / empty[0]:.2f} of the requests, {decide[2] / empty[2]:.2f} times the 99th percentile"
        )


if __name__ == "__main__":
    main()
