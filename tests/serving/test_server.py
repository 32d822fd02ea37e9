"""The command: its processes, kill -9, full disks, new models under load, one server a folder, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from oracles.bundles import linear_bundle
from oracles.disks import small_disk
from oracles.runs import ROOT
from oracles.waiting import wait_until
from serving.conftest import IDS, NAMES

from reagent_lite.files import appearing_folder

ROW = {"state_features": {"3": 1.0}}


class Server:
    """A running `workflows.serve`, from when it answers or has ended."""

    def __init__(self, model: Path, log: Path, *settings: str, output: Path) -> None:
        command = [sys.executable, "-m", "workflows.serve", "--model", str(model), "--log", str(log), "--port", "0"]
        command += [f"--set={setting}" for setting in ("poll_seconds=0.2", *settings)]
        self._files = [output / f"{log.name}-{os.urandom(4).hex()}.{name}" for name in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)
        while self.process.poll() is None:
            time.sleep(0.05)
            if address := re.search(r"at (http://\S+), log", self.errors):
                self.url = address[1]
                break

    @property
    def errors(self) -> str:
        return self._files[1].read_text()

    def stop(self) -> dict[str, Any]:
        """SIGTERM; returns the last line of standard output."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.errors
        result: dict[str, Any] = json.loads(self._files[0].read_text())
        return result

    def post(self, path: str, body: object) -> httpx.Response:
        """A connection of its own, which any worker takes."""
        return httpx.post(self.url + path, json=body, timeout=30)

    def reward(self, decision: str, value: float = 1.0) -> int:
        """Returns the status of the answer."""
        return self.post("/reward", {"decision_id": decision, "reward": value}).status_code

    def decide(self) -> str:
        decision: str = self.post("/decide", {"rows": [ROW]}).json()["decisions"][0]["decision_id"]
        return decision

    def wait_for(self, health: int) -> None:
        """Returns when /healthz answers with a status."""
        wait_until(lambda: httpx.get(self.url + "/healthz", timeout=60).status_code == health)

    def kill(self) -> None:
        """kill -9 of all processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for process in (self.process, *children):
            with suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(children, timeout=30)
        self.process.wait(30)


@contextmanager
def serving(model: Path, log: Path, *settings: str, output: Path | None = None) -> Iterator[Server]:
    server = Server(model, log, *settings, output=output or log.parent)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


def ids_of(log: Path) -> list[str]:
    return [
        decision
        for file in sorted(log.glob("*.parquet"))
        for decision in pq.read_table(file)["decision_id"].to_pylist()
    ]


def test_what_was_answered_is_in_the_log_after_a_kill(named: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(named, log, "workers=2") as server:
        ids = [server.decide() for _ in range(20)]
        rewards = [server.reward(decision) for decision in ids[:10]]
        assert rewards == [204] * 10  # by connections of their own, which the other worker takes as well
        assert "reagent_decisions_total" in httpx.get(server.url + "/metrics").text
        server.kill()
    with serving(named, log, "workers=1", "rotate_seconds=0.3") as server:
        assert server.reward(ids[10], 2.0) == 204
        assert [server.reward(decision) for decision in ids[11:]] == [204] * 9
        assert server.stop()["restarts"] == 0
    assert sorted(ids_of(log)) == sorted(ids)


def test_a_worker_that_is_killed_is_started_again_with_its_journal(named: Path, tmp_path: Path) -> None:
    with serving(named, tmp_path / "log") as server:
        decision = server.decide()
        (worker,) = [
            child for child in psutil.Process(server.process.pid).children() if "spawn_main" in "".join(child.cmdline())
        ]
        worker.kill()
        assert server.reward(decision) == 204
        assert server.stop()["restarts"] == 1
    assert ids_of(tmp_path / "log") == [decision]


def test_a_server_that_is_stopped_while_its_workers_start_ends(named: Path, tmp_path: Path) -> None:
    for seconds in (0.0, 1.0):
        with serving(named, tmp_path / f"log{seconds}", "workers=2") as server:
            time.sleep(seconds)
            assert server.stop()["restarts"] == 0


def test_two_servers_on_one_folder_and_a_damaged_model_are_refused(named: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(named, log, "workers=2") as server:
        with serving(named, log) as second:
            assert second.process.wait(60) == 5
            assert f"pid {server.process.pid}, since" in second.errors
        server.decide()
        workers = psutil.Process(server.process.pid).children()
        server.process.kill()
        assert psutil.wait_procs(workers, timeout=60)[1] == []  # they end with their server
    (named / "model.onnx").write_bytes(b"")
    with serving(named, tmp_path / "other") as server:
        assert server.process.wait(60) == 2
        assert "model.onnx" in server.errors


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size="1m", files=50) as folder:
        yield folder


@pytest.mark.slow  # test_decision_log.py has full disks without a process
def test_a_full_disk_is_answered_with_503_and_nothing_is_half_written(disk: Path, named: Path) -> None:
    log, filler = disk / "log", disk / "filler"
    # its output is on the disk that does not fill up
    with serving(named, log, "rotate_seconds=0.5", output=named.parent) as server:
        ids = [server.decide() for _ in range(20)]
        with filler.open("wb", buffering=0) as stream, suppress(OSError):
            while stream.write(b"x" * 512):
                pass
        first = [server.reward(decision) for decision in ids]
        answer = server.post("/decide", {"rows": [ROW | {"mdp_id": "n" * 200}] * 50})
        assert answer.status_code == 503
        assert answer.json()["problems"][0]["got"] == "No space left on device"
        server.wait_for(503)
        assert list(log.glob("*.parquet")) == []
        wait_until(lambda: not list(log.glob("*.tmp")))  # there is one while a poll tries
        filler.unlink()
        again = [server.reward(decision) for decision in ids]
        assert set(zip(first, again, strict=True)) <= {(204, 409), (503, 204)}
        server.wait_for(200)
        server.stop()
    assert ids_of(log) == ids


def test_new_models_take_over_without_a_dropped_request(named: Path, tmp_path: Path) -> None:
    answers: list[tuple[int, str]] = []
    ended = threading.Event()
    models = [linear_bundle(tmp_path / f"{n}", np.full((3, 2), float(n)), NAMES, IDS) for n in range(3)]

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as connection:
            while not ended.wait(0.005):
                answer = connection.post("/decide", json={"rows": [ROW]})
                answers.append((answer.status_code, answer.json().get("model", "")))

    settings = ("workers=2", "reward_seconds=0.001")  # so that all are written at the end
    with serving(named, tmp_path / "log", *settings) as server, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        try:
            wait_until(lambda: len(set(answers)) == 1)
            for number, model in enumerate(models):
                with appearing_folder(named, served=True) as folder:
                    shutil.copytree(model, folder, dirs_exist_ok=True)
                wait_until(lambda wanted=number + 2: len(set(answers)) == wanted)  # type: ignore[misc]
        finally:
            ended.set()
        for posting in clients:
            posting.result()
        server.stop()
    assert {status for status, _ in answers} == {200}
    assert len(set(answers)) == 4
    assert len(ids_of(tmp_path / "log")) == len(answers)
