"""Dates, lists, amounts and mapped values: the same raw value is the same feature wherever it is read."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.bundles import linear_bundle
from helpers.commands import scored
from helpers.logs import write_lines
from serving.conftest import Open

from reagent_lite.config.column_names import features_of
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import BundleError, DataError
from reagent_lite.feature_ids import FeatureId

COLUMNS: dict[str, Any] = {
    "state_features": [
        "age",
        {"column": "joined", "kind": "time"},
        {"column": "day", "kind": "date", "format": "%d.%m.%Y"},
        {"column": "tags", "kind": "list", "levels": ["a", "b"]},
        {"column": "income", "kind": "currency", "unit": "$"},
        {"column": "rent", "kind": "currency", "unit": "€", "decimal": ","},
        {"column": "rate", "kind": "percent"},
        {"column": "plan", "map": {"low": 1, "high": 2.5, "-": None}},
    ]
}
FEATURES = ("age", *sorted(features_of(COLUMNS["state_features"][1:]), key=FeatureId))
IDS = tuple(map(FeatureId, FEATURES))
WEIGHT = np.stack((np.arange(1.0, len(IDS) + 1), np.zeros(len(IDS))))
ACTIONS = ("mail", "call")
NONE: dict[str, Any] = {}
# 2026-01-31 is a Saturday, 2026-02-01 a Sunday
READ: list[tuple[str, Any, dict[str, float]]] = [
    ("joined", "2026-01-31T10:30", {"joined_weekday": 5, "joined_hour": 10}),
    ("joined", "2026-02-01 23:05:59+02:00", {"joined_weekday": 6, "joined_hour": 23}),
    ("joined", "2026-01-31", {"joined_weekday": 5}),
    ("joined", None, NONE),
    ("day", "01.02.2026", {"day_weekday": 6}),
    ("tags", "b| a", {"tags=a": 1, "tags=b": 1}),
    ("tags", "c", {"tags=a": 0, "tags=b": 0}),
    ("tags", '["b", "z"]', {"tags=a": 0, "tags=b": 1}),
    ("income", "$1,234.50", {"income": 1234.5}),
    ("income", "-$5", {"income": -5}),
    ("income", "($2.25)", {"income": -2.25}),
    ("income", "7", {"income": 7}),
    ("rent", "1.234,50 €", {"rent": 1234.5}),
    ("rent", "\u22121 234 €", {"rent": -1234}),
    ("rate", "12.5 %", {"rate": 0.125}),
    ("plan", "high", {"plan": 2.5}),
    ("plan", "-", NONE),
]
"""(column, raw value, the features that it is)."""
REFUSED: list[tuple[str, Any, str]] = [
    ("joined", "31.01.2026", "a date or time such as 2026-01-31"),
    ("day", "2026-02-01", "a date as %d.%m.%Y"),
    ("income", "5 EUR", "an amount such as 1,234.50 $"),
    ("income", "$1.234,50", "an amount such as"),
    ("income", "$१२", "an amount such as"),
    ("rate", "12", "per cent such as 12.5 %"),
]
ROWS = [{"age": 1.0, column: value, "action": "mail", "reward": row} for row, (column, value, _) in enumerate(READ)]
EXPECTED = np.array([[{"age": 1, **read}.get(name, np.nan) for name in FEATURES] for _, _, read in READ], np.float32)


def states_of(log: Path, tmp_path: Path) -> Any:
    copy = prepare_training_copy(Log(str(log), actions=ACTIONS, columns=COLUMNS, directory=str(tmp_path / "copies")))
    order = np.argsort(copy.reward[:])
    names = [str(name) for name in copy.state_ids]
    return copy.state[:][order][:, [names.index(name) for name in FEATURES]]


def test_one_table(tmp_path: Path, opened: Open) -> None:
    """Training from four formats, bundle, frame, score and server."""
    frame = pd.DataFrame(ROWS)
    write_lines(tmp_path / "log.jsonl", ROWS)
    frame.to_csv(tmp_path / "log.csv", index=False)
    frame.to_parquet(tmp_path / "log.parquet")
    for name in ("log.jsonl", "log.csv", "log.parquet"):
        np.testing.assert_array_equal(states_of(tmp_path / name, tmp_path), EXPECTED, err_msg=name)
    model = linear_bundle(tmp_path / "model", WEIGHT, ACTIONS, IDS, columns=COLUMNS)
    worker = opened(model)
    bundle = worker.model.bundle
    states = [{name: value for name, value in row.items() if name not in ("action", "reward")} for row in ROWS]
    np.testing.assert_array_equal(bundle.states(states), EXPECTED)
    values = np.nan_to_num(EXPECTED) @ WEIGHT[0]
    given = frame.drop(columns=["action", "reward"])
    np.testing.assert_allclose(bundle.predict(given).q[:, 0], values, rtol=1e-5)
    np.testing.assert_allclose(bundle.predict(pa.Table.from_pandas(given)).q[:, 0], values, rtol=1e-5)
    _, table = scored(model, tmp_path / "log.csv", tmp_path / "scores.parquet", policy="greedy", all_scores=True)
    q = [row["mail"] for row in table["scores"].to_pylist()]
    np.testing.assert_allclose(q, values, rtol=1e-5)
    worker.post("/decide", rows=[{"state_features": state} for state in states])
    worker.post("/decide", rows=states)  # by the log's own names
    logged = [row["state_features"] for row in worker.waiting_rows()]
    np.testing.assert_array_equal(bundle.states(logged), np.concatenate((EXPECTED, EXPECTED)))


@pytest.mark.parametrize(("column", "value", "expected"), REFUSED)
def test_other_values_are_refused_with_column_row_and_value(
    column: str, value: str, expected: str, tmp_path: Path, opened: Open
) -> None:
    absent = dict.fromkeys(column for column, _, _ in READ)
    rows = [absent | row for row in (*ROWS[:3], {**ROWS[0], column: value})]
    log = write_lines(tmp_path / "log.jsonl", rows)
    with pytest.raises(DataError) as error:
        states_of(log, tmp_path)
    problem = error.value.problems[0]
    assert problem.where == f"{log}:4"
    assert problem.expected.startswith(expected)
    assert problem.expected.endswith(f"in {column}")
    assert repr(value) in problem.got
    worker = opened(linear_bundle(tmp_path / "model", WEIGHT, ACTIONS, IDS, columns=COLUMNS))
    with pytest.raises(BundleError, match=rf"states\[0\], column {column}: expected"):
        worker.model.bundle.states([{column: value}])
    status, refusal = worker.refusal("/decide", rows=[{"state_features": {"age": 1}}, {"age": 1, column: value}])
    assert (status, refusal["where"]) == (422, f"body.rows.1, column {column}")


def test_types_of_arrow(tmp_path: Path) -> None:
    """Times with zone and nanoseconds, dates, lists, dictionaries and decimals."""
    zone = pa.timestamp("ns", "America/New_York")
    table = pa.table(
        {
            "joined": pa.array([datetime(2026, 1, 31, 3), None], pa.timestamp("us", "UTC")).cast(zone),
            "tags": pa.array([["a"], []]),
            "income": pa.array(["$3", None]).dictionary_encode(),
            "day": pa.array([datetime(2026, 2, 1), None], pa.date32()),
            "rent": pa.array([1, 2]),
            "plan": pa.array(["low", "-"]),
            "rate": pa.array(["1 %", "2 %"], pa.large_string()),
            "age": [1, 2],
            "action": ["mail", "call"],
            "reward": [0, 1],
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    # 03:00 in UTC is 22:00 of Friday in New York
    first = {"joined_weekday": 4, "joined_hour": 22, "day_weekday": 6, "tags=a": 1, "tags=b": 0, "income": 3, "rent": 1}
    first |= {"rate": 0.01, "plan": 1, "age": 1}
    second = {"tags=a": 0, "tags=b": 0, "rent": 2, "rate": 0.02, "age": 2}
    expected = [[row.get(name, np.nan) for name in FEATURES] for row in (first, second)]
    np.testing.assert_allclose(states_of(tmp_path / "log.parquet", tmp_path), expected)


def test_rewards_and_propensities_in_texts(tmp_path: Path) -> None:
    rows = [
        {"age": 1, "action": "mail", "earned": "1.200,50 €", "p": "50 %"},
        {"age": 2, "action": "Mail", "earned": "-3 €", "p": "25 %"},
    ]
    columns = {
        "reward": {"column": "earned", "kind": "currency", "unit": "€", "decimal": ","},
        "action_probability": {"column": "p", "kind": "percent"},
        "action": {"column": "action", "map": {"Mail": "mail"}},
        "state_features": ["age"],
    }
    log = write_lines(tmp_path / "log.jsonl", rows)
    copy = prepare_training_copy(Log(str(log), actions=ACTIONS, columns=columns, directory=str(tmp_path / "copies")))
    order = np.argsort(-copy.reward[:])
    assert copy.reward[:][order].tolist() == [1200.5, -3]
    assert copy.propensity[:][order].tolist() == [0.5, 0.25]
    assert copy.action[:].tolist() == [0, 0]


def test_the_openapi_names_raw_columns(tmp_path: Path, opened: Open) -> None:
    worker = opened(linear_bundle(tmp_path / "model", WEIGHT, ACTIONS, IDS, columns=COLUMNS))
    schema = json.dumps(worker.client.get("/openapi.json").json()["components"]["schemas"]["StateFeatures"])
    assert '"joined"' in schema
    assert '"joined_hour"' in schema
