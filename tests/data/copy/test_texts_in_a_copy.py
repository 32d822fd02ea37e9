"""Texts as features of logs: the same copy from every format, numbers among texts, many levels, levels of shards."""

import csv
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from oracles.transitions import code_of_text

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.copy.features import summarize_copy
from reagent_lite.data.copy.texts import count_others, require_texts
from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
from reagent_lite.data.features.fitting import fit_columns
from reagent_lite.data.features.log_features import summarize_log
from reagent_lite.data.features.summary import ColumnSummary, Merge
from reagent_lite.data.rows import levels
from reagent_lite.data.stage import data_files
from reagent_lite.data.tables import read_log
from reagent_lite.errors import DataError
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

COLUMNS: Any = {"action": "shown", "reward": "clicked", "state_features": ["age", "country"]}
COUNTRIES = ["DE", "FR", None, "DE", "US", "DE"]
FRAME = pd.DataFrame({"age": [30.5, 40, 50, 60, 70, 80], "country": COUNTRIES, "shown": list("ababab"), "clicked": 1.0})
STATES = [
    {name: value for name, value in (("age", age), ("country", country)) if value is not None}
    for age, country in zip(FRAME["age"], COUNTRIES, strict=True)
]
ACTIONS = ("a", "b")


def copy_of(log: Any, folder: Path, columns: Any = COLUMNS) -> TrainingCopy:
    return prepare_training_copy(log, actions=ACTIONS, directory=str(folder / "copies"), columns=columns)


def maps_of_values() -> pa.Table:
    kind = pa.map_(pa.string(), pa.struct({"number": pa.float32(), "text": pa.string()}))
    values = [
        [(name, {"text" if isinstance(one, str) else "number": one}) for name, one in state.items()] for state in STATES
    ]
    return pa.table({"state_features": pa.array(values, kind), "action": list("ababab"), "reward": [1.0] * 6})


def written(name: str, folder: Path) -> tuple[Any, Any]:
    """The rows of FRAME in a format, and the names of its columns."""
    file = folder / f"log.{name}"
    rows = [{"state_features": one, "action": "ab"[at % 2], "reward": 1.0} for at, one in enumerate(STATES)]
    if name == "csv":
        FRAME.to_csv(file, index=False)
        return file, COLUMNS
    if name == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file, None
    if name == "json cells.csv":
        pd.DataFrame([{**row, "state_features": json.dumps(row["state_features"])} for row in rows]).to_csv(file)
        return file, None
    if name == "parquet":
        pa.parquet.write_table(pa.table(FRAME.astype({"country": "category"})), file)
        return file, COLUMNS
    if name == "struct.parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), file)
        return file, None
    if name == "json":
        text = [json.dumps(row["state_features"]) for row in rows]
        pd.DataFrame(rows).assign(state_features=text).to_parquet(folder / "log.parquet")
        return folder / "log.parquet", None
    frames = {"pandas": FRAME.astype({"country": "category"}), "polars": pl.from_pandas(FRAME)}
    frames["polars categorical"] = frames["polars"].with_columns(pl.col("country").cast(pl.Categorical))
    return (maps_of_values(), None) if name == "map" else (frames[name], COLUMNS)


@pytest.mark.parametrize(
    "name",
    ["csv", "jsonl", "json cells.csv", "parquet", "struct.parquet", "pandas", "polars", "polars categorical", "map"],
)
def test_every_format_has_the_same_codes_and_texts(name: str, tmp_path: Path) -> None:
    copy = copy_of(*written(name, tmp_path)[:1], tmp_path, written(name, tmp_path)[1])
    by_name = {str(one): copy.state[:, column] for column, one in enumerate(copy.state_ids)}
    codes = [np.nan if one is None else code_of_text(one) for one in COUNTRIES]
    np.testing.assert_array_equal(by_name["country"], np.array(codes, np.float32))
    np.testing.assert_array_equal(by_name["age"], FRAME["age"].to_numpy(np.float32))
    texts = {str(feature): counts for feature, counts in copy.levels["state"].items()}
    assert texts == {"country": {"DE": 3, "FR": 1, "US": 1}}


def test_a_table_of_the_log_has_the_texts(tmp_path: Path) -> None:
    table = read_log(written("csv", tmp_path)[0], COLUMNS)
    first, third = (table["state_features"].to_pylist()[row] for row in (0, 2))
    assert first == [("age", {"number": 30.5, "text": None}), ("country", {"number": None, "text": "DE"})]
    assert third == [("age", {"number": 50.0, "text": None})]


def write_cells(file: Path, cells: list[str]) -> Path:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["age", "country", "shown", "clicked"])
        writer.writerows([[1.5, cell, "a", 1] for cell in cells])
    return file


