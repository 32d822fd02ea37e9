"""DQN over [B, K] choices: the same learner for named actions and for candidate lists.

y = r + boost + gamma^steps * bootstrap * Q_target(s', a'),   a' = argmax over allowed of Q(s', .)   (double)
                                                                  argmax over allowed of Q_target(s', .)
                                                                  the logged next action              (SARSA)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from reagent_lite.algorithms.bcq import BCQActionFilter, LoggingPolicy
from reagent_lite.algorithms.policy_learner import (
    Assign,
    PolicyLearner,
    TargetSettings,
    configured_network,
    evaluating,
    network_settings,
    reward_boost,
    tensors_under,
)
from reagent_lite.config import WorkflowConfig
from reagent_lite.models.q_networks import allowed_values, build_q_network, chosen_values
from reagent_lite.models.value_heads import CategoricalHead, QuantileHead, ScalarHead, ScaledHead, Scorer
from reagent_lite.rl.losses import conservative_loss, imitation_loss
from reagent_lite.rl.td import Bounds, double_q_value, greedy_value, select_choice
from reagent_lite.types import SourceSpec, TransitionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DQNSettings(TargetSettings):
    """Parameters of the loss.

    Attributes:
        maxq: whether the next action is the best allowed one; false: the logged one (SARSA).
        double: whether the online network chooses the next action, whose value the target network gives.
        cql_alpha: weight of the conservative term relative to half the squared TD error.
        drop_threshold: BCQ's smallest probability of an action, as a share of the largest.
    """

    maxq: bool = True
    double: bool = True
    cql_alpha: float = 0.0
    drop_threshold: float = 0.1


class DQN(PolicyLearner):
    """Mnih et al. (2015) with double Q (van Hasselt 2016), BCQ (Fujimoto 2019) and CQL (Kumar 2020) on request.

    Args:
        q_network: forward(state, mask, features) -> [B, K, H].
        head: turns the H outputs into a value; see models.value_heads.
        settings: parameters of the loss.
        reward_boost: [K] added to the reward by action, or None.
        behavior_cloning: for BCQ: a network of the same kind with H = 1, or the estimated logging policy.
    """

    name: ClassVar[str] = "dqn"
    settings: DQNSettings

    def __init__(
        self,
        q_network: nn.Module,
        head: nn.Module,
        settings: DQNSettings,
        *,
        reward_boost: Tensor | None = None,
        behavior_cloning: nn.Module | None = None,
    ) -> None:
        super().__init__(q_network, head, settings, reward_boost)
        self.q_network = q_network
        self.behavior_cloning = behavior_cloning
        self._imitates = behavior_cloning is not None and not isinstance(behavior_cloning, LoggingPolicy)

    @classmethod
    def build(cls, config: WorkflowConfig, spec: SourceSpec, return_bounds: Bounds) -> Self:
        """Returns the learner that rl, rainbow and training describe."""
        rainbow = config.rainbow
        head = _head(config)
        assert config.rl.cql_alpha is not None, "with_length_for comes first"
        behavior_cloning: nn.Module | None = None
        if rainbow.bcq and config.evaluation.propensities == "estimate":
            behavior_cloning = LoggingPolicy(spec)
        elif rainbow.bcq:
            behavior_cloning = build_q_network(spec, network_settings(config.training))
        return cls(
            configured_network(config, spec, outputs=head.outputs, dueling=rainbow.dueling_architecture),
            head,
            DQNSettings.of(
                config,
                return_bounds,
                maxq=config.rl.maxq_learning,
                double=rainbow.double_q_learning,
                cql_alpha=config.rl.cql_alpha,
                drop_threshold=rainbow.bcq_drop_threshold,
            ),
            reward_boost=reward_boost(config),
            behavior_cloning=behavior_cloning,
        )

    def warm_start(self, weights: Mapping[str, Tensor], assign: Assign) -> str:
        """Loads the Q-network, and the behavior-cloning network of a model trained with BCQ."""
        assign(self.q_network, tensors_under("network.", weights))
        self.target_network.load_state_dict(self.q_network.state_dict())
        saved = tensors_under("behavior_cloning.", weights)
        if self.behavior_cloning is None or not self._imitates:
            return "the optimizer starts anew"
        if not saved:
            return "the optimizer and the behavior-cloning network start anew"
        assign(self.behavior_cloning, saved)
        return "the optimizer starts anew"

    @property
    def online(self) -> nn.Module:
        """The Q-network."""
        return self.q_network

    @property
    def scorer(self) -> Scorer:
        """The online network with its head: from states and choices to values."""
        return Scorer(self.q_network, self.head)

    @property
    def restriction(self) -> nn.Module:
        """See `PolicyLearner.restriction`; with BCQ, choices that are likely in the log."""
        if self.behavior_cloning is None:
            return super().restriction
        return BCQActionFilter(self.behavior_cloning, self.settings.drop_threshold)

    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, a sum weighted by `batch.weight`, and its parts."""
        alpha = self.settings.cql_alpha
        actions = batch.actions
        if alpha:
            outputs = allowed_values(self.q_network, batch.state, actions)
            logged_outputs = select_choice(outputs, batch.action)
        else:
            logged_outputs = chosen_values(self.q_network, batch.state, actions, batch.action)
        rows, self.row_errors = self.td_losses(logged_outputs, self.next_outputs(batch), batch)
        loss = batch.weight.dot(rows)
        metrics = {"td_loss": loss.detach()}
        if alpha:
            values = self.head(outputs) / self.head.scale
            gap = batch.weight.dot(conservative_loss(values, actions.mask, batch.action))
            loss = loss + alpha * self.head.half_squares * gap  # type: ignore[operator]
            metrics["cql_gap"] = gap.detach()
        if self.behavior_cloning is not None and self._imitates:
            logits = allowed_values(self.behavior_cloning, batch.state, actions).squeeze(2)
            imitation = batch.weight.dot(imitation_loss(logits, actions.mask, batch.action))
            loss = loss + imitation
            metrics["imitation_loss"] = imitation.detach()
        return loss, metrics

    @torch.no_grad()
    def next_outputs(self, batch: TransitionBatch) -> Tensor:
        """Returns the target network's outputs [B, H] of the next choice; 0 if no choice is allowed."""
        state = batch.next_state
        actions = batch.next_actions
        target = partial(chosen_values, self.target_network, state, actions)
        if not self.settings.maxq:
            return target(batch.next_action.clamp(min=0))
        allowed = actions.mask
        if self.behavior_cloning is not None:
            with evaluating(self.behavior_cloning):
                allowed = self.restriction(state, allowed, actions.features)
        # a dueling mean covers all choices that the log allows, as in the exported model: BCQ restricts only the choice
        if self.settings.double:
            with evaluating(self.q_network):
                q = self.head(allowed_values(self.q_network, state, actions))
            return double_q_value(q, target, allowed)
        outputs = allowed_values(self.target_network, state, actions)
        return greedy_value(self.head(outputs), outputs, allowed)


def _head(config: WorkflowConfig) -> ScalarHead | CategoricalHead | QuantileHead:
    rainbow = config.rainbow
    if rainbow.categorical:
        return CategoricalHead(rainbow.num_atoms, rainbow.qmin, rainbow.qmax)
    if rainbow.quantile:
        return QuantileHead(rainbow.num_atoms)
    scale = config.rl.value_scale
    if scale is None:
        return ScalarHead(config.rl.q_network_loss)
    assert scale != "returns", "with_defaults_for comes first"
    return ScaledHead(config.rl.q_network_loss, *scale)
