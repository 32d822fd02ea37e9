"""Models for evaluation: expected outcomes of a row, and values of the evaluated policy (FQE).

r_hat(s, a) <- r                                                     for the reward and each metric (T = 1 + M outputs)
q(s, a)     <- r + gamma^steps * bootstrap * sum_a' pi(a'|s') q_target(s', a')
r_hat, q    <- r_hat + mean residual, q + mean residual / mean (1 - discount)      a few times during a fit
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

from reagent_lite.algorithms.policy_learner import SoftUpdate
from reagent_lite.models.q_networks import NetworkSettings, build_q_network, chosen_values, only_choice
from reagent_lite.rl.td import discount
from reagent_lite.types import Actions, SourceSpec, TransitionBatch

FEWEST_STEPS = 1000
"""Smallest number of optimizer steps before early stopping."""
CHECKED_SHARE = 0.05
CHECKED_ROWS = 8192
"""Share of the fitting episodes, and largest number of rows, whose loss ends a fit by early stopping."""
_CHECK_EVERY = 100
_PATIENCE = 5
_LEAST_GAIN = 0.001
_SMALLEST_END_SHARE = 1e-3  # of 1 - discount, on average: values are at most 1000 rewards
_INITIAL_SCALE = 0.1  # scale of the initial random outputs; at 0 gradients cancel, and Adam amplifies rounding errors

PolicyProbabilities = Callable[[Tensor, Actions], Tensor]
"""From states [B, S] and choices to probabilities [B, K], 0 for choices that are not allowed."""
Read = Callable[[Tensor, Actions], tuple[Tensor, Actions]]
"""Normalizes states and choices."""
Loss = Callable[[TransitionBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]


def pass_through(state: Tensor, actions: Actions) -> tuple[Tensor, Actions]:
    """Returns states and choices as they are, for networks that are called with normalized ones."""
    return state, actions


def outcomes_of(batch: TransitionBatch) -> Tensor:
    """Returns the reward and the metrics of each row, [B, T]."""
    return torch.cat((batch.reward.unsqueeze(1), batch.metrics), 1)


class RewardAndQModels(nn.Module):
    """Reward model and value model of one policy; Le, Voloshin & Yue (2019), fitted Q evaluation.

    Networks predict in units of `reward_scale` and `value_scale`, as differences from `mean`. One learning rate
    therefore fits outcomes of any size, and values begin near their final size. `set_scales` computes the units from
    the data.

    Args:
        reward_network: forward(state, mask, features) -> [B, K, T].
        value_network: forward(state, mask, features) -> [B, K, T].
        gamma: discount per step.
        target_update_rate: soft update of the target network.
        num_outcomes: T, the reward and the metrics.
        read: normalizes the states and choices that the networks are called with.
    """

    def __init__(
        self,
        reward_network: nn.Module,
        value_network: nn.Module,
        *,
        gamma: float,
        target_update_rate: float,
        num_outcomes: int,
        read: Read = pass_through,
    ) -> None:
        super().__init__()
        self.reward_network = reward_network
        self.value_network = value_network
        self.target_network = copy.deepcopy(value_network).requires_grad_(False)
        self.gamma = gamma
        self.target_update_rate = target_update_rate
        self.reward_scale = nn.Buffer(torch.ones(num_outcomes))
        self.value_scale = nn.Buffer(torch.ones(num_outcomes))
        self.mean = nn.Buffer(torch.zeros(num_outcomes))
        self._read = read

    def forward(self, batch: TransitionBatch, next_propensities: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, a sum weighted by `batch.weight`, and its two parts.

        next_propensities [B, K] are the evaluated policy's at `batch.next_state`; 0 for choices that are not allowed.
        """
        outcomes = outcomes_of(batch)
        target = self._target(batch, next_propensities)
        state, logged, index = self._read_logged(batch)
        predicted = chosen_values(self.reward_network, state, logged, index)
        value = chosen_values(self.value_network, state, logged, index)
        reward_loss = (batch.weight * (predicted - outcomes / self.reward_scale + self.mean).square().sum(1)).sum()
        value_loss = (batch.weight * (value - target).square().sum(1)).sum()
        return reward_loss + value_loss, {"reward_loss": reward_loss.detach(), "value_loss": value_loss.detach()}

    @torch.no_grad()
    def residual_sums(self, batch: TransitionBatch, next_propensities: Tensor) -> Tensor:
        """Returns sums over rows, weighted by `batch.weight`: [2 + 2 T] float64.

        They are of 1, of 1 - discount, of the target network's Bellman residuals, and of the reward network's, in the
        units of the networks. The arguments are those of `forward`.
        """
        weight = batch.weight.double()
        state, logged, index = self._read_logged(batch)
        value = chosen_values(self.target_network, state, logged, index)
        predicted = chosen_values(self.reward_network, state, logged, index)
        residual = self._target(batch, next_propensities) - value
        of_reward = outcomes_of(batch) / self.reward_scale - self.mean - predicted
        d = discount(self.gamma, batch.steps, batch.bootstrap).double()
        counts = torch.stack((weight.sum(), weight @ (1 - d)))
        return torch.cat((counts, weight @ residual.double(), weight @ of_reward.double()))

    @torch.no_grad()
    def shift(self, sums: Tensor) -> None:
        """Adds to all predictions, and to all values, the constants that make their mean residuals 0.

        An error that the values of all states share shrinks only by the discount in each pass of updates, errors of
        single states much faster. This removes it at once; Bertsekas & Castanon (1989), adaptive aggregation, with
        one aggregate.

        Args:
            sums: `residual_sums` of many rows of all processes.
        """
        of_value, of_reward = sums[2:].view(2, -1)
        of_value = of_value / sums[1].clamp(min=_SMALLEST_END_SHARE * sums[0])
        for network, shift in (
            (self.value_network, of_value),
            (self.target_network, of_value),
            (self.reward_network, of_reward / sums[0]),
        ):
            *_, bias = network.parameters()
            bias.view(-1, len(shift)).add_(shift)

    def after_step(self) -> None:
        """Moves the target network towards the value network."""
        self._soft_update()

    @cached_property
    def _soft_update(self) -> SoftUpdate:
        return SoftUpdate(self.target_network, self.value_network, self.target_update_rate)

    @torch.no_grad()
    def predict(self, state: Tensor, actions: Actions) -> tuple[Tensor, Tensor]:
        """Returns expected outcomes and values, each [B, K, T].

        Values are those of the target network, an average over the last steps with less variance than the online
        network.
        """
        state, actions = self._read(state, actions)
        rewards = (self.reward_network(state, actions.mask, actions.features) + self.mean) * self.reward_scale
        return rewards, self._values(state, actions)

    def set_scales(self, sums: Tensor) -> None:
        """Sets the units from the sums of `scale_sums` over all training rows of all processes.

        The unit of outcomes is their root mean square. The unit of values is this times the mean number of discounted
        following steps, 1 / (1 - mean discount). In these units both have the same mean.
        """
        count = sums[0].clamp(min=1)
        kept = sums[1]
        mean, square = (sums[2:] / count).view(2, -1)
        scale = square.sqrt()
        self.reward_scale.copy_(torch.where(scale > 0, scale, 1))
        self.mean.copy_(mean / self.reward_scale)
        self.value_scale.copy_(self.reward_scale / (1 - kept / count).clamp(min=_SMALLEST_END_SHARE))

    def scale_sums(self, batch: TransitionBatch) -> Tensor:
        """Returns rows, and sums of discounts, outcomes and squared outcomes, [2 + 2 T] float64; padding left out."""
        real = (batch.weight > 0).double()
        outcomes = outcomes_of(batch).double()
        d = discount(self.gamma, batch.steps, batch.bootstrap).double()
        return torch.cat((real.sum().view(1), (real @ d).view(1), real @ outcomes, real @ outcomes.square()))

    @torch.no_grad()
    def _target(self, batch: TransitionBatch, next_propensities: Tensor) -> Tensor:
        """Returns the targets of values [B, T], in the units of the networks."""
        next_q = self._values(*self._read(batch.next_state, batch.next_actions))
        next_value = (next_propensities.to(next_q.dtype).unsqueeze(2) * next_q).sum(1)
        d = discount(self.gamma, batch.steps, batch.bootstrap).unsqueeze(1)
        return (outcomes_of(batch) + d * next_value) / self.value_scale - self.mean

    def _read_logged(self, batch: TransitionBatch) -> tuple[Tensor, Actions, Tensor]:
        """Returns states and choices as networks read them, and the index [B] of the logged choice."""
        logged = only_choice(batch.actions, batch.action)  # other candidates would be normalized for nothing
        index = batch.action if logged.features is None else torch.zeros_like(batch.action)
        return *self._read(batch.state, logged), index

    def _values(self, state: Tensor, actions: Actions) -> Tensor:
        values: Tensor = (self.target_network(state, actions.mask, actions.features) + self.mean) * self.value_scale
        return values * actions.mask.unsqueeze(2)


