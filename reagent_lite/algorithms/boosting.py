"""Values of decisions with one reward each: a fitted reward model in the place of a network that learns by steps."""

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from reagent_lite.algorithms.policy_learner import Assign, PolicyLearner, TargetSettings, reward_boost
from reagent_lite.algorithms.reward_fit import RewardFit, RewardRows, TreeSettings, fit_rewards
from reagent_lite.config import WorkflowConfig
from reagent_lite.models.q_networks import chosen_values
from reagent_lite.models.reward_models import RewardModel, build_reward_model
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.rl.td import Bounds
from reagent_lite.types import SourceSpec, TransitionBatch


class Boosting(PolicyLearner):
    """A linear model of the reward, products of features and trees; see `reward_fit`. It takes no optimizer steps.

    Args:
        model: the model, not fitted yet.
        settings: gamma is 0.
        reward_boost: [K] added to the reward by action, or None.

    Attributes:
        fit: errors of the model on rows that it has not seen; None until it is fitted, and after a load.
    """

    name: ClassVar[str] = "boosting"
    score: ClassVar[str] = "expected reward"
    advice: ClassVar[str] = "Check"

    def __init__(self, model: RewardModel, settings: TargetSettings, reward_boost: Tensor | None = None) -> None:
        super().__init__(model, ScalarHead(), settings, reward_boost)
        self.model = model
        self.fit: RewardFit | None = None

    @classmethod
    def build(cls, config: WorkflowConfig, spec: SourceSpec, return_bounds: Bounds) -> Self:
        """Returns a learner whose values are 0."""
        return cls(build_reward_model(spec), TargetSettings.of(config, None), reward_boost(config))

    def fit_rows(self, rows: RewardRows, settings: TreeSettings) -> None:
        """Fits the model to decisions; rl.reward_boost, which is known, is added to its values."""
        self.fit = fit_rewards(self.model, rows, settings)
        if self.reward_boost is not None:
            self.model.add(self.reward_boost)

    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the squared error, a sum weighted by `batch.weight`."""
        outputs = chosen_values(self.model, batch.state, batch.actions, batch.action)
        rows, self.row_errors = self.td_losses(outputs, self.next_outputs(batch), batch)
        loss = batch.weight.dot(rows)
        return loss, {"td_loss": loss.detach()}

    def next_outputs(self, batch: TransitionBatch) -> Tensor:
        """Returns 0, [B, 1]: later rewards do not count."""
        return torch.zeros_like(batch.reward).unsqueeze(1)

    def warm_start(self, weights: Mapping[str, Tensor], assign: Assign) -> str:
        """Raises NotImplementedError: the config refuses warm starts."""
        raise NotImplementedError

    @property
    def online(self) -> RewardModel:
        """The reward model."""
        return self.model

    @property
    def scorer(self) -> Scorer:
        """The reward model with its head."""
        return Scorer(self.model, self.head)

    def after_step(self) -> None:
        """Does nothing: there is no target network to move."""
