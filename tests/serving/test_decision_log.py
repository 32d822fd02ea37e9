"""The log: rows by hand, the order of an episode, what a killed server leaves, full disks, new models, and training."""

import asyncio
import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from oracles.bundles import bilinear_bundle, linear_bundle
from oracles.runs import trained
from serving.conftest import IDS, NAMES, Open, Worker

from reagent_lite.config.serve import ServeConfig
from reagent_lite.errors import BundleError, ConfigError
from reagent_lite.serving.decision_log import DecisionLog, epoch_of_clock, open_log, worker_of
from reagent_lite.serving.served_model import ServedModel

ROW = {"state_features": {"3": 1.0, "age": None}, "mdp_id": "7"}
EVENT = {"model": "m", "mdp_id": None, "sequence_number": None, "state_features": {"3": 1.0}, "action": "mail",
         "possible_actions": list(NAMES), "action_probability": 0.5}  # fmt: skip


def decided(worker: Worker, **keys: Any) -> str:
    one: str = worker.post("/decide", rows=[ROW | keys])["decisions"][0]["decision_id"]
    return one


def rotated(worker: Worker) -> list[dict[str, Any]]:
    """Writes what is complete and returns all rows of the log."""
    asyncio.run(worker.log.rotate())
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
    found = rotated(worker)
    assert worker.log.waiting == 0
    today = time.strftime("%Y-%m-%d", time.gmtime())
    action, probability = found[0].pop("action"), found[0].pop("action_probability")
    assert action in ("call", "wait")
    assert probability == pytest.approx(0.5)  # both values are 0
    assert found[0] == {
        "decision_id": first, "model": worker.model.version, "ds": today, "mdp_id": "7", "sequence_number": 4,
        "state_features": [("3", 1.0)], "reward": 2.5, "possible_actions": ["call", "wait"],
        "metrics": [("clicks", 3.0)], "terminal": True,
    }  # fmt: skip
    assert found[1]["mdp_id"] == found[1]["decision_id"] == alone["decision_id"]
    assert found[1]["terminal"]
    assert abs(found[1]["sequence_number"] / 1e6 - time.time()) < 100
    assert (found[1]["action"], found[1]["action_probability"]) == (alone["action"], alone["propensity"])
    assert (found[1]["possible_actions"], found[1]["metrics"]) == (list(NAMES), None)


def test_an_episode_is_written_in_order_and_late_rewards_are_refused(named: Path, opened: Open) -> None:
    worker = opened(named, reward_seconds=0.5)
    begin = time.monotonic()
    one, two = decided(worker, sequence_number=1), decided(worker, sequence_number=2)
    other = decided(worker, mdp_id="8", sequence_number=1)
    for decision in (two, other):
        worker.post("/reward", decision_id=decision, reward=1.0)
    rows = rotated(worker)
    if time.monotonic() - begin < 0.5:  # the machine was not asleep
        assert [row["decision_id"] for row in rows] == [other]
    time.sleep(0.5)
    assert {(row["decision_id"], row["reward"]) for row in rotated(worker)} == {(other, 1), (one, 0), (two, 1)}
    assert worker.client.post("/reward", json={"decision_id": one, "reward": 1.0}).status_code in (404, 409)


def test_the_oldest_do_not_wait_when_too_many_do(named: Path, opened: Open) -> None:
    worker = opened(named, waiting_decisions=2)
    ids = [decided(worker, mdp_id=f"{n}") for n in range(5)]
    asyncio.run(worker.log.poll())
    assert [row["decision_id"] for row in rows_of(worker.folder)] == ids[:3]
    assert worker.client.post("/reward", json={"decision_id": ids[2], "reward": 1.0}).status_code == 409


