"""Images over HTTP: nested lists decide, other values are refused, and the log has the bytes that training reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bundles import content
from serving.conftest import NAMES, Open, Worker

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.export.predictor import ImagePredictor
from reagent_lite.export.writer import write_bundle
from reagent_lite.feature_ids import id_of
from reagent_lite.models.images import ImageNetwork
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.rl.policies import EpsilonGreedy
from reagent_lite.types import FeatureSpec, FeatureType, Image, NormalizationSpec, SourceSpec

IMAGE = Image(shape=(2, 2, 1))
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


@pytest.fixture
def worker(tmp_path: Path, opened: Open) -> Worker:
    """A worker of a model with q = the first three of the four pixels, from 0 to 1."""
    spec = FeatureSpec(feature_id=id_of("image"), feature_type=FeatureType.IMAGE, image=IMAGE)
    source = SourceSpec(num_state_features=4, action_names=NAMES, image=IMAGE)
    network = build_q_network(source, NetworkSettings(hidden=(), activations=(), conv_layers=()))
    assert isinstance(network, ImageNetwork)
    with torch.no_grad():
        network.network.layers[0].weight.copy_(torch.eye(4)[:3])  # type: ignore[union-attr]
    scorer = Scorer(network.eval(), ScalarHead())
    predictor = ImagePredictor(scorer, image=IMAGE, action_names=NAMES, policy=EpsilonGreedy(0.0))
    values = np.arange(24, dtype=np.uint8).reshape(6, 4)
    state = NormalizationSpec((spec,))
    write_bundle(tmp_path / "model", predictor, content=content("dqn", SampleRows(values=values), state=state))
    return opened(tmp_path / "model", reward_seconds=1e-6)


def lists(*pixels: int) -> list[Any]:
    return np.array(pixels).reshape(IMAGE.shape).tolist()


def test_images_decide_and_come_back_from_the_log(tmp_path: Path, worker: Worker) -> None:
    pictures = [(9, 255, 0, 1), (255, 0, 0, 255), (0, 1, 2, 3)]
    rows = [{"mdp_id": "e", "sequence_number": k, "state_features": lists(*p)} for k, p in enumerate(pictures)]
    decisions = worker.post("/decide", rows=rows)["decisions"]
    assert [NAMES.index(decision["action"]) for decision in decisions] == [1, 0, 2]
    assert worker.post("/decide", rows=rows)["decisions"] == decisions  # the same request again
    bundle = worker.model.bundle
    np.testing.assert_allclose(bundle.predict_rows([lists(0, 51, 255, 9)]).q, [[0, 0.2, 1]], atol=1e-6)
    worker.written()
    copy = prepare_training_copy(Log(worker.folder, actions=NAMES, directory=str(tmp_path / "copies"), image=IMAGE))
    assert copy.state.dtype == np.uint8
    assert copy.state[:3].tolist() == [list(p) for p in pictures]


def test_other_values_are_refused(worker: Worker) -> None:
    expected = "an image of shape [2, 2, 1], integers from 0 to 255"
    for state, got in (
        (lists(1, 2, 3, 4)[:1], "shape [1, 2, 1]"),
        ([1, 2, 3, 4], "shape [4]"),
        (lists(1, 2, 3, 256), "256"),
        (lists(1, 2, -1, 4), "-1"),
        (np.ones((2, 2, 1)).tolist(), "values of type float64"),
        ([[[1], [2]], [[3]]], "lists of different lengths"),
        ({"0": 1.0}, "features"),
        ("AAAA", "a str"),
        (None, "values that are no integers"),
        ([[[True], [True]], [[True], [False]]], "values that are no integers"),
    ):
        status, problem = worker.refusal("/decide", rows=[{"state_features": state}])
        assert (status, problem["where"]) == (422, "body.rows.0.state_features")
        assert problem["expected"] == expected
        assert problem["got"] == got or state is None
    status, problem = worker.refusal("/decide", rows=[{}])
    assert (status, problem["where"]) == (422, "body.rows.0.state_features")


def test_the_api_describes_the_image(worker: Worker) -> None:
    schema = worker.client.get("/openapi.json").json()["components"]["schemas"]["StateFeatures"]
    for size in (2, 2, 1):
        assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", size, size)
        schema = schema["items"]
    assert schema == {"type": "integer", "minimum": 0, "maximum": 255}
