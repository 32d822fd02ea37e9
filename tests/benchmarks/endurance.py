"""Does a server last? An hour at a modest rate, or rounds of kill -9 and of new models under load.

    python -m tests.benchmarks.endurance [--minutes 60] [--rate 30]
    python -m tests.benchmarks.endurance --rounds 21

Two workers. Clients decide, send every other reward, now and then a hundred rows, a wrong body, or half a request on a
connection of its own. A line a minute, or a round: resident memory and open files of each process, sizes of the
database and its write-ahead log, lines of the server's messages. Rounds take turns: kill -9 of the server, of a worker,
and a new model. In the end the log is compared with what the clients were answered.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.serving.decision_log import open_log
from tests.benchmarks.turns import ROOT, options_of

sys.path.insert(0, str(ROOT / "tests"))
from helpers.bundles import linear_bundle  # of the tests, whose folder is their root

CLIENTS = 4
NAMES = ("mail", "call", "wait")
ROW = {"state_features": {"3": 1.0, "4": 0.5}}
OF_HOUR = ("reward_seconds=120", "rotate_seconds=60", "request_seconds=3")
OF_ROUNDS = ("reward_seconds=4", "rotate_seconds=0.5", "poll_seconds=0.2")


class Clients:
    """Threads that load a port, and what they were answered."""

    def __init__(self, port: int, rate: float) -> None:
        self._port = port
        self._pause = CLIENTS / rate
        self._ended = threading.Event()
        self.actions: dict[str, str] = {}  # by decision
        self.rewards: dict[str, float] = {}  # that were answered with 204
        self.unsure: set[str] = set()  # decisions whose reward was not answered
        self.statuses: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._load, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _load(self, seed: int) -> None:
        rng = random.Random(seed)
        connection = HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._ended.wait(self._pause * rng.uniform(0.5, 1.5)):
            try:
                self._act(connection, rng)
            except (OSError, HTTPException) as error:
                self.statuses[type(error).__name__] += 1
                connection.close()

    def _act(self, connection: HTTPConnection, rng: random.Random) -> None:
        kind = rng.random()
        if kind < 0.01:
            with socket.create_connection(("127.0.0.1", self._port)) as half:
                half.send(
                    b"POST /decide HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"[: rng.randrange(90)]
                )
        elif kind < 0.02:
            self._post(connection, "/decide", '{"rows": [{"age"')
        if kind > 0.98:
            connection.close()
        answer = self._post(connection, "/decide", json.dumps({"rows": [ROW] * (100 if kind > 0.99 else 1)}))
        decisions = answer["decisions"] if answer else []
        self.actions.update({decision["decision_id"]: decision["action"] for decision in decisions})
        for decision in decisions[:1]:
            if rng.random() < 0.5:
                name = decision["decision_id"]
                value = rng.choice((1.0, 2.0, 3.0))
                self.unsure.add(name)
                if self._post(connection, "/reward", json.dumps({"decision_id": name, "reward": value})) is not None:
                    self.rewards[name] = value
                self.unsure.remove(name)

    def _post(self, connection: HTTPConnection, path: str, body: str) -> dict[str, Any] | None:
        """Returns the answer, {} if it is empty; None if the request was refused."""
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        reason = json.loads(content)["problems"][0]["got"][:60] if answer.status == 503 else ""
        self.statuses[f"{path} {answer.status} {reason}".strip()] += 1
        return (json.loads(content) if content else {}) if answer.status in (200, 204) else None


class Server:
    """The server as a process."""

    def __init__(self, model: Path, log: Path, port: int, settings: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "workflows.serve", "--model", str(model), "--log", str(log)]
        command += [f"--set={setting}" for setting in (f"port={port}", "workers=2", *settings)]
        self.messages = log.with_suffix(".messages")
        self._log = log
        before = self.lines()
        with self.messages.open("a") as errors:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            self.process = psutil.Popen(command, cwd=ROOT, env=environment, stderr=errors, stdout=subprocess.DEVNULL)
        while not (ports := re.findall(r"at http://\S+:(\d+), log", "\n".join(lines_after(self.messages, before)))):
            assert self.process.poll() is None, self.messages.read_text()
            time.sleep(0.1)
        self.port = int(ports[-1])

    def lines(self) -> int:
        return len(self.messages.read_text().splitlines()) if self.messages.exists() else 0

    def workers(self) -> list[psutil.Process]:
        return [child for child in self.process.children() if "spawn_main" in " ".join(child.cmdline())]

    def state(self) -> str:
        """Returns the memory, files and sizes of this moment."""
        processes = [self.process, *self.process.children(recursive=True)]
        memory = " ".join(f"{process.memory_info().rss / 1e6:.1f}" for process in processes)
        files = " ".join(str(process.num_fds()) for process in processes)
        sizes = {file.name: file.stat().st_size for file in (self._log / ".decisions").iterdir()}
        kilobytes = {name: sizes.get(f"decisions.sqlite{name}", 0) // 1000 for name in ("", "-wal")}
        return (
            f"MB {memory} | files {files} | database kB {kilobytes['']} + {kilobytes['-wal']} "
            f"| Parquet files {len(list(self._log.glob('*.parquet')))} | messages {self.lines()}"
        )


def lines_after(messages: Path, before: int) -> list[str]:
    """Returns the lines of messages after those of earlier servers."""
    return messages.read_text().splitlines()[before:]


def disturb(number: int, server: Server, model: Path, log: Path) -> Server:
    """Kills the server, kills a worker, or replaces the model; returns the server that runs."""
    if number % 3 == 0:
        server.process.kill()
        server.process.wait()
        return Server(model, log, server.port, OF_ROUNDS)
    if number % 3 == 1:
        random.choice(server.workers()).kill()
    else:
        linear_bundle(model, np.full((3, 2), float(number)), NAMES, (3, 4))
    return server


def compare(log: Path, clients: Clients) -> str:
    """Returns how the whole log differs from what the clients were answered."""
    config = ServeConfig(model="m", log=str(log), reward_seconds=1e-6)
    with open_log(config, choices="named actions") as flushed:
        flushed.rotate()
    rows = [row for file in log.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    logged = {row["decision_id"]: row for row in rows}
    wrong_actions = sum(logged[name]["action"] != action for name, action in clients.actions.items() if name in logged)
    expected = {name: clients.rewards.get(name, 0.0) for name in clients.actions}
    wrong_rewards = sum(
        logged[name]["reward"] != value
        for name, value in expected.items()
        if name in logged and name not in clients.unsure
    )
    return (
        f"decisions answered {len(clients.actions)}, lost {len(clients.actions.keys() - logged.keys())}, "
        f"doubled {len(rows) - len(logged)}, logged without an answer {len(logged.keys() - clients.actions.keys())}; "
        f"actions wrong {wrong_actions}; rewards answered {len(clients.rewards)}, "
        f"not answered {len(clients.unsure)}, wrong {wrong_rewards}"
    )


def main() -> None:
    options = options_of(__doc__, minutes=60.0, rate=30.0, rounds=0)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        model = linear_bundle(Path(name) / "model", np.array([[1.0, 0], [0, 1], [0, 0]]), NAMES, (3, 4))
        server = Server(model, log, 0, OF_ROUNDS if options.rounds else OF_HOUR)
        clients = Clients(server.port, options.rate)
        begun = time.monotonic()
        for number in range(options.rounds or int(options.minutes)):
            if options.rounds:
                decided = len(clients.actions)
                while len(clients.actions) < decided + 50:
                    time.sleep(0.1)
                time.sleep(random.random())
                server = disturb(number, server, model, log)
            else:
                time.sleep(60)
            print(f"{number} {time.monotonic() - begun:.0f} s, {len(clients.actions)} | {server.state()}", flush=True)
        clients.stop()
        server.process.send_signal(signal.SIGTERM)
        print(f"exit code {server.process.wait(60)}; {dict(clients.statuses)}")
        print(compare(log, clients))
        print("messages:", Counter(re.sub(r"\S*\d\S*", "_", line) for line in server.messages.read_text().splitlines()))


if __name__ == "__main__":
    main()
