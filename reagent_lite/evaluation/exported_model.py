"""An exported model under evaluation: its probabilities of logged choices, and models fitted to its policy.

raw rows ─┬─► the bundle, through onnxruntime ─────────────► probabilities
          └─► the bundle's own normalization ─► networks ──► expected outcomes, values
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reagent_lite.algorithms.cpe_heads import CPEHeads, build_cpe_heads
from reagent_lite.config import check
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.config.norm_params import NormParams
from reagent_lite.config.rl import RLConfig
from reagent_lite.config.training import TrainingConfig
from reagent_lite.data.copy.features import summarize_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.feature_types import MIN_PRESENT_VALUES
from reagent_lite.data.features.fitting import fit_columns
from reagent_lite.data.features.normalization import parse_normalization
from reagent_lite.data.rows.matrices import in_order
from reagent_lite.data.sampling.normalized import Reordered
from reagent_lite.data.sampling.spans import Spans, single_steps, time_steps
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.bundle import Bundle, Prediction, load_bundle
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.models.q_networks import NetworkSettings
from reagent_lite.rl.policies import EpsilonGreedy, Softmax, TargetPolicy, policy_of
from reagent_lite.sim.spec import EnvSpec
from reagent_lite.types import Actions, NormalizationSpec, SourceSpec

CHOICES = ("named actions (workflows.dqn)", "candidates (workflows.parametric_dqn)")
"""What a model decides among, in words: by whether it is parametric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How models of a policy read the raw columns of a log.

    Attributes:
        normalization: by column, "state" and for candidates "action".
        training: shape of the networks.
        missing_as_zero: whether missing features are read as 0.
    """

    normalization: dict[str, NormalizationSpec]
    training: TrainingConfig
    missing_as_zero: bool = False

    @classmethod
    def fitted(cls, copy: TrainingCopy, config: EvaluateConfig) -> "Reading":
        """Returns the defaults of training, with the normalization fitted to a log; of rare features there is none.

        Raises:
            DataError: a feature that cannot be fitted.
        """
        names = {"state": "state_features"} | ({"action": "action"} if copy.parametric else {})
        columns = {name: summarize_copy(copy, name, NormParams(), config.seed) for name in names.values()}
        rare = [
            str(feature)
            for column in columns.values()
            for feature, summary in column.features.items()
            if summary.moments.count < MIN_PRESENT_VALUES
        ]
        settings = NormParams(feature_overrides=dict.fromkeys(rare, "DO_NOT_PREPROCESS"))
        specs = fit_columns(columns, settings, where=config.data_path)
        return cls(normalization={key: specs[name].spec for key, name in names.items()}, training=TrainingConfig())

    def heads(self, copy: TrainingCopy, *, gamma: float, target_update_rate: float) -> CPEHeads:
        """Returns models of a policy that read a log's raw columns."""
        spec = SourceSpec(
            num_state_features=self.normalization["state"].width,
            num_action_features=self.normalization["action"].width if copy.parametric else 0,
            action_names=copy.action_names,
            metric_names=copy.metric_names,
        )
        training = self.training
        shape = NetworkSettings(
            hidden=training.layers[1:-1], activations=training.activations[:-1], min_std=training.weight_init_min_std
        )
        heads = build_cpe_heads(spec, shape, gamma=gamma, target_update_rate=target_update_rate)
        state = self._reader("state", copy.state_ids)
        action = self._reader("action", copy.action_ids) if copy.parametric else None
        for name in ("reward_network", "value_network", "target_network"):
            setattr(heads, name, FromRaw(state, action, getattr(heads, name)))
        return heads

    def _reader(self, column: str, ids: tuple[int, ...]) -> Reordered:
        spec = self.normalization[column]
        return Reordered(ids, spec, Preprocessor(spec, missing_as_zero=self.missing_as_zero))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """A model that is evaluated.

    Attributes:
        key: the config key that names it.
        path: its folder.
        bundle: loaded and verified.
        config: what it was trained with, as JSON.
        normalization: by column, "state" and for candidates "action".
    """

    key: str
    path: Path
    bundle: Bundle
    config: dict[str, Any]
    normalization: dict[str, NormalizationSpec]

    @classmethod
    def load(cls, key: str, path: str) -> "ExportedModel":
        """Loads a bundle with the config and the normalization in its folder.

        Raises:
            BundleError: no model there, or one that was altered, or without its normalization.
        """
        folder = Path(path).expanduser()
        bundle = load_bundle(folder)
        config, encoded = (json.loads((folder / name).read_bytes()) for name in ("config.json", "normalization.json"))
        columns = ("state", "action") if bundle.parametric else ("state",)
        lacking = [name for name in columns if name not in encoded]
        if lacking:
            where, advice = str(folder / "normalization.json"), "Export the model again"
            raise BundleError(Problem(where, f"parameters of {' and '.join(lacking)} features", "none", advice))
        specs = {name: parse_normalization(encoded[name], where=f"{folder}: {name}") for name in columns}
        return cls(key=key, path=folder, bundle=bundle, config=config, normalization=specs)

    @property
    def origin(self) -> dict[str, Any]:
        """Workflow, steps and hashes of data and config, from its manifest."""
        return {key: self.bundle.manifest[key] for key in ("workflow", "steps", "data_hash", "config_hash")}

    def learned_from(self, content: str) -> bool:
        """Whether it has learned from logged rows, given facts.content_of; in simulation alone it has from none."""
        alone = (self.config.get("simulation") or {}).get("share") == 1
        return self.bundle.manifest["data_hash"] == content and not alone

    @property
    def gamma(self) -> float | None:
        """Discount it was trained with, None where its config does not say."""
        value = self.config.get("rl", {}).get("gamma")
        return None if value is None else float(value)

    def spans(self, copy: TrainingCopy) -> Spans:
        """Returns how rows of a log are discounted: by steps, or by time if it was trained so.

        Raises:
            DataError: rows that go on without a positive time_diff, where that is the discount.
        """
        if self.by_time:
            return time_steps(copy, float(self.config["rl"].get("time_diff_unit_length", 1.0)))
        return single_steps(copy)

    @property
    def by_time(self) -> bool:
        """Whether it was trained to discount by the time between rows, not by steps."""
        return bool(self.config.get("rl", {}).get("use_seq_num_diff_as_time_diff", False))

    def policy(self, config: EvaluateConfig) -> TargetPolicy:
        """Returns the evaluated policy: the one it was exported with, unless the config names another."""
        if config.policy == "acting":
            return policy_of(self.bundle.policy)
        if config.policy == "greedy":
            return EpsilonGreedy()
        return Softmax(config.temperature or check(RLConfig, self.config.get("rl", {})).temperature)

    @property
    def reading(self) -> Reading:
        """How models of its policy read a log: by its normalization, with networks as wide as its own."""
        return Reading(
            normalization=self.normalization,
            training=check(TrainingConfig, self.config.get("training", {})),
            missing_as_zero=bool(self.config.get("rl", {}).get("set_missing_value_to_zero", False)),
        )


