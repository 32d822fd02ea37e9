"""Critic Regularized Regression over [B, K] choices; Wang et al. (2020), with exact means over the choices.

y = r + boost + gamma^steps * bootstrap * sum_a' pi(a'|s') Q_target(s', a')
A(s, a) = Q(s, a) - sum_a' pi(a'|s) Q(s, a')
w(s, a) = min(exp(A / beta), max_weight)   or   1 if A > 0, else 0

The paper samples actions and also has a target network of the actor; with few choices the mean needs no samples.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor

from reagent_lite.algorithms.actor_critic import ActorCritic
from reagent_lite.algorithms.policy_learner import TargetSettings, configured_network, evaluating, reward_boost
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.algorithm import CRRConfig
from reagent_lite.models.q_networks import allowed_values
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.rl.policies import Softmax
from reagent_lite.rl.td import Bounds, expected_value, select_choice
from reagent_lite.types import SourceSpec, TransitionBatch

_ACTOR = Softmax(1.0)


class CRR(ActorCritic[CRRConfig]):
    """Critic Regularized Regression; see the top of this file. The section has the parameters of the weights."""

    name: ClassVar[str] = "crr"

    @classmethod
    def build(cls, config: WorkflowConfig, spec: SourceSpec, return_bounds: Bounds) -> Self:
        """Returns the learner that crr, rl and training describe."""
        return cls(
            configured_network(config, spec, outputs=1, dueling=config.rainbow.dueling_architecture),
            configured_network(config, spec, outputs=1, dueling=False),
            ScalarHead(config.rl.q_network_loss),
            TargetSettings.of(config, return_bounds),
            config.crr or CRRConfig(),
            reward_boost=reward_boost(config),
        )

    def weights(self, batch: TransitionBatch, outputs: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns w(s, a) of the logged actions, [B]; see `ActorCritic.weights`."""
        q = self.head(outputs)
        advantage = select_choice(q, batch.action) - expected_value(q, _ACTOR.propensities(logits, batch.actions.mask))
        if self.section.weights == "binary":
            return (advantage > 0).to(q.dtype), {}
        return (advantage / self.section.beta).exp().clamp(max=self.section.max_weight), {}

    @torch.no_grad()
    def next_outputs(self, batch: TransitionBatch) -> Tensor:
        """Returns the mean of the target network's Q(s', .) under the actor, [B, 1]."""
        state = batch.next_state
        actions = batch.next_actions
        with evaluating(self.actor):
            logits = allowed_values(self.actor, state, actions).squeeze(2)
        q = self.head(allowed_values(self.target_network, state, actions))
        return expected_value(q, _ACTOR.propensities(logits, actions.mask)).unsqueeze(1)
