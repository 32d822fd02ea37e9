"""The command: its processes, kill -9, full disks, new models under load, one server a folder, and how it ends."""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import httpx
import numpy as np
import psutil
import pytest
from helpers.bundles import linear_bundle
from helpers.clocks import MovedClock
from helpers.interpreters import Interpreter
from helpers.runs import ROOT
from helpers.waiting import wait_until
from serving.conftest import IDS, NAMES, flush, rows_of

from reagent_lite.data.served_log import waiting_in

ROW = {"state_features": {"3": 1.0}}


class Server:
    """A running `workflows.serve`, from when it answers or has ended; its clock is this machine's, or a moved one."""

    def __init__(self, model: Path, log: Path, *settings: str, clock: MovedClock | None = None) -> None:
        command = ["-m", "workflows.serve", "--model", str(model), "--log", str(log),
                   *(f"--set={setting}" for setting in ("port=0", "poll_seconds=0.2", *settings))]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if clock is not None:
            command = ["-c", "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *command]
            environment |= clock.environment
        self.process = Interpreter(command, cwd=ROOT, env=environment)
        wait_until(lambda: " at http" in self.process.said or self.process.poll() is not None, seconds=300)
        self.url = "".join(re.findall(r"at (https?://\S+), log", self.process.said))

    def stop(self) -> int:
        """SIGTERM; returns the number of restarts."""
        self.process.send_signal(signal.SIGTERM)
        outcome, errors = self.process.communicate(60)
        assert self.process.returncode == 0, errors
        return int(json.loads(outcome)["restarts"])

    def post(self, path: str, body: object) -> httpx.Response:
        """A connection of its own, which any worker takes."""
        return httpx.post(self.url + path, json=body, timeout=30)

    def reward(self, decision: str, value: float = 1.0) -> int:
        """Returns the status of the answer."""
        return self.post("/reward", {"decision_id": decision, "reward": value}).status_code

    def decide(self) -> str:
        return str(self.post("/decide", {"rows": [ROW]}).json()["decisions"][0]["decision_id"])

    def close(self) -> None:
        """kill -9 of all processes."""
        self.process.close()


def ids_of(log: Path) -> list[str]:
    """Returns the ids of all decisions of a log."""
    flush(log)
    return [row["decision_id"] for row in rows_of(log)]


def test_what_was_answered_is_in_the_log_after_a_kill(named: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closing(Server(named, log, "workers=2")) as server:
        ids = [server.decide() for _ in range(20)]
        with pytest.raises(HTTPError, match="413"):  # and no broken pipe
            urlopen(f"{server.url}/decide", b" " * 20_000_000)
        # by connections of their own, which the other worker takes as well
        assert [server.reward(decision) for decision in ids[:10]] == [204] * 10
        assert "reagent_decisions_total" in httpx.get(server.url + "/metrics").text
        server.close()
    with closing(Server(named, log, "workers=1", "rotate_seconds=0.3")) as server:
        assert [server.reward(decision) for decision in ids[10:]] == [204] * 10
        assert server.stop() == 0
        assert "20 decisions wait for rewards" in server.process.said
    assert (str(waiting_in(str(log)))[:25], rows_of(log)) == ("20 decisions wait for rew", [])
    assert sorted(ids_of(log)) == sorted(ids)
    assert [row["reward"] for row in rows_of(log)] == [1.0] * 20


def test_a_connection_stays_open_between_requests(named: Path, tmp_path: Path) -> None:
    with (
        closing(Server(named, tmp_path / "log")) as server,
        closing(HTTPConnection(server.url.removeprefix("http://"), timeout=30)) as connection,
    ):
        for seconds in (0, 6):
            time.sleep(seconds)
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()


def test_a_worker_that_is_killed_is_started_again_with_its_journal(named: Path, tmp_path: Path) -> None:
    with closing(Server(named, tmp_path / "log")) as server:
        decision = server.decide()
        (worker,) = (child for child in server.process.children() if "spawn_main" in "".join(child.cmdline()))
        worker.kill()
        assert (server.reward(decision), server.stop()) == (204, 1)
    assert ids_of(tmp_path / "log") == [decision]


def test_a_worker_that_is_killed_before_it_is_ready_is_started_again(named: Path, tmp_path: Path) -> None:
    with closing(Server(named, tmp_path / "log")) as server:
        wait_until(lambda: bool(workers(server)))
        workers(server)[0].kill()
        assert server.decide()
        assert server.stop() == 1


def workers(server: Server) -> list[psutil.Process]:
    return [child for child in server.process.children() if "spawn_main" in "".join(child.cmdline())]


def test_a_server_that_is_started_at_once_after_kill_waits_for_the_port(named: Path, tmp_path: Path) -> None:
    """Its worker ends with it, but here only after seconds, as one that is swapped out or writes to a slow disk."""
    with closing(Server(named, tmp_path / "log")) as server, ThreadPoolExecutor(1) as pool:
        ids = [server.decide()]
        (worker,) = workers(server)
        worker.suspend()
        server.process.kill()
        port = server.url.rpartition(":")[2]
        starting = pool.submit(Server, named, tmp_path / "log", f"port={port}")
        time.sleep(4)
        worker.resume()
        with closing(starting.result()) as second:
            assert (second.url, "is in use; waiting 15 s" in second.process.said) == (server.url, True)
            ids.append(second.decide())
            assert [second.reward(decision) for decision in ids] == [204, 204]
            second.stop()
        assert psutil.wait_procs([worker], timeout=60)[1] == []
    assert ids_of(tmp_path / "log") == ids


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_server_that_is_stopped_while_its_workers_start_ends(named: Path, tmp_path: Path, seconds: float) -> None:
    with closing(Server(named, tmp_path / "log", "workers=2")) as server:
        time.sleep(seconds)
        assert server.stop() == 0


def test_a_second_server_is_refused_and_workers_end_with_their_server(named: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closing(Server(named, log)) as server:
        with closing(Server(named, log)) as second:
            assert second.process.wait(60) == 5
            assert f"pid {server.process.pid}, since" in second.process.said
        server.decide()
        workers = server.process.children()
        server.process.kill()
        assert psutil.wait_procs(workers, timeout=60)[1] == []  # they end with their server


def test_new_models_take_over_without_a_dropped_request(named: Path, tmp_path: Path) -> None:
    answers: list[tuple[int, str]] = []
    ended = threading.Event()

    def client() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as connection:
            while not ended.wait(0.005):
                answer = connection.post("/decide", json={"rows": [ROW]})
                answers.append((answer.status_code, answer.json().get("model", "")))

    with (
        closing(Server(named, tmp_path / "log", "workers=2")) as server,
        ThreadPoolExecutor(4) as pool,
        ExitStack() as ending,
    ):
        ending.callback(ended.set)
        clients = [pool.submit(client) for _ in range(4)]
        wait_until(lambda: len(set(answers)) == 1)
        for number in range(3):
            linear_bundle(named, np.full((3, 2), float(number)), NAMES, IDS)
            wait_until(lambda wanted=number + 2: len(set(answers)) == wanted)  # type: ignore[misc]
        ended.set()
        assert [posting.result() for posting in clients] == [None] * 4
        server.stop()
    assert ({status for status, _ in answers}, len(set(answers))) == ({200}, 4)
    assert len(ids_of(tmp_path / "log")) == len(answers)
