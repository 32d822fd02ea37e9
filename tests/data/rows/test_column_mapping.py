"""Logs with the user's own names for columns and features, in every format, held to what pandas and hand say."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.event_files import write_frame
from helpers.events import timeline_config

from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.loader import check
from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.log_features import summarize_log
from reagent_lite.data.formats.frames import path_of
from reagent_lite.data.logs import Log
from reagent_lite.data.tables import read_log
from reagent_lite.data.timeline.stage import run_timeline
from reagent_lite.errors import ConfigError, DataError, NoRowsError
from reagent_lite.feature_ids import id_of

COLUMNS: dict[str, Any] = {
    "mdp_id": "session",
    "sequence_number": "at",
    "state_features": ["age", "income"],
    "reward": "clicked",
    "action": "shown",
    "possible_next_actions": "next_allowed",
    "next_state_features": ["age_after", "income"],
}
FRAME = pd.DataFrame(
    {
        "session": ["a", "a", "b"],
        "at": pd.to_datetime(["2026-01-01 10:00:00", "2026-01-01 10:00:30", "2026-01-02 00:00:00"]),
        "age": [30.0, 31.0, np.nan],
        "income": [1.5, 2.5, -1.0],
        "age_after": [31.0, 5.0, 5.0],
        "clicked": [0.0, 1.0, 2.0],
        "shown": ["left", "right", "left"],
        "reward": [9.0, 9.0, 9.0],
        "note": ["x", "y", "z"],
        "next_allowed": [[1, 1], [0, 0], [0, 0]],
    }
)
AS_TEXT = {
    "log.csv": FRAME.assign(next_allowed=FRAME["next_allowed"].map(str)),
    "log.json": FRAME.assign(at=FRAME["at"].dt.strftime("%Y-%m-%dT%H:%M:%S")),
}


def written(folder: Path, name: str) -> str:
    return str(write_frame(AS_TEXT.get(name, FRAME), folder / name))


def copy_of(path: Any, folder: Path, columns: dict[str, Any]) -> TrainingCopy:
    return prepare_training_copy(
        Log(path, actions=("left", "right"), directory=str(folder / "copies"), columns=columns)
    )


TEN = (20_454 * 86_400 + 36_000) * 10**6
"""By hand: 2026-01-01 is day 20 454 since 1970."""


@pytest.mark.parametrize("name", ["log.csv", "log.json", "log.parquet", "log.feather"])
def test_own_columns_are_read_as_the_contract_s(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name)
    copy = copy_of(path, tmp_path, COLUMNS)
    ids = [str(feature_id) for feature_id in copy.state_ids]
    assert copy.state_ids == tuple(sorted(map(id_of, ("age", "age_after", "income"))))
    order = np.argsort(copy.sequence)  # the episodes' times
    rows = {name: getattr(copy, name)[order].tolist() for name in ("reward", "action", "sequence")}
    rows |= {name: copy.state[order, ids.index(name)].tolist() for name in ("age", "income")}
    np.testing.assert_equal(rows, {
        "reward": [0, 1, 2], "action": [0, 1, 0], "age": [30, 31, np.nan], "income": [1.5, 2.5, -1],
        "sequence": [TEN, TEN + 30 * 10**6, TEN + (86_400 - 36_000) * 10**6],
    })  # fmt: skip
    summary = summarize_log(Log(path, columns=COLUMNS).files, NormParams())
    assert (summary.rows_by_position, {*summary.columns["state_features"].features}) == (
        0,
        {id_of("age"), id_of("income")},
    )


@pytest.mark.parametrize("name", ["log.csv", "log.json"])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (COLUMNS | {"reward": "click"}, "'click', as columns.reward says, got columns .*'clicked'"),
        (COLUMNS | {"state_features": ["agee"]}, "'agee', as columns.state_features says"),
        (
            {"mdp_id": "Session", "sequence_number": "At"},
            "'Session', as columns.mdp_id says, got .*: 'session'\n.*'At'",
        ),
        (COLUMNS | {"state_features": "age"}, r"got 30.* in a list: .state_features.: \[.age"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_the_nearest(
    tmp_path: Path, name: str, columns: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, name)
    with pytest.raises(DataError, match=rf"{path}.*: expected .*{words}"):
        copy_of(path, tmp_path, columns)
    assert not (tmp_path / "copies").exists() or not list((tmp_path / "copies").iterdir())


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [("", NoRowsError, "expected rows"), ('1,2,TRUE,left 5"\n', DataError, r"log\.csv:2: expected quotation marks")],
)
def test_a_header_without_rows_or_with_a_broken_one(
    tmp_path: Path, text: str, kind: type[DataError], words: str
) -> None:
    (tmp_path / "log.csv").write_text("r,age,last,action\n" + text)
    with pytest.raises(kind, match=words):
        copy_of(f"{tmp_path}/log.csv", tmp_path, {"reward": "r", "state_features": ["age"], "terminal": "last"})


def test_names_pass_through_timelines(tmp_path: Path) -> None:
    frame = FRAME.drop(columns=["age_after", "next_allowed"]).assign(last=[False, True, True])
    columns = {key: value for key, value in COLUMNS.items() if not key.startswith(("next", "possible"))}
    source = write_frame(frame, tmp_path / "events.parquet")
    run_timeline(timeline_config(tmp_path, source, {"columns": columns | {"terminal": "last"}}))
    copy = copy_of(f"{tmp_path}/train", tmp_path, {})
    assert ({*map(str, copy.state_ids)}, sorted(copy.reward.tolist())) == ({"age", "income"}, [0, 1, 2])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rewards": "clicked"}, r"columns.rewards: expected one of mdp_id, .*, got 'rewards'"),
        ({"reward": ["a", "b"]}, r"columns.reward: expected the name of one column, got \['a', 'b'\]"),
        ({"state_features": ["a", "b", "a"]}, "columns.state_features: expected each column once, got 'a' twice"),
        ({"mdp_id": ""}, "columns.mdp_id: expected names of columns, got ''"),
        ({"mdp_id": 3}, "columns.mdp_id"),
        ({"mdp_id": None}, "columns.mdp_id: expected string or list of strings or objects or object, got null"),
        ({"state_features": []}, r"columns.state_features: expected names of columns, got \[\]"),
        ({"state_features": [["age"]]}, "columns.state_features: expected string or list of strings"),
        (["age"], r'columns: expected an object, got \["age"\]'),
        (3, "columns: expected an object, got 3"),
    ],
)
def test_names_that_no_log_can_have(columns: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(ConvertConfig, {"data_path": "a.csv", "output_path": "b.csv", "columns": columns})
    with pytest.raises(ConfigError, match=message):
        read_log("a.csv", columns)


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that frames given in the place of a path are written to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "reagent-lite/frames"


def test_a_frame_in_the_place_of_a_path(tmp_path: Path, frames: Path) -> None:
    for days, name in ((31, "unused"), (29, "used")):
        (frames / name).mkdir(parents=True)
        os.utime(frames / name, (0, time.time() - days * 86_400))
    frame = FRAME.assign(group=pd.cut(FRAME["age"], 2))
    for log in (frame, pa.table(frame)):
        assert sorted(copy_of(log, tmp_path, COLUMNS).reward.tolist()) == [0, 1, 2]
    (file,) = frames.glob("*/*.arrow")
    assert {folder.name for folder in frames.iterdir()} == {"used", file.parent.name}


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (3, "got int: Expected"),
        (FRAME.assign(income=[10**30, 1, 2]), "got DataFrame: Python int too large"),
        (FRAME["age"], "got Series: Cannot import"),
        (FRAME.assign(age=["old", 1, 2]), "got DataFrame: .*; Conversion failed for column a"),
        (polars.LazyFrame({"mdp_id": ["1"]}), r"got a LazyFrame of polars.*collect\(\)"),
    ],
    ids=range(5),
)
def test_what_is_no_frame_is_refused(tmp_path: Path, frames: Path, log: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"data: expected .*{words}"):
        copy_of(log, tmp_path, COLUMNS)


LEFT, RIGHT = {"7": 1.0, "size": 2.0}, {"7": 0.5, "size": None}
CANDIDATES = pa.Table.from_pylist([
    {"mdp_id": "a", "sequence_number": n, "state_features": {"age": float(n), "3": None if n else 1.0}, "action": LEFT,
     "reward": 1.0, "possible_actions": [RIGHT, LEFT][n:], "next_state_features": {"age": n + 1.0, "3": 2.0},
     "possible_next_actions": [LEFT] * (1 - n), "action_probability": 0.5}
    for n in range(2)
])  # fmt: skip


@pytest.mark.parametrize(
    ("log", "actions", "columns"),
    [(pa.table(FRAME.assign(shown=FRAME["shown"].astype("category"))), ("left", "right"), COLUMNS),
     (CANDIDATES, None, {})],
    ids=["named", "candidates"],
)  # fmt: skip
def test_frames_of_pandas_polars_and_arrow_make_equal_copies(
    log: pa.Table, actions: tuple[str, ...] | None, columns: dict[str, Any], tmp_path: Path, frames: Path
) -> None:
    made = []
    for number, frame in enumerate((log, log.to_pandas(), polars.from_arrow(log))):
        folder = tmp_path / f"{number}"
        prepare_training_copy(Log(path_of(frame), actions=actions, directory=str(folder), columns=columns))
        made.append(({file.name: file.read_bytes() for file in folder.rglob("*.npy")}, read_log(frame, columns)))
    assert len(made[0][0]) > 10
    assert made[1] == made[2] == made[0]