def test_a_number_among_texts_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        copy_of(write_cells(tmp_path / "log.csv", ["DE", "FR", "3", "DE"]), tmp_path)
    (problem,) = error.value.problems
    assert problem.where == f"{tmp_path}/log.csv:4"
    assert (problem.expected, problem.got) == ("a text for 'country' in state_features, as in other rows", "3.0")
    assert problem.todo == "All values of a feature are numbers, or all are texts, which are categories"


def test_a_text_among_numbers_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        copy_of(write_cells(tmp_path / "log.csv", ["1", "cef33", "3", ""]), tmp_path)
    (problem,) = error.value.problems
    assert (problem.where, problem.got) == (f"{tmp_path}/log.csv:3", '"cef33"')
    assert problem.expected == "a number for 'country' in state_features, as in other rows"


def test_words_are_texts_beside_texts_and_numbers_without(tmp_path: Path) -> None:
    copy = copy_of(write_cells(tmp_path / "log.csv", ["true", "nan", "maybe"]), tmp_path)
    assert list(copy.levels["state"].values()) == [{"maybe": 1, "nan": 1, "true": 1}]
    copy = copy_of(write_cells(tmp_path / "flags.csv", ["true", "false", "true"]), tmp_path)
    assert copy.levels["state"] == {}
    assert sorted(copy.state[:, [str(one) for one in copy.state_ids].index("country")].tolist()) == [0, 1, 1]


