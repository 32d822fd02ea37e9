"""Texts as features of logs: the same copy from every format, numbers among texts, many levels, levels of shards."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.event_files import small_blocks, write_frame
from helpers.logs import write_lines
from helpers.summaries import spec_of
from helpers.transitions import code_of_text

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.copy.feature_summaries import summarize_copy
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.texts import count_others, require_texts
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.column_fits import Fitted, fit_columns
from reagent_lite.data.features.log_features import summarize_log
from reagent_lite.data.features.summary import ColumnSummary, Merge
from reagent_lite.data.logs import Log
from reagent_lite.data.rows import levels
from reagent_lite.data.tables import read_log
from reagent_lite.errors import DataError
from reagent_lite.types import FeatureSpec, FeatureType

COLUMNS: Any = {"action": "shown", "reward": "clicked", "state_features": ["age", "country"]}
COUNTRIES = ["DE", "FR", None, "DE", "US", "DE"]
CODES = [np.nan if country is None else float(code_of_text(country)) for country in COUNTRIES]
FRAME = pd.DataFrame({"age": [30.5, 40, 50, 60, 70, 80], "country": COUNTRIES, "shown": list("ababab"), "clicked": 1.0})
STATES = [
    {name: value for name, value in (("age", age), ("country", country)) if value is not None}
    for age, country in zip(FRAME["age"], COUNTRIES, strict=True)
]


def copy_of(log: Any, folder: Path, columns: Any = COLUMNS) -> TrainingCopy:
    return prepare_training_copy(Log(log, actions=("a", "b"), directory=str(folder / "copies"), columns=columns))


ROWS = [{"state_features": state, "action": "ab"[at % 2], "reward": 1.0} for at, state in enumerate(STATES)]
MAPS = pa.table({
    "state_features": pa.array(
        [[(name, {"text" if isinstance(value, str) else "number": value}) for name, value in state.items()]
         for state in STATES],
        pa.map_(pa.string(), pa.struct({"number": pa.float32(), "text": pa.string()})),
    ),
    "action": list("ababab"), "reward": [1.0] * 6,
})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "write", "columns"),
    [
        ("columns.csv", lambda file: FRAME.to_csv(file, index=False), COLUMNS),
        ("columns.parquet", lambda file: FRAME.astype({"country": "category"}).to_parquet(file), COLUMNS),
        ("columns.feather", lambda file: FRAME.astype({"country": "category"}).to_feather(file), COLUMNS),
        ("rows.jsonl", lambda file: write_lines(file, ROWS), None),
        (
            "cells.csv",
            lambda file: pd.DataFrame(
                [{**row, "state_features": json.dumps(row["state_features"])} for row in ROWS]
            ).to_csv(file),
            None,
        ),
        ("structs.parquet", lambda file: pq.write_table(pa.Table.from_pylist(ROWS), file), None),
        ("maps.parquet", lambda file: pq.write_table(MAPS, file), None),
    ],
)
def test_every_format_has_the_same_codes_and_texts(
    name: str, write: Callable[[Path], object], columns: Any, tmp_path: Path
) -> None:
    write(tmp_path / name)
    copy = copy_of(tmp_path / name, tmp_path, columns)
    by_name = {str(feature): copy.state[:, index].tolist() for index, feature in enumerate(copy.state_ids)}
    np.testing.assert_equal(by_name, {"age": FRAME["age"].tolist(), "country": CODES})
    assert {str(feature): counts for feature, counts in copy.levels["state"].items()} == {
        "country": {"DE": 3, "FR": 1, "US": 1}
    }
    assert read_log(tmp_path / name, columns)["state_features"].to_pylist()[2] == [
        ("age", {"number": 50.0, "text": None})
    ]


def write_cells(file: Path, cells: list[str]) -> Path:
    file.parent.mkdir(exist_ok=True)
    return write_frame(pd.DataFrame({"age": 1.5, "country": cells, "shown": "a", "clicked": 1}), file)


@pytest.mark.parametrize(
    ("files", "where", "expected", "got"),
    [
        ([["DE", "FR", "3", "DE"]], "0.csv:4", "a string for 'country' in state_features", "3.0"),
        ([["1", "cef33", "3", ""]], "0.csv:3", "a number for 'country' in state_features", '"cef33"'),
        ([["DE", "x" * 201]], "0.csv:3", "categories of at most 200 characters in state_features", '"xxx'),
        ([["DE", "FR"], ["", "7"]], "1.csv:3", "a string for feature country, as in .*0.csv:2", "a number"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_its_line(
    files: list[list[str]], where: str, expected: str, got: str, tmp_path: Path
) -> None:
    for number, cells in enumerate(files):
        write_cells(tmp_path / "log" / f"{number}.csv", cells)
    with pytest.raises(DataError, match=f"log/{where}: expected {expected}.*, got {got}"):
        copy_of(tmp_path / "log", tmp_path)
    with pytest.raises(DataError, match=f"log/{where}: expected {expected.partition(',')[0]}"):
        summarize_log(Log(str(tmp_path / "log"), columns=COLUMNS).files, NormParams())
    if len(files) == 1:
        with pytest.raises(DataError, match=f"log/{where}: expected {expected}.*, got {got}"):
            read_log(tmp_path / "log", COLUMNS)


def test_words_are_texts_beside_texts_and_numbers_without(tmp_path: Path) -> None:
    copy = copy_of(write_cells(tmp_path / "log.csv", ["true", "nan", "maybe"]), tmp_path)
    assert list(copy.levels["state"].values()) == [{"maybe": 1, "nan": 1, "true": 1}]
    copy = copy_of(write_cells(tmp_path / "flags.csv", ["true", "false", "true"]), tmp_path)
    assert copy.levels["state"] == {}
    assert sorted(copy.state[:, list(map(str, copy.state_ids)).index("country")].tolist()) == [0, 1, 1]


def summary_of(file: Path, folder: Path, settings: NormParams | None = None) -> ColumnSummary:
    """The states of a file's copy."""
    return summarize_copy(copy_of(file, folder), "state_features", settings or NormParams(), 0)


