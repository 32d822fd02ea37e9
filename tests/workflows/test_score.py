"""workflows.score: what onnxruntime says of the same rows in every format, and what is refused."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.commands import scored
from helpers.logs import Row, write_lines
from helpers.runs import Runner

import reagent_lite
from reagent_lite.config import check
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.errors import BundleError, ConfigError, DataError, ReagentLiteError
from reagent_lite.export import load_bundle
from reagent_lite.feature_ids import FeatureId
from reagent_lite.tasks import scoring
from reagent_lite.tasks.convert import convert
from reagent_lite.tasks.score import score

NAMES, IDS, ITEM = ("mail", "call", "wait"), (3, FeatureId("age")), (7, FeatureId("size"))


@pytest.fixture
def named(tmp_path: Path) -> Path:
    return linear_bundle(tmp_path / "model", np.array([[1.0, 0], [0, 1], [0, 0]]), NAMES, IDS)


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    return bilinear_bundle(tmp_path / "candidates", np.eye(2), IDS, ITEM)


def rows(number: int, *, parametric: bool) -> list[Row]:
    """Rows without what training needs besides; some lack a feature, a list, or every action."""
    rng = np.random.default_rng(0)

    def row(n: int) -> Row:
        features = {"3": float(rng.normal()), **({"age": float(rng.normal())} if n % 4 else {})}
        listed: Row = {"possible_actions": [name for name in NAMES if rng.random() < 0.6]} if n % 3 else {}
        if parametric:
            items = [{"7": float(x), "size": 2.0} for x in rng.normal(size=n % 5)]
            listed = {"possible_actions": [*items, {"7": 0.5}] if n % 7 else []}
        return {"mdp_id": f"{n // 3}", "sequence_number": n % 3, "state_features": features, **listed}

    return [row(n) for n in range(number)]


def by_hand(model: Path, given: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns values, probabilities and what may be taken, from a session of onnxruntime of its own."""

    def dense(maps: list[dict[str, float]], names: tuple[str, ...]) -> np.ndarray:
        values = [[features.get(name, np.nan) for name in names] for features in maps]
        return np.array(values, np.float32).reshape(-1, len(names))

    session = onnxruntime.InferenceSession(model / "model.onnx", providers=["CPUExecutionProvider"])
    state = dense([row["state_features"] for row in given], ("3", "age"))
    feed = [state, ~np.isnan(state)]
    if len(session.get_inputs()) == 3:
        allowed = [row.get("possible_actions", NAMES) for row in given]
        mask = np.array([[name in actions for name in NAMES] for actions in allowed])
    else:
        longest = max(len(row["possible_actions"]) for row in given)
        lists = np.stack([dense((row["possible_actions"] + [{}] * longest)[:longest], ("7", "size")) for row in given])
        mask = np.arange(longest) < np.array([[len(row["possible_actions"])] for row in given])
        feed += [lists, ~np.isnan(lists)]
    names = [tensor.name for tensor in session.get_inputs()]
    q, propensities = session.run(["q", "propensities"], dict(zip(names, [*feed, mask], strict=True)))
    return q, propensities, mask


def close(values: list[float | None], expected: Any) -> None:
    np.testing.assert_allclose(np.array(values, float), np.array(expected, float), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["named", "candidates"])