def test_a_disk_that_takes_the_parquet_file_and_no_journal_repeats_no_decision(
    named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = opened(named)
    ids = [decided(worker, mdp_id=f"{n}") for n in range(3)]
    worker.post("/reward", decision_id=ids[0], reward=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("reagent_lite.serving.decision_log.appearing_file", full)
        assert [row["decision_id"] for row in rotated(worker)] == ids[:1]
    assert worker.client.get("/healthz").status_code == 503
    worker.post("/reward", decision_id=ids[1], reward=1.0)
    assert [row["decision_id"] for row in rotated(worker)] == ids[:2]
    assert worker.client.get("/healthz").status_code == 200
    assert worker.log.waiting == 1


def test_lines_before_a_failed_rotation_are_on_the_disk(
    named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[Path, int] = {}
    worker, sync = opened(named), os.fsync

    def syncing(descriptor: int) -> None:
        sync(descriptor)
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}"))] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", syncing)
    for broken in ("write_decisions", "appearing_file", "DecisionLog._begin"):
        with monkeypatch.context() as patch:
            patch.setattr(f"reagent_lite.serving.decision_log.{broken}", full)
            one = decided(worker, mdp_id=broken)
            worker.post("/reward", decision_id=one, reward=1.0)
            asyncio.run(worker.log.rotate())
            asyncio.run(worker.log.poll())
        journals = [file for file in worker.folder.glob(".worker-0/*.jsonl") if file.stat().st_size]
        assert journals
        assert {file: synced.get(file) for file in journals} == {file: file.stat().st_size for file in journals}


def test_an_episode_goes_on_in_order_where_the_clock_is_set_back(
    named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, clock, after = opened(named), time.time_ns, []
    for back in (0, 3600, 0):
        monkeypatch.setattr(time, "time_ns", lambda back=back: clock() - back * 10**9)
        monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9)
        after += [one["decision_id"] for one in worker.post("/decide", rows=[ROW] * 500)["decisions"]]
    worker.post("/reward", decision_id=after[-1], reward=1.0, terminal=True)
    rows = [one.row() for one in worker.log._waiting.values()]
    assert [row["decision_id"] for row in rows] == after
    assert (np.diff([row["sequence_number"] for row in rows]) > 0).all()
    assert abs(rows[-1]["sequence_number"] / 1e6 - time.time()) < 100


def test_workers_number_an_episode_alike_where_they_are_started_again_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, clock, numbers = ServeConfig(model="m", log=str(tmp_path), workers=2, reward_seconds=1e-6), time.time_ns, []

    def number(log: DecisionLog) -> None:
        log.append([EVENT, EVENT | {"sequence_number": 2**53, "state_features": {"at": 1e18}}])
        numbers.append([one.row()["sequence_number"] for one in log._waiting.values()][-2])

    def set_back(hours: int) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: clock() - hours * 3600 * 10**9)

    epoch = epoch_of_clock(tmp_path)
    with open_log(config, 0, parametric=False, epoch=epoch) as first:
        set_back(1)
        with open_log(config, 1, parametric=False, epoch=epoch) as second:  # one worker of the server
            for log in (first, second, first, second):
                number(log)
    for hours, closed in ((2, False), (2, True), (1, False)):  # the server, after a kill, a kill, and a proper end
        set_back(hours)
        with open_log(config, 0, parametric=False) as log:
            number(log)
            if closed:
                asyncio.run(log.close())
    assert len(numbers) == len(set(numbers)) == 7
    assert sorted(numbers) == numbers
    assert "the system's clock is 7,2" in caplog.text


def test_a_journal_that_cannot_be_written_is_unhealthy_until_the_next_poll(named: Path, opened: Open) -> None:
    worker = opened(named)
    first, journal = decided(worker), worker.log._descriptor
    worker.log._descriptor = os.open("/dev/full", os.O_WRONLY)
    assert worker.client.post("/decide", json={"rows": [ROW]}).status_code == 503
    os.close(worker.log._descriptor)
    worker.log._descriptor = journal
    assert worker.client.get("/healthz").status_code == 503
    asyncio.run(worker.log.poll())
    assert worker.client.get("/healthz").status_code == 200
    assert list(worker.log._waiting) == [first]


def test_the_next_server_has_what_was_answered(named: Path, opened: Open, tmp_path: Path) -> None:
    worker = opened(named)
    ids = [decided(worker, mdp_id=f"{n}") for n in range(4)]
    for one in ids[:2]:
        worker.post("/reward", decision_id=one, reward=1.0)
    before = tmp_path / "before"
    shutil.copytree(worker.folder / ".worker-0", before)
    rotated(worker)
    after = tmp_path / "after"
    shutil.copytree(worker.folder, after)
    for file in before.iterdir():  # as if it had been killed between the Parquet file and the journals
        shutil.copy(file, after / ".worker-0")
    with (sorted((after / ".worker-0").glob("*.jsonl"))[0]).open("ab") as torn:
        torn.write(b'{"decision_id":"0-half')
    worker.post("/reward", decision_id=ids[2], reward=5.0)
    for folder, left in ((worker.folder, {ids[2]: 5, ids[3]: 0}), (after, {ids[2]: 0, ids[3]: 0})):
        copy = tmp_path / f"copy of {folder.name}"
        shutil.copytree(folder, copy)
        config = ServeConfig(model="m", log=str(copy), reward_seconds=1e-6)
        with open_log(config, 0, parametric=False) as log:
            assert log.waiting == 2
            asyncio.run(log.close())
        found = rows_of(copy)
        assert {row["decision_id"]: row["reward"] for row in found} == {ids[0]: 1, ids[1]: 1, **left}
        assert len(found) == 4


