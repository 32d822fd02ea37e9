"""`training.network`: a class of the user's own, from training to the exported model, and what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.logs import candidate_rows, write_lines
from helpers.runs import ROOT, small, trained
from safetensors.numpy import load_file

from reagent_lite.errors import ConfigError
from reagent_lite.export import load_bundle
from reagent_lite.models.q_networks import NetworkSettings, custom_network
from reagent_lite.types import SourceSpec

__all__ = ["small"]
MODULE = """
import torch
from torch import Tensor, nn

class Squares(nn.Module):
    "q = W x^2 + b, of the state."

    def __init__(self, spec, settings):
        super().__init__()
        self.parametric = spec.parametric
        self.shape = (1 if spec.parametric else len(spec.action_names), settings.outputs)
        features = spec.num_state_features + (spec.num_action_features if spec.parametric else 0)
        self.layer = nn.Linear(features, self.shape[0] * self.shape[1])

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return self.layer(state * state).view(-1, self.shape[0], self.shape[1])

class Layers(Squares):
    "A convolution, attention, a recurrent layer and batch normalization, over the features of the state in turn."

    def __init__(self, spec, settings):
        super().__init__(spec, settings)
        width = spec.num_action_features if spec.parametric else 1
        self.convolution = nn.Conv1d(1, 4, 3, padding=1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.GRU(4, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.values = nn.Linear(6 + (width if spec.parametric else 0), self.shape[0] * self.shape[1])

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        hidden = self.convolution(state.unsqueeze(1)).transpose(1, 2)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.norm(self.recurrent(hidden)[1][0])
        if not self.parametric:
            return self.values(hidden).view(-1, self.shape[0], self.shape[1])
        return self.values(torch.cat((hidden.unsqueeze(1).expand(-1, features.shape[1], -1), features), 2))

class Mean(nn.Module):
    "q = w (x - mean of the list), of a candidate's features x."

    def __init__(self, spec, settings):
        super().__init__()
        self.layer = nn.Linear(spec.num_action_features, settings.outputs)

    def forward(self, state: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        return self.layer(features - features.mean(1, keepdim=True))

class TooFew(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return self.layer(state)

class Failing(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return state + torch.zeros(17)

class Unknown(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return self.layer(torch.special.bessel_j0(state)).view(-1, self.shape[0], self.shape[1])

class Fixed(Squares):
    def __init__(self, spec, settings):
        super().__init__(spec, settings)
        self.requires_grad_(False)

class Branching(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(state if state.sum() > 0 else -state, mask, features)

class Steep(Squares):
    "Torch's exporter writes log(sigmoid), which is minus infinity far below 0."

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(nn.functional.logsigmoid(state.clamp(-200.0, 200.0)), mask, features)

class Ratio(Squares):
    "0 / 0 of a missing feature."

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(state / state.abs(), mask, features)

class OfAllMissing(Squares):
    "A mean over the features that are there, NaN only where none is."

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(state / (state != 0).sum(1, keepdim=True), mask, features)

class BranchOnNaN(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(torch.zeros_like(state) if state.isnan().any() else state, mask, features)

class BranchOnRows(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(state if len(state) < 500 else 2 * state, mask, features)

class Half(Squares):
    "Torch's exporter writes a sum in float16 as one in float32."

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        total = state.half() @ torch.ones(state.shape[1], state.shape[1]).half()
        return super().forward(total.float(), mask, features)

class ToNumbers(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(torch.nan_to_num(torch.maximum(state / state.abs(), -state), 0.5), mask, features)

class TimeFirst(Squares):
    def __init__(self, spec, settings):
        super().__init__(spec, settings)
        self.recurrent = nn.GRU(1, spec.num_state_features)

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(self.recurrent(state.unsqueeze(2))[0][:, -1], mask, features)

class Random(Squares):
    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
        return super().forward(nn.functional.dropout(state, 0.5), mask, features)
"""


@pytest.fixture
def tree(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (example,) = re.findall("```python\n(from torch.+?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    (tmp_path / "own_networks.py").write_text(MODULE + example)
    monkeypatch.syspath_prepend(tmp_path)
    small["norm_params"] = {"feature_overrides": dict.fromkeys("012", "DO_NOT_PREPROCESS")}
    small["training"]["network"] = "own_networks:Squares"
    return small


def test_a_network_of_ones_own_is_trained_and_exported(tree: dict[str, Any], tmp_path: Path) -> None:
    trained(tree)
    weights = load_file(tmp_path / "out/model/weights.safetensors")
    state = np.array([[1, 2, 3], [-1, 0.5, 2]], np.float32)
    expected = state**2 @ weights["network.layer.weight"].T + weights["network.layer.bias"]
    np.testing.assert_allclose(load_bundle(tmp_path / "out/model").predict(state).q, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("network", "workflow"),
    [("Layers", "dqn"), ("Layers", "parametric_dqn"), ("Normed", "dqn")],
    ids=["layers of all kinds", "for candidates", "the README's"],
)
def test_networks_of_any_layers_are_exported(tree: dict[str, Any], tmp_path: Path, network: str, workflow: str) -> None:
    """Layers has convolutions, attention, recurrent layers and batch normalization."""
    if workflow == "parametric_dqn":
        del tree["actions"]
        tree["training_data_path"] = str(write_lines(tmp_path / "candidates.jsonl", candidate_rows(200)))
    tree["training"]["network"] = f"own_networks:{network}"
    model = Path(str(trained(tree, workflow).model))
    bundle = load_bundle(model)
    assert bundle.check_golden() < 1e-5
    candidates = [] if workflow == "parametric_dqn" else None
    nothing = bundle.predict(np.zeros((0, 3), np.float32), candidates=candidates)  # onnxruntime's GRU would abort
    assert (len(nothing.q), len(nothing.greedy), len(nothing.draw()[0])) == (0, 0, 0)
    assert str(tmp_path).encode() not in (model / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("own_networks.Squares", 'expected package.module:Class, got "own_networks.Squares"'),
        ("no_such_module:Net", "no_such_module:Net, got ModuleNotFoundError: No module named"),
        ("own_networks:Nothing", "got AttributeError: module 'own_networks' has no attribute 'Nothing'"),
        ("own_networks:Failing", "got RuntimeError: The size of tensor a"),
        ("own_networks:TooFew", r"expected values \[3, 2, 1\] of 3 rows, got \[3, 2\]"),
        ("own_networks:Fixed", "expected a module with parameters to learn, got own_networks:Fixed, which has none"),
        ("own_networks:Unknown", "only operations of ONNX, got UnsupportedOperatorError: .*bessel_j0"),
        ("own_networks:Steep", r"model\.onnx, extreme inputs: expected at most a share of 0\.0 of q to differ"),
        ("own_networks:Ratio", r"q of the live network: expected finite numbers, got \d+ of \d+ are not"),
        ("own_networks:OfAllMissing", r"q of the live network: expected finite numbers, got \d+ of \d+ are not"),
        ("own_networks:Half", r"model\.onnx: expected at most a share of 0\.0 of q to differ"),
        (
            "own_networks:BranchOnNaN",
            r"got BundleError: own_networks.py:\d+: expected no branches on values of tensors",
        ),
        (
            "own_networks:BranchOnRows",
            r"got BundleError: own_networks.py:\d+: expected no branches on values of tensors",
        ),
        ("own_networks:Random", "expected the same values of a row whether it is alone or among others"),
        ("own_networks:TimeFirst", "expected the same values of a row whether it is alone or among others"),
        (
            "own_networks:Branching",
            r"got BundleError: own_networks.py:\d+: expected no branches on values of tensors",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    network: str, message: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    tree["training"]["network"] = network
    with pytest.raises(ConfigError, match=f"training\\.network: .*{message}"):
        trained(tree)
    assert not (tmp_path / "out").exists()


def test_values_that_a_network_replaces_itself_are_those_of_the_file(tree: dict[str, Any], tmp_path: Path) -> None:
    """The maximum of NaN (0 / 0, of a missing feature) and a number is NaN, which the network replaces by 0.5."""
    tree["training"]["network"] = "own_networks:ToNumbers"
    trained(tree)
    weights = load_file(tmp_path / "out/model/weights.safetensors")
    state = np.array([[np.nan, np.nan, np.nan], [np.nan, -3, 2]], np.float32)
    inner = np.array([[0.5, 0.5, 0.5], [0.5, 3, 1]]) ** 2
    expected = inner @ weights["network.layer.weight"].T + weights["network.layer.bias"]
    np.testing.assert_allclose(load_bundle(tmp_path / "out/model").predict(state).q, expected, rtol=1e-5)


@pytest.mark.usefixtures("tree")
def test_values_may_not_depend_on_candidates_that_mask_excludes() -> None:
    spec = SourceSpec(num_state_features=1, num_action_features=2)
    with pytest.raises(ConfigError, match="with or without candidates that mask excludes"):
        custom_network("own_networks:Mean", spec, NetworkSettings(hidden=(), activations=()))
