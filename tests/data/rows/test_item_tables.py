"""Item tables: what is read, what is refused, and logs that name items against logs that repeat their features."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.event_files import write_events, write_frame
from helpers.items import ITEMS, NAMES, events, repeated, transitions
from helpers.logs import Row, write_lines, written

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.copy.copy_summaries import content_of
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.log_features import summarize_log
from reagent_lite.data.formats.arrow import BLOCK_VALUES
from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.item_files import read_items
from reagent_lite.errors import DataError
from reagent_lite.feature_ids import FeatureId
from reagent_lite.item_table import ItemTable

PRICE = FeatureId("price")


def items_of(folder: Path, rows: Sequence[Row]) -> ItemTable:
    return read_items(str(write_lines(folder / "items.jsonl", rows)), "item_id")


def copied(folder: Path, log: Path, items: ItemTable | None) -> TrainingCopy:
    return prepare_training_copy(Log(str(log), directory=str(folder), items=items))


def test_a_table_has_ids_in_its_order_and_features_ascending_and_comes_back_from_json(tmp_path: Path) -> None:
    items = items_of(tmp_path, ITEMS)
    for table in (items, ItemTable.of_json(items.json())):
        assert (table.ids, table.feature_ids, table.sha256) == (NAMES, (7, PRICE), items.sha256)
        assert table.values.tolist() == np.float32([[0.25, 2], [0.1, 1], [-0.5, 3.5], [1.5, 0.5], [0.75, 4]]).tolist()
    assert NAMES == ("tea", "milk", "bread", "12", "jam")
    assert items.rows(["jam", 12, "12", "beer", None]).tolist() == [4, 3, 3, -1, -1]
    assert json.loads(items.json())["feature_ids"] == [7, "price"]
    assert items_of(tmp_path / "other", [*ITEMS, {"item_id": "beer", "price": 1.5, "7": 0.0}]).sha256 != items.sha256


@pytest.mark.parametrize("extension", ["csv", "parquet", "feather", "jsonl"])
def test_every_format_gives_the_same_table(extension: str, tmp_path: Path) -> None:
    frame = pd.DataFrame(ITEMS)[["7", "item_id", "price"]].astype({"item_id": str}).rename(columns={"item_id": "sku"})
    if extension == "csv":
        frame.insert(0, "", range(5))  # the row labels of pandas, which are no feature
    read = read_items(str(write_frame(frame, tmp_path / f"items.{extension}")), "sku")
    assert (read.ids, read.feature_ids, read.sha256) == (NAMES, (7, PRICE), items_of(tmp_path, ITEMS).sha256)


@pytest.mark.parametrize(("name", "text", "words"), [
    *(("items.jsonl", "".join(json.dumps(item) + "\n" for item in (*ITEMS, *others)), words) for others, words in [
        ([{"item_id": "milk", "price": 1.0, "7": 0.0}],
         "items.jsonl:6: expected each id once, got 'milk' again, first at {folder}/items.jsonl:2"),
        ([{"item_id": "12", "price": 1.0, "7": 0.0}],
         "items.jsonl:6: expected each id once, got '12' again, first at {folder}/items.jsonl:4"),
        ([{"item_id": "beer", "price": 1.0}],
         "items.jsonl:6: expected a number for every feature of the item table, got no 7"),
        ([{"item_id": "beer"}],
         "items.jsonl:6: expected a number for every feature of the item table, got no 7, price"),
        ([{"item_id": "beer", "price": None, "7": 1.0}, {"item_id": "rum", "7": 1.0}],
         "items.jsonl:6: expected a number for every feature of the item table, got no price; 1 more row like it: 7"),
        ([{"price": 1.0, "7": 0.0}], "items.jsonl:6: expected an id in item_id, got null"),
        ([{"item_id": 1.5, "price": 1.0, "7": 0.0}], "expected a string or an integer in item_id, got 1.5"),
        ([{"item_id": "beer", "price": "low", "7": 0.0}],
         "items.jsonl:6: expected a number for 'price' in the item table, as in other rows, got \"low\""),
        ([{"item_id": "beer", "price": 1e39, "7": 0.0}],
         "items.jsonl:6: expected finite numbers in the item table, got inf for 'price' as float32"),
    ]),
    ("items.csv", "item_id,price\n", "expected an item table with a row for each item, got none in 1 file"),
    ("items.csv", "item_id\na\nb\n", "expected columns of features besides 'item_id', got none"),
    ("items.csv", "sku,price\na,1\n", "expected a column 'item_id' with the ids of the items, got columns price, sku"),
    ("items.csv", "item_id,color\na,red\nb,blue\nc,7\n", "items.csv:4: expected a string for 'color'"),
])  # fmt: skip
def test_bad_tables_are_refused_with_their_line(name: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(words.format(folder=tmp_path))):
        read_items(str(written(tmp_path / name, text)), "item_id")


def test_texts_of_items_are_categories(tmp_path: Path) -> None:
    rows = [{**item, "kind": kind} for item, kind in zip(ITEMS, ("hot", "cold", "food", "food", "food"), strict=True)]
    items = items_of(tmp_path, rows)
    copy = copied(tmp_path, write_lines(tmp_path / "log.jsonl", events()), items)
    for texts in (*(of_code.values() for of_code in items.texts.values()), *copy.levels["action"].values()):
        assert sorted(texts) == ["cold", "food", "hot"]


@pytest.mark.parametrize("made", [list, transitions], ids=["events", "transitions"])
@pytest.mark.parametrize("form", ["jsonl", "struct.parquet", "csv"])
def test_ids_and_repeated_features_are_the_same_rows(made: Any, form: str, tmp_path: Path) -> None:
    rows = json.dumps(made(events()))
    ids = re.sub(r"\b12\b(?=[,\]])", '"12"', rows) if "parquet" in form else rows  # a column of Parquet has one type
    by_id, by_features = (
        copied(tmp_path, write_events(logged, tmp_path / name, form), items)
        for name, logged, items in (
            ("ids", json.loads(ids), items_of(tmp_path, ITEMS)), ("features", made(repeated(events())), None),
        )
    )  # fmt: skip
    assert by_id.action_ids == by_features.action_ids == (7, PRICE)
    assert (len(by_id), content_of(by_id)) == (len(events()), content_of(by_features))


def test_an_unknown_item_is_a_fault_with_its_line(tmp_path: Path) -> None:
    rows = events()
    rows[3] = {**rows[3], "action": "beer"}
    rows[5] = {**rows[5], "possible_actions": [*rows[5]["possible_actions"], "rum"]}
    log = write_lines(tmp_path / "log.jsonl", rows)
    with pytest.raises(DataError) as error:
        copied(tmp_path, log, items_of(tmp_path, ITEMS))
    expected = "expected an id of the 5 items in the item table, in"
    assert [str(problem) for problem in error.value.problems[:2]] == [
        f'{log}:4: {expected} action, got "beer". Add the item to the table',
        f'{log}:6: {expected} possible_actions, got "rum". Add the item to the table',
    ]
    with pytest.raises(DataError, match=r"the item table, data\.items"):
        copied(tmp_path, log, None)
    texts = [{**row, "possible_actions": str(row["possible_actions"])} for row in events()]
    with pytest.raises(DataError, match=r"1: expected a list of ids of items in .*\. Write \["):
        copied(tmp_path, write_lines(tmp_path / "texts.jsonl", texts), items_of(tmp_path, ITEMS))


def test_integers_in_csv_columns_with_gaps_are_ids(tmp_path: Path) -> None:
    items = items_of(tmp_path, [{**item, "item_id": number} for number, item in enumerate(ITEMS)])
    number_of = {name: number for number, name in enumerate(NAMES)} | {12: 3, None: None}
    rows = [
        {**row, **{name: number_of[row[name]] for name in ("action", "next_action")},
         **{name: [number_of[item] for item in row[name]] for name in ("possible_actions", "possible_next_actions")}}
        for row in transitions(events())
    ]  # fmt: skip
    log = write_events(rows, tmp_path / "log", "csv")
    assert ",3.0," in (log / "events-0.csv").read_text()
    features = write_lines(tmp_path / "features.jsonl", transitions(repeated(events())))
    assert content_of(copied(tmp_path, log, items)) == content_of(copied(tmp_path, features, None))


def test_another_table_makes_another_copy(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", events())
    first = copied(tmp_path / "copy", log, items_of(tmp_path, ITEMS))
    assert copied(tmp_path / "copy", log, items_of(tmp_path, ITEMS)).folder == first.folder
    cheaper = items_of(tmp_path, [{**item, "price": item["price"] / 2} for item in ITEMS])
    second = copied(tmp_path / "copy", log, cheaper)
    assert second.folder != first.folder
    assert second.candidates[:, 1].tolist() == (first.candidates[:, 1] / 2).tolist()


def test_statistics_of_candidates_are_those_of_repeated_features(tmp_path: Path) -> None:
    by_id, by_features = (
        summarize_log(
            Log(str(write_lines(tmp_path / name, rows)), items=items).files,
            NormParams(cols_to_norm=("state_features", "action")),
        )
        for name, rows, items in (
            ("a.jsonl", events(), items_of(tmp_path, ITEMS)),
            ("b.jsonl", repeated(events()), None),
        )
    )
    assert (by_id.parametric, str(by_id.columns)) == (True, str(by_features.columns))


@pytest.mark.parametrize("extension", ["parquet", "feather"])
def test_blocks_are_small_where_ids_stand_for_many_features(extension: str, tmp_path: Path) -> None:
    items = ItemTable(ids=("a",), feature_ids=tuple(range(1000)), values=np.ones((1, 1000), np.float32))
    frame = pd.DataFrame({"action": ["a"] * 600, "possible_actions": [["a"] * 10] * 600, "reward": [1.0] * 600})
    log = str(write_frame(frame, tmp_path / f"log.{extension}"))
    rows, without_items = (
        list(read_blocks(Log(log, items=table).files, lambda block: block.table.num_rows)) for table in (items, None)
    )
    assert (sum(rows), without_items) == (600, [600])
    assert max(rows) * 10 * 1000 <= BLOCK_VALUES
