"""Critic Regularized Regression over [B, K] choices; Wang et al. (2020), with exact means over the choices.

y = r + boost + gamma^steps * bootstrap * sum_a' pi(a'|s') Q_target(s', a')
A(s, a) = Q(s, a) - sum_a' pi(a'|s) Q(s, a')
w(s, a) = min(exp(A / beta), max_weight)   or   1 if A > 0, else 0

The paper samples actions and also has a target network of the actor; with few choices the mean needs no samples.
"""

from typing import ClassVar, Self

from torch import Tensor, nn

from reagent_lite.algorithms.actor_critic import ActorCritic, imitation
from reagent_lite.algorithms.policy_learner import TargetSettings, configured_network, evaluating, reward_boost
from reagent_lite.config import WorkflowConfig
from reagent_lite.config.algorithm import CRRConfig
from reagent_lite.models.q_networks import allowed_values
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.rl.policies import Softmax
from reagent_lite.rl.td import Bounds, chosen, expected_value
from reagent_lite.types import SourceSpec, TransitionBatch

_ACTOR = Softmax(1.0)


class CRR(ActorCritic):
    """Critic Regularized Regression; see the top of this file.

    Args:
        critic: forward(state, mask, features) -> [B, K, 1].
        actor: network of the same kind; its outputs are logits.
        head: turns the critic's output into a value.
        settings: parameters of the targets.
        section: parameters of the weights.
        reward_boost: [K] added to the reward by action, or None.
    """

    name: ClassVar[str] = "crr"

    def __init__(
        self,
        critic: nn.Module,
        actor: nn.Module,
        head: ScalarHead,
        settings: TargetSettings,
        section: CRRConfig,
        *,
        reward_boost: Tensor | None = None,
    ) -> None:
        super().__init__(critic, actor, head, settings, reward_boost=reward_boost)
        self.section = section

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

    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, a sum weighted by `batch.weight`, and its parts."""
        outputs = allowed_values(self.critic, batch.state, batch.actions)
        logits = self.logits(batch)
        rows, self.row_errors = self.td_losses(outputs, batch)
        weights = self.weights(self.head(outputs.detach()), logits.detach(), batch.actions.mask, batch.action)
        td_loss = batch.weight.dot(rows)
        actor_loss = imitation(batch, logits, weights)
        return td_loss + actor_loss, {"td_loss": td_loss.detach(), "actor_loss": actor_loss.detach()}

    def weights(self, q: Tensor, logits: Tensor, mask: Tensor, action: Tensor) -> Tensor:
        """Returns w(s, a) of the logged actions, [B], for q, logits and mask [B, K]."""
        advantage = chosen(q, action) - expected_value(q, _ACTOR.propensities(logits, mask))
        if self.section.weights == "binary":
            return (advantage > 0).to(q.dtype)
        return (advantage / self.section.beta).exp().clamp(max=self.section.max_weight)

    def next_value(self, batch: TransitionBatch) -> Tensor:
        """Returns the mean of the target network's Q(s', .) under the actor, [B]."""
        state = batch.next_state
        actions = batch.next_actions
        with evaluating(self.actor):
            logits = allowed_values(self.actor, state, actions).squeeze(2)
        q = self.head(allowed_values(self.target_network, state, actions))
        return expected_value(q, _ACTOR.propensities(logits, actions.mask))