class FromRaw(nn.Module):
    """A network behind the normalization of what it reads.

    Args:
        state: forward(values [N, S], presence [N, S]) -> [N, W].
        action: those of candidates' features; None if actions are fixed.
        network: forward(state, mask, features).
    """

    def __init__(self, state: nn.Module, action: nn.Module | None, network: nn.Module) -> None:
        super().__init__()
        self.state, self.action, self.network = state, action, network
        self.needs_candidate_list = bool(network.needs_candidate_list)

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None) -> Tensor:
        """Returns what the network does, for raw state [B, S] and features [B, K, F], NaN where missing."""
        if features is not None:
            assert self.action is not None
            flat = features.flatten(0, 1)
            features = self.action(flat, ~flat.isnan()).view(*mask.shape, -1)
        return self.network(self.state(state, ~state.isnan()), mask, features)  # type: ignore[no-any-return]


class Choices:
    """Predictions of a bundle, through onnxruntime, for rows with another order of columns and actions.

    Args:
        bundle: the model.
        state_ids: features of the rows' states, by column.
        action_names: the rows' actions in their order; of candidates they are not read.
        action_ids: features of the rows' candidates, by column.
    """

    def __init__(
        self, bundle: Bundle, state_ids: Sequence[int], action_names: Sequence[str], action_ids: Sequence[int]
    ) -> None:
        self._bundle, self._state_ids, self._action_ids = bundle, state_ids, action_ids
        names = () if bundle.parametric else action_names
        self._order = np.array([bundle.action_names.index(name) for name in names], np.int64)

    @classmethod
    def in_simulation(cls, bundle: Bundle, spec: EnvSpec) -> "Choices":
        """Returns the choices of a bundle without `misfits` in an environment."""
        return cls(bundle, range(spec.observation_size), spec.action_names, range(spec.action_feature_size))

    def __call__(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Prediction:
        """Returns the predictions for state [N, S], mask [N, K] and, of candidates, features [N, K, F].

        Raises:
            BundleError: an infinite feature.
        """
        values = in_order(state.cpu().numpy(), self._state_ids, self._bundle.state_feature_ids, absent=np.nan)
        allowed = None if mask is None else mask.cpu().numpy()
        if self._bundle.parametric:
            assert features is not None
            flat = features.cpu().numpy().reshape(-1, features.shape[2])
            choices = in_order(flat, self._action_ids, self._bundle.action_feature_ids, absent=np.nan)
            return self._bundle.predict(values, mask=allowed, candidates=list(choices.reshape(*features.shape[:2], -1)))
        inverse = self._order.argsort()
        prediction = self._bundle.predict(values, mask=None if allowed is None else allowed[:, inverse])
        return replace(
            prediction,
            q=prediction.q[:, self._order],
            greedy=np.append(inverse, -1)[prediction.greedy],  # -1, where nothing is allowed, stays
            propensities=prediction.propensities[:, self._order],
            mask=prediction.mask[:, self._order],
        )

    def values(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns the values [N, K] of what environments show; -inf for a choice that the model does not take."""
        prediction = self(state, mask, features)
        q = np.where(prediction.mask, prediction.q, np.float32(-np.inf))
        return torch.from_numpy(q).to(state.device)

    def logarithms(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns the logarithms [N, K] of the model's probabilities: at temperature 1 their softmax is these."""
        probabilities = torch.from_numpy(self(state, mask, features).propensities)
        return probabilities.log().float().to(state.device)


class ExportedPolicy:
    """Probabilities of an exported model's policy, on rows of a log or in simulation.

    Args:
        model: the model whose policy it is.
        config: says which policy is made of its values.
        choices: what the model's bundle chooses for the rows.
    """

    def __init__(self, model: ExportedModel, config: EvaluateConfig, choices: Choices) -> None:
        self._model, self._choices = model, choices
        self._policy = None if config.policy == "acting" else model.policy(config)

    def __call__(self, state: Tensor, actions: Actions) -> Tensor:
        """Returns probabilities [B, K] for raw state [B, S] and choices; a row that has none gives zeros."""
        return self.probabilities(state, actions.mask, actions.features)

    def probabilities(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns probabilities [N, K] for state [N, S], mask [N, K] and, of candidates, features [N, K, F].

        Raises:
            BundleError: the model gives a value that is no finite number, or an infinite feature.
        """
        prediction = self._choices(state, mask, features)
        allowed, q = torch.from_numpy(prediction.mask), torch.from_numpy(prediction.q)
        decides = torch.ones(len(state), dtype=torch.bool) if mask is None else mask.cpu().any(1)
        if self._policy is None:
            found = torch.from_numpy(np.ascontiguousarray(prediction.propensities))
        else:
            found = self._policy.propensities(q.masked_fill(~allowed, 0.0), allowed)
        lost = decides & (found.sum(1) == 0)  # a restriction that is no number leaves no choice
        if not found.isfinite().all() or (~q.isfinite() & allowed).any() or lost.any():
            where = f"{self._model.key} {self._model.path}"
            advice = "Train again: a model that diverged has no policy"
            raise BundleError(Problem(where, "probabilities of every choice", "values that are no numbers", advice))
        return found


def kind_of(*, parametric: bool) -> str:
    """Returns which kind of model decides so, in words."""
    return f"a model of {CHOICES[parametric]}"


def several_types(spec: EnvSpec, where: str) -> list[Problem]:
    """Returns the problem of an environment whose agents are of several types, where one policy plays them all."""
    if len(spec.agent_type_names) == 1:
        return []
    got = f"{spec.name} with {' and '.join(spec.agent_type_names)}"
    advice = "A training run plays all types together: simulation.policies says who plays which"
    return [Problem(where, "an environment whose agents are of one type", got, advice)]


def misfits(bundle: Bundle, spec: EnvSpec, where: str) -> list[Problem]:
    """Returns why a model cannot play in an environment, nothing where it can.

    Names of actions may stand in another order; of the features a model reads, the environment must show every one.

    Args:
        bundle: the model.
        spec: the environment.
        where: what the model is called in messages.
    """
    problems = []
    advice = f"Play where it was trained, or train in {spec.name}"
    if spec.candidates and not bundle.parametric:
        expected = f"{kind_of(parametric=True)}, for {spec.name} has candidates that differ from step to step"
        problems.append(Problem(where, expected, kind_of(parametric=False), advice))
    elif not bundle.parametric and set(bundle.action_names) != set(spec.action_names):
        problems.append(
            Problem(
                where,
                f"actions {', '.join(spec.action_names)} of {spec.name}",
                ", ".join(bundle.action_names),
                "Train with the environment's names",
            )
        )
    sizes = {
        "state": (bundle.state_feature_ids, spec.observation_size),
        "action": (bundle.action_feature_ids, spec.action_feature_size),
    }
    for name, (ids, size) in sizes.items():
        unknown = [str(one) for one in ids if not 0 <= one < size]
        if unknown:
            expected = f"{name} features among 0 to {size - 1} of {spec.name}"
            problems.append(Problem(where, expected, ", ".join(unknown), advice))
    return problems
