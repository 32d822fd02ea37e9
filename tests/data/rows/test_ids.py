"""Ids of episodes and items: one rule in all formats for numbers, their texts, and what is no id."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reagent_lite
from reagent_lite.data.rows.item_files import given_items
from reagent_lite.errors import DataError

SPELLINGS = {
    "7": "7", " 7 ": "7", "7.0": "7", "-3.00": "-3", "-0.0": "0", "9007199254740993.0": "9007199254740993",
    "007": "007", "07.0": "07.0", "7.5": "7.5", "7.0a": "7.0a", "+7": "+7", "7e0": "7e0", "1.0.0": "1.0.0",
    "7.": "7.", "\uff17": "\uff17",
}  # fmt: skip


def read(path: Path) -> list[Any]:
    return reagent_lite.read_log(path, {"state_features": ["x"]}).column("mdp_id").to_pylist()


def table_of(ids: Any) -> dict[str, Any]:
    rows = len(ids)
    return {
        "mdp_id": ids,
        "sequence_number": range(rows),
        "action": [0] * rows,
        "reward": [1.0] * rows,
        "x": range(rows),
    }


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_texts_of_whole_numbers_are_one_id_in_every_format(form: str, tmp_path: Path) -> None:
    rows = [dict(zip(table_of([]), row, strict=True)) for row in zip(*table_of([*SPELLINGS]).values(), strict=True)]
    file = tmp_path / f"log.{form}"
    if form == "csv":
        file.write_text(
            "\n".join(",".join(map(str, row)) for row in ([*rows[0]], *(row.values() for row in rows))) + "\n"
        )
    elif form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    assert read(file) == [*SPELLINGS.values()]


def test_texts_and_numbers_of_json_are_one_id(tmp_path: Path) -> None:
    ids = (7, "7", 7.0, " 7.0", "007", "a", None, "")
    rows = [{"mdp_id": name, "sequence_number": n, "action": 0, "reward": 1, "x": 0.5} for n, name in enumerate(ids)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(tmp_path / "log.jsonl") == ["7", "7", "7", "7", "007", "a", None, None]


@pytest.mark.parametrize(
    ("kind", "exact", "rounded"),
    [(pa.float16(), 2**11 - 1, 2**11), (pa.float32(), 2**24 - 1, 2**24), (pa.float64(), 2**53 - 1, 2**53)],
)  # fmt: skip
def test_floats_that_may_be_rounded_integers_are_no_ids(kind: Any, exact: int, rounded: int, tmp_path: Path) -> None:
    for name, ids in (("exact", [exact, 7]), ("rounded", [7, rounded])):
        values = np.array(ids, kind.to_pandas_dtype())
        pq.write_table(pa.table(table_of(pa.array(values))), tmp_path / f"{name}.parquet")
    assert read(tmp_path / "exact.parquet") == [str(exact), "7"]
    with pytest.raises(DataError, match=r"parquet:2: expected .* in mdp_id, got .*may be a rounded integer"):
        read(tmp_path / "rounded.parquet")


def test_ids_of_an_item_table_with_gaps(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,price\n7.0,1\n8.0,2\n007,3\n")
    items = given_items(str(tmp_path / "items.csv"), "item_id", None)
    assert items is not None
    assert items.ids == ("7", "8", "007")
