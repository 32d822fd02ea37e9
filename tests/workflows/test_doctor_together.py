"""Doctors of several machines: their steps in two threads, whole runs as two processes on loopback."""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.doctors import LOOPBACK, RECORD, Rows, by_name, failures, store
from helpers.interpreters import Interpreter
from helpers.runs import ROOT, end, with_config

from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.distributed import connections
from reagent_lite.distributed.declarations import Declaration
from reagent_lite.distributed.key_value_store import Link, connect
from reagent_lite.distributed.meeting_file import Record
from reagent_lite.distributed.membership import Membership
from reagent_lite.distributed.network import Address
from reagent_lite.doctor.checks import CheckResult
from reagent_lite.doctor.machines import _clocks, reach_others, watch_share
from reagent_lite.mounts import find_mount


def together(work: Callable[[Membership], list[CheckResult]]) -> list[list[CheckResult]]:
    """Runs the work of two machines in two threads that share a store, and returns the rows of each."""
    with store() as server, ThreadPoolExecutor(2) as threads:

        def run(node: int) -> list[CheckResult]:
            link = Link(lambda: connect("127.0.0.1", server.port, "", 15.0))
            record = Record(**RECORD)  # type: ignore[arg-type]
            both = tuple(Declaration(node=i, host="h", pid=1, processes=1, device="cpu") for i in (0, 1))
            rows = work(Membership(link, record, node, both, RendezvousConfig()))
            link.close()
            return rows

        return [*threads.map(run, (0, 1), timeout=30)]


@pytest.mark.parametrize(
    ("folder", "state", "count", "words"),
    [("b", "FAILED", 4, "node 1 does not see the file"), ("/proc/self", "warning", 2, "node 1 cannot write in")],
)
def test_folders_that_are_not_one_share(tmp_path: Path, folder: str, state: str, count: int, words: str) -> None:
    folders = [tmp_path / "a", tmp_path / folder]
    for path in folders:
        path.mkdir(exist_ok=True)
    for rows in together(lambda member: watch_share(member, 1.0, folders[member.node])):
        assert [row.state for row in rows].count(state) == count  # for new files, and for replaced ones
        assert any(words in row.found for row in rows if row.state == state)
    assert [*folders[0].iterdir(), *tmp_path.glob("b/*")] == []


def test_a_slow_network_does_not_count_as_a_wrong_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(member: Membership, *arguments: Any) -> Any:
            time.sleep(0.1 * member.node)
            try:
                return call(member, *arguments)
            finally:
                time.sleep(0.1 * member.node)

        return slow

    for name in ("give", "read_values"):
        monkeypatch.setattr(Membership, name, slowly(getattr(Membership, name)))
    for (row,) in together(lambda member: [_clocks(member, 10.0)]):
        match = re.fullmatch(r"at most (\S+) s from node 0's \(node 1, to within (\S+) s\)", row.found)
        assert match is not None, row.found
        assert float(match[1]) <= float(match[2]) + 0.01


def test_a_pair_that_is_cut_is_named_with_both_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    local = [Address("lo", "127.0.0.1"), Address("lo", "127.0.0.2")]
    monkeypatch.setattr(Membership, "worker_address", property(lambda member: local[member.node]))
    monkeypatch.setattr(
        connections, "connection_error", lambda address, *_: "" if address == local[0].address else "timed out"
    )
    monkeypatch.setattr("reagent_lite.doctor.machines._CONNECT_SECONDS", 0.1)
    for (row,) in together(lambda member: reach_others(member, 1.0)):
        assert row.state == "FAILED"
        assert re.fullmatch(r"node 0 \(127.0.0.1, lo\): .* node 1 \(127.0.0.2:\d+, lo\), got timed out", row.found)
        assert re.match(r"Open TCP ports \d+-\d+", row.todo)


Doctors = Callable[..., list[tuple[int, Rows]]]


@pytest.fixture
def doctors(tmp_path: Path, small: dict[str, Any]) -> Doctors:
    """doctors(arguments of node 0, of node 1): exit code and rows by name of each."""
    (tmp_path / "share").mkdir()
    tree = small | LOOPBACK | {"num_nodes": 2, "init_method": f"file://{tmp_path}/share/run.rdzv"}
    command = ["-m", "workflows.doctor", *with_config(tmp_path, tree), "--node_index"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(*arguments: list[str]) -> list[tuple[int, Rows]]:
        running = [
            Interpreter([*command, str(node), *given], env=environment, cwd=tmp_path)
            for node, given in enumerate(arguments)
        ]
        ended = [end(process, 60) for process in running]
        assert list((tmp_path / "share").iterdir()) == []
        return [(done.code, by_name(done.outcome)) for done in ended]

    return run


def test_two_machines_that_can_train_together(doctors: Doctors, tmp_path: Path) -> None:
    for code, rows in doctors([], []):
        assert code == 0, failures(rows)
        assert rows["machines meet"][0]["found"].startswith("all 2, at 127.0.0.1:")
        assert rows["machines reach each other"][0]["found"].startswith("2 connections")
        assert (rows["share: mount"][0]["state"] == "ok") == find_mount(tmp_path).is_network


def test_what_differs_between_machines_is_seen_by_all(doctors: Doctors) -> None:
    differing = ["--set", "rl.gamma=0.5", "--set", 'training_data_path="/no/such/data"']
    (first, rows), (second, others) = doctors([], differing)
    assert (first, failures(rows)) == (3, ["machines fit together", "the other machines"])
    assert (second, failures(others)) == (3, ["machines fit together", "training data"])
    keys = {row["found"].partition(":")[0] for row in rows["machines fit together"]}
    assert {"config key rl.gamma", "config key training_data_path"} <= keys
    assert rows["machines fit together"] == others["machines fit together"]


def test_machines_that_do_not_meet(doctors: Doctors, tmp_path: Path) -> None:
    """Node 1 runs, but looks at another folder: each doctor names the missing machine and shows all its own rows."""
    (tmp_path / "elsewhere").mkdir()
    elsewhere = ["--set", f"init_method=file://{tmp_path}/elsewhere/run.rdzv"]
    (first, rows), (second, others) = doctors(["--wait", "3"], ["--wait", "3", *elsewhere])
    assert (first, failures(rows)) == (second, failures(others)) == (3, ["machines meet"])
    assert "no sign of node 1" in rows["machines meet"][0]["found"]
    assert "expected node 0 within 3 s, got no file" in others["machines meet"][0]["found"]
    assert rows["training data"][0]["state"] == others["training data"][0]["state"] == "ok"
