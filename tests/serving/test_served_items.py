"""Models with an item table: ids in requests, answers and the log, and a newer table beside the model."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.bundles import bilinear_bundle
from helpers.logs import write_lines
from serving.conftest import IDS, ITEMS, Open, Worker, acted

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import BundleError, DataError
from reagent_lite.export import load_bundle
from reagent_lite.item_table import ITEMS_FILE, ItemTable
from reagent_lite.serving.served_model import ServedModel

STATE = {"3": 2.0, "age": 1.0}  # the values are 2 f7 + f8: tea 2, milk 6, 12 has 3, tea too 2


def table(folder: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_lines(folder / "newer.jsonl", rows))


def test_items_are_ranked_by_id(items: Path, opened: Open) -> None:
    worker = opened(items)
    assert rankings(worker, possible_actions=["tea", 12, "milk"]) == [("milk", 2, 6.0), ("12", 1, 3.0), ("tea", 0, 2.0)]
    assert [action for action, _, _ in rankings(worker)] == ["milk", "12", "tea", "tea too"]
    assert worker.post("/rank", rows=[{"state_features": STATE}])["items"] == ITEMS.sha256


def test_decisions_and_the_log_name_items_and_the_log_trains(items: Path, opened: Open, tmp_path: Path) -> None:
    worker = opened(items)
    rows = [{"state_features": STATE, "possible_actions": ["tea", 12, "tea too"], "mdp_id": "7"},
            {"state_features": STATE, "mdp_id": "7"}]  # fmt: skip
    answer = worker.post("/decide", rows=rows)
    # tea too is tea to the model, so that it has its place in the draw
    choices = [["tea", "12"], ["tea", "milk", "12"]]
    expected = acted(load_bundle(items), rows, np.random.default_rng([5, 0]), candidates=choices)
    actions = [offered[index] for offered, (index, _) in zip(choices, expected, strict=True)]
    assert [(each["action"], each["propensity"]) for each in answer["decisions"]] == [
        (action, propensity) for action, (_, propensity) in zip(actions, expected, strict=True)
    ]
    assert answer["items"] == worker.client.get("/healthz").json()["items"] == ITEMS.sha256
    assert [(row["possible_actions"], row["items"]) for row in worker.waiting_rows()] == [
        (offered, ITEMS.sha256) for offered in choices
    ]
    for number, decision in enumerate(answer["decisions"]):
        worker.post("/reward", decision_id=decision["decision_id"], reward=1.0, terminal=bool(number))
    worker.written()
    assert pq.read_table(worker.folder, columns=["action"])["action"].to_pylist() == actions
    copy = prepare_training_copy(Log(str(worker.folder), directory=str(tmp_path / "copy"), items=ITEMS))
    assert copy.action.tolist() == [index for index, _ in expected]
    dearer = ItemTable(ids=ITEMS.ids, feature_ids=ITEMS.feature_ids, values=2 * ITEMS.values)
    other = prepare_training_copy(Log(str(worker.folder), directory=str(tmp_path / "other"), items=dearer))
    assert [note[:6] for note in other.notes if note not in copy.notes] == ["2 rows"]
    assert copy.candidates[: copy.list_offsets[1]].tolist() == ITEMS.values[[0, 2]].tolist()


@pytest.mark.parametrize("path", ["/decide", "/rank"])
def test_items_that_the_table_lacks_are_422(path: str, items: Path, opened: Open) -> None:
    worker = opened(items)
    rows = [{"state_features": STATE}, {"state_features": STATE, "possible_actions": ["tea", "beer"]}]
    status, problem = worker.refusal(path, rows=rows)
    expected = f"ids of the 4 items in the item table {ITEMS.sha256[:12]}"
    assert (status, problem["where"], problem["expected"], problem["got"]) == (
        422, "candidates[1]", expected, "'beer'",
    )  # fmt: skip
    for wrong in ([], [1.5], [{"7": 1.0}], [None], "tea"):
        assert worker.refusal(path, rows=[{"state_features": STATE, "possible_actions": wrong}])[0] == 422
    assert worker.log.waiting == 0


def test_a_newer_table_is_served_as_soon_as_it_is_there(
    items: Path, opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"item_id": "tea", "7": 5.0, "8": 0.0}, {"item_id": "beer", "8": 1.0, "7": 1.0}]
    worker = opened(items, items=table(tmp_path, rows))
    assert rankings(worker) == [("tea", 0, 10.0), ("beer", 1, 3.0)]
    before = worker.model.versions["items"]
    table(tmp_path, [*rows, {"item_id": "beer", "7": 0.0, "8": 0.0}])
    worker.poll()
    assert (worker.model.versions["items"], worker.model.refused) == (before, 1)
    assert "expected each id once, got 'beer' again" in caplog.text
    for part in (rows[:1], [*rows, {"item_id": "rum", "7": 0.0, "8": 0.0}]):  # a table that is being written
        table(tmp_path, part)
        asyncio.run(worker.model.poll())
        assert worker.model.versions["items"] == before
    worker.poll()
    assert worker.model.swapped == 1
    assert len({ITEMS.sha256, before, worker.model.versions["items"]}) == 3
    assert f"with items {worker.model.versions['items'][:12]} in the place of" in caplog.text
    answer = worker.post("/decide", rows=[{"state_features": STATE, "possible_actions": ["rum"]}])
    assert (answer["decisions"][0]["action"], answer["items"]) == ("rum", worker.model.versions["items"])


@pytest.mark.parametrize(
    ("model", "rows", "error", "words"),
    [
        ("items", [{"item_id": "tea", "7": 5.0}], BundleError, r"the item feature 8, .* got features 7"),
        ("items", [{"item_id": "tea", "7": 5.0, "8": 0.0}] * 2, DataError, "expected each id once"),
        ("candidates", [{"item_id": "tea", "7": 5.0, "8": 0.0}], BundleError, r"items: .* without data\.items"),
    ],
)
def test_tables_that_do_not_fit_the_model_are_refused(
    model: str, rows: Any, error: type[Exception], words: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(error, match=words):
        ServedModel(str(request.getfixturevalue(model)), table(tmp_path, rows))


def test_a_bundle_decides_by_id(items: Path) -> None:
    bundle = load_bundle(items)
    assert (bundle.choices, bundle.items.sha256, bundle.item_id) == ("items", ITEMS.sha256, "item_id")
    assert f'"sha256": "{ITEMS.sha256}"' in (items / "manifest.json").read_text()
    states = bundle.states([STATE, STATE])
    prediction = bundle.predict(states, candidates=[["milk", 12], np.array(["tea"])])
    np.testing.assert_array_equal(prediction.q, np.float32([[6, 3], [2, np.nan]]))
    assert bundle.predict(states).q.tolist() == [[2, 6, 3, 2]] * 2
    assert bundle.predict_rows([STATE] * 2, [["tea", "milk"], [{"7": 1.0}, {}]]).q.tolist() == [[2, 6], [2, 0]]
    index, probability = bundle.act(states, candidates=[["milk"], [12]], rng=0)
    assert (index.tolist(), probability.tolist()) == ([0, 0], [1, 1])
    with pytest.raises(BundleError, match=r"candidates\[0\]: .* the 4 items"):
        bundle.predict(states[:1], candidates=[["beer"]])


def test_items_are_the_model_s_own_protected_and_checked(items: Path, candidates: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="has no item table"):
        load_bundle(candidates).predict_rows([STATE], [["tea"]])
    (items / ITEMS_FILE).write_bytes((items / ITEMS_FILE).read_bytes().replace(b"tea too", b"tea two"))
    with pytest.raises(BundleError, match=ITEMS_FILE):
        load_bundle(items)
    short = ItemTable(ids=("tea",), feature_ids=(7,), values=np.ones((1, 1), np.float32))
    with pytest.raises(BundleError, match="the item feature 8"):
        bilinear_bundle(tmp_path / "short", np.eye(2), IDS, (7, 8), short)


def rankings(worker: Worker, **row: Any) -> list[tuple[str, int, float]]:
    (ranked,) = worker.post("/rank", rows=[{"state_features": STATE, **row}])["rankings"]
    return [(choice["action"], choice["index"], choice["score"]) for choice in ranked]
