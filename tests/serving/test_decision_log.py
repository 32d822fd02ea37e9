"""The log: rows by hand, the order of an episode, what a killed server leaves, full disks, new models, and training."""

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from oracles.bundles import bilinear_bundle, linear_bundle
from oracles.runs import trained
from serving.conftest import IDS, NAMES, Open, Worker

from reagent_lite.config.serve import ServeConfig
from reagent_lite.data.writing.decisions import write_decisions
from reagent_lite.errors import BundleError, ConfigError, ReagentLiteError
from reagent_lite.mounts import Mount
from reagent_lite.serving import decision_log
from reagent_lite.serving.decision_log import DecisionLog, open_log
from reagent_lite.serving.served_model import ServedModel

ROW = {"state_features": {"3": 1.0, "age": None}, "mdp_id": "7"}
EVENT = {"model": "m", "mdp_id": None, "sequence_number": None, "state_features": {"3": 1.0}, "action": "mail",
         "possible_actions": list(NAMES), "action_probability": 0.5}  # fmt: skip


def decided(worker: Worker, **keys: Any) -> str:
    decision: str = worker.post("/decide", rows=[ROW | keys])["decisions"][0]["decision_id"]
    return decision


def rotated(worker: Worker) -> list[dict[str, Any]]:
    """Writes what is complete and returns all rows of the log."""
    worker.log.rotate()
    return rows_of(worker.folder)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_rows_are_events_of_the_contract(named: Path, opened: Open) -> None:
    worker = opened(named)
    first = decided(worker, sequence_number=4, possible_actions=["call", "wait"])
    alone = worker.post("/decide", rows=[{"state_features": {"age": 2.5}}])["decisions"][0]
    worker.post("/reward", decision_id=first, reward=2.5, metrics={"clicks": 3}, terminal=True)
    worker.post("/reward", decision_id=alone["decision_id"], reward=-1.0)
    rows = rotated(worker)
    assert worker.log.waiting == 0
    today = time.strftime("%Y-%m-%d", time.gmtime())
    action, probability = rows[0].pop("action"), rows[0].pop("action_probability")
    assert action in ("call", "wait")
    assert probability == pytest.approx(0.5)  # both values are 0
    assert rows[0] == {
        "decision_id": first, "model": worker.model.version, "ds": today, "mdp_id": "7", "sequence_number": 4,
        "state_features": [("3", 1.0)], "reward": 2.5, "possible_actions": ["call", "wait"],
        "metrics": [("clicks", 3.0)], "terminal": True,
    }  # fmt: skip
    assert rows[1]["mdp_id"] == rows[1]["decision_id"] == alone["decision_id"]
    assert rows[1]["terminal"]
    assert abs(rows[1]["sequence_number"] / 1e6 - time.time()) < 100
    assert (rows[1]["action"], rows[1]["action_probability"]) == (alone["action"], alone["propensity"])
    assert (rows[1]["possible_actions"], rows[1]["metrics"]) == (list(NAMES), None)


def test_an_episode_is_written_in_order_and_late_rewards_are_refused(named: Path, opened: Open) -> None:
    worker = opened(named, reward_seconds=0.5)
    begin = time.monotonic()
    first, second = decided(worker, sequence_number=1), decided(worker, sequence_number=2)
    other = decided(worker, mdp_id="8", sequence_number=1)
    for decision in (second, other):
        worker.post("/reward", decision_id=decision, reward=1.0)
    rows = rotated(worker)
    if time.monotonic() - begin < 0.5:  # the machine was not asleep
        assert [row["decision_id"] for row in rows] == [other]
    time.sleep(0.5)
    assert {(row["decision_id"], row["reward"]) for row in rotated(worker)} == {(other, 1), (first, 0), (second, 1)}
    assert worker.client.post("/reward", json={"decision_id": first, "reward": 1.0}).status_code in (404, 409)


def test_the_oldest_do_not_wait_when_too_many_do(named: Path, opened: Open) -> None:
    worker = opened(named, waiting_decisions=2)
    ids = [decided(worker, mdp_id=f"{n}") for n in range(5)]
    worker.log.poll()
    assert [row["decision_id"] for row in rows_of(worker.folder)] == ids[:3]
    assert worker.client.post("/reward", json={"decision_id": ids[2], "reward": 1.0}).status_code == 409


