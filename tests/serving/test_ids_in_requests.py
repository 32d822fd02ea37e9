"""Ids over HTTP: decided by their vectors, counted where they are other, and logged as training reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bundles import PLAIN, content
from serving.conftest import NAMES, Open, Worker

from reagent_lite.categories import code_of
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.export.predictor import DiscretePredictor
from reagent_lite.export.writer import write_bundle
from reagent_lite.feature_ids import FeatureId
from reagent_lite.models.embeddings import EmbeddedNetwork
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.types import Embedding, FeatureSpec, FeatureType, NormalizationSpec, SourceSpec

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


@pytest.fixture
def worker(tmp_path: Path, opened: Open) -> Worker:
    """A worker of a model with q = (rated, seen, -age): sums of the vectors of ids, each of which has one number."""
    codes = tuple(sorted(map(code_of, "abc")))
    features = [FeatureSpec(feature_id=FeatureId("age"), feature_type=FeatureType.DO_NOT_PREPROCESS)]
    for name, length, scores in (("seen", 3, False), ("rated", 2, True)):
        table = Embedding(table="item", rows=5, dim=1, length=length, pooling="sum", scores=scores)
        kind = FeatureType.EMBEDDING
        features.append(
            FeatureSpec(feature_id=FeatureId(name), feature_type=kind, possible_values=codes, embedding=table)
        )
    spec = NormalizationSpec.from_features({feature.feature_id: feature for feature in features})
    source = SourceSpec(num_state_features=spec.width, action_names=NAMES, state_embeddings=spec.embeddings)
    network = build_q_network(source, NetworkSettings(hidden=(), activations=()))
    assert isinstance(network, EmbeddedNetwork)
    vectors = {"a": 1.0, "b": 10.0, "c": 100.0}
    with torch.no_grad():
        rows = [0.0, -5.0, *(vectors[name] for name in sorted(vectors, key=code_of))]
        network.tables["table_item"].copy_(torch.tensor(rows).unsqueeze(1))
        order = [str(feature.feature_id) for feature in spec.features]
        weight = torch.zeros(3, 3)
        for row, (name, factor) in enumerate((("rated", 1.0), ("seen", 1.0), ("age", -1.0))):
            weight[row, order.index(name)] = factor
        linear = network.network.layers[0]  # type: ignore[union-attr]
        linear.weight.copy_(weight)
        linear.bias.zero_()
    predictor = DiscretePredictor(
        Preprocessor(spec),
        Scorer(network.eval(), ScalarHead()),
        state_feature_ids=spec.feature_ids,
        action_names=NAMES,
        policy=PLAIN,
    )
    values = np.full((4, len(spec.feature_ids)), np.nan, np.float32)
    values[:2, :2] = [[0.5, code_of("a")], [1.5, code_of("z")]]
    write_bundle(tmp_path / "model", predictor, content=content("dqn", SampleRows(values=values), state=spec))
    return opened(tmp_path / "model", reward_seconds=1e-6)


def q_of(worker: Worker, state: dict[str, Any]) -> list[float]:
    bundle = worker.model.bundle
    return [round(float(q), 4) for q in bundle.predict(bundle.states([state])).q[0]]


def test_values_by_hand(worker: Worker) -> None:
    assert q_of(worker, {"age": 2, "seen": ["a", "c"], "rated": {"b": 0.5, "a": -1.0}}) == [4.0, 101.0, -2.0]
    assert q_of(worker, {"seen": ["z", "a", "a", "b"]}) == [0.0, -3.0, 0.0]  # another id, and one too many
    assert q_of(worker, {"age": 1, "rated": [{"key": "c", "value": 2.0}]}) == [200.0, 0.0, -1.0]


def test_ids_decide_are_counted_and_come_back_from_the_log(tmp_path: Path, worker: Worker) -> None:
    states: list[dict[str, Any]] = [
        {"age": 2.5, "seen": ["c", "b"]},
        {"age": 1.0, "seen": ["z", 17], "rated": {"c": 2.0}},
        {"age": -1e6, "seen": [], "rated": {}},
    ]
    decisions = worker.post("/decide", rows=[{"mdp_id": "e", "state_features": state} for state in states])["decisions"]
    assert [NAMES.index(decision["action"]) for decision in decisions] == [1, 0, 2]
    page = worker.client.get("/metrics").text
    assert 'reagent_features_other_total{feature="seen"} 2.0' in page
    assert 'reagent_features_missing_total{feature="rated"} 2.0' in page
    assert 'feature="seen[0]"' not in page
    worker.written()
    copy = prepare_training_copy(
        Log(
            worker.folder,
            actions=NAMES,
            directory=str(tmp_path / "copies"),
            id_features=worker.model.bundle.ids_of_log,
        )
    )
    expected = worker.model.bundle.states(states)
    order = [copy.state_ids.index(name) for name in worker.model.bundle.state_feature_ids if name in copy.state_ids]
    kept = [name in copy.state_ids for name in worker.model.bundle.state_feature_ids]
    assert np.array_equal(np.asarray(copy.state[:3])[:, order], expected[:, kept], equal_nan=True)
    assert np.isnan(expected[:, ~np.array(kept)]).all()


def test_other_values_are_refused(worker: Worker) -> None:
    for features, where, expected in (
        ({"seen": [1.5]}, "body.rows.0.state_features.seen", "a list of ids, strings or integers"),
        ({"seen": {"a": 1}}, "body.rows.0.state_features.seen", "a list of ids, strings or integers"),
        ({"rated": ["a"]}, "body.rows.0.state_features.rated", "ids with finite scores, {id: score}"),
        ({"seen": ["x" * 201]}, "body.rows.0.state_features.seen", "ids of at most 200 characters"),
        ({"age": ["a"]}, "states[0], feature age", "a finite float32, true or false, the text of a category, or null"),
        ({"seen[0]": "a"}, "states[0]", "feature ids among age, rated, seen"),
    ):
        status, problem = worker.refusal("/decide", rows=[{"state_features": features}])
        assert (status, problem["where"], problem["expected"]) == (422, where, expected)


def test_the_api_describes_ids(worker: Worker) -> None:
    schemas = worker.client.get("/openapi.json").json()["components"]["schemas"]
    properties = schemas["StateFeatures"]["properties"]
    assert properties.keys() == {"age", "seen", "rated"}
    one = {"type": ["string", "integer"], "maxLength": 200}
    listed = {"type": "array", "items": one, "minItems": 0}
    assert properties["seen"]["anyOf"] == [{"anyOf": [one, listed]}, {"type": "null"}]
