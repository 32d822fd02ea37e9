"""Base of learners with a critic Q(s, .) and an actor, whose logits define the policy.

loss = TD loss of Q(s, a)  -  w(s, a) log pi(a|s)          a is the logged action, w >= 0 has no gradient
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from reagent_lite.algorithms.policy_learner import Assign, BatchEvaluation, PolicyLearner, TargetSettings, under
from reagent_lite.config import WorkflowConfig
from reagent_lite.models.q_networks import allowed_values
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.rl.losses import constant_loss, imitation_loss
from reagent_lite.rl.td import chosen, td_target
from reagent_lite.types import TransitionBatch


class ActorCritic(PolicyLearner):
    """A critic and an actor; a derived class defines the next value and the weights of actions.

    Args:
        critic: forward(state, mask, features) -> [B, K, 1].
        actor: network of the same kind; its outputs are logits.
        head: turns the critic's output into a value.
        settings: parameters of the targets.
        reward_boost: [K] added to the reward by action, or None.
    """

    score: ClassVar[str] = "logit of the policy (not a value)"

    def __init__(
        self,
        critic: nn.Module,
        actor: nn.Module,
        head: ScalarHead,
        settings: TargetSettings,
        *,
        reward_boost: Tensor | None = None,
    ) -> None:
        super().__init__(critic, settings, reward_boost)
        self.critic = critic
        self.actor = actor
        self.head = head

    @abstractmethod
    def next_value(self, batch: TransitionBatch) -> Tensor:
        """Returns the value of the next state, [B], without a gradient; 0 if no choice is allowed."""

    @property
    def online(self) -> nn.Module:
        """The critic."""
        return self.critic

    @property
    def scorer(self) -> Scorer:
        """The actor: its logits are the scores."""
        return Scorer(self.actor, ScalarHead())

    def td_losses(self, outputs: Tensor, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Returns TD loss and priority of each row, [B], for the critic's outputs [B, K, 1]."""
        with torch.no_grad():
            next_value = self.next_value(batch).unsqueeze(1)
        logged_outputs = chosen(outputs, batch.action)
        return self.head.loss(logged_outputs, next_value, *self.rewards(batch), self.settings.value_bounds)

    def logits(self, batch: TransitionBatch) -> Tensor:
        """Returns the actor's logits, [B, K]; logits of choices that are not allowed are undefined."""
        return allowed_values(self.actor, batch.state, batch.actions).squeeze(2)

    @torch.no_grad()
    def evaluate(self, batch: TransitionBatch) -> BatchEvaluation:
        """See `PolicyLearner.evaluate`: values are the critic's, scores the actor's."""
        outputs = allowed_values(self.critic, batch.state, batch.actions)
        return BatchEvaluation(
            q=self.head(outputs),
            scores=self.logits(batch),
            choices=batch.actions.mask,
            td_loss=batch.weight.dot(self.td_losses(outputs, batch)[0]),
            target=td_target(*self.rewards(batch), self.next_value(batch), self.settings.value_bounds),
        )

    def constant_loss(self, mean: float, variance: float) -> float | None:
        """See `PolicyLearner.constant_loss`."""
        return constant_loss(mean, variance, self.head.kind)

    def parameter_groups(self, config: WorkflowConfig) -> list[dict[str, Any]]:
        """Returns the critic with its weight decay, and all other parameters without."""
        critic = list(self.critic.parameters())
        ids = {id(parameter) for parameter in critic}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in ids]
        decay = config.training.l2_decay
        return [{"params": critic, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]

    def warm_start(self, weights: Mapping[str, Tensor], assign: Assign) -> str:
        """Loads the actor; an exported model does not have the critic."""
        assign(self.actor, under("network.", weights))
        return "the optimizer and the critic start anew"


def imitation(batch: TransitionBatch, logits: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum over rows of -w log pi(a|s), weighted by `batch.weight`; logits [B, K], weights [B]."""
    return batch.weight.dot(weights * imitation_loss(logits, batch.actions.mask, batch.action))
