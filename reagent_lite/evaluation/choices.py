"""An exported model in an environment: whether the two fit, and what the model says of what environments show."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from reagent_lite.errors import Problem
from reagent_lite.export.bundle import Bundle, Prediction
from reagent_lite.sim.spec import EnvSpec

_KINDS = ("a model of named actions (workflows.dqn)", "a model of candidates (workflows.parametric_dqn)")


def kind_of(*, parametric: bool) -> str:
    """Returns which kind of model decides so, in words."""
    return _KINDS[parametric]


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
        problems.append(Problem(where, f"actions {', '.join(spec.action_names)} of {spec.name}",
                                ", ".join(bundle.action_names), "Train with the environment's names"))  # fmt: skip
    sizes = {"state": (bundle.state_feature_ids, spec.observation_size),
             "action": (bundle.action_feature_ids, spec.action_feature_size)}  # fmt: skip
    for name, (ids, size) in sizes.items():
        unknown = [str(one) for one in ids if not 0 <= one < size]
        if unknown:
            expected = f"{name} features among 0 to {size - 1} of {spec.name}"
            problems.append(Problem(where, expected, ", ".join(unknown), advice))
    return problems


class ChoicesInSimulation:
    """Predictions of an exported model, through onnxruntime, with choices in the environment's order.

    Args:
        bundle: without `misfits`.
        spec: the environment.
    """

    def __init__(self, bundle: Bundle, spec: EnvSpec) -> None:
        self._bundle = bundle
        self._columns, self._action_columns = list(bundle.state_feature_ids), list(bundle.action_feature_ids)
        names = () if bundle.parametric else spec.action_names
        self._order = np.array([bundle.action_names.index(name) for name in names], np.int64)

    def __call__(self, observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Prediction:
        """Returns what the model says of observation [N, S], mask [N, K] and, for candidates, features [N, K, F].

        Raises:
            BundleError: an infinite feature.
        """
        values = observation[:, self._columns].cpu().numpy()
        allowed = None if mask is None else mask.cpu().numpy()
        if self._bundle.parametric:
            assert features is not None
            candidates = list(features[:, :, self._action_columns].cpu().numpy())
            return self._bundle.predict(values, mask=allowed, candidates=candidates)
        if allowed is not None:
            allowed = allowed[:, self._order.argsort()]
        prediction = self._bundle.predict(values, mask=allowed)
        places = np.append(self._order.argsort(), -1)  # -1, where nothing is allowed, stays
        return replace(
            prediction,
            q=prediction.q[:, self._order],
            greedy=places[prediction.greedy],
            propensities=prediction.propensities[:, self._order],
            mask=prediction.mask[:, self._order],
        )