def fitted(summary: ColumnSummary, most: int = 100) -> Fitted:
    return fit_columns({"x": summary}, NormParams(max_unique_enum_values=most), where="data")["x"]


def category(fit: Fitted) -> FeatureSpec:
    (feature,) = (feature for feature in fit.spec.features if feature.levels)
    return feature


@pytest.mark.parametrize(
    ("cells", "levels", "other", "note"),
    [
        ([*"E", *"D" * 9, *"B" * 20, *"C" * 15, *"A" * 25], {"A": 25, "B": 20, "C": 15}, 10,
         "2 further texts that count as other: 14.3% of 70"),
        (["0,5", "1,5"] * 20, {"0,5": 20, "1,5": 20}, 0, "all of them look like numbers"),
    ],
)  # fmt: skip
def test_levels_are_the_most_frequent_in_the_order_of_their_texts(
    cells: list[str], levels: dict[str, int], other: int, note: str, tmp_path: Path
) -> None:
    copy = copy_of(write_cells(tmp_path / "log.csv", cells), tmp_path)
    fit = fitted(summarize_copy(copy, "state_features", NormParams(), 0), most=3)
    feature, statistics = category(fit), fit.statistics["features"]["country"]
    assert (feature.feature_type, feature.levels) == ("ENUM", tuple(levels))
    assert feature.possible_values == tuple(float(code_of_text(level)) for level in levels)
    assert (statistics["levels"], statistics["other"]) == (levels, other)
    assert note in "".join(fit.notes)
    assert count_others(copy, "state", spec_of(feature)).get(feature.feature_id, 0) == other


