"""The command: its processes, kill -9, rewards from worker to worker, one server a folder, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
from oracles.runs import ROOT

ROW = {"state_features": {"3": 1.0}}


class Server:
    """A running `workflows.serve`, from when it answers or has ended."""

    def __init__(self, model: Path, log: Path, *settings: str) -> None:
        command = [sys.executable, "-m", "workflows.serve", "--model", str(model), "--log", str(log), "--port", "0"]
        command += [f"--set={one}" for one in ("poll_seconds=0.2", *settings)]
        self._files = [log.with_name(f"{log.name}-{os.urandom(4).hex()}.{name}") for name in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)
        while self.process.poll() is None:
            time.sleep(0.05)
            if found := re.search(r"at (http://\S+), log", self.errors):
                self.url = found[1]
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

    def decide(self) -> str:
        one: str = self.post("/decide", {"rows": [ROW]}).json()["decisions"][0]["decision_id"]
        return one

    def kill(self) -> None:
        """kill -9 of all processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for one in (self.process, *children):
            with suppress(psutil.NoSuchProcess):
                os.kill(one.pid, signal.SIGKILL)
        psutil.wait_procs(children, timeout=30)
        self.process.wait(30)


@contextmanager
def serving(model: Path, log: Path, *settings: str) -> Iterator[Server]:
    server = Server(model, log, *settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


def ids_of(log: Path) -> list[str]:
    return [one for file in sorted(log.glob("*.parquet")) for one in pq.read_table(file)["decision_id"].to_pylist()]


def test_what_was_answered_is_in_the_log_after_a_kill(named: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(named, log, "workers=2") as server:
        ids = [server.decide() for _ in range(20)]
        assert {one[0] for one in ids} <= {"0", "1"}
        rewards = [server.post("/reward", {"decision_id": one, "reward": 1.0}).status_code for one in ids[:10]]
        assert rewards == [204] * 10  # by connections of their own, which the other worker takes as well
        assert "reagent_decisions_total" in httpx.get(server.url + "/metrics").text
        server.kill()
    with serving(named, log, "workers=1", "rotate_seconds=0.3") as server:
        assert server.post("/reward", {"decision_id": ids[10], "reward": 2.0}).status_code == 204
        assert [server.post("/reward", {"decision_id": one, "reward": 1.0}).status_code for one in ids[11:]] == [
            204
        ] * 9
        assert server.stop()["restarts"] == 0
    assert sorted(ids_of(log)) == sorted(ids)


def test_a_worker_that_is_killed_is_started_again_with_its_journal(named: Path, tmp_path: Path) -> None:
    with serving(named, tmp_path / "log") as server:
        one = server.decide()
        (worker,) = [
            child for child in psutil.Process(server.process.pid).children() if "spawn_main" in "".join(child.cmdline())
        ]
        worker.kill()
        assert server.post("/reward", {"decision_id": one, "reward": 1.0}).status_code == 204
        assert server.stop()["restarts"] == 1
    assert ids_of(tmp_path / "log") == [one]


def test_two_servers_on_one_folder_and_a_damaged_model_are_refused(named: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(named, log) as server:
        with serving(named, log) as second:
            assert second.process.wait(60) == 5
            assert f"pid {server.process.pid}, since" in second.errors
        server.decide()
    (named / "model.onnx").write_bytes(b"")
    with serving(named, tmp_path / "other") as server:
        assert server.process.wait(60) == 2
        assert "model.onnx" in server.errors


@pytest.mark.parametrize(("settings", "words"), [(["rotate_mb=0.0"], "rotate_mb"), (["workers=0"], "workers")])
def test_wrong_settings_end_with_code_2(named: Path, tmp_path: Path, settings: list[str], words: str) -> None:
    with serving(named, tmp_path / "log", *settings) as server:
        assert server.process.wait(60) == 2
        assert words in server.errors
