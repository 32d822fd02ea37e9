"""Rows of episodes against rows written out by hand; numbers in every format, bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from helpers.cases import cases
from numpy.typing import NDArray

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.formats.format_table import ENCODINGS
from reagent_lite.data.logs import Log
from reagent_lite.data.writing.episode_rows import EpisodeBlock, LogSchema, episode_rows
from reagent_lite.data.writing.table_writers import table_writer
from reagent_lite.errors import DataError

NAMES = ("left", "right")


def floats(values: Any) -> NDArray[np.float32]:
    return np.array(values, np.float32)


TWO = EpisodeBlock(
    mdp_ids=("a", "b"),
    lengths=np.array([2, 1]),
    terminal=np.array([True, False]),
    state=floats([[1, 0.1], [2, -0.0], [3, 1e-20]]),
    action=np.array([0, 1, 1]),
    reward=floats([0.5, 1, -2]),
    propensity=floats([0.95, 0.05, 1]),
    mask=None,
    features=None,
    last_state=floats([[4, 5], [6, 7]]),
    last_mask=None,
    last_features=None,
)
"""Episode a of two rows comes to its end, episode b of one row is cut."""
ONE_CANDIDATE = replace(
    TWO, mask=np.ones((3, 1), bool), action=np.zeros(3, np.int64), features=floats([[[1]], [[2]], [[3]]]),
    last_mask=np.ones((2, 2), bool), last_features=floats([[[4], [5]], [[6], [7]]]),
)  # fmt: skip
"""One candidate in each row and two behind each end, of one feature."""


def written(file: Path, schema: LogSchema, block: EpisodeBlock = TWO) -> Path:
    with table_writer(file) as writer:
        writer.write(episode_rows(block, schema))
    return file


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_events_by_hand(tmp_path: Path) -> None:
    rows = lines(written(tmp_path / "x.jsonl", LogSchema(transitions=False, action_names=NAMES, ds="d1")))
    both = list(NAMES)
    # a's end leads nowhere; b was cut, and what came then is in no other row
    nothing = {"next_state_features": None, "possible_next_actions": None}
    assert rows == [
        {"ds": "d1", "mdp_id": "a", "sequence_number": 0, "state_features": {"0": 1, "1": 0.1}, "action": "left",
         "reward": 0.5, "possible_actions": both, "action_probability": 0.95, "terminal": False, "truncated": False,
         **nothing},
        {"ds": "d1", "mdp_id": "a", "sequence_number": 1, "state_features": {"0": 2, "1": 0}, "action": "right",
         "reward": 1, "possible_actions": both, "action_probability": 0.05, "terminal": True, "truncated": False,
         **nothing},
        {"ds": "d1", "mdp_id": "b", "sequence_number": 0, "state_features": {"0": 3, "1": 1e-20}, "action": "right",
         "reward": -2, "possible_actions": both, "action_probability": 1, "terminal": False, "truncated": True,
         "next_state_features": {"0": 6, "1": 7}, "possible_next_actions": both},
    ]  # fmt: skip
    assert list(rows[0])[:4] == ["ds", "mdp_id", "sequence_number", "state_features"]


LEFT, RIGHT = {"0": -1, "1": 0}, {"0": 1, "1": 0.5}


@cases(
    "block, schema, by_hand",
    {
        # last rows of episodes that were cut alone say what could be done next; a came to its end
        "events of names": (
            replace(TWO, mask=np.ones((3, 2), bool), last_mask=np.array([[1, 1], [1, 0]], bool)),
            LogSchema(transitions=False, action_names=NAMES),
            {"possible_next_actions": [None, None, ["left"]]},
        ),
        "events of candidates": (
            ONE_CANDIDATE,
            LogSchema(transitions=False),
            {
                "possible_next_actions": [None, None, [{"0": 6}, {"0": 7}]],
                "next_state_features": [None, None, {"0": 6, "1": 7}],
            },
        ),
        "choices that close": (
            replace(TWO, mask=np.array([[1, 0], [1, 1], [0, 1]], bool), last_mask=np.array([[1, 1], [1, 0]], bool)),
            LogSchema(transitions=True, action_names=NAMES),
            {
                "possible_actions": [["left"], ["left", "right"], ["right"]],
                "possible_next_actions": [["left", "right"], [], ["left"]],
                "next_action": ["right", None, None],
                "next_state_features": [{"0": 2, "1": 0}, {"0": 4, "1": 5}, {"0": 6, "1": 7}],
                "time_diff": [1, 1, 1],
            },
        ),
        "fixed actions as candidates": (
            TWO,
            LogSchema(transitions=True, action_features=floats([[-1, 0], [1, 0.5]])),
            {
                "action": [LEFT, RIGHT, RIGHT],
                "next_action": [RIGHT, None, None],
                "possible_actions": [[LEFT, RIGHT]] * 3,
                "possible_next_actions": [[LEFT, RIGHT], [], [LEFT, RIGHT]],
            },
        ),
        "candidates that differ": (
            replace(
                TWO,
                action=np.array([2, 0, 1]),
                mask=np.array([[1, 0, 1], [1, 0, 0], [0, 1, 0]], bool),
                # nan of choices that are not there: never read
                features=floats([[[1], [nan], [2]], [[3], [nan], [nan]], [[nan], [4], [nan]]]),
                last_mask=np.array([[1, 1, 1], [0, 1, 1]], bool),
                last_features=floats([[[nan], [nan], [nan]], [[nan], [5], [6]]]),
            ),
            LogSchema(transitions=True),
            {
                "action": [{"0": 2}, {"0": 3}, {"0": 4}],
                "possible_actions": [[{"0": 1}, {"0": 2}], [{"0": 3}], [{"0": 4}]],
                "next_action": [{"0": 3}, None, None],
                "possible_next_actions": [[{"0": 3}], [], [{"0": 5}, {"0": 6}]],
            },
        ),
    },
)
def test_columns_by_hand(tmp_path: Path, block: EpisodeBlock, schema: LogSchema, by_hand: dict[str, list[Any]]) -> None:
    rows = lines(written(tmp_path / "x.jsonl", schema, block))
    assert {name: [row[name] for row in rows] for name in by_hand} == by_hand
    assert "ds" not in rows[0]


def test_a_part_of_a_table_has_its_own_maps_and_lists(tmp_path: Path) -> None:
    table = episode_rows(TWO, LogSchema(transitions=True, action_features=floats([[-1, 0], [1, 0.5]])))
    for name, rows in (("whole.jsonl", table), ("part.jsonl", table.slice(1))):
        with table_writer(tmp_path / name) as writer:
            writer.write(rows)
    assert lines(tmp_path / "part.jsonl") == lines(tmp_path / "whole.jsonl")[1:]


ENDS = [0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 16777216, 0.1, 1 / 3, 1e10, 123456.7]


@pytest.mark.parametrize("suffix", list(ENCODINGS))
def test_every_float32_comes_back_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    """Any bit pattern that is a finite number, and the ends of the range."""
    drawn = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    values = np.append(floats(ENDS), drawn[np.isfinite(drawn)])[:18_000].reshape(-1, 3)
    block = replace(
        TWO, mdp_ids=("a",), lengths=np.array([6000]), terminal=np.array([True]), state=values,
        action=np.arange(6000) % 2, reward=values[:, 0], propensity=np.full(6000, 0.1, np.float32),
        last_state=floats([[0, 0, 0]]),
    )  # fmt: skip
    file = written(tmp_path / f"x{suffix}", LogSchema(transitions=True, action_names=NAMES), block)
    copy = prepare_training_copy(Log(str(file), actions=NAMES, directory=str(tmp_path / "copy")))
    assert (copy.state[:6000].tobytes(), copy.reward.tobytes()) == (values.tobytes(), values[:, 0].tobytes())
    assert (copy.propensity == np.float32(0.1)).all()
    if suffix == ".jsonl":  # what any other JSON reader finds
        assert floats([list(row["state_features"].values()) for row in lines(file)]).tobytes() == values.tobytes()


def duckdb_types(file: Path) -> dict[str, str]:
    """What another reader finds."""
    return {row[0]: row[1] for row in duckdb.sql(f"DESCRIBE SELECT * FROM read_parquet('{file}')").fetchall()}


def test_parquet_has_the_types_of_the_contract(tmp_path: Path) -> None:
    named = written(tmp_path / "n.parquet", LogSchema(transitions=True, action_names=NAMES, ds="d"))
    maps = "MAP(BIGINT, FLOAT)"
    assert duckdb_types(named) == {
        "ds": "VARCHAR", "mdp_id": "VARCHAR", "sequence_number": "BIGINT", "state_features": maps, "action": "VARCHAR",
        "reward": "FLOAT", "possible_actions": "VARCHAR[]", "action_probability": "FLOAT", "next_state_features": maps,
        "next_action": "VARCHAR", "possible_next_actions": "VARCHAR[]", "time_diff": "BIGINT", "terminal": "BOOLEAN",
        "truncated": "BOOLEAN",
    }  # fmt: skip
    mapped = written(tmp_path / "m.parquet", LogSchema(transitions=False, action_features=floats([[-1], [1]])))
    assert {duckdb_types(mapped)[name] for name in ("action", "possible_actions")} == {maps, f"{maps}[]"}


@pytest.mark.parametrize("suffix", list(ENCODINGS))
def test_a_log_appears_whole_or_not_at_all(tmp_path: Path, suffix: str) -> None:
    target, schema = tmp_path / f"x{suffix}", LogSchema(transitions=False, action_names=NAMES)
    with pytest.raises(KeyboardInterrupt), table_writer(target) as writer:  # noqa: PT012
        for _ in range(20):
            writer.write(episode_rows(TWO, schema))
        assert not target.exists()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    before = written(target, schema).read_bytes()
    assert written(target, schema).read_bytes() == before  # the same rows, no time
    with pytest.raises(DataError):
        written(target, schema, replace(TWO, reward=floats([1, np.inf, 1])))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == {target: before}


@pytest.mark.parametrize(("block", "words"), [
    (replace(TWO, reward=floats([1, np.inf, 1])), "reward of episode a: expected finite numbers, got inf"),
    (replace(TWO, state=floats([[1, 2], [3, 4], [5, np.nan]])),
     "state_features of episode b, 1: expected finite numbers, got nan"),
    (replace(TWO, last_state=floats([[1, 2], [np.nan, 4]])), "next_state_features of episode b, 0"),
    (replace(TWO, propensity=floats([np.nan, 1, 1])), "action_probability of episode a"),
    (replace(ONE_CANDIDATE, features=floats([[[1]], [[2]], [[np.nan]]])),
     "possible_actions of episode b, 0, 0: expected finite"),
    (replace(ONE_CANDIDATE, last_features=floats([[[1], [1]], [[np.inf], [1]]])),
     "possible_next_actions of episode b, 0, 0: expected finite"),
])  # fmt: skip
def test_what_is_no_number_is_refused(block: EpisodeBlock, words: str) -> None:
    with pytest.raises(DataError, match=words):
        episode_rows(block, LogSchema(transitions=True, action_names=NAMES if block.features is None else ()))


@pytest.mark.parametrize(
    ("target", "words"), [("x.tsv", r"a name that ends in .jsonl, "), ("file/x.jsonl", "a file that can be written")]
)
def test_where_nothing_can_be_written(tmp_path: Path, target: str, words: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=words):
        written(tmp_path / target, LogSchema(transitions=False, action_names=NAMES))
