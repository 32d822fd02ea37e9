"""DQN over [B, K] choices: the same learner for named actions and for candidate lists.

y = r + boost + gamma^steps * bootstrap * Q_target(s', a'),   a' = argmax over allowed of Q(s', .)   (double)
                                                                  argmax over allowed of Q_target(s', .)
                                                                  the logged next action              (SARSA)
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reagent_lite.models.q_networks import allowed_values
from reagent_lite.models.restrictions import LikelyInTheLog, Unrestricted
from reagent_lite.models.value_heads import Bounds, Scorer
from reagent_lite.rl.losses import conservative_loss, imitation_loss
from reagent_lite.rl.td import chosen, discount, greedy_choice, taken_value
from reagent_lite.types import Actions, TransitionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DQNSettings:
    """What the loss is made of.

    Attributes:
        gamma: discount per step.
        target_update_rate: soft update of the target network.
        maxq: best allowed next action, else the logged one.
        double: the online network chooses, the target network values.
        cql_alpha: weight of the conservative term beside half the squared TD error.
        drop_threshold: BCQ's share of the largest imitated probability.
        value_bounds: targets are clipped to them, or None.
    """

    gamma: float
    target_update_rate: float
    maxq: bool = True
    double: bool = True
    cql_alpha: float = 0.0
    drop_threshold: float = 0.1
    value_bounds: Bounds = None


class DQN(nn.Module):
    """Mnih et al. (2015) with double Q (van Hasselt 2016), BCQ (Fujimoto 2019) and CQL (Kumar 2020) where asked for.

    Args:
        q_network: forward(state, mask, features) -> [B, K, H].
        head: the meaning of the H outputs.
        settings: see DQNSettings.
        reward_boost: [K] added to the reward by action, or None.
        imitator: network of the same kind with H = 1, whose logits imitate the log; turns BCQ on.

    Attributes:
        row_errors: [B] priorities of the rows of the last batch that went forward; see models.value_heads.
    """

    def __init__(
        self,
        q_network: nn.Module,
        head: nn.Module,
        settings: DQNSettings,
        *,
        reward_boost: Tensor | None = None,
        imitator: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.q_network = q_network
        self.target_network = copy.deepcopy(q_network).requires_grad_(False).eval()
        self.head: nn.Module = head
        self.imitator = imitator
        self.reward_boost: Tensor | None
        self.register_buffer("reward_boost", reward_boost)
        self.row_errors = torch.empty(0)

    def train(self, mode: bool = True) -> "DQN":
        """Sets the online networks' mode; the target network always evaluates."""
        super().train(mode)
        self.target_network.eval()
        return self

    @property
    def scorer(self) -> Scorer:
        """State and choices to values, by the online network."""
        return Scorer(self.q_network, self.head)

    @property
    def restriction(self) -> nn.Module:
        """Which open choices the policy takes: what is learned from, judged, played and exported obeys it."""
        if self.imitator is None:
            return Unrestricted()
        return LikelyInTheLog(self.imitator, self.settings.drop_threshold)

    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, a sum weighted by `batch.weight`, and its parts."""
        s = self.settings
        outputs, taken = self._taken(batch)
        rows, self.row_errors = self._td_losses(batch, taken)
        td = batch.weight.dot(rows)
        loss, metrics = td, {"td_loss": td.detach()}
        if s.cql_alpha:
            gap = batch.weight.dot(conservative_loss(self.head(outputs), batch.actions.mask, batch.action))
            alpha = s.cql_alpha * self.head.half_squares  # type: ignore[operator]
            loss, metrics["cql_gap"] = loss + alpha * gap, gap.detach()
        if self.imitator is not None:
            logits = allowed_values(self.imitator, batch.state, batch.actions.mask, batch.actions.features).squeeze(2)
            imitation = batch.weight.dot(imitation_loss(logits, batch.actions.mask, batch.action))
            loss, metrics["imitation_loss"] = loss + imitation, imitation.detach()
        return loss, metrics

    @torch.no_grad()
    def judge(self, batch: TransitionBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values [B, K], choices the policy takes [B, K] bool and the TD loss, weighted by `batch.weight`.

        Values are of use where a choice is allowed.
        """
        choices = self.restriction(batch.state, batch.actions.mask, batch.actions.features)
        outputs = allowed_values(self.q_network, batch.state, batch.actions.mask, batch.actions.features)
        losses, _ = self._td_losses(batch, chosen(outputs, batch.action))
        return self.head(outputs), choices, batch.weight.dot(losses)

    def after_step(self) -> None:
        """Soft update: target <- rate * online + (1 - rate) * target, running statistics included."""
        rate = self.settings.target_update_rate
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target_network.parameters()), list(self.q_network.parameters()), rate)
            for old, new in zip(self.target_network.buffers(), self.q_network.buffers(), strict=True):
                old.copy_(torch.lerp(old, new, rate) if old.is_floating_point() else new)

    def allowed_next(self, batch: TransitionBatch) -> Actions:
        """Returns the next choices that may be taken: those of the log, less those BCQ finds unlikely."""
        if self.imitator is None:
            return batch.next_actions
        mask, features = batch.next_actions.mask, batch.next_actions.features
        with _evaluating(self.imitator):
            return Actions(mask=self.restriction(batch.next_state, mask, features), features=features)

    def _td_losses(self, batch: TransitionBatch, taken: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            next_taken = self._next_taken(batch)
            d = discount(self.settings.gamma, batch.steps, batch.bootstrap)
        bounds = self.settings.value_bounds
        return self.head.loss(taken, next_taken, self._reward(batch), d, bounds)  # type: ignore[operator,no-any-return]

    def _reward(self, batch: TransitionBatch) -> Tensor:
        return batch.reward if self.reward_boost is None else batch.reward + self.reward_boost[batch.action]

    def _taken(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Returns outputs [B, K, H], where the conservative term needs them, and those of the logged action [B, H]."""
        if self.settings.cql_alpha:
            outputs = allowed_values(self.q_network, batch.state, batch.actions.mask, batch.actions.features)
            return outputs, chosen(outputs, batch.action)
        taken = _outputs_of(self.q_network, batch.state, batch.actions, batch.action)
        return taken, taken

    def _next_taken(self, batch: TransitionBatch) -> Tensor:
        """Returns the target network's outputs [B, H] of the next choice; 0 where none is allowed and chosen."""
        if not self.settings.maxq:
            return _outputs_of(
                self.target_network, batch.next_state, batch.next_actions, batch.next_action.clamp(min=0)
            )
        actions = self.allowed_next(batch)
        if not self.settings.double:
            outputs = allowed_values(self.target_network, batch.next_state, batch.next_actions.mask, actions.features)
            return taken_value(outputs, greedy_choice(self.head(outputs), actions.mask), actions.mask)
        with _evaluating(self.q_network):
            q = self.head(allowed_values(self.q_network, batch.next_state, batch.next_actions.mask, actions.features))
        choice = greedy_choice(q, actions.mask)
        # a dueling mean runs over what the log allows, as at export; BCQ only restricts the choice
        outputs = _outputs_of(self.target_network, batch.next_state, batch.next_actions, choice)
        return outputs * actions.mask.gather(1, choice.unsqueeze(1))


def _outputs_of(network: nn.Module, state: Tensor, actions: Actions, choice: Tensor) -> Tensor:
    """Returns outputs [B, H] of one choice per row; one candidate is scored instead of K where that is the same."""
    if actions.features is None or network.needs_candidate_list:
        return chosen(allowed_values(network, state, actions.mask, actions.features), choice)
    mask = actions.mask.gather(1, choice.unsqueeze(1))
    return network(state, mask, chosen(actions.features, choice).unsqueeze(1)).squeeze(1)  # type: ignore[no-any-return]


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Chooses without dropout and without touching running statistics."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