def test_files_of_one_log_have_one_kind_of_values(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    write_cells(tmp_path / "log" / "a.csv", ["DE", "FR"])
    write_cells(tmp_path / "log" / "b.csv", ["", "7"])
    with pytest.raises(DataError) as error:
        copy_of(tmp_path / "log", tmp_path)
    (problem,) = error.value.problems
    assert problem.where == f"{tmp_path}/log/b.csv:3"
    assert problem.expected == f"a text for feature country, as in {tmp_path}/log/a.csv:2"
    with pytest.raises(DataError, match=r"b\.csv:3: expected a text for feature country, as in"):
        summarize_log(data_files(str(tmp_path / "log"), COLUMNS), NormParams())


def test_prose_is_no_category(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.csv:3: expected categories of at most 200 characters in state_features"):
        copy_of(write_cells(tmp_path / "log.csv", ["DE", "x" * 201]), tmp_path)


def test_metrics_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"state_features": {"0": 1}, "action": "a", "reward": 1, "metrics": {"views": "many"}}\n')
    with pytest.raises(DataError, match=r"log\.jsonl:1: expected a number for 'views' in metrics"):
        copy_of(file, tmp_path, None)


def fitted(summary: ColumnSummary, most: int = 100) -> tuple[FeatureSpec, tuple[str, ...], dict[str, Any]]:
    settings = NormParams(max_unique_enum_values=most)
    found = fit_columns({"state_features": summary}, settings, where="data")["state_features"]
    (feature,) = (one for one in found.spec.features if one.levels)
    return feature, found.notes, found.statistics["features"]["country"]


def shards(tmp_path: Path) -> list[Path]:
    """Two files of 40 and 30 rows with different levels: A 25, B 20, C 15, D 9, E 1 together."""
    cells = [*"A" * 20, *"B" * 5, *"C" * 15], [*"A" * 5, *"B" * 15, *"D" * 9, "E"]
    return [write_cells(tmp_path / f"shard{number}.csv", some) for number, some in enumerate(cells)]


def test_levels_are_the_most_frequent_in_the_order_of_their_texts(tmp_path: Path) -> None:
    whole = write_cells(tmp_path / "whole.csv", [*"E", *"D" * 9, *"B" * 20, *"C" * 15, *"A" * 25])
    copy = copy_of(whole, tmp_path)
    feature, notes, statistics = fitted(summarize_copy(copy, "state_features", NormParams(), 0), most=3)
    assert (feature.feature_type, feature.levels) == ("ENUM", ("A", "B", "C"))
    assert feature.possible_values == tuple(float(code_of_text(one)) for one in "ABC")
    assert statistics["levels"] == {"A": 25, "B": 20, "C": 15}
    assert statistics["other"] == 10
    assert [one for one in notes if "other" in one] == [
        "data: state_features: feature country: 3 levels (norm_params.max_unique_enum_values), and 2 further texts "
        "that count as other: 14.3% of 70 values"
    ]
    assert {str(one): count for one, count in count_others(copy, "state", spec_of(feature)).items()} == {"country": 10}


def test_other_values_of_candidates_count_in_each_row_that_lists_them(tmp_path: Path) -> None:
    """Seven rows list x, y and z, three list x and z: of the levels x and z, y is other in seven rows."""
    lists = [["x", "y", "z"]] * 7 + [["x", "z"]] * 3
    rows = [
        {
            "state_features": {"age": 1.0},
            "action": {"country": kinds[0]},
            "possible_actions": [{"country": kind} for kind in kinds],
            "reward": 1.0,
        }
        for kinds in lists
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    copy = prepare_training_copy(str(file), actions=None, directory=str(tmp_path / "copies"))
    feature, _, _ = fitted(summarize_copy(copy, "action", NormParams(), 0), most=2)
    assert feature.levels == ("x", "z")
    assert list(count_others(copy, "action", spec_of(feature)).values()) == [7]


def spec_of(feature: FeatureSpec) -> NormalizationSpec:
    return NormalizationSpec.ordered({feature.feature_id: feature})


@pytest.mark.parametrize("most", [2, 3, 100])
def test_shards_with_different_levels_give_what_all_rows_give(most: int, tmp_path: Path) -> None:
    files = shards(tmp_path)
    whole = tmp_path / "whole.csv"
    lines = [file.read_text().splitlines(keepends=True) for file in files]
    whole.write_text("".join([*lines[1], *lines[0][1:]]))
    settings = NormParams(max_unique_enum_values=most)
    merge = Merge(settings.num_samples, most)
    for file in files:
        own = summarize_copy(copy_of(file, tmp_path), "state_features", settings, 0)
        merge.add(ColumnSummary.from_bytes(own.to_bytes()))
    together = fitted(merge.summary(), most)[0]
    assert together == fitted(summarize_copy(copy_of(whole, tmp_path), "state_features", settings, 0), most)[0]
    log = summarize_log(data_files(str(whole), COLUMNS), settings).columns["state_features"]
    assert together == fitted(log, most)[0]
    assert together.levels == tuple("ABCDE"[:most])


def test_numerals_as_texts_are_a_category_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    row = '{"state_features": {"country": "%d,5"}, "action": "a", "reward": 1}\n'
    file.write_text("".join(row % (number % 2) for number in range(40)))
    feature, notes, _ = fitted(summarize_copy(copy_of(file, tmp_path, None), "state_features", NormParams(), 0))
    assert feature.levels == ("0,5", "1,5")
    assert any("all of them look like numbers" in note for note in notes)


def test_an_override_cannot_make_a_number_of_a_text(tmp_path: Path) -> None:
    summary = summarize_copy(copy_of(shards(tmp_path)[0], tmp_path), "state_features", NormParams(), 0)
    settings = NormParams(feature_overrides={"country": "CONTINUOUS"})
    with pytest.raises(DataError, match="feature country: expected ENUM, as its values are texts, got the override"):
        fit_columns({"x": summary}, settings, where="data")


def test_a_normalization_of_numbers_refuses_texts_with_their_line_and_the_other_way_round(tmp_path: Path) -> None:
    copy = copy_of(write_cells(tmp_path / "log.csv", ["", "DE", "FR"]), tmp_path)
    age, country = sorted(copy.state_ids, key=lambda one: str(one) == "country")
    numbers = {one: FeatureSpec(feature_id=one, feature_type=FeatureType.CONTINUOUS) for one in (age, country)}
    with pytest.raises(DataError) as error:
        require_texts(copy, "state", NormalizationSpec.ordered(numbers), "norm.json")
    (problem,) = error.value.problems
    assert (problem.where, problem.got) == (f"{tmp_path}/log.csv:3", "a text")
    assert problem.expected == "a number for feature country, as norm.json has parameters for"
    texts = {
        one: FeatureSpec(feature_id=one, feature_type=FeatureType.ENUM, possible_values=(1.0,), levels=("x",))
        for one in (age, country)
    }
    with pytest.raises(DataError, match=r"log\.csv:2: expected a text for feature age, as norm.json .* got a number"):
        require_texts(copy, "state", NormalizationSpec.ordered(texts), "norm.json")


def test_many_levels_take_bounded_memory_and_time(tmp_path: Path) -> None:
    rows = 300_000
    file = tmp_path / "log.parquet"
    users = pa.array([f"user {number}" for number in range(rows)])
    often = pa.array(["often" if number % 4 == 0 else None for number in range(rows)])
    table = pa.table({"country": pa.compute.coalesce(often, users), "age": np.arange(rows) % 50 / 2,
                      "shown": pa.array(["a"] * rows), "clicked": np.ones(rows)})  # fmt: skip
    pa.parquet.write_table(table, file)
    tracemalloc.start()
    start = time.process_time()
    copy = copy_of(file, tmp_path)
    feature, notes, statistics = fitted(summarize_copy(copy, "state_features", NormParams(), 0), most=10)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "often" in feature.levels
    assert statistics["levels"]["often"] == rows / 4
    # the other nine are seen once, or twice where two of 225 000 texts have one code
    assert 18 >= rows - rows / 4 - statistics["other"] >= 9
    assert any("65,536 or more texts that count as other: 75.0%" in note for note in notes)
    assert len(copy.levels["state"][feature.feature_id]) == levels.MOST_LEVELS
    assert peak < 300e6
    assert seconds < 30  # 3 s, several times as long with tracemalloc
