"""The log: rows by hand, the order of an episode, what a killed server leaves, full disks, new models, and training."""

import errno
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.disks import small_disk
from serving.conftest import IDS, NAMES, Open, Worker, pass_time, rows_of

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.data.writing.decisions import write_decisions
from reagent_lite.errors import BundleError, ConfigError, DataError, ReagentLiteError
from reagent_lite.mounts import Mount
from reagent_lite.rl.policies import EpsilonGreedy
from reagent_lite.serving import decision_log
from reagent_lite.serving.decision_log import DecisionLog, RepeatedError, open_log
from reagent_lite.serving.served_model import ServedModel

ROW = {"state_features": {"3": 1.0, "age": None}, "mdp_id": "7"}

EVENT = {"model": "m", "mdp_id": None, "sequence_number": None, "state_features": {"3": 1.0}, "action": "mail",
         "possible_actions": list(NAMES), "action_probability": 0.5}  # fmt: skip


def decided(worker: Worker, **keys: Any) -> str:
    return str(worker.post("/decide", rows=[ROW | keys])["decisions"][0]["decision_id"])


def test_rows_are_events_of_the_contract(worker: Worker) -> None:
    first = decided(worker, sequence_number=4, possible_actions=["call", "wait"])
    alone = worker.post("/decide", rows=[{"state_features": {"age": 2.5}}])["decisions"][0]
    worker.post("/reward", decision_id=first, reward=2.5, metrics={"clicks": 3}, terminal=True)
    worker.post("/reward", decision_id=alone["decision_id"], reward=-1.0)
    rows = worker.written()
    assert rows[0].pop("action") in ("call", "wait")
    assert abs(rows[1].pop("sequence_number") / 1e6 - time.time()) < 100
    of_both = {"model": worker.model.version, "ds": time.strftime("%Y-%m-%d", time.gmtime()), "terminal": True}
    assert rows == [
        of_both | {"decision_id": first, "mdp_id": "7", "sequence_number": 4, "state_features": [("3", 1.0)],
                   "reward": 2.5, "possible_actions": ["call", "wait"], "metrics": [("clicks", 3.0)],
                   "action_probability": pytest.approx(0.5)},  # both values are 0
        of_both | {"decision_id": alone["decision_id"], "mdp_id": alone["decision_id"], "action": alone["action"],
                   "action_probability": alone["propensity"], "state_features": [("age", 2.5)], "reward": -1.0,
                   "possible_actions": list(NAMES), "metrics": None},
    ]  # fmt: skip


def test_single_decisions_are_a_log_of_single_decisions_until_one_has_an_episode(
    worker: Worker, tmp_path: Path
) -> None:
    """Two single decisions, then an episode of two with another single decision between."""
    state = {"state_features": {"age": 2.0}}
    first, second = worker.post("/decide", rows=[state, state])["decisions"]
    worker.post("/reward", decision_id=second["decision_id"], reward=3.0, terminal=False)
    rows = worker.written()
    assert [set(row) & {"mdp_id", "sequence_number", "terminal"} for row in rows] == [set(), set()]
    assert [(row["decision_id"], row["reward"]) for row in rows] == [
        (first["decision_id"], 0.0),
        (second["decision_id"], 3.0),
    ]
    copy = prepare_training_copy(Log(str(worker.folder), actions=NAMES, directory=str(tmp_path / "single")))
    assert (len(copy), copy.reward.tolist()) == (2, [0.0, 3.0])
    ids = [decided(worker, mdp_id="e"), decided(worker, mdp_id=None), decided(worker, mdp_id="e")]
    for decision in ids:
        worker.post("/reward", decision_id=decision, reward=1.0, terminal=decision == ids[2])
    assert [row.get("mdp_id") for row in worker.written()] == [None, None, "e", ids[1], "e"]
    copy = prepare_training_copy(Log(str(worker.folder), actions=NAMES, directory=str(tmp_path / "episodes")))
    assert (len(copy), copy.bootstrap.tolist().count(True)) == (5, 1)


def test_decisions_are_written_by_their_age_alone_and_late_rewards_are_refused(worker: Worker) -> None:
    first, second = (decided(worker, sequence_number=number) for number in (1, 2))
    pass_time(worker.log, 1800)
    third = decided(worker, mdp_id="8")
    for decision in (second, third):
        worker.post("/reward", decision_id=decision, reward=1.0)
    worker.log.rotate()
    assert (rows_of(worker.folder), worker.log.waiting) == ([], 3)
    pass_time(worker.log, 1801)
    worker.log.rotate()
    assert [(row["decision_id"], row["reward"]) for row in rows_of(worker.folder)] == [(first, 0), (second, 1)]
    assert worker.client.post("/reward", json={"decision_id": first, "reward": 1.0}).status_code == 409
    assert [row["decision_id"] for row in worker.written()] == [first, second, third]