def build_reward_and_q_models(
    spec: SourceSpec,
    settings: NetworkSettings,
    *,
    gamma: float,
    target_update_rate: float,
    read: Read = pass_through,
) -> RewardAndQModels:
    """Returns heads as wide and deep as the Q-network, with one small initial output per choice and outcome.

    With random initial values, a small log does not have enough steps to correct them. Streams, dropout and batch
    normalization are left out: values of one fixed policy do not need them.
    """
    num_outcomes = 1 + len(spec.metric_names)
    plain = dataclasses.replace(settings, dueling=False, outputs=num_outcomes, dropout=0.0, batch_norm=False)
    reward_network = build_q_network(spec, plain)
    value_network = build_q_network(spec, plain)
    for network in (reward_network, value_network):
        *_, last_weight, _ = network.parameters()
        last_weight.data.mul_(_INITIAL_SCALE)
    return RewardAndQModels(
        reward_network,
        value_network,
        gamma=gamma,
        target_update_rate=target_update_rate,
        num_outcomes=num_outcomes,
        read=read,
    )


class EarlyStopping:
    """Ends a fit once the loss on held-out rows has stopped falling.

    The loss may rise while values propagate backwards through episodes, one update of the target network at a time.
    Therefore no fit ends before 5 * horizon / target_update_rate steps.

    Args:
        heads: the fitted heads, after `set_scales`.
        loss: returns the mean loss on the held-out rows.
    """

    def __init__(self, heads: RewardAndQModels, loss: Callable[[], float]) -> None:
        horizon = float((heads.value_scale / heads.reward_scale).max())
        self._earliest = max(FEWEST_STEPS, math.ceil(5 * horizon / heads.target_update_rate))
        self._loss = loss
        self._best = math.inf
        self._checks_without_gain = 0

    def __call__(self, steps: int) -> bool:
        """Returns whether the fit ends after a number of steps; call it after every step."""
        if steps < self._earliest or steps % _CHECK_EVERY:
            return False
        loss = self._loss()
        if loss < self._best * (1 - _LEAST_GAIN):
            self._best = loss
            self._checks_without_gain = 0
        else:
            self._checks_without_gain += 1
        return self._checks_without_gain == _PATIENCE