def test_journals_of_more_workers_go_to_those_that_are_left(tmp_path: Path) -> None:
    many = ServeConfig(model="m", log=str(tmp_path / "log"), workers=4)
    ids = []
    for worker in range(4):
        with open_log(many, worker, parametric=False) as log:
            ids += log.append([EVENT])
    few = many.model_copy(update={"workers": 2})
    for worker in range(2):
        with open_log(few, worker, parametric=False) as log:
            assert log.waiting == 2
            assert [log.join(one, {"reward": 1.0}) for one in ids if worker_of(one, few) == worker] == ["joined"] * 2
            asyncio.run(log.close())
    assert {row["decision_id"] for row in rows_of(tmp_path / "log")} == set(ids)
    for worker in range(2):  # a client that repeats a reward after a restart hears the same as before it
        with open_log(few, worker, parametric=False) as log:
            own = [worker_of(one, few) == worker for one in ids]
            assert [log.join(one, {"reward": 1.0}) == "again" for one in ids] == own
            assert log.join("0-20261123T000000000000-1", {"reward": 1.0}) == "unknown"
    with open_log(many, 0, parametric=False) as log:
        log.append([EVENT])
    with pytest.raises(ConfigError, match="decisions among candidates, got others"), open_log(many, 0, parametric=True):
        pass


def test_a_new_model_takes_over_and_a_damaged_one_does_not(named: Path, opened: Open, tmp_path: Path) -> None:
    worker = opened(named)
    versions, actions = [worker.model.version], ("call",) * 3

    def answered() -> tuple[str, tuple[str, ...]]:
        answer = worker.post("/decide", rows=[{"state_features": {"3": 1000.0}}] * 3)
        return answer["model"], tuple(one["action"] for one in answer["decisions"])

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
    for file in sorted(new.iterdir(), key=lambda one: one.name != "manifest.json"):
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


def test_one_log_has_one_kind_of_actions_also_after_a_restart(
    named: Path, candidates: Path, opened: Open, tmp_path: Path
) -> None:
    worker = opened(named, reward_seconds=1e-6)
    decided(worker)
    assert len(rotated(worker)) == 1
    shutil.copytree(worker.folder, tmp_path / "again", ignore=shutil.ignore_patterns(".*"))
    config = ServeConfig(model="m", log=str(tmp_path / "again"))
    with (
        pytest.raises(ConfigError, match="decisions among candidates, got others"),
        open_log(config, 0, parametric=True),
    ):
        pass
    with open_log(config, 0, parametric=False):
        pass
    with pytest.raises(BundleError, match="a model of dqn, as the log, got parametric_dqn"):
        ServedModel(str(candidates), parametric=False)


@pytest.mark.parametrize("kind", ["named", "candidates"])
def test_the_log_trains_as_it_is(
    kind: str, opened: Open, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    worker = opened(request.getfixturevalue(kind))
    rng = np.random.default_rng(0)
    for episode in range(40):
        for step in range(4):
            features = {"3": float(rng.normal()), "age": float(rng.normal())}
            row: dict[str, Any] = {"state_features": features, "mdp_id": f"{episode}"}
            if kind == "candidates":
                items = [{"7": float(x), "8": 1.0} for x in rng.normal(size=3)]
                row |= {"possible_actions": items, "sequence_number": step}
            one = worker.post("/decide", rows=[row])["decisions"][0]["decision_id"]
            metrics = {"metrics": {"clicks": 1.0}} if episode >= 20 else {}
            worker.post("/reward", decision_id=one, reward=step, terminal=step == 3, **metrics)
        if episode in (10, 39):
            assert len(rotated(worker)) == 4 * (episode + 1)
    tree = {"training_data_path": str(worker.folder), "model_output_path": str(tmp_path / "out"), "use_gpu": False,
            "training": {"layers": [-1, 4, -1 if kind == "named" else 1], "activations": ["relu", "linear"],
                         "minibatch_size": 32}, "evaluation": {"learn_from_scored": True}}  # fmt: skip
    outcome = trained(tree | ({"actions": list(NAMES)} if kind == "named" else {}))
    assert outcome.rows == 160
    gaps = "gaps not counted, as sequence_number is a time" if kind == "named" else "0 gaps"
    assert f"160 rows in 40 episodes, 40 true ends, 0 cut by a limit, {gaps}" in caplog.text
    assert outcome.scores["CPE/Reward/Logged_Reward"] == pytest.approx(1.5)