def test_time_without_a_server_does_not_count_as_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers run for 20 minutes each, between which the clock goes by hours, or back."""
    config, clock = ServeConfig(model="m", log=str(tmp_path)), time.time_ns
    written = []
    for hours in (0, 5, 10, 2, -3):
        monkeypatch.setattr(time, "time_ns", lambda hours=hours: clock() + hours * 3600 * 10**9)
        with open_log(config, choices="named actions") as log:
            log.append([EVENT])
            pass_time(log, 1201)
            log.rotate()
        written.append([int(row["decision_id"].split("-")[1]) for row in rows_of(tmp_path)])
    assert written == [[], [], [1], [1, 2], [1, 2, 3]]


def test_the_oldest_do_not_wait_when_too_many_do(named: Path, opened: Open) -> None:
    worker = opened(named, waiting_decisions=2)
    ids = [decided(worker, mdp_id=f"{n}") for n in range(5)]
    worker.log.poll()
    assert [row["decision_id"] for row in rows_of(worker.folder)] == ids[:3]
    assert worker.client.post("/reward", json={"decision_id": ids[2], "reward": 1.0}).status_code == 409


def test_long_lists_are_written_a_part_at_a_time(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        worker.post("/reward", decision_id=decided(worker, mdp_id=f"{number}"), reward=1.0)
    monkeypatch.setattr(decision_log, "_FILE_BYTES", 1)
    assert (len(worker.written()), len([*worker.folder.glob("*.parquet")])) == (3, 3)


def test_a_server_that_ends_at_any_step_of_a_file_writes_each_decision_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, batches = tmp_path / "log", decision_log._batches
    copies: list[Path] = []

    def copying(work: Callable[..., Any], *given: Any) -> Any:
        copies.append(shutil.copytree(folder, tmp_path / f"copy{len(copies)}"))
        return work(*given)

    with (
        open_log(ServeConfig(model="m", log=str(folder)), choices="named actions") as log,
        monkeypatch.context() as patch,
    ):
        ids = log.append([EVENT] * 220)
        for decision in ids:
            log.join(decision, {"reward": 1.0})
        patch.setattr(decision_log, "_FILE_ROWS", 100)
        patch.setattr(decision_log, "_BATCH_ROWS", 50)
        patch.setattr(decision_log, "write_decisions", partial(copying, write_decisions))
        patch.setattr(decision_log, "_batches", lambda rows: (copying(list, batch) for batch in batches(rows)))
        pass_time(log)
        ids += log.append([EVENT] * 30)
        log.rotate()
    assert [row["decision_id"] for row in rows_of(folder)] == ids[:220]
    # of three files: batches that are named for it, the file, batches that are deleted
    assert len(copies) == 2 * (2 + 1 + 2) + 1 + 1 + 1
    rewards = [1.0] * 220 + [5.0] + [0.0] * 29
    for copy in copies:
        with open_log(ServeConfig(model="m", log=str(copy), reward_seconds=1e-6), choices="named actions") as log:
            assert log.join(ids[220], {"reward": 5.0}) == "joined"
            assert {log.join(decision, {"reward": 1.0}) for decision in ids[:221]} == {"again"}
            log.rotate()
            assert (log.waiting, log.written) == (0, 250)
        rows = sorted((int(row["decision_id"].split("-")[1]), row["reward"]) for row in rows_of(copy))
        assert rows == list(enumerate(rewards, 1))


def test_a_full_disk_is_answered_with_503_until_the_next_poll_and_nothing_is_half_written(
    disk: Path, worker: Worker
) -> None:
    ids = [decided(worker, mdp_id=f"{n}") for n in range(20)]
    with suppress(OSError):
        (disk / "filler").write_bytes(b"x" * 2**20)
    rewards = [{"decision_id": decision, "reward": 1.0} for decision in ids]
    first = [worker.client.post("/reward", json=reward).status_code for reward in rewards]
    status, problem = worker.refusal("/decide", rows=[ROW | {"mdp_id": "n" * 200}] * 50)
    assert (status, problem["where"], problem["got"]) == (503, "log", "No space left on device")
    pass_time(worker.log)
    worker.log.rotate()
    assert (worker.client.get("/healthz").status_code, [*disk.glob("*.parquet"), *disk.glob("*.tmp")]) == (503, [])
    (disk / "filler").unlink()
    again = [worker.client.post("/reward", json=reward).status_code for reward in rewards]
    assert set(zip(first, again, strict=True)) <= {(204, 409), (503, 204)}
    worker.log.rotate()
    assert (worker.client.get("/healthz").status_code, [row["decision_id"] for row in rows_of(disk)]) == (200, ids)


def test_a_database_that_cannot_be_read_as_another_process_recovers_it_is_a_503_with_its_reason(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
    row = ROW | {"mdp_id": "7", "sequence_number": 1}
    decision = worker.post("/decide", rows=[row])["decisions"][0]["decision_id"]
    worker.post("/reward", decision_id=decision, reward=1.0)
    select = worker.log._all

    def locked(sql: str, *values: Any) -> Any:
        if any(part in sql for part in refused):
            raise error
        return select(sql, *values)

    monkeypatch.setattr(worker.log, "_all", locked)
    reward = {"decision_id": decision, "reward": 1.0}
    refused: list[str] = []
    for path, body, part in (("/decide", {"rows": [row]}, "episode = ?"), ("/reward", reward, "max(latest")):
        refused[:] = [part]
        status, problem = worker.refusal(path, **body)
        assert (status, problem["where"], problem["got"]) == (503, "database", "another process has the database")
    assert 'reagent_unavailable_total{reason="database"} 2.0' in worker.client.get("/metrics").text
    assert not worker.log.failure


def test_a_file_that_cannot_be_written_is_tried_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = decided(worker)
    worker.post("/reward", decision_id=decision, reward=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(decision_log, "write_decisions", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        assert (worker.written(), worker.client.get("/healthz").status_code) == ([], 503)
    worker.log.poll()
    assert ([row["decision_id"] for row in rows_of(worker.folder)], worker.log.waiting) == ([decision], 0)


def test_what_was_answered_is_on_the_disk_after_a_poll_and_before_a_file_has_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    wal, synced, sync = worker.folder / ".decisions/decisions.sqlite-wal", dict[str, bytes](), os.fsync

    def syncing(descriptor: int) -> None:
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[str(path)] = path.read_bytes() if path.is_file() else b""

    def unsynced() -> bool:
        return wal.read_bytes() != synced[str(wal)]

    def writing(target: Path, rows: Any) -> None:
        assert not unsynced()
        write_decisions(target, rows)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(decision_log, "write_decisions", writing)
    first = decided(worker)
    worker.log.poll()
    assert not unsynced()
    worker.post("/reward", decision_id=first, reward=1.0)
    assert (unsynced(), len(worker.written())) == (True, 1)
    second = decided(worker)
    monkeypatch.setattr(decision_log, "_WAL_BYTES", 0)
    worker.log.poll()  # the write-ahead log begins again, when it is in the database
    assert (wal.stat().st_size, [row["decision_id"] for row in worker.waiting_rows()]) == (0, [second])


def test_workers_number_an_episode_alike_where_they_are_started_again_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, clock = ServeConfig(model="m", log=str(tmp_path), reward_seconds=1e-6), time.time_ns
    in_episode = EVENT | {"mdp_id": "e"}

    def set_back(hours: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: clock() - hours * 3600 * 10**9)

    with open_log(config, choices="named actions") as first:
        set_back(1)
        with closing(DecisionLog(config, choices="named actions", epoch=first.epoch)) as second:  # of a later worker
            ids = [name for log in (first, second, first, second) for name in log.append([in_episode] * 100)]
    for hours in (2, 2, 1):  # the server again, with decisions in the database, and with all of them in files
        set_back(hours)
        with open_log(config, choices="named actions") as log:
            ids += log.append([in_episode, EVENT | {"sequence_number": 2**53, "state_features": {"at": 1e18}}])
            log.rotate()
    rows = sorted(rows_of(tmp_path), key=lambda row: int(row["decision_id"].split("-")[1]))
    assert [row["decision_id"] for row in rows] == ids
    numbers = [row["sequence_number"] for row in rows if row["sequence_number"] != 2**53]
    assert (numbers, len(numbers)) == (sorted(set(numbers)), 4 * 100 + 3)
    assert abs(numbers[-1] - clock() / 1000) < 100e6
    assert "the system's clock is 7,2" in caplog.text


def test_any_worker_takes_a_reward_once(tmp_path: Path) -> None:
    config = ServeConfig(model="m", log=str(tmp_path))
    with (
        open_log(config, choices="named actions") as log,
        closing(DecisionLog(config, choices="named actions", epoch=log.epoch)) as other,
    ):
        ids = [decision for each in (log, other, other, log) for decision in each.append([EVENT])]
        assert [other.join(decision, {"reward": 1.0}) for decision in ids] == ["joined"] * 4
        for written in (0, 4):  # a client that repeats a reward hears the same once it is in a file
            assert (log.written, other.waiting) == (written, 4 - written)
            assert [log.join(decision, {"reward": 1.0}) for decision in ids] == ["again"] * 4
            pass_time(log)
            log.rotate()
        name, _, code = ids[0].split("-")
        numbers = ("0", "2", "5", "01", str(10**30), "\u0661", "")
        unknown = (*(f"{name}-{number}-{code}" for number in numbers), f"{name}-1", f"{name}-1-", f"{name}-1-{code}0",
                   f"x{name}-1-{code}", f"{name}-1-{code.upper()}-", f"{name}--1-{code}", "1", "")  # fmt: skip
        assert {other.join(decision, {"reward": 1.0}) for decision in unknown} == {"unknown"}
    assert {row["decision_id"] for row in rows_of(tmp_path)} == {*ids}


def test_ids_cannot_be_guessed_and_none_is_given_twice_when_the_last_second_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The database is put back to its last sync, as of a machine that lost power, and other clients decide."""
    config = ServeConfig(model="m", log=str(tmp_path / "log"))
    folder = tmp_path / "log" / ".decisions"
    with open_log(config, choices="named actions") as log:
        kept = log.append([EVENT] * 3)
        log.poll()
        shutil.copy(folder / "decisions.sqlite", tmp_path / "synced")
        lost = log.append([EVENT] * 4)
        assert len({decision.split("-")[2] for decision in kept + lost}) == 7
        assert {len(decision.split("-")[2]) for decision in kept} == {16}
    for name in ("decisions.sqlite-wal", "decisions.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "synced", folder / "decisions.sqlite")
    with open_log(config, choices="named actions") as log:
        assert "4 decisions missing, numbers 4 to 7 of log" in caplog.text
        again = log.append([EVENT] * 4)
        assert [decision.split("-")[1] for decision in again] == [decision.split("-")[1] for decision in lost]
        assert not {*again} & {*lost}
        assert {log.join(decision, {"reward": 1.0}) for decision in lost} == {"unknown"}
        assert {log.join(decision, {"reward": 1.0}) for decision in kept + again} == {"joined"}
        pass_time(log)
        log.rotate()
        assert {log.join(decision, {"reward": 1.0}) for decision in lost} == {"unknown"}
    assert [row["decision_id"] for row in rows_of(tmp_path / "log")] == kept + again
    caplog.clear()
    with open_log(config, choices="named actions"):
        assert "missing" not in caplog.text


_FRAMES = 4096 + 24  # bytes of a page in the write-ahead log


@pytest.mark.parametrize("damage", ["missing", "cut", "overwritten", "none"])
def test_a_damaged_write_ahead_log_is_named_with_the_decisions_that_are_lost(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after kill -9: the files of a log that is open are copied."""
    config = ServeConfig(model="m", log=str(tmp_path / "log"))
    with open_log(config, choices="named actions") as log:
        ids = log.append([EVENT] * 5)
        log.poll()
        for _ in range(6):
            ids += log.append([EVENT] * 2)
        copy = shutil.copytree(tmp_path / "log", tmp_path / "copy")
    wal = copy / ".decisions" / "decisions.sqlite-wal"
    (copy / ".decisions" / "decisions.sqlite-shm").unlink()
    if damage == "missing":
        wal.unlink()
    elif damage == "cut":
        os.truncate(wal, _FRAMES * 5)
    elif damage == "overwritten":
        with wal.open("r+b") as stream:
            stream.seek(_FRAMES * 5)
            stream.write(b"?" * 500)
    with open_log(ServeConfig(model="m", log=str(copy)), choices="named actions") as log:
        left = log.waiting
        expected = {"missing": [5], "none": [17]}.get(damage, range(5, 17))
        assert left in expected
        text = f"{copy / '.decisions' / 'decisions.sqlite'}: {17 - left} decisions missing, numbers {left + 1} to 17 of"
        assert (text in caplog.text) == (damage != "none")
        assert [log.join(decision, {"reward": 1.0}) for decision in ids] == ["joined"] * left + ["unknown"] * (
            17 - left
        )


@pytest.mark.parametrize("damage", ["-wal", "both", "database"])
def test_decisions_before_the_first_poll_of_a_log_are_named_when_they_are_lost(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And those of a log whose database was removed, unless they are in files."""
    with open_log(ServeConfig(model="m", log=str(tmp_path / "log")), choices="named actions") as log:
        if damage == "database":
            log.append([EVENT] * 3)
            pass_time(log)
            log.rotate()
        log.append([EVENT] * 4)
        name = log.name
        first = 4 if damage == "database" else 1
        copy = shutil.copytree(tmp_path / "log", tmp_path / "copy")
    names = {"-wal": ["-wal"], "both": ["", "-wal"], "database": [""]}[damage]
    for suffix in (*names, "-shm"):
        (copy / ".decisions" / f"decisions.sqlite{suffix}").unlink()
    for text in (f"4 decisions missing, numbers {first} to {first + 3} of log {name}: it or decisions.sqlite-wal", ""):
        caplog.clear()
        with open_log(ServeConfig(model="m", log=str(copy)), choices="named actions") as log:
            assert (text in caplog.text, "missing" in caplog.text) == (True, bool(text))
            assert (log.name == name) == (damage == "-wal")


def test_a_database_is_no_link_to_a_file_of_others(tmp_path: Path) -> None:
    (tmp_path / ".decisions").mkdir()
    (tmp_path / "other").touch()
    (tmp_path / ".decisions" / "decisions.sqlite").symlink_to(tmp_path / "other")
    config = ServeConfig(model="m", log=str(tmp_path))
    with pytest.raises(ConfigError, match="to be no link"), open_log(config, choices="named actions"):
        pass
    assert (tmp_path / "other").read_bytes() == b""


def test_a_copy_of_the_database_alone_has_what_was_synced(worker: Worker, tmp_path: Path) -> None:
    ids = [decided(worker, mdp_id=f"{n}") for n in range(20)]
    worker.post("/reward", decision_id=ids[3], reward=2.0)
    worker.log.poll()
    (tmp_path / "copy" / ".decisions").mkdir(parents=True)
    shutil.copy(worker.folder / ".decisions" / "decisions.sqlite", tmp_path / "copy" / ".decisions")
    config = ServeConfig(model="m", log=str(tmp_path / "copy"), reward_seconds=1e-6)
    with open_log(config, choices="named actions") as log:
        log.rotate()
    rows = rows_of(tmp_path / "copy")
    assert [(row["decision_id"], row["reward"]) for row in rows] == [(k, 2.0 * (k == ids[3])) for k in ids]


def test_decisions_of_files_are_not_written_again_with_an_older_database(tmp_path: Path) -> None:
    config = ServeConfig(model="m", log=str(tmp_path / "log"))
    with open_log(config, choices="named actions") as log:
        ids = log.append([EVENT] * 5)
        log.poll()
        shutil.copy(tmp_path / "log" / ".decisions" / "decisions.sqlite", tmp_path / "older")
        ids += log.append([EVENT] * 5)
        pass_time(log)
        log.rotate()
    shutil.copy(tmp_path / "older", tmp_path / "log" / ".decisions" / "decisions.sqlite")
    with open_log(config, choices="named actions") as log:
        assert (log.waiting, log.written) == (0, 10)
        ids += log.append([EVENT])
        pass_time(log)
        log.rotate()
    rows = rows_of(tmp_path / "log")
    assert [row["decision_id"].split("-")[1] for row in rows] == [f"{n}" for n in range(1, 12)]
    assert [row["decision_id"] for row in rows] == ids


def test_a_file_of_others_beside_the_database_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    other = tmp_path / "disk" / "decisions.newest"
    other.write_text("important")
    config = ServeConfig(model="m", log=str(tmp_path / "log"), database=str(tmp_path / "disk"))
    with pytest.raises(DataError, match="a file that no server wrote"), open_log(config, choices="named actions"):
        pass
    assert other.read_text() == "important"


def test_a_database_of_an_earlier_version_refuses_repeated_decisions_as_well(tmp_path: Path) -> None:
    config, event = ServeConfig(model="m", log=str(tmp_path)), EVENT | {"mdp_id": "7", "sequence_number": 3}
    with open_log(config, choices="named actions") as log:
        log.append([event])
        for statement in ("DROP INDEX numbers", "ALTER TABLE decisions DROP COLUMN number"):
            log._db.execute(statement)
    with open_log(config, choices="named actions") as log:
        ids = log.append([event])
        with pytest.raises(RepeatedError):
            log.append([EVENT, event])
        assert (log.waiting, log.find_decision("7", 3)) == (2, (ids[0], event))


def test_folders_that_cannot_hold_the_log_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require_refused(config: ServeConfig, text: str) -> None:
        with pytest.raises(ReagentLiteError, match=re.escape(text)), open_log(config, choices="named actions"):
            pass

    log, disk = tmp_path / "log", tmp_path / "disk"
    on_share = ServeConfig(model="m", log=str(log))
    local = ServeConfig(model="m", log=str(log), database=str(disk))
    share = Mount("server:/export", "/share", "nfs4", ("rw",))
    monkeypatch.setattr(decision_log, "find_mount", lambda path: None if path.is_relative_to(disk) else share)
    require_refused(on_share, f"{log}/.decisions on nfs4")
    journal = log / ".worker-0" / "20261123T000000000000.jsonl"
    journal.parent.mkdir(parents=True)
    journal.touch()
    with open_log(local, choices="named actions") as opened:
        opened.append([EVENT])
    journal.write_text('{"decision_id":"0-1"}\n')
    require_refused(local, f"got {journal}")
    journal.unlink()
    (disk / "decisions.sqlite").write_text("no database" * 100)
    require_refused(local, "file is not a database")


def test_a_new_model_takes_over_when_it_is_whole_and_a_damaged_one_or_one_of_another_kind_does_not(
    named: Path, worker: Worker, tmp_path: Path
) -> None:
    def answered() -> tuple[str, str]:
        answer = worker.post("/decide", rows=[{"state_features": {"3": 1000.0}}])
        return answer["model"], answer["decisions"][0]["action"]

    before = worker.model.version
    assert answered() == (before, "mail")
    new = linear_bundle(tmp_path / "new", np.array([[0.0, 0], [1, 0], [0, 0]]), NAMES, IDS)
    for file in sorted(new.iterdir(), key=lambda path: path.name != "manifest.json"):
        shutil.copy(file, named)
        worker.poll()
    after, refused = worker.model.version, worker.model.refused
    assert (after != before, worker.model.swapped, refused >= 1) == (True, 1, True)
    damaged = linear_bundle(tmp_path / "damaged", np.eye(3)[:, :2], NAMES, IDS)
    (damaged / "model.onnx").write_bytes(b"?")
    for folder in (damaged, bilinear_bundle(tmp_path / "of candidates", np.eye(2), IDS, (7, 8))):
        shutil.copytree(folder, named, dirs_exist_ok=True)
        worker.poll()
        assert answered() == (after, "call")
    assert (worker.model.swapped, worker.model.refused >= refused + 2) == (1, True)


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
            shutil.rmtree(tmp_path / "log" / ".decisions")
    with pytest.raises(BundleError, match=f"choices: .* {kind} missing, candidates new"):
        ServedModel(str(candidates), interface={"choices": (kind,)})


@pytest.mark.parametrize(
    ("names", "ids", "got"),
    [
        (("mail", "wait", "fax"), IDS, "actions: .* got call missing, fax new"),
        (("call", "mail", "wait"), IDS, "actions: .* got another order"),
        (NAMES, (3, 4), "state features: .* got age missing, 4 new"),
    ],
)
def test_a_new_model_whose_clients_send_or_get_other_names_waits_for_a_start(
    names: Any, ids: Any, got: str, named: Path, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    before = worker.model.version
    linear_bundle(named, np.ones((3, 2)), names, ids)
    worker.poll()
    assert (worker.model.version, worker.model.refused) == (before, 1)
    assert re.search(got, caplog.text)
    assert ServedModel(str(named)).version != before


def test_a_new_model_takes_the_columns_that_clients_may_send(
    named: Path, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.model.interface["data.columns"] = ("session for mdp_id",)
    linear_bundle(named, np.ones((3, 2)), NAMES, IDS[::-1])
    worker.poll()
    assert (worker.model.swapped, worker.model.refused) == (0, 1)
    worker.model.interface["data.columns"] = ()
    linear_bundle(named, np.zeros((3, 2)), NAMES, IDS[::-1], policy=EpsilonGreedy(0))
    worker.poll()
    assert (worker.model.swapped, worker.model.refused) == (1, 1)
    assert "takes one action with propensity 1.0 in 100% of its decisions" in caplog.text


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of the log, on a disk that fills up."""
    with small_disk(tmp_path / "log", size="1m", files=50) as folder:
        yield folder
