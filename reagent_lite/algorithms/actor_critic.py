"""Base of learners with a critic Q(s, .) and an actor, whose logits define the policy.

loss = TD loss of Q(s, a)  -  w(s, a) log pi(a|s)          a is the logged action, w >= 0 has no gradient
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

from reagent_lite.algorithms.policy_learner import Assign, BatchEvaluation, PolicyLearner, TargetSettings, tensors_under
from reagent_lite.config.section import Section
from reagent_lite.models.q_networks import allowed_values
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.rl.losses import imitation_loss
from reagent_lite.rl.td import select_choice
from reagent_lite.types import TransitionBatch

S = TypeVar("S", bound=Section)


class ActorCritic(PolicyLearner, Generic[S]):
    """A critic and an actor; a derived class defines the next value and the weights of actions.

    Args:
        critic: forward(state, mask, features) -> [B, K, 1].
        actor: network of the same kind; its outputs are logits.
        head: turns the critic's output into a value.
        settings: parameters of the targets.
        section: the algorithm's own section of the config.
        reward_boost: [K] added to the reward by action, or None.
    """

    score: ClassVar[str] = "logit of the policy (not a value)"

    def __init__(
        self,
        critic: nn.Module,
        actor: nn.Module,
        head: ScalarHead,
        settings: TargetSettings,
        section: S,
        *,
        reward_boost: Tensor | None = None,
    ) -> None:
        super().__init__(critic, head, settings, reward_boost)
        self.critic = critic
        self.actor = actor
        self.section = section

    @abstractmethod
    def weights(self, batch: TransitionBatch, outputs: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weights of the logged actions, [B], without a gradient, and further parts of the loss by name.

        Args:
            batch: the rows.
            outputs: [B, K, 1] of the critic, without a gradient.
            logits: [B, K] of the actor, without a gradient.
        """

    @property
    def online(self) -> nn.Module:
        """The critic."""
        return self.critic

    @property
    def scorer(self) -> Scorer:
        """The actor: its logits are the scores."""
        return Scorer(self.actor, ScalarHead())

    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, a sum weighted by `batch.weight`, and its parts."""
        outputs = allowed_values(self.critic, batch.state, batch.actions)
        logits = self.logits(batch)
        rows, self.row_errors = self.td_losses(select_choice(outputs, batch.action), self.next_outputs(batch), batch)
        weights, further = self.weights(batch, outputs.detach(), logits.detach())
        td_loss = batch.weight.dot(rows)
        actor_loss = batch.weight.dot(weights * imitation_loss(logits, batch.actions.mask, batch.action))
        parts = {"td_loss": td_loss, "actor_loss": actor_loss, **further}
        return sum(further.values(), td_loss + actor_loss), {name: part.detach() for name, part in parts.items()}

    def logits(self, batch: TransitionBatch) -> Tensor:
        """Returns the actor's logits, [B, K]; logits of choices that are not allowed are undefined."""
        return allowed_values(self.actor, batch.state, batch.actions).squeeze(2)

    def evaluate(self, batch: TransitionBatch) -> BatchEvaluation:
        """See `PolicyLearner.evaluate`: values are the critic's, scores the actor's."""
        return replace(super().evaluate(batch), scores=self.logits(batch).detach())

    def warm_start(self, weights: Mapping[str, Tensor], assign: Assign) -> str:
        """Loads the actor; an exported model does not have the critic."""
        assign(self.actor, tensors_under("network.", weights))
        return "the optimizer and the critic start anew"
