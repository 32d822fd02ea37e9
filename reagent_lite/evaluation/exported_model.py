"""An exported model under evaluation: its probabilities on logged rows, and models fitted to its policy.

raw rows ─┬─► the bundle, through onnxruntime ─────────────► probabilities
          └─► the bundle's own normalization ─► networks ──► expected outcomes, values
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reagent_lite.algorithms.policy_learner import network_settings
from reagent_lite.algorithms.reward_and_q_models import Read, RewardAndQModels, build_reward_and_q_models
from reagent_lite.config import check
from reagent_lite.config.algorithm import Q_TEMPERATURE
from reagent_lite.config.embedding_config import counted_ids
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.norm_params import NormParams
from reagent_lite.config.paths import DataPath, show_paths
from reagent_lite.config.training import TrainingConfig
from reagent_lite.data.copy.feature_summaries import summarize_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.column_fits import fit_columns
from reagent_lite.data.features.feature_types import MIN_PRESENT_VALUES
from reagent_lite.data.features.normalization_files import parse_normalization
from reagent_lite.data.sampling.discounts import time_discounts
from reagent_lite.data.sampling.normalized import Reordered
from reagent_lite.data.sampling.spans import Spans, single_steps, time_steps
from reagent_lite.errors import BundleError, DataError, Problem
from reagent_lite.export.bundle import CONFIG_FILE, EVALUATION_FILE, NORMALIZATION_FILE, Bundle, load_bundle
from reagent_lite.export.choices import Choices
from reagent_lite.feature_ids import id_of
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.rl.policies import EpsilonGreedy, Softmax, TargetPolicy, policy_of
from reagent_lite.types import Actions, FeatureSpec, FeatureType, NormalizationSpec, SourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureReader:
    """Normalization and network shapes with which models of a policy read the raw columns of a log.

    Attributes:
        normalization: specs by column, "state" and for candidates "action".
        training: shape of the networks.
        missing_as_zero: whether missing features are read as 0.
    """

    normalization: dict[str, NormalizationSpec]
    training: TrainingConfig
    missing_as_zero: bool = False

    @classmethod
    def fit(cls, copy: TrainingCopy, config: EvaluateConfig) -> "FeatureReader":
        """Returns the default network shapes, and normalization fitted to a log; rare features are not normalized.

        Raises:
            DataError: a feature cannot be fitted.
        """
        names = {"state": "state_features"} | ({"action": "action"} if copy.parametric else {})
        ids = counted_ids(config.embeddings)
        columns = {name: summarize_copy(copy, name, NormParams(), config.seed, ids) for name in names.values()}
        rare = [
            str(feature)
            for column in columns.values()
            for feature, summary in column.features.items()
            if summary.moments.count < MIN_PRESENT_VALUES
        ]
        texts = {str(feature) for column in columns.values() for feature in column.levels}
        overrides = {feature: "ENUM" if feature in texts else "DO_NOT_PREPROCESS" for feature in rare}
        settings = NormParams(feature_overrides=overrides)
        embeddings = {id_of(name): section for name, section in config.embeddings.items()}
        specs = fit_columns(columns, settings, where=show_paths(config.data_path), embeddings=embeddings)
        return cls(normalization={key: specs[name].spec for key, name in names.items()}, training=TrainingConfig())

    @classmethod
    def raw(cls, copy: TrainingCopy) -> "FeatureReader":
        """Returns the default network shapes, and no normalization: for policies to which no model is fitted."""

        def raw(ids: tuple[int, ...]) -> NormalizationSpec:
            kind = FeatureType.DO_NOT_PREPROCESS
            return NormalizationSpec(tuple(FeatureSpec(feature_id=feature, feature_type=kind) for feature in ids))

        action = {"action": raw(copy.action_ids)} if copy.parametric else {}
        return cls(normalization={"state": raw(copy.state_ids)} | action, training=TrainingConfig())

    def spec(self, copy: TrainingCopy) -> SourceSpec:
        """Returns the feature and action counts of a log after normalization."""
        return SourceSpec(
            num_state_features=self.normalization["state"].width,
            num_action_features=self.normalization["action"].width if copy.parametric else 0,
            action_names=copy.action_names,
            metric_names=copy.metric_names,
            state_embeddings=self.normalization["state"].embeddings,
            action_embeddings=self.normalization["action"].embeddings if copy.parametric else (),
            image=self.normalization["state"].image,
        )

    def reader(self, copy: TrainingCopy) -> Read:
        """Returns a function that normalizes a log's raw states and choices."""
        is_image = self.normalization["state"].image is not None
        read_state = None if is_image else self._reader("state", copy.state_ids)
        read_action = self._reader("action", copy.action_ids) if copy.parametric else None

        def read(state: Tensor, actions: Actions) -> tuple[Tensor, Actions]:
            features = None
            if actions.features is not None:
                assert read_action is not None
                flat = actions.features.flatten(0, 1)
                features = read_action(flat, ~flat.isnan()).view(*actions.mask.shape, -1)
            normalized = state if read_state is None else read_state(state, ~state.isnan())
            return normalized, Actions(mask=actions.mask, features=features)

        return read

    def heads(self, copy: TrainingCopy, *, gamma: float, target_update_rate: float) -> RewardAndQModels:
        """Returns models of a policy that read a log's raw columns."""
        return build_reward_and_q_models(
            self.spec(copy),
            network_settings(self.training),
            gamma=gamma,
            target_update_rate=target_update_rate,
            read=self.reader(copy),
        )

    def _reader(self, column: str, ids: tuple[int, ...]) -> Reordered:
        spec = self.normalization[column]
        return Reordered(ids, spec, Preprocessor(spec, missing_as_zero=self.missing_as_zero))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """An exported model under evaluation.

    Attributes:
        key: config key that names it.
        path: its folder.
        bundle: its bundle, loaded and verified.
        config: config it was trained with, as JSON.
        reading: its normalization and network shapes, which models of its policy share.
        time_discount: TimeDiscounts.json of its training; None if it was trained by rows, or by an earlier version.
    """

    key: str
    path: Path
    bundle: Bundle
    config: dict[str, Any]
    reading: FeatureReader
    time_discount: dict[str, Any] | None

    @classmethod
    def load(cls, key: str, path: str) -> "ExportedModel":
        """Loads a bundle with the config and the normalization in its folder.

        Raises:
            BundleError: no model in the folder, or a model that was altered or has no normalization.
        """
        folder = Path(path).expanduser()
        bundle = load_bundle(folder)
        config, encoded = (json.loads((folder / name).read_bytes()) for name in (CONFIG_FILE, NORMALIZATION_FILE))
        columns = ("state", "action") if bundle.parametric else ("state",)
        lacking = [name for name in columns if name not in encoded]
        if lacking:
            raise BundleError(
                Problem(
                    str(folder / NORMALIZATION_FILE),
                    f"parameters of {' and '.join(lacking)} features",
                    "none",
                    "Export the model again",
                )
            )
        specs = {name: parse_normalization(encoded[name], where=f"{folder}: {name}") for name in columns}
        reading = FeatureReader(
            normalization=specs,
            training=check(TrainingConfig, config.get("training", {})),
            missing_as_zero=bool(config.get("rl", {}).get("set_missing_value_to_zero", False)),
        )
        evaluation = folder / EVALUATION_FILE
        time_discount = json.loads(evaluation.read_bytes()).get("time_discount") if evaluation.exists() else None
        return cls(key=key, path=folder, bundle=bundle, config=config, reading=reading, time_discount=time_discount)

    @property
    def origin(self) -> dict[str, Any]:
        """Workflow, steps and hashes of data and config, from its manifest."""
        return {key: self.bundle.manifest[key] for key in ("workflow", "steps", "data_hash", "config_hash")}

    def learned_from(self, content: str) -> bool:
        """Returns whether it was trained on rows with this content hash (`content_of`); false for simulation alone."""
        alone = (self.config.get("simulation") or {}).get("share") == 1
        return self.bundle.manifest["data_hash"] == content and not alone

    @property
    def gamma(self) -> float | None:
        """Discount it was trained with; None if its config has none."""
        value = self.config.get("rl", {}).get("gamma")
        return None if value is None else float(value)

    def spans(self, copy: TrainingCopy) -> Spans:
        """Returns the spans by which rows of a log are discounted: steps, or times if it was trained with times.

        Raises:
            DataError: rows before the end without a positive time_diff, if time is the discount.
        """
        if self.by_time:
            return time_steps(copy, self.unit_length)
        return single_steps(copy)

    @property
    def unit_length(self) -> float:
        """The rl.time_diff_unit_length of its training."""
        return float(self.config["rl"].get("time_diff_unit_length", 1.0))

    def discount_warnings(self, copy: TrainingCopy, path: DataPath, gamma: float) -> Iterator[str]:
        """Yields a warning if times of a log seem to be in another unit than in training.

        Raises:
            DataError: nearly all discounts by time_diff are 0, or all are 1.
        """
        if not self.by_time:
            return
        discounts = time_discounts(copy, unit_length=self.unit_length, gamma=gamma)
        if discounts is None:
            return
        todo = "Give the log times in the unit of the log that the model was trained on"
        if problem := discounts.problem(f"{self.key} {self.path}, on {show_paths(path)}", todo):
            raise DataError(problem)
        kept = self.time_discount
        warnings = (discounts.warning(), discounts.differs_from(kept))
        yield from (f"{self.key}: {warning}" for warning in warnings if warning is not None)

    @property
    def by_time(self) -> bool:
        """Whether it was trained to discount by the time between rows instead of steps."""
        return bool(self.config.get("rl", {}).get("use_seq_num_diff_as_time_diff", False))

    def policy(self, config: EvaluateConfig) -> TargetPolicy:
        """Returns the evaluated policy: the one it was exported with, unless the config names another."""
        if config.policy == "acting":
            return policy_of(self.bundle.policy)
        if config.policy == "greedy":
            return EpsilonGreedy()
        return Softmax(config.temperature or self.config.get("rl", {}).get("temperature") or Q_TEMPERATURE)


