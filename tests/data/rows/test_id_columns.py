"""Ids, lists of ids and ids with scores in every form that a log may have them in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.logs import write_lines

from reagent_lite import read_log
from reagent_lite.categories import code_of
from reagent_lite.config import check
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.embedding_config import id_features
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError
from reagent_lite.feature_ids import id_of
from reagent_lite.id_values import IdFeature
from reagent_lite.tasks.convert import convert

FEATURES = (
    IdFeature(id_of("user"), 1, False),
    IdFeature(id_of("seen"), 3, False),
    IdFeature(id_of("rated"), 2, True),
)
VALUES: list[dict[str, Any]] = [
    {"age": 1.0, "user": "u1", "seen": ["a", "b"], "rated": {"x": 0.5}},
    {"age": 2.0, "user": "17", "seen": [], "rated": {"x": -1.0, "y": 2.0}},
    {"age": 3.0, "seen": ["a", "a", "c", "d", "e"], "rated": {}},
    {"age": 4.0, "user": "", "seen": ["9007199254740993"], "rated": {"z": 0.0}},
]


def expected_columns() -> dict[str, list[float]]:
    nan = float("nan")
    a, b, c = map(code_of, "abc")
    x, y, z = map(code_of, "xyz")
    return {
        "user": [code_of("u1"), code_of("17"), nan, code_of("")],
        "seen[0]": [a, nan, a, code_of("9007199254740993")],
        "seen[1]": [b, nan, a, nan],
        "seen[2]": [nan, nan, c, nan],
        "rated[0]": [x, x, nan, z],
        "rated[1]": [nan, y, nan, nan],
        "rated[0] score": [0.5, -1.0, nan, 0.0],
        "rated[1] score": [nan, 2.0, nan, nan],
    }


def rows_of(values: list[Any]) -> list[dict[str, Any]]:
    return [
        {"mdp_id": f"m{number}", "sequence_number": 0, "state_features": state, "action": "L", "reward": 1.0,
         "terminal": True}
        for number, state in enumerate(values)
    ]  # fmt: skip


def copy_of(path: Path, **given: Any) -> TrainingCopy:
    return prepare_training_copy(Log(path, actions=("L", "R"), id_features=FEATURES, **given))


def assert_expected(copy: TrainingCopy) -> None:
    column = {str(name): number for number, name in enumerate(copy.state_ids)}
    state = np.asarray(copy.state[: len(copy)])[np.argsort(copy.origin_line)]
    for name, values in expected_columns().items():
        assert np.array_equal(state[:, column[name]], np.array(values, np.float32), equal_nan=True), name
    assert state[:, column["age"]].tolist() == [1, 2, 3, 4]
    assert column.keys() == {"age", *expected_columns()}
    assert copy.levels["state"] == {}
    assert copy.counts["ids_left_out"] == 2
    assert "2 ids are left out of lists" in " ".join(copy.notes)


def test_json_objects(tmp_path: Path) -> None:
    assert_expected(copy_of(write_lines(tmp_path / "log.jsonl", rows_of(VALUES))))


def test_integers_are_the_texts_of_their_digits(tmp_path: Path) -> None:
    values = [dict(value) for value in VALUES]
    values[1]["user"] = 17
    values[3]["seen"] = [9007199254740993]  # not a float64
    assert_expected(copy_of(write_lines(tmp_path / "log.jsonl", rows_of(values))))


def test_lists_of_pairs(tmp_path: Path) -> None:
    pairs = [
        {**value, "rated": [{"key": key, "value": score} for key, score in value["rated"].items()]} for value in VALUES
    ]
    assert_expected(copy_of(write_lines(tmp_path / "log.jsonl", rows_of(pairs))))


def test_columns_of_parquet(tmp_path: Path) -> None:
    kinds = {"age": pa.float64(), "user": pa.string(), "seen": pa.list_(pa.string()),
             "rated": pa.map_(pa.string(), pa.float32())}  # fmt: skip
    maps = [list(value["rated"].items()) for value in VALUES]
    arrays = {
        name: pa.array(maps if name == "rated" else [value.get(name) for value in VALUES], kind)
        for name, kind in kinds.items()
    }
    others = {name: [row[name] for row in rows_of(VALUES)] for name in ("mdp_id", "sequence_number", "action", "reward",
                                                                        "terminal")}  # fmt: skip
    pq.write_table(pa.table({**arrays, **others}), tmp_path / "log.parquet")
    assert_expected(copy_of(tmp_path / "log.parquet", columns={"state_features": list(kinds)}))


def test_cells_of_csv(tmp_path: Path) -> None:
    lines = ["mdp_id,sequence_number,state_features,action,reward,terminal"]
    for row in rows_of(VALUES):
        cell = json.dumps(row["state_features"]).replace('"', '""')
        lines.append(f'{row["mdp_id"]},0,"{cell}",L,1.0,true')
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    assert_expected(copy_of(tmp_path / "log.csv"))


def test_lists_as_json_in_maps_of_texts_and_numbers(tmp_path: Path) -> None:
    """The log of a server."""
    kind = pa.map_(pa.string(), pa.struct({"number": pa.float32(), "text": pa.string()}))

    def of(value: Any) -> dict[str, Any]:
        text = value if isinstance(value, str) or value is None else json.dumps(value)
        return {"number": value} if isinstance(value, float) else {"text": text}

    states = pa.array([[(name, of(inner)) for name, inner in value.items()] for value in VALUES], kind)
    rows = rows_of(VALUES)
    others = {
        name: [row[name] for row in rows] for name in ("mdp_id", "sequence_number", "action", "reward", "terminal")
    }
    pq.write_table(pa.table({"state_features": states, **others}), tmp_path / "log.parquet")
    assert_expected(copy_of(tmp_path / "log.parquet"))


@pytest.mark.parametrize(
    ("feature", "value", "expected"),
    [
        ("user", 1.5, "an id, a string or an integer, for 'user' in state_features"),
        ("user", {"a": 1.0}, "an id, a string or an integer, for 'user'"),
        ("user", "x" * 201, "ids of at most 200 characters, for 'user'"),
        ("seen", [["a"]], "a list of ids, strings or integers, for 'seen'"),
        ("seen", ["a", None], "a list of ids, strings or integers, for 'seen'"),
        ("rated", {"a": "high"}, "ids with finite scores, {id: score}, for 'rated'"),
        ("rated", ["a"], "ids with finite scores"),
        ("rated", {"a": 1e39}, "ids with finite scores"),
    ],
)
def test_other_values_are_refused_with_their_line(tmp_path: Path, feature: str, value: Any, expected: str) -> None:
    values = [dict(of) for of in VALUES]
    values[2][feature] = value
    log = write_lines(tmp_path / "log.jsonl", rows_of(values))
    with pytest.raises(DataError, match=r"log\.jsonl:3") as caught:
        copy_of(log)
    assert expected in str(caught.value)


def test_columns_of_the_timelines_of_reagent(tmp_path: Path) -> None:
    """Maps of ids by numbers of features, beside state_features; both may have a feature 35."""
    dense = pa.map_(pa.int64(), pa.float64())
    lists = pa.map_(pa.int64(), pa.list_(pa.int64()))
    scores = pa.map_(pa.int64(), pa.map_(pa.int64(), pa.float64()))
    columns = {
        "mdp_id": pa.array(["m", "m"]),
        "sequence_number": pa.array([1, 11]),
        "state_features": pa.array([[(1, 1.0)], [(2, 1.0)]], dense),
        "state_id_list_features": pa.array([[(35, [156, 157]), (36, [138])], [(35, [153]), (36, [139])]], lists),
        "state_id_score_list_features": pa.array([[(35, [(156, 0.5), (157, 0.4)])], [(36, [(139, 0.7)])]], scores),
        "next_state_features": pa.array([[(2, 1.0)], None], dense),
        "next_state_id_list_features": pa.array([[(35, [153]), (36, [139])], None], lists),
        "next_state_id_score_list_features": pa.array([[(36, [(139, 0.7)])], None], scores),
        "action": pa.array(["L", "R"]),
        "reward": pa.array([1.0, 0.2]),
        "next_action": pa.array(["R", ""]),
        "possible_next_actions": pa.array([["L", "R"], []], pa.list_(pa.string())),
    }
    features = (
        IdFeature(id_of("state_id_list_features.35"), 2, False),
        IdFeature(id_of("state_id_score_list_features.35"), 2, True),
        IdFeature(id_of("state_id_score_list_features.36"), 1, True),
    )
    for name in ("log.parquet", "log.jsonl"):
        if name.endswith("parquet"):
            pq.write_table(pa.table(columns), tmp_path / name)
        else:
            rows = pa.table(columns).to_pylist(maps_as_pydicts="strict")
            write_lines(tmp_path / name, rows)
        copy = prepare_training_copy(Log(tmp_path / name, actions=("L", "R"), id_features=features))
        values = dict(zip(map(str, copy.state_ids), copy.state.T.tolist(), strict=True))
        first = "state_id_list_features.35"
        assert values[f"{first}[0]"] == [code_of("156"), code_of("153")]
        assert values[f"{first}[1]"][0] == code_of("157")
        assert values["state_id_score_list_features.35[1] score"][0] == pytest.approx(0.4)
        assert values["state_id_score_list_features.36[0]"][1] == code_of("139")
        assert copy.next_index.tolist()[0] == 1
        assert copy.follows.tolist() == [True, False]  # the same ids in the next row and as next state


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".csv"])
@pytest.mark.parametrize("form", [".jsonl", ".parquet"])
def test_a_converted_log_has_the_same_ids(tmp_path: Path, suffix: str, form: str) -> None:
    values = [dict(value) for value in VALUES]
    values[3]["user"] = 9007199254740993  # a float64 has no such number, nor has a float32 of maps
    rows = [
        {**row, "action": {"item": f"i{number}", "tags": ["a", f"b{number}"]}, "possible_actions": [
            {"item": f"i{number}", "tags": ["a", f"b{number}"]}, {"item": 7, "price": 2.5}]}
        for number, row in enumerate(rows_of(values))
    ]  # fmt: skip
    embeddings: dict[str, Any] = {
        "user": {}, "seen": {"length": 3}, "rated": {"length": 2, "scores": True, "pooling": "sum"}, "item": {},
        "tags": {"length": 2},
    }  # fmt: skip
    source = write_lines(tmp_path / "log.jsonl", rows)
    if form == ".parquet":
        maps = {**embeddings, "age": None}
        frame = read_log(source, embeddings=embeddings)
        assert [set(dict(row)) <= maps.keys() for row in frame["state_features"].to_pylist()] == [True] * 4
        source = tmp_path / "log.parquet"
        pq.write_table(frame, source)
    target = tmp_path / f"converted{suffix}"
    convert(check(ConvertConfig, {"data_path": str(source), "output_path": str(target), "embeddings": embeddings}))
    ids = id_features(
        check(ConvertConfig, {"data_path": "x", "output_path": "x.csv", "embeddings": embeddings}).embeddings
    )
    first, second = (prepare_training_copy(Log(path, id_features=ids)) for path in (tmp_path / "log.jsonl", target))
    for name in ("state", "candidates", "reward", "list_offsets"):
        assert np.array_equal(getattr(first, name), getattr(second, name), equal_nan=True), name
    assert (first.state_ids, first.action_ids) == (second.state_ids, second.action_ids)
    assert second.counts["ids_left_out"] == 2  # no list was cut


def test_lists_that_are_not_declared_are_named(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", rows_of(VALUES))
    with pytest.raises(DataError, match=r"a list of ids .* embeddings"):
        convert(check(ConvertConfig, {"data_path": str(log), "output_path": str(tmp_path / "out.csv")}))
