"""Implicit Q-learning over [B, K] choices; Kostrikov, Nair & Levine (2022). Targets use logged actions only.

V(s)  <- expectile of Q_target(s, a) over logged actions:   |expectile - [u < 0]| u^2,  u = Q_target(s, a) - V(s)
y      = r + boost + gamma^steps * bootstrap * V(s')
w(s, a) = min(exp(beta * (Q_target(s, a) - V(s))), max_weight)
"""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from reagent_lite.algorithms.actor_critic import ActorCritic
from reagent_lite.algorithms.policy_learner import (
    TargetSettings,
    configured_network,
    evaluating,
    network_settings,
    reward_boost,
)
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.algorithm import IQLConfig
from reagent_lite.models.q_networks import build_q_network, chosen_values
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.rl.losses import expectile_loss
from reagent_lite.rl.td import Bounds
from reagent_lite.types import SourceSpec, TransitionBatch


class IQL(ActorCritic[IQLConfig]):
    """Implicit Q-learning; see the top of this file.

    Args:
        critic: forward(state, mask, features) -> [B, K, 1].
        actor: network of the same kind; its outputs are logits.
        value: V(s), a network of one choice: forward(state, mask [B, 1], None) -> [B, 1, 1].
        head: turns the critic's output into a value.
        settings: parameters of the targets.
        section: expectile, and parameters of the weights.
        reward_boost: [K] added to the reward by action, or None.
    """

    name: ClassVar[str] = "iql"

    def __init__(
        self,
        critic: nn.Module,
        actor: nn.Module,
        value: nn.Module,
        head: ScalarHead,
        settings: TargetSettings,
        section: IQLConfig,
        *,
        reward_boost: Tensor | None = None,
    ) -> None:
        super().__init__(critic, actor, head, settings, section, reward_boost=reward_boost)
        self.value = value

    @classmethod
    def build(cls, config: WorkflowConfig, spec: SourceSpec, return_bounds: Bounds) -> Self:
        """Returns the learner that iql, rl and training describe."""
        state_value_spec = SourceSpec(
            num_state_features=spec.num_state_features,
            action_names=("value",),
            state_embeddings=spec.state_embeddings,
            image=spec.image,
        )
        return cls(
            configured_network(config, spec, outputs=1, dueling=config.rainbow.dueling_architecture),
            configured_network(config, spec, outputs=1, dueling=False),
            build_q_network(state_value_spec, network_settings(config.training)),
            ScalarHead(config.rl.q_network_loss),
            TargetSettings.of(config, return_bounds),
            config.iql or IQLConfig(),
            reward_boost=reward_boost(config),
        )

    def weights(self, batch: TransitionBatch, outputs: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns w(s, a) of the logged actions, [B], and the loss of V; see `ActorCritic.weights`."""
        with torch.no_grad():
            logged_outputs = chosen_values(self.target_network, batch.state, batch.actions, batch.action)
            q = self.head(logged_outputs.unsqueeze(1)).squeeze(1)
        value = self.state_value(batch.state)
        weights = (self.section.beta * (q - value.detach())).exp().clamp(max=self.section.max_weight)
        return weights, {"value_loss": batch.weight.dot(expectile_loss(value, q, self.section.expectile))}

    def state_value(self, state: Tensor) -> Tensor:
        """Returns V(s), [B]."""
        mask = torch.ones(len(state), 1, dtype=torch.bool, device=state.device)
        return self.value(state, mask, None).view(-1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def next_outputs(self, batch: TransitionBatch) -> Tensor:
        """Returns V(s'), [B, 1]; 0 if no choice is allowed."""
        with evaluating(self.value):
            return (self.state_value(batch.next_state) * batch.next_actions.mask.any(1)).unsqueeze(1)