def test_scores_are_those_of_onnxruntime_on_the_same_rows(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws are in the order of the rows, whatever the blocks are."""
    parametric = kind == "candidates"
    model, given = request.getfixturevalue(kind), rows(200, parametric=parametric)
    for number, suffix in enumerate((".jsonl", ".parquet", ".arrow", ".csv")):
        source = write_lines(tmp_path / "part.jsonl", given[number * 50 : number * 50 + 50])
        convert(check(ConvertConfig, {"data_path": str(source), "output_path": f"{tmp_path}/rows/{number}{suffix}"}))
    q, propensities, mask = by_hand(model, given)
    allowed = mask.any(1)
    best = np.where(mask, q, -np.inf).argmax(1)
    monkeypatch.setattr(scoring, "BLOCK_VALUES", 60)  # a block is predicted in parts
    outcome, table = scored(model, tmp_path / "rows", tmp_path / "s.parquet", policy="greedy", all_scores=True)
    assert (outcome.rows, outcome.undecided_rows) == (200, int((~allowed).sum()))
    ids = [(row["mdp_id"], row["sequence_number"]) for row in given]
    assert list(zip(*table.select(["mdp_id", "sequence_number"]).to_pydict().values(), strict=True)) == ids
    expected = [int(k) if some else None for k, some in zip(best, allowed, strict=True)]
    assert table["index"].to_pylist() == expected
    choices = [row["possible_actions"] if parametric else NAMES for row in given]
    actions = [None if k is None else listed[k] for k, listed in zip(expected, choices, strict=True)]
    if parametric:
        actions = [action and {name: np.float32(x) for name, x in action.items()} for action in actions]
    assert table["action"].to_pylist(maps_as_pydicts="strict") == actions
    close(table["score"].to_pylist(), np.where(allowed, q[np.arange(200), best], np.nan))
    assert set(table["action_probability"].to_pylist()) == {1.0, None}
    for n, scores in enumerate(table["scores"].to_pylist()):
        assert parametric or tuple(scores) == NAMES
        close(list(scores if parametric else scores.values()), np.where(mask[n], q[n], np.nan)[: len(choices[n])])

    _, drawn = scored(model, tmp_path / "rows", tmp_path / "drawn.parquet", seed=5)
    bundle = load_bundle(model)
    lists = bundle.candidates([row["possible_actions"] for row in given]) if parametric else None
    index, _ = bundle.act(
        bundle.states([row["state_features"] for row in given]), mask=None if parametric else mask, candidates=lists,
        rng=np.random.default_rng(5),
    )  # fmt: skip
    assert drawn["index"].fill_null(-1).to_pylist() == index.tolist()
    of_graph = np.where(allowed, propensities[np.arange(200), np.maximum(index, 0)], 0)
    np.testing.assert_allclose(drawn["action_probability"].fill_null(0), of_graph, rtol=1e-6)


@pytest.mark.usefixtures("caches")
def test_a_frame_and_the_command(named: Path, tmp_path: Path, run: Runner) -> None:
    frame = pd.DataFrame({
        "3": [1.0, 0.0, -2.0], "age": [0.5, 2.0, -1.0], "customer": ["a", "b", "c"], "region": [7, None, 9],
        "day": pd.to_datetime(["2026-11-01", "2026-11-02", None]),
    })  # fmt: skip
    columns = {"state_features": ["3", "age"], "mdp_id": "customer"}
    config = {"columns": columns, "policy": "greedy", "keep": ["region", "customer", "day"]}
    table = reagent_lite.score(named, frame, config=config)
    assert table.column_names[:5] == ["mdp_id", "sequence_number", "region", "customer", "day"]
    expected = {"mdp_id": ["a", "b", "c"], "customer": ["a", "b", "c"], "region": ["7", None, "9"],
                "action": ["mail", "call", "wait"], "score": [1.0, 2.0, 0.0],
                "sequence_number": [None] * 3}  # fmt: skip
    assert table.select(list(expected)).to_pydict() == expected
    assert [day and day[:10] for day in table["day"].to_pylist()] == ["2026-11-01", "2026-11-02", None]
    frame.to_parquet(tmp_path / "rows.parquet")
    flags = ("--model", str(named), "--data", str(tmp_path / "rows.parquet"), "--output", str(tmp_path / "s.parquet"))
    command = run("score", config, *flags).ok
    assert (command.outcome["rows"], command.outcome["undecided_rows"]) == (3, 0)
    assert pq.read_table(tmp_path / "s.parquet") == table


def test_a_text_that_is_kept_is_the_same_beside_values_of_other_types(named: Path, tmp_path: Path) -> None:
    given = [{"state_features": STATE, "key": key} for key in ("a", 5, None, "a", True, [1])]
    table = reagent_lite.score(named, write_lines(tmp_path / "rows.jsonl", given), config={"keep": ["key"]})
    assert table["key"].to_pylist() == ["a", "5", None, "a", "true", "[1]"]


def test_formulas_are_escaped_in_csv_on_request(named: Path, tmp_path: Path) -> None:
    keys = ["=1+1", "+1+1", "-A1", "@x", "\tx", "\n=x", "＝1", "a=1", "'", "-1", "+0.5", "-1e-3", None]
    log = write_lines(tmp_path / "rows.jsonl", [{"state_features": STATE, "=key": key} for key in keys])
    read = []
    for escape in (False, True):
        keys_of = {"keep": ["=key"], "escape_formulas": escape, "output_path": str(tmp_path / "scores.csv")}
        score(check(ScoreConfig, {"model": str(named), "data_path": str(log), **keys_of}))
        with (tmp_path / "scores.csv").open(newline="") as stream:
            read.append([row["'=key" if escape else "=key"] or None for row in csv.DictReader(stream)])
    assert read == [keys, ["'=1+1", "'+1+1", "'-A1", "'@x", "'\tx", "'\n=x", "'＝1", *keys[7:]]]
    with pytest.raises(ConfigError, match="escape_formulas: expected false unless output_path is CSV"):
        check(ScoreConfig, {"model": "m", "data_path": "d", "output_path": "s.parquet", "escape_formulas": True})


STATE = {"3": 1.0, "age": 2.0}
REFUSED: list[tuple[str, list[Row], Row, type[ReagentLiteError], str]] = [
    ("named", [{"state_features": {"3": 1.0, "Age": 2.0}}], {}, DataError,
     r"rows.jsonl: expected the state feature age, .*Nearest: 'Age'"),
    ("candidates", [{"state_features": STATE, "possible_actions": [{"7": 1.0}]}], {}, DataError,
     "the candidate feature size, which"),
    ("named", [{"3": 1.0, "age": 2.0}], {"columns": {"state_features": ["3"]}}, DataError,
     "columns: expected the state feature age"),
    ("named", [{"3": 1.0}], {"columns": {"state_features": ["3", "age"]}}, DataError, "a column 'age'"),
    ("named", [{"state": STATE}], {}, DataError, "rows.jsonl:1: .* 'state_features'"),
    ("candidates", [{"state_features": STATE}], {}, DataError, "a column 'possible_actions'"),
    ("named", [{"state_features": STATE}, {"state_features": None}], {}, DataError, "rows.jsonl:2: .*state_features"),
    ("named", [{"state_features": {**STATE, "3": "x"}}], {}, DataError, "rows.jsonl:1: "),
    ("named", [{"state_features": {**STATE, "3": 1e39}}], {}, DataError, "finite numbers in state_features"),
    ("named", [{"state_features": STATE, "possible_actions": ["fax"]}], {}, DataError, "names of actions"),
    ("named", [{"state_features": STATE, "mdp_id": "e", "sequence_number": at} for at in (1, "2026-01-01")], {},
     DataError, "rows.jsonl:2: expected integers in sequence_number, as in .*rows.jsonl:1, got a time"),
    ("named", [], {}, DataError, "rows of data"),
    ("named", [{"state_features": STATE, "regions": 1}], {"keep": ["region"]}, DataError, "column: 'regions'"),
    ("named", [{"state_features": STATE}], {"keep": ["action"]}, ConfigError, "keep: expected columns other than"),
    ("named", [{"age": 1}], {"keep": ["age"], "columns": {"state_features": ["age"]}}, ConfigError, "no features"),
    ("named", [{"state_features": STATE}], {"output_path": ""}, ConfigError, "output_path: expected a path"),
    ("named", [{"state_features": STATE}], {"output_path": "rows.jsonl"}, ConfigError, "apart from the input"),
    ("named", [{"state_features": STATE}], {"output_path": "s.xlsx"}, ConfigError, "a name that ends in"),
    ("named", [{"state_features": STATE}], {"policy": "greedy", "seed": 1}, ConfigError, "seed: expected absent"),
    ("named", [{"state_features": STATE}], {"model": "nowhere"}, BundleError, "nowhere"),
]  # fmt: skip


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(("kind", "given", "keys", "error", "message"), REFUSED)
def test_what_cannot_be_scored_is_refused_and_older_scores_stay(
    kind: str, given: list[Row], keys: Row, error: type[ReagentLiteError], message: str,
    tmp_path: Path, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    model = request.getfixturevalue(kind)
    write_lines(tmp_path / "rows.jsonl", given)
    (tmp_path / "s.parquet").write_bytes(b"older scores")
    content = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    with pytest.raises(error, match=message):
        scored(model, Path("rows.jsonl"), Path("s.parquet"), **keys)
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == content


def test_the_probability_of_a_candidate_that_is_listed_twice_is_that_of_both(candidates: Path, tmp_path: Path) -> None:
    items = [{"7": 1.0}, {"7": 2.0}, {"size": None, "7": 1.0}]
    given = [{"state_features": {"3": 0.0, "age": 0.0}, "possible_actions": items}] * 30  # all values are 0
    _, table = scored(candidates, write_lines(tmp_path / "rows.jsonl", given), tmp_path / "s.parquet", seed=1)
    assert set(table["index"].to_pylist()) == {0, 1, 2}
    close(table["action_probability"].to_pylist(), [1 / 3 if k == 1 else 2 / 3 for k in table["index"].to_pylist()])
