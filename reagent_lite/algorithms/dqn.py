"""DQN over [B, K] choices: the same learner for named actions and for candidate lists.

y = r + boost + gamma^steps * bootstrap * Q_target(s', a'),   a' = argmax over allowed of Q(s', .)   (double)
                                                                  argmax over allowed of Q_target(s', .)
                                                                  the logged next action              (SARSA)
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from reagent_lite.models.q_networks import allowed_values, chosen_values
from reagent_lite.models.restrictions import LikelyInTheLog, Unrestricted
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.rl.losses import conservative_loss, constant_loss, imitation_loss
from reagent_lite.rl.td import Bounds, chosen, discount, double_q_value, greedy_value, td_target
from reagent_lite.types import TransitionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DQNSettings:
    """Parameters of the loss.

    Attributes:
        gamma: discount per step.
        target_update_rate: soft update of the target network.
        maxq: the next action is the best allowed one; otherwise the logged one (SARSA).
        double: the online network chooses the next action, the target network gives its value.
        cql_alpha: weight of the conservative term relative to half the squared TD error.
        drop_threshold: share of the largest imitated probability that BCQ asks of an action.
        value_bounds: lowest and highest target, or None.
    """

    gamma: float
    target_update_rate: float
    maxq: bool = True
    double: bool = True
    cql_alpha: float = 0.0
    drop_threshold: float = 0.1
    value_bounds: Bounds = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Values and targets of a batch.

    Attributes:
        q: [B, K] values; those of choices that are not allowed are undefined.
        choices: [B, K] bool, the choices the policy may take.
        td_loss: the TD loss, a sum weighted by the batch's weights.
        target: [B] the value that the loss asks of the logged choice; the mean where it asks for a distribution.
    """

    q: Tensor
    choices: Tensor
    td_loss: Tensor
    target: Tensor


class DQN(nn.Module):
    """Mnih et al. (2015) with double Q (van Hasselt 2016), BCQ (Fujimoto 2019) and CQL (Kumar 2020) on request.

    Args:
        q_network: forward(state, mask, features) -> [B, K, H].
        head: turns the H outputs into a value; see models.value_heads.
        settings: parameters of the loss.
        reward_boost: [K] added to the reward by action, or None.
        imitator: network of the same kind with H = 1 whose logits imitate the log; turns BCQ on.

    Attributes:
        row_errors: [B] priorities of the rows of the last batch; see models.value_heads.
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
        """The online network with its head: from states and choices to values."""
        return Scorer(self.q_network, self.head)

    @property
    def restriction(self) -> nn.Module:
        """Which of the allowed choices the policy may take; targets, evaluation, simulation and export obey it."""
        if self.imitator is None:
            return Unrestricted()
        return LikelyInTheLog(self.imitator, self.settings.drop_threshold)

    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, a sum weighted by `batch.weight`, and its parts."""
        alpha, actions = self.settings.cql_alpha, batch.actions
        if alpha:
            outputs = allowed_values(self.q_network, batch.state, actions)
            taken = chosen(outputs, batch.action)
        else:
            taken = chosen_values(self.q_network, batch.state, actions, batch.action)
        rows, self.row_errors = self._td_losses(taken, *self._target_parts(batch))
        loss = batch.weight.dot(rows)
        metrics = {"td_loss": loss.detach()}
        if alpha:
            gap = batch.weight.dot(conservative_loss(self.head(outputs), actions.mask, batch.action))
            loss, metrics["cql_gap"] = loss + alpha * self.head.half_squares * gap, gap.detach()  # type: ignore[operator]
        if self.imitator is not None:
            logits = allowed_values(self.imitator, batch.state, actions).squeeze(2)
            imitation = batch.weight.dot(imitation_loss(logits, actions.mask, batch.action))
            loss, metrics["imitation_loss"] = loss + imitation, imitation.detach()
        return loss, metrics

    @torch.no_grad()
    def evaluate(self, batch: TransitionBatch) -> Evaluated:
        """Returns values and targets of a batch, and its TD loss, weighted by `batch.weight`."""
        outputs = allowed_values(self.q_network, batch.state, batch.actions)
        next_value, reward, d = parts = self._target_parts(batch)
        losses, _ = self._td_losses(chosen(outputs, batch.action), *parts)
        return Evaluated(
            q=self.head(outputs),
            choices=self.restriction(batch.state, batch.actions.mask, batch.actions.features),
            td_loss=batch.weight.dot(losses),
            target=td_target(reward, d, self.head(next_value.unsqueeze(1)).squeeze(1), self.settings.value_bounds),
        )

    def constant_loss(self, mean: float, variance: float) -> float | None:
        """Returns a TD loss that the best constant value does not exceed, for targets of this mean and variance.

        None for distributions, whose loss has another minimum than these two numbers give.
        """
        return constant_loss(mean, variance, self.head.kind) if isinstance(self.head, ScalarHead) else None

    def after_step(self) -> None:
        """Soft update: target <- rate * online + (1 - rate) * target, running statistics included."""
        rate = self.settings.target_update_rate
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target_network.parameters()), list(self.q_network.parameters()), rate)
            for old, new in zip(self.target_network.buffers(), self.q_network.buffers(), strict=True):
                old.copy_(torch.lerp(old, new, rate) if old.is_floating_point() else new)

    @torch.no_grad()
    def _target_parts(self, batch: TransitionBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the next choice's outputs [B, H], reward with its boost [B], and discount [B]."""
        reward = batch.reward if self.reward_boost is None else batch.reward + self.reward_boost[batch.action]
        return self._next_value(batch), reward, discount(self.settings.gamma, batch.steps, batch.bootstrap)

    def _td_losses(self, taken: Tensor, next_value: Tensor, reward: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
        """Returns loss and priority of each row; taken [B, H] are the online network's outputs of the logged action."""
        bounds = self.settings.value_bounds
        return self.head.loss(taken, next_value, reward, discount, bounds)  # type: ignore[operator,no-any-return]

    def _next_value(self, batch: TransitionBatch) -> Tensor:
        """Returns the target network's outputs [B, H] of the next choice; 0 where none is allowed."""
        state, actions = batch.next_state, batch.next_actions
        target = partial(chosen_values, self.target_network, state, actions)
        if not self.settings.maxq:
            return target(batch.next_action.clamp(min=0))
        allowed = actions.mask
        if self.imitator is not None:
            with _evaluating(self.imitator):
                allowed = self.restriction(state, allowed, actions.features)
        # a dueling mean runs over all that the log allows, as at export: BCQ restricts only the choice
        if self.settings.double:
            with _evaluating(self.q_network):
                q = self.head(allowed_values(self.q_network, state, actions))
            return double_q_value(q, target, allowed)
        outputs = allowed_values(self.target_network, state, actions)
        return greedy_value(self.head(outputs), outputs, allowed)


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    """Puts a network into evaluation mode: no dropout, and running statistics stay as they are."""
    training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(training)
