"""Categories over HTTP: decided by their levels, counted where they are other, and logged as training reads them."""

from pathlib import Path

import numpy as np
import pytest
from helpers.bundles import category_bundle, category_candidates_bundle
from helpers.transitions import code_of_text
from serving.conftest import Open, Worker

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log

WEIGHT = np.array([[0.0, 0, 0, 50, 0], [0, 0, 0, 0, 50]])
NAMES = ("mail", "call")


def test_texts_decide_are_counted_and_come_back_from_the_log(tmp_path: Path, worker: Worker) -> None:
    countries = ["DE", "FR", "DE", "Atlantis"]
    rows = [{"mdp_id": "e", "state_features": {"age": 2.5, "country": country}} for country in countries]
    decisions = worker.post("/decide", rows=rows)["decisions"]
    assert [decision["action"] for decision in decisions[:3]] == ["mail", "call", "mail"]
    page = worker.client.get("/metrics").text
    assert 'reagent_features_other_total{feature="country"} 1.0' in page
    assert 'reagent_features_missing_total{feature="3"} 4.0' in page
    worker.written()
    copy = prepare_training_copy(Log(str(worker.folder), actions=NAMES, directory=str(tmp_path / "copies")))
    assert list(copy.levels["state"].values()) == [{"Atlantis": 1, "DE": 2, "FR": 1}]
    by_name = {str(name): copy.state[:3, column].tolist() for column, name in enumerate(copy.state_ids)}
    codes = [float(code_of_text(country)) for country in countries[:3]]
    assert (by_name["country"], by_name["age"]) == (codes, [2.5] * 3)


def test_candidates_have_texts(tmp_path: Path, opened: Open) -> None:
    worker = opened(category_candidates_bundle(tmp_path / "model"), reward_seconds=1e-6)
    offers = [{"country": "US"}, {"country": "FR"}, {"country": "DE"}]
    row = {"state_features": {"7": 1.0}, "possible_actions": offers}
    ranked = worker.post("/rank", rows=[row])["rankings"][0]
    assert ranked == [{"index": 1, "score": 2.0}, {"index": 2, "score": 1.0}, {"index": 0, "score": 0.0}]
    decisions = worker.post("/decide", rows=[row] * 3)["decisions"]
    assert all(decision["action"] == offers[decision["index"]] for decision in decisions)
    assert 'reagent_features_other_total{feature="country"} 3.0' in worker.client.get("/metrics").text
    worker.written()
    copy = prepare_training_copy(Log(str(worker.folder), directory=str(tmp_path / "copies")))
    assert [sorted(decision) for decision in copy.levels["action"].values()] == [["DE", "FR", "US"]]
    assert copy.action.tolist() == [decision["index"] for decision in decisions]


@pytest.mark.parametrize(
    ("features", "where", "expected"),
    [
        ({"country": 3.0}, "states[0], feature country", "a string or null, as it is a category"),
        ({"age": "DE"}, "states[0], feature age", "a number or null"),
        ({"country": "x" * 201}, "body.rows.0.state_features.country", "a string of at most 200 characters"),
        ({"country": True}, "states[0], feature country", "a string or null, as it is a category"),
    ],
)
def test_other_values_are_refused_by_the_name_of_the_feature(
    features: dict[str, object], where: str, expected: str, worker: Worker
) -> None:
    status, problem = worker.refusal("/decide", rows=[{"state_features": features}])
    assert (status, problem["where"], problem["expected"]) == (422, where, expected)


def test_the_openapi_says_which_features_are_texts(worker: Worker) -> None:
    schema = worker.client.get("/openapi.json").json()["components"]["schemas"]["StateFeatures"]
    assert schema["properties"]["country"] == {
        "anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}],
        "examples": ["DE", "FR"],
    }
    assert schema["properties"]["age"]["anyOf"][0]["type"] == "number"
    assert {"required": ["country"], "properties": {"country": {"type": "string"}}} in schema["anyOf"]


@pytest.fixture
def worker(tmp_path: Path, opened: Open) -> Worker:
    return opened(category_bundle(tmp_path / "model", WEIGHT, NAMES), reward_seconds=1e-6)