def test_a_server_that_ends_at_any_step_of_a_file_writes_each_decision_once(
    named: Path, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = opened(named)
    rows = [ROW | {"mdp_id": f"{n}"} for n in range(2500)]
    ids = [decision["decision_id"] for decision in worker.post("/decide", rows=rows)["decisions"]]
    for decision in ids[:2200]:
        worker.log.join(decision, {"reward": 1.0})
    copies: list[Path] = []

    def copying(work: Callable[..., Any], *given: Any) -> Any:
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(worker.folder, copies[-1])
        return work(*given)

    batches = decision_log._batches
    monkeypatch.setattr(decision_log, "_FILE_ROWS", 1000)
    monkeypatch.setattr(decision_log, "write_decisions", partial(copying, write_decisions))
    monkeypatch.setattr(decision_log, "_batches", lambda rows: (copying(list, batch) for batch in batches(rows)))
    assert sorted(row["decision_id"] for row in rotated(worker)) == sorted(ids[:2200])
    monkeypatch.undo()
    # of three files: batches that are named for it, the file, batches that are deleted
    assert len(copies) == 2 * (2 + 1 + 2) + 1 + 1 + 1
    expected = dict.fromkeys(ids[:2200], 1.0) | {ids[2200]: 5.0} | dict.fromkeys(ids[2201:], 0.0)
    for copy in copies:
        with open_log(ServeConfig(model="m", log=str(copy), reward_seconds=1e-6), choices="named actions") as log:
            assert log.join(ids[2200], {"reward": 5.0}) == "joined"
            assert {log.join(decision, {"reward": 1.0}) for decision in ids[:2201]} == {"again"}
            log.rotate()
            assert (log.waiting, log.written) == (0, 2500)
        assert [(row["decision_id"], row["reward"]) for row in rows_of(copy)] == list(expected.items())


def test_a_file_that_cannot_be_written_is_tried_again(
    named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = opened(named)
    decision = decided(worker)
    worker.post("/reward", decision_id=decision, reward=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(decision_log, "write_decisions", full)
        assert rotated(worker) == []
        assert worker.client.get("/healthz").status_code == 503
        assert decided(worker) != decision  # the database takes it nevertheless
    worker.log.poll()
    assert [row["decision_id"] for row in rows_of(worker.folder)] == [decision]
    assert worker.client.get("/healthz").json()["waiting"] == 1


def test_what_was_answered_is_on_the_disk_after_a_poll_and_before_a_file_has_it(
    named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, sync, synced = opened(named), os.fsync, dict[str, int]()

    def syncing(descriptor: int) -> None:
        sync(descriptor)
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size

    def on_the_disk() -> bool:
        return synced["decisions.sqlite-wal"] == (worker.folder / ".decisions/decisions.sqlite-wal").stat().st_size

    def writing(target: Path, rows: Any) -> None:
        assert on_the_disk()
        write_decisions(target, rows)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(decision_log, "write_decisions", writing)
    first = decided(worker)
    worker.log.poll()
    assert on_the_disk()
    worker.post("/reward", decision_id=first, reward=1.0)
    assert not on_the_disk()
    assert len(rotated(worker)) == 1
    second = decided(worker)
    monkeypatch.setattr(decision_log, "_WAL_BYTES", 0)
    worker.log.poll()  # the write-ahead log begins again, when it is in the database
    assert (worker.folder / ".decisions/decisions.sqlite-wal").stat().st_size == 0
    assert [row["decision_id"] for row in worker.waiting_rows()] == [second]


def test_workers_number_an_episode_alike_where_they_are_started_again_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, clock = ServeConfig(model="m", log=str(tmp_path), reward_seconds=1e-6), time.time_ns

    def set_back(hours: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: clock() - hours * 3600 * 10**9)

    with open_log(config, choices="named actions") as first:
        set_back(1)
        with closing(DecisionLog(config, choices="named actions", epoch=first.epoch)) as second:  # of a later worker
            ids = [name for log in (first, second, first, second) for name in log.append([EVENT] * 100)]
    for hours in (2, 2, 1):  # the server again, with decisions in the database, and with all of them in files
        set_back(hours)
        with open_log(config, choices="named actions") as log:
            ids += log.append([EVENT, EVENT | {"sequence_number": 2**53, "state_features": {"at": 1e18}}])
            log.rotate()
    rows = sorted(rows_of(tmp_path), key=lambda row: int(row["decision_id"].rpartition("-")[2]))
    assert [row["decision_id"] for row in rows] == ids
    numbers = [row["sequence_number"] for row in rows if row["sequence_number"] != 2**53]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4 * 100 + 3
    assert abs(numbers[-1] - clock() / 1000) < 100e6
    assert "the system's clock is 7,2" in caplog.text


def test_a_full_disk_is_answered_with_503_until_the_next_poll(named: Path, opened: Open) -> None:
    worker = opened(named)
    first = decided(worker)
    pages = worker.log._db.execute("PRAGMA page_count").fetchone()[0]
    worker.log._db.execute(f"PRAGMA max_page_count = {pages}")
    answer = worker.client.post("/decide", json={"rows": [ROW] * 100})
    assert (answer.status_code, answer.json()["problems"][0]["got"]) == (503, "No space left on device")
    assert worker.client.get("/healthz").status_code == 503
    worker.log._db.execute("PRAGMA max_page_count = 1000000")
    worker.log.poll()
    assert worker.client.get("/healthz").status_code == 200
    assert [row["decision_id"] for row in worker.waiting_rows()] == [first]


def test_any_worker_takes_a_reward_once(tmp_path: Path) -> None:
    config = ServeConfig(model="m", log=str(tmp_path))
    with (
        open_log(config, choices="named actions") as log,
        closing(DecisionLog(config, choices="named actions", epoch=log.epoch)) as other,
    ):
        ids = [decision for each in (log, other, other, log) for decision in each.append([EVENT])]
        assert len(set(ids)) == 4
        assert [other.join(decision, {"reward": 1.0}) for decision in ids] == ["joined"] * 4
        for written in (0, 4):  # a client that repeats a reward hears the same once it is in a file
            assert (log.written, other.waiting) == (written, 4 - written)
            assert [log.join(decision, {"reward": 1.0}) for decision in ids] == ["again"] * 4
            log.rotate()
        name = ids[0].rpartition("-")[0]
        for unknown in (f"{name}-0", f"{name}-5", f"{name}-{10**30}", f"x{name}-1", f"{name}--1", "1", ""):
            assert other.join(unknown, {"reward": 1.0}) == "unknown"
    assert sorted(row["decision_id"] for row in rows_of(tmp_path)) == sorted(ids)


def test_folders_that_cannot_hold_the_log_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(config: ServeConfig) -> str:
        with pytest.raises(ReagentLiteError) as caught, open_log(config, choices="named actions"):
            pass
        return str(caught.value)

    log = tmp_path / "log"
    config = ServeConfig(model="m", log=str(log))
    share = Mount("server:/export", "/share", "nfs4", ("rw",))
    with monkeypatch.context() as patch:
        patch.setattr(
            decision_log, "find_mount", lambda path: None if path.is_relative_to(tmp_path / "disk") else share
        )
        assert f"{log}/.decisions on nfs4" in refusal(config)
        assert not log.exists()
        local = config.model_copy(update={"database": str(tmp_path / "disk")})
        with open_log(local, choices="named actions") as opened:
            opened.append([EVENT])
        assert [file.name for file in (tmp_path / "disk").iterdir()] == [".lock", "decisions.sqlite"]
    journal = log / ".worker-0" / "20261123T000000000000.jsonl"
    journal.parent.mkdir(parents=True)
    journal.touch()
    with open_log(config, choices="named actions"):
        pass
    journal.write_text('{"decision_id":"0-1"}\n')
    assert f"got {journal}" in refusal(config)
    journal.unlink()
    (log / ".decisions" / "decisions.sqlite").write_text("no database" * 100)
    assert "file is not a database" in refusal(config)


def test_a_new_model_takes_over_and_a_damaged_one_does_not(named: Path, opened: Open, tmp_path: Path) -> None:
    worker = opened(named)
    versions, actions = [worker.model.version], ("call",) * 3

    def answered() -> tuple[str, tuple[str, ...]]:
        answer = worker.post("/decide", rows=[{"state_features": {"3": 1000.0}}] * 3)
        return answer["model"], tuple(decision["action"] for decision in answer["decisions"])

    assert answered() == (versions[0], ("mail",) * 3)
    linear_bundle(named, np.array([[0.0, 0], [1, 0], [0, 0]]), NAMES, IDS)
    asyncio.run(worker.model.poll())
    versions.append(worker.model.version)
    assert versions[0] != versions[1]
    assert answered() == (versions[1], actions)
    linear_bundle(named, np.array([[0.0, 0], [0, 0], [1, 0]]), NAMES, IDS)
    damaged = bytearray((named / "model.onnx").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (named / "model.onnx").write_bytes(damaged)
    asyncio.run(worker.model.poll())
    assert answered() == (versions[1], actions)
    bilinear_bundle(named, np.eye(2), IDS, (7, 8))
    asyncio.run(worker.model.poll())
    assert answered() == (versions[1], actions)
    assert (worker.model.swapped, worker.model.refused) == (1, 2)


def test_a_model_that_is_copied_file_by_file_takes_over_when_it_is_whole(
    named: Path, opened: Open, tmp_path: Path
) -> None:
    worker = opened(named)
    before = worker.model.version
    new = linear_bundle(tmp_path / "new", np.array([[2.0, 0], [0, 1], [0, 0]]), NAMES, IDS)
    for file in sorted(new.iterdir(), key=lambda path: path.name != "manifest.json"):
        shutil.copy(file, named)
        asyncio.run(worker.model.poll())
    assert (worker.model.version != before, worker.model.swapped) == (True, 1)
    assert worker.model.refused >= 1


def test_a_server_that_starts_while_its_model_is_copied_waits_until_it_is_whole(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = linear_bundle(tmp_path / "new", np.array([[2.0, 0], [0, 1], [0, 0]]), NAMES, IDS)
    left = sorted(new.iterdir())
    shutil.copy(left.pop(), named)
    monkeypatch.setattr(time, "sleep", lambda _: left and shutil.copy(left.pop(), named))
    assert ServedModel(str(named)).version == ServedModel(str(new)).version
    left.clear()  # nobody copies any more
    (named / "model.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"model\.onnx"):
        ServedModel(str(named))


@pytest.mark.parametrize("kind", ["named actions", "items"])
def test_one_log_has_one_kind_of_actions_also_after_a_restart(candidates: Path, tmp_path: Path, kind: Any) -> None:
    config = ServeConfig(model="m", log=str(tmp_path / "log"), reward_seconds=1e-6)
    with open_log(config, choices=kind) as log:
        log.append([EVENT | ({"items": "h"} if kind == "items" else {})])
        log.rotate()
    for _ in range(2):  # with the database, and with Parquet files alone
        for other in {"named actions", "items", "candidates"} - {kind}:
            with (
                pytest.raises(ConfigError, match=f"among {other}, got one for {kind}"),
                open_log(config, choices=other),
            ):
                pass
        with open_log(config, choices=kind):
            pass
        shutil.rmtree(tmp_path / "log" / ".decisions")
    with pytest.raises(BundleError, match=f"among {kind}, as the log"):
        ServedModel(str(candidates), choices=kind)


def test_the_log_trains_as_it_is(
    candidates: Path, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, rng = opened(candidates), np.random.default_rng(0)
    for episode in range(40):
        for step in range(4):
            row = {"state_features": {"3": float(rng.normal()), "age": float(rng.normal())}, "mdp_id": f"{episode}",
                   "possible_actions": [{"7": float(x), "8": 1.0} for x in rng.normal(size=3)]}  # fmt: skip
            decision = worker.post("/decide", rows=[row])["decisions"][0]["decision_id"]
            metrics = {"metrics": {"clicks": 1.0}} if episode >= 20 else {}
            worker.post("/reward", decision_id=decision, reward=step, terminal=step == 3, **metrics)
        if episode in (10, 39):
            assert len(rotated(worker)) == 4 * (episode + 1)
    outcome = trained({
        "training_data_path": str(worker.folder), "model_output_path": str(tmp_path / "out"), "use_gpu": False,
        "training": {"layers": [-1, 4, 1], "activations": ["relu", "linear"], "minibatch_size": 32},
        "evaluation": {"learn_from_scored": True},
    })  # fmt: skip
    assert outcome.rows == 160
    assert "160 rows in 40 episodes, 40 true ends, 0 cut by a limit, " in caplog.text
    assert outcome.scores["CPE/Reward/Logged_Reward"] == pytest.approx(1.5)