class LevelCorrection:
    """Shifts all predictions a few times during a fit, so that it needs no pass for each step of the horizon.

    Args:
        heads: the fitted heads.
        sums: returns the sums of `residual_sums` over many rows of all processes.
        every: number of steps between two corrections.
    """

    def __init__(self, heads: RewardAndQModels, sums: Callable[[], Tensor], every: int) -> None:
        self._heads = heads
        self._sums = sums
        self._every = every

    def __call__(self, steps: int) -> None:
        """Corrects the predictions after some numbers of steps; call it after every step."""
        if steps % self._every == 0:
            self.shift()

    def shift(self) -> None:
        """Corrects the predictions now; call it after the last step."""
        self._heads.shift(self._sums())


def fit_reward_and_q_models(
    heads: RewardAndQModels,
    batches: Iterable[TransitionBatch],
    policy: PolicyProbabilities,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss | None = None,
    correct: LevelCorrection | None = None,
    stop: EarlyStopping | None = None,
) -> dict[str, Tensor]:
    """Takes one optimizer step per batch.

    Args:
        heads: the heads to fit.
        batches: rows of fitting episodes.
        policy: the evaluated policy, from states and choices to propensities [B, K].
        optimizer: optimizer of the trained parameters of `heads`.
        loss: `heads` wrapped in DistributedDataParallel, if several processes fit together.
        correct: shifts the predictions; it must do so at the same steps on every process.
        stop: ends the fit early; it must decide the same on every process.

    Returns:
        Mean loss of each model over the batches (empty without batches), on the device.
    """
    totals: dict[str, Tensor] = {}
    count = 0
    for count, batch in enumerate(batches, start=1):
        with torch.no_grad():
            next_propensities = policy(batch.next_state, batch.next_actions)
        value, metrics = (loss or heads)(batch, next_propensities)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        heads.after_step()
        totals = {name: totals.get(name, 0) + metric for name, metric in metrics.items()}
        if correct is not None:
            correct(count)
        if stop is not None and stop(count):
            break
    if correct is not None:
        correct.shift()
    return {name: total / count for name, total in totals.items()}
