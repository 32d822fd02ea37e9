"""Files of the log are prefixes in time: what they hold does not depend on outcomes."""

import os
import shutil
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic_core import to_json
from serving.conftest import flush, pass_time, rows_of
from serving.test_decision_log import EVENT

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.data.logs import Log
from reagent_lite.data.served_log import waiting_in
from reagent_lite.data.writing.decisions import write_decisions
from reagent_lite.errors import DataError, NoRowsError
from reagent_lite.serving.decision_log import DecisionLog, open_log

HOUR = 3600


def test_means_of_prefixes_are_unbiased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 logs, some with a server that ends and a clock that is set, of decisions by two workers.

    A share of the decisions earns 1, which is reported after any delay within the hour; the others are never reported.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)  # half of the time
    rng, clock = np.random.default_rng(0), time.time_ns
    errors: list[list[float]] = [[], [], []]  # of the mean of the first, second and last prefix
    for run in range(200):
        folder, share = tmp_path / str(run), rng.uniform(0.1, 0.9)
        config = ServeConfig(model="m", log=str(folder), waiting_decisions=10**6)
        decided = np.sort(rng.uniform(0, 2.5 * HOUR, 40))
        earned = rng.random(40) < share
        events = [(at, "decide", k) for k, at in enumerate(decided)]
        events += [(decided[k] + rng.uniform(0, HOUR - 60), "reward", k) for k in np.flatnonzero(earned)]
        events += [(at * HOUR, "rotate", 0) for at in (0.5, 1.3, 2, 3)]
        events += [(rng.uniform(0, 3 * HOUR), "restart", 0)] * (run % 2)
        ids: list[str] = []
        now, rotations = 0.0, 0
        with ExitStack() as ending:
            log, other = _opened(config, ending)
            for at, what, k in sorted(events):
                for worker in (log, other):
                    pass_time(worker, at - now)
                now = at
                if what == "decide":
                    ids += (log, other)[k % 2].append([EVENT])
                elif what == "reward":
                    assert (log, other)[k // 2 % 2].join(ids[k], {"reward": 1.0}) == "joined"
                elif what == "restart":
                    if run % 4 == 1:  # else as after kill -9
                        log.rotate()
                    ending.pop_all().close()
                    step = rng.choice([-5, 5]) * HOUR
                    monkeypatch.setattr(time, "time_ns", lambda step=step: clock() + int(step * 1e9))
                    log, other = _opened(config, ending)
                else:
                    log.rotate()
                    rewards = [row["reward"] for row in _in_order(folder)]
                    assert [row["decision_id"] for row in _in_order(folder)] == ids[: len(rewards)]
                    assert rewards == earned[: len(rewards)].tolist()
                    if rewards:
                        errors[rotations].append(np.mean(rewards) - share)
                    rotations += bool(rewards) and rotations < 2
    for of_prefix in errors:
        assert len(of_prefix) > 150
        assert abs(np.mean(of_prefix)) < 3 * np.std(of_prefix) / len(of_prefix) ** 0.5


def test_what_waits_is_said_to_those_who_read_the_log(tmp_path: Path) -> None:
    with open_log(ServeConfig(model="m", log=str(tmp_path)), choices="named actions") as log:
        log.append([EVENT] * 3)
        log.poll()
        with pytest.raises(NoRowsError, match=r"got 3 decisions wait for rewards \(since 20.*, 3600 s each"):
            _ = Log(str(tmp_path)).files
        pass_time(log)
        log.append([EVENT])
        log.rotate()
        assert [file.name.split("-", 2)[2] for file in Log(str(tmp_path)).files] == ["1-3.parquet"]
        (sentence,) = Log(str(tmp_path)).notes()
        assert sentence.startswith(f"{tmp_path}: 1 decision waits for rewards (since 20")
    assert waiting_in(str(tmp_path / "nothing")) is None
    flush(tmp_path)
    assert Log(str(tmp_path)).notes() == ()


def test_a_log_of_an_earlier_version_is_refused_until_it_has_all_its_decisions(tmp_path: Path) -> None:
    with open_log(ServeConfig(model="m", log=str(tmp_path)), choices="named actions") as log:
        ids = log.append([EVENT] * 9)
        name = ids[0].split("-")[0]
        for numbers in ((2, 5), (7,)):  # as an earlier version wrote those with a reward
            file = tmp_path / f"20261123T00000000000{numbers[0]}-{name}.parquet"
            write_decisions(file, [log._row(number, number, to_json(EVENT), b'{"reward": 1}') for number in numbers])
            log._db.executemany("DELETE FROM decisions WHERE id = ?", [(number,) for number in numbers])
        with pytest.raises(DataError, match=f"expected all 6 decisions .* of log {name}, got 3 missing"):
            _ = Log(str(tmp_path)).files
    flush(tmp_path)
    assert (len(Log(str(tmp_path)).files), [row["decision_id"] for row in _in_order(tmp_path)]) == (3, ids)


def test_a_log_and_its_copy_are_refused(tmp_path: Path) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy"
    with open_log(ServeConfig(model="m", log=str(log), reward_seconds=1e-6), choices="named actions") as opened:
        opened.append([EVENT] * 3)
        opened.rotate()
    shutil.copytree(log, copy)
    with pytest.raises(DataError, match=f"copy/.*: expected each decision once, got those of {log}/.* again"):
        _ = Log([str(log), str(copy)]).files


def _opened(config: ServeConfig, ending: ExitStack) -> tuple[DecisionLog, DecisionLog]:
    """Opens a log as the parent of a server does, and as a worker."""
    log = ending.enter_context(open_log(config, choices="named actions"))
    worker = ending.enter_context(closing(DecisionLog(config, choices="named actions", epoch=log.epoch)))
    return log, worker


def _in_order(folder: Path) -> list[dict[str, Any]]:
    return sorted(rows_of(folder), key=lambda row: int(row["decision_id"].split("-")[1]))
