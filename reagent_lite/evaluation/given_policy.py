"""Policies that are not models: uniform, the logging policy, and probabilities in a column of the log.

The probabilities of a row are appended to its state, so that these policies are functions of states and choices too.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from reagent_lite.algorithms.reward_and_q_models import PolicyProbabilities
from reagent_lite.config.evaluate_config import COLUMN, LOGGED, UNIFORM, EvaluateConfig
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.rows.matrices import PolicyColumn
from reagent_lite.data.sampling.source import FeatureColumns
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.cpe import MODELED
from reagent_lite.evaluation.evaluator import EvaluationInput
from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.types import Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPolicy:
    """An evaluated policy that is not a model.

    Attributes:
        key: config key that names it.
        path: uniform, logged, or column:NAME.
    """

    origin: ClassVar[dict[str, Any]] = dict.fromkeys(("workflow", "steps", "data_hash", "config_hash"))
    gamma: ClassVar[float | None] = None

    key: str
    path: str

    @property
    def column(self) -> str:
        """Name of the log's column with the policy's probabilities; "" if it has no column."""
        return self.path.removeprefix(COLUMN) if self.path.startswith(COLUMN) else ""

    def policy(self, config: EvaluateConfig) -> str:
        """Returns the policy in words."""
        words = {UNIFORM: "uniform over the possible actions", LOGGED: "the logging policy"}
        return words.get(self.path, f"probabilities in column {self.column}")

    def on(self, log: EvaluationInput, column: PolicyColumn | None) -> tuple[EvaluationInput, PolicyProbabilities]:
        """Returns the log with the policy's input appended to its states, and the policy.

        Args:
            log: rows of a single training copy.
            column: the policy's column, if it has one.
        """
        copy = log.sides.train
        if self.path == UNIFORM:
            return log, _uniform
        if column is None:  # the logging policy
            column = PolicyColumn(values=log.rows.propensity[:, None].numpy(), complete=False)
        width = log.rows.state.width
        if column.complete:
            values = column.values
            unknown = _unknown_next(copy)
            split = log.split
            policy: PolicyProbabilities = partial(_complete, width)
        else:
            values = np.concatenate((column.values, np.asarray(copy.action)[:, None]), 1, dtype=np.float32)
            reason = "only the probability of the logged action is known, so no model is fitted to the policy"
            unknown = dict.fromkeys(MODELED, reason)
            split = replace(log.split, fitted=log.split.fitted[:0], checked=log.split.checked[:0])
            policy = partial(_of_logged, width)
        state = log.rows.state
        extended = _StatesWithProbabilities(
            values=state.values, width=width, mapped=state.mapped, probabilities=torch.from_numpy(values)
        )
        rows = replace(log.rows, state=extended)
        return replace(log, rows=rows, train_rows=rows, split=split, unknown=unknown), policy


def _uniform(state: Tensor, actions: Actions) -> Tensor:
    allowed = actions.mask.float()
    return allowed / allowed.sum(1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatesWithProbabilities(FeatureColumns):
    """States with a policy's probabilities appended.

    Attributes:
        probabilities: [R, P] probabilities for the log's rows; those for other states are unknown.
    """

    probabilities: Tensor

    def take(self, index: Tensor) -> Tensor:
        """Returns states and probabilities [n, W + P]; NaN for unknown probabilities."""
        last = len(self.probabilities) - 1
        probabilities = self.probabilities.index_select(0, index.clamp(max=last))
        probabilities = probabilities.masked_fill((index > last).unsqueeze(1), torch.nan)
        return torch.cat((FeatureColumns.take(self, index), probabilities), 1)


def _complete(width: int, state: Tensor, actions: Actions) -> Tensor:
    """Returns every choice's probability, stored in `state` after the first `width` columns."""
    probabilities = state[:, width:].nan_to_num(0.0)
    return pad(probabilities, (0, actions.mask.shape[1] - probabilities.shape[1])) * actions.mask


def _of_logged(width: int, state: Tensor, actions: Actions) -> Tensor:
    """Returns the probability of the logged action, NaN for others; probability and action follow `width` features."""
    probability, action = state[:, width:].unbind(1)
    index = action.nan_to_num(0.0).long().clamp(0, actions.mask.shape[1] - 1).unsqueeze(1)
    return torch.full(actions.mask.shape, torch.nan).scatter(1, index, probability.unsqueeze(1))


def _unknown_next(copy: TrainingCopy) -> dict[str, str]:
    """Returns why estimates of returns by a model are missing, if next states with their choices are not rows."""
    after = np.minimum(np.arange(len(copy)) + 1, len(copy) - 1)
    followed = np.asarray(copy.next_index) == after
    if copy.parametric:
        followed &= np.asarray(copy.next_list) == np.asarray(copy.actions_list)[after]
    else:
        followed &= (np.asarray(copy.next_mask) == np.asarray(copy.mask)[after]).all(1)
    unknown = int(((np.asarray(copy.bootstrap) > 0) & ~followed).sum())
    if not unknown:
        return {}
    reason = f"the next state of {pluralize(unknown, 'row')} is not a row of the log, so the policy is unknown there"
    return {name: reason for name in MODELED if ESTIMATORS[name].sequential}