def test_other_values_of_candidates_count_in_each_row_that_lists_them(tmp_path: Path) -> None:
    """Seven rows list x, y and z, three list x and z: of the levels x and z, y is other in seven rows."""
    rows = [
        {
            "state_features": {"age": 1.0},
            "action": {"country": "x"},
            "possible_actions": [{"country": kind} for kind in kinds],
            "reward": 1.0,
        }
        for kinds in ["xyz"] * 7 + ["xz"] * 3
    ]
    copy = prepare_training_copy(
        Log(str(write_lines(tmp_path / "log.jsonl", rows)), directory=str(tmp_path / "copies"))
    )
    feature = category(fitted(summarize_copy(copy, "action", NormParams(), 0), most=2))
    assert (feature.levels, [*count_others(copy, "action", spec_of(feature)).values()]) == (("x", "z"), [7])


@pytest.mark.parametrize("most", [2, 3, 100])
def test_shards_with_different_levels_give_what_all_rows_give(most: int, tmp_path: Path) -> None:
    """Two shards of 40 and 30 rows with different levels: A 25, B 20, C 15, D 9, E 1 together."""
    shards = [*"A" * 20, *"B" * 5, *"C" * 15], [*"A" * 5, *"B" * 15, *"D" * 9, "E"]
    settings = NormParams(max_unique_enum_values=most)
    merge = Merge(settings.num_samples, most)
    for number, cells in enumerate(shards):
        of_shard = summary_of(write_cells(tmp_path / f"shard{number}.csv", cells), tmp_path, settings)
        merge.add(ColumnSummary.from_bytes(of_shard.to_bytes()))
    together = category(fitted(merge.summary(), most))
    whole = write_cells(tmp_path / "whole.csv", shards[1] + shards[0])
    log = summarize_log(Log(str(whole), columns=COLUMNS).files, settings).columns["state_features"]
    assert (together, together.levels) == (category(fitted(log, most)), tuple("ABCDE"[:most]))


def test_an_override_cannot_make_a_number_of_a_text(tmp_path: Path) -> None:
    summary = summary_of(write_cells(tmp_path / "log.csv", [*"AB" * 10]), tmp_path)
    with pytest.raises(DataError, match="feature country: expected ENUM, as"):
        fit_columns({"x": summary}, NormParams(feature_overrides={"country": "CONTINUOUS"}), where="data")


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (FeatureSpec(feature_id=0, feature_type=FeatureType.CONTINUOUS),
         r"log\.csv:3: expected a number for feature country"),
        (FeatureSpec(feature_id=0, feature_type=FeatureType.ENUM, possible_values=(1.0,), levels=("x",)),
         r"log\.csv:2: expected a string for feature age"),
    ],
)  # fmt: skip
def test_a_normalization_of_numbers_refuses_texts_with_their_line_and_the_other_way_round(
    feature: FeatureSpec, words: str, tmp_path: Path
) -> None:
    copy = copy_of(write_cells(tmp_path / "log.csv", ["", "DE", "FR"]), tmp_path)
    spec = spec_of(*(replace(feature, feature_id=feature_id) for feature_id in copy.state_ids))
    with pytest.raises(DataError, match=words):
        require_texts(copy, "state", spec, "norm.json")


def test_of_many_levels_the_most_frequent_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every four rows one has the same text, the others one each: 30 are kept, 60 held from block to block."""
    monkeypatch.setattr(levels, "MOST_LEVELS", 30)
    small_blocks(monkeypatch, 2000)
    cells = ["often" if number % 4 == 0 else f"user {number}" for number in range(1000)]
    copy = copy_of(write_cells(tmp_path / "log.csv", cells), tmp_path)
    fit = fitted(summarize_copy(copy, "state_features", NormParams(), 0), most=10)
    feature, statistics = category(fit), fit.statistics["features"]["country"]
    assert 30 <= len(copy.levels["state"][feature.feature_id]) <= 60
    assert (len(feature.levels), statistics["levels"]["often"], statistics["other"]) == (10, 250, 750 - 9)