class ExportedPolicy:
    """Probabilities of an exported model's policy, on rows of a log or in simulation.

    Args:
        model: the model.
        config: selects the policy to derive from its values.
        choices: computes the bundle's predictions.
    """

    def __init__(self, model: ExportedModel, config: EvaluateConfig, choices: Choices) -> None:
        self._model = model
        self._choices = choices
        self._policy = None if config.policy == "acting" else model.policy(config)

    def __call__(self, state: Tensor, actions: Actions) -> Tensor:
        """Returns probabilities [B, K] for raw state [B, S] and choices; a row without choices gives zeros."""
        return self.probabilities(state, actions.mask, actions.features)

    def probabilities(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns probabilities [N, K] for state [N, S], mask [N, K] and candidates' features [N, K, F].

        Raises:
            BundleError: the model gives a value that is no finite number, or an infinite feature.
        """
        prediction = self._choices(state, mask, features)
        allowed = torch.from_numpy(prediction.mask)
        q = torch.from_numpy(prediction.q)
        decides = torch.ones(len(state), dtype=torch.bool) if mask is None else mask.cpu().any(1)
        if self._policy is None:
            propensities = torch.from_numpy(np.ascontiguousarray(prediction.propensities))
        else:
            propensities = self._policy.propensities(q.masked_fill(~allowed, 0.0), allowed)
        lost = decides & (propensities.sum(1) == 0)  # NaN in a restriction leaves no choice
        if not propensities.isfinite().all() or (~q.isfinite() & allowed).any() or lost.any():
            raise BundleError(
                Problem(
                    f"{self._model.key} {self._model.path}",
                    "probabilities of every choice",
                    "values that are no numbers",
                    "Train again: a model that diverged has no policy",
                )
            )
        return propensities
