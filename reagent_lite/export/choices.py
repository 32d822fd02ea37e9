"""An exported model for rows with another order of columns and actions, and for environments."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from reagent_lite.data.rows.matrices import in_order
from reagent_lite.errors import Problem
from reagent_lite.export.bundle import Bundle, Prediction
from reagent_lite.sim.spec import EnvSpec

CHOICES = ("named actions (workflows.dqn)", "candidates (workflows.parametric_dqn)")
"""Kinds of choices in words, indexed by `parametric`."""


class Choices:
    """Predictions of a bundle, through onnxruntime, for rows with another order of columns and actions.

    Args:
        bundle: the model.
        state_ids: feature ids of the rows' states, by column.
        action_names: names of the rows' actions, in order; not used with candidates.
        action_ids: feature ids of the rows' candidates, by column.
    """

    def __init__(
        self, bundle: Bundle, state_ids: Sequence[int], action_names: Sequence[str], action_ids: Sequence[int]
    ) -> None:
        self._bundle = bundle
        self._state_ids = state_ids
        self._action_ids = action_ids
        names = () if bundle.parametric else action_names
        self._order = np.array([bundle.action_names.index(name) for name in names], np.int64)

    @classmethod
    def in_simulation(cls, bundle: Bundle, spec: EnvSpec) -> "Choices":
        """Returns the choices of a bundle in an environment; `compare_with_environment` must return nothing."""
        return cls(bundle, range(spec.observation_size), spec.action_names, range(spec.action_feature_size))

    def __call__(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Prediction:
        """Returns predictions for state [N, S], mask [N, K] and features [N, K, F] of candidates.

        Raises:
            BundleError: a feature is infinite.
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
            greedy=np.append(inverse, -1)[prediction.greedy],  # -1 stays -1
            propensities=prediction.propensities[:, self._order],
            mask=prediction.mask[:, self._order],
        )

    def values(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns values [N, K] for an environment; -inf for a choice that the model does not take."""
        prediction = self(state, mask, features)
        q = np.where(prediction.mask, prediction.q, np.float32(-np.inf))
        return torch.from_numpy(q).to(state.device)

    def logarithms(self, state: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns the logarithms [N, K] of the model's probabilities; their softmax is the probabilities."""
        probabilities = torch.from_numpy(self(state, mask, features).propensities)
        return probabilities.log().float().to(state.device)


def kind_of_model(*, parametric: bool) -> str:
    """Returns the kind of a model in words."""
    return f"a model of {CHOICES[parametric]}"


def several_types(spec: EnvSpec, where: str) -> list[Problem]:
    """Returns a problem if agents of an environment have several types, which one policy cannot play."""
    if len(spec.agent_type_names) == 1:
        return []
    got = f"{spec.name} with {' and '.join(spec.agent_type_names)}"
    advice = "Use a training run, which plays all types together: simulation.policies names the policy of each type"
    return [Problem(where, "an environment with one type of agents", got, advice)]


def compare_with_environment(bundle: Bundle, spec: EnvSpec, where: str) -> list[Problem]:
    """Returns the reasons why a model cannot play in an environment.

    The names of actions may have another order. The environment must have every feature that the model reads.

    Args:
        bundle: the model.
        spec: the environment.
        where: name of the model in messages.
    """
    problems = []
    advice = f"Use the environment that it was trained in, or train in {spec.name}"
    if spec.candidates and not bundle.parametric:
        expected = f"{kind_of_model(parametric=True)}, as {spec.name} has candidates that differ from step to step"
        problems.append(Problem(where, expected, kind_of_model(parametric=False), advice))
    elif not bundle.parametric and set(bundle.action_names) != set(spec.action_names):
        problems.append(
            Problem(
                where,
                f"actions {', '.join(spec.action_names)} of {spec.name}",
                ", ".join(bundle.action_names),
                "Train with the environment's names",
            )
        )
    shape = None if spec.image is None else spec.image.shape
    if bundle.image_shape != shape:
        kinds = ["numbers" if axes is None else f"images {list(axes)}" for axes in (shape, bundle.image_shape)]
        return [*problems, Problem(where, f"a model of {kinds[0]}, as {spec.name} has", f"one of {kinds[1]}", advice)]
    sizes = {
        "state": (bundle.state_feature_ids, spec.observation_size),
        "action": (bundle.action_feature_ids, spec.action_feature_size),
    }
    for name, (ids, size) in sizes.items():
        unknown = [str(feature) for feature in ids if not 0 <= feature < size]
        if unknown:
            expected = f"{name} features among 0 to {size - 1} of {spec.name}"
            problems.append(Problem(where, expected, ", ".join(unknown), advice))
    return problems
