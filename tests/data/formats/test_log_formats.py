"""The same rows in every format give the same training copy, and the copy has what the rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from oracles.event_files import FORMATS, data_of, small_blocks
from oracles.transitions import check_copy, check_same

from reagent_lite.data.copy.first_look import first_rows
from reagent_lite.data.copy.training_copy import prepare_training_copy

Row = dict[str, Any]
NAMES = ("left", "right")
NUM = 400


def discrete_rows() -> list[Row]:
    """Episodes of 5 rows in disorder; a feature that is absent now and then; names that CSV has to quote."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for number in rng.permutation(NUM).tolist():
        episode, step = divmod(number, 5)
        ends = step == 4
        rows.append({
            "mdp_id": f'é"{episode},\n{episode}', "sequence_number": step * 10,
            "state_features": {"0": number / 8, "7": -0.0} if number % 3 else {"7": 1e-20},
            "next_state_features": {} if ends else {"0": (number + 1) / 8, "7": 0.1},
            "action": NAMES[number % 2], "next_action": None if ends else NAMES[(number + 1) % 2],
            "possible_actions": ["left", "right"], "possible_next_actions": [] if ends else ["left", "right"],
            "reward": float(np.float32(rng.normal())), "time_diff": 10, "action_probability": 0.25 + number % 2 / 2,
            "metrics": {"clicks": number / 2}, "terminal": ends, "truncated": False,
        })  # fmt: skip
    return rows


def parametric_rows() -> list[Row]:
    rows = []
    for row in discrete_rows():
        left, right = {"1": 1.0, "2": 0.0}, {"1": 0.0, "2": row["reward"]}
        maps = {"left": left, "right": right, None: {}}
        rows.append(row | {
            "action": maps[row["action"]], "next_action": maps[row["next_action"]],
            "possible_actions": [left, right],
            "possible_next_actions": [maps[name] for name in row["possible_next_actions"]],
        })  # fmt: skip
    return rows


FORMS = (*FORMATS, "csv.gz", "csv.bz2", "csv.zst", "dense.csv", "stream.arrow", "feather")


@pytest.mark.parametrize("kind", ["discrete", "parametric"])
def test_every_format_gives_the_same_copy(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = discrete_rows() if kind == "discrete" else parametric_rows()
    actions = NAMES if kind == "discrete" else None
    found = {}
    for number, form in enumerate(FORMS):
        if number == 1:
            small_blocks(monkeypatch, 4000, 9000)
        file = tmp_path / (f"x.{form}" if form != "jsonl.gz" else "X.JSON.GZ")
        file.write_bytes(data_of(rows, form))
        found[form] = prepare_training_copy(str(file), actions=actions, directory=str(tmp_path / "copies"))
    check_copy(found["jsonl"], rows, actions)
    for copy in found.values():
        assert (len(copy), copy.notes) == (NUM, ())
        check_same(found["jsonl"], copy)
    # a CSV record that spans three lines begins in the first of them; the header is line 1
    position = np.array(found["jsonl"].origin_line) - 1
    np.testing.assert_array_equal(np.array(found["csv"].origin_line), 2 + 2 * position)


def test_urls_and_formats_that_mix_in_a_folder(tmp_path: Path) -> None:
    """A folder's shards may be of several formats: rows 0 to 199 of one, 200 to 399 of the other."""
    rows, filesystem = discrete_rows(), fsspec.filesystem("memory")
    urls = [f"memory://formats/{name}" for name in ("json", "mixed", "packed")]
    filesystem.pipe("/formats/json/x.jsonl", data_of(rows, "jsonl"))
    filesystem.pipe("/formats/mixed/a.csv", data_of(rows[:200], "dense.csv"))
    filesystem.pipe("/formats/mixed/b.arrow", data_of(rows[200:], "stream.arrow"))
    filesystem.pipe("/formats/packed/x.csv.gz", data_of(rows, "csv.gz"))
    seen = first_rows(urls[2], NAMES)
    assert seen.state_ids == (0, 7)
    assert 0 < seen.rows <= NUM
    one, *others = (prepare_training_copy(url, actions=NAMES, directory=str(tmp_path)) for url in urls)
    for other in others:
        check_same(one, other)
