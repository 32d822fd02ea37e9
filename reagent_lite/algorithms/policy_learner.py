"""The base of every algorithm: a loss of a batch, a step of the target network, and the learned policy.

batch ─► forward ─► loss ─► optimizer ─► after_step
state, choices ─┬─► scorer ──────► scores [B, K] ──┐
                └─► restriction ─► choices [B, K] ─┴─► policy (rl.policies), evaluated, simulated and exported
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from reagent_lite.config import WorkflowConfig
from reagent_lite.config.training import TrainingConfig
from reagent_lite.models.embeddings import by_learning_rate, learned_tables
from reagent_lite.models.q_networks import NetworkSettings, allowed_values, build_q_network, custom_network
from reagent_lite.models.restrictions import Unrestricted
from reagent_lite.models.value_heads import ScalarHead, Scorer
from reagent_lite.rl.losses import constant_loss
from reagent_lite.rl.td import Bounds, discount, select_choice, td_target
from reagent_lite.types import SourceSpec, TransitionBatch

Assign = Callable[[nn.Module, Mapping[str, Tensor]], None]
"""Loads tensors into a module, or raises an error that names those that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """Parameters of the targets of all algorithms.

    Attributes:
        gamma: discount per step.
        target_update_rate: soft update of the target network.
        value_bounds: lowest and highest target, or None.
    """

    gamma: float
    target_update_rate: float
    value_bounds: Bounds = None

    @classmethod
    def of(cls, config: WorkflowConfig, return_bounds: Bounds, **others: Any) -> Self:
        """Returns the settings of a config; `return_bounds` are used with rl.value_bounds "rewards"."""
        rl = config.rl
        return cls(
            gamma=rl.gamma,
            target_update_rate=rl.target_update_rate,
            value_bounds=return_bounds if rl.value_bounds == "rewards" else rl.value_bounds,
            **others,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEvaluation:
    """Values and targets of a batch.

    Attributes:
        q: [B, K] values; values of choices that are not allowed are undefined.
        scores: [B, K] scores from which the policy is computed; q itself if these are values.
        choices: [B, K] bool, the choices that the policy may take.
        td_loss: the TD loss, a sum weighted by the batch's weights.
        target: [B] target of the logged choice; the mean if the target is a distribution.
    """

    q: Tensor
    scores: Tensor
    choices: Tensor
    td_loss: Tensor
    target: Tensor


class SoftUpdate:
    """Sets target <- rate * online + (1 - rate) * target when called, running statistics included.

    It keeps the tensors of both networks, since a search for them costs as much as the update of a small network: make
    it after the networks were moved to their device.
    """

    def __init__(self, target: nn.Module, online: nn.Module, rate: float) -> None:
        self._rate = rate
        self._target: list[Tensor] = list(target.parameters())
        self._online: list[Tensor] = list(online.parameters())
        self._buffers = list(zip(target.buffers(), online.buffers(), strict=True))

    @torch.no_grad()
    def __call__(self) -> None:
        """Moves the target network."""
        torch._foreach_lerp_(self._target, self._online, self._rate)
        for old, new in self._buffers:
            old.copy_(torch.lerp(old, new, self._rate) if old.is_floating_point() else new)


class PolicyLearner(nn.Module, ABC):
    """Learns one policy.

    Args:
        online: the network that learns values; the target network is a copy that follows it.
        head: turns the network's outputs of a choice into a value; see models.value_heads.
        settings: parameters of the targets.
        reward_boost: [K] added to the reward by action, or None.

    Attributes:
        settings: as given.
        target_network: follows the online network.
        row_errors: [B] priorities of the rows of the last batch; see models.value_heads.
    """

    name: ClassVar[str]
    """The config's `algorithm`."""
    score: ClassVar[str] = "value"
    """Meaning of a score, for the model card."""
    advice: ClassVar[str] = (
        "Take more optimizer steps (epochs, or a smaller training.minibatch_size), try another training.learning_rate, "
        "and check"
    )
    """Advice about values that help no more than a constant; "that ..." follows."""

    def __init__(
        self, online: nn.Module, head: nn.Module, settings: TargetSettings, reward_boost: Tensor | None
    ) -> None:
        super().__init__()
        self.settings = settings
        self.head = head
        self.target_network = copy.deepcopy(online).requires_grad_(False).eval()
        self.reward_boost: Tensor | None
        self.register_buffer("reward_boost", reward_boost)
        self.row_errors = torch.empty(0)

    @classmethod
    @abstractmethod
    def build(cls, config: WorkflowConfig, spec: SourceSpec, return_bounds: Bounds) -> Self:
        """Returns a learner with initial weights drawn from torch's generator."""

    @abstractmethod
    def forward(self, batch: TransitionBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss, a sum weighted by `batch.weight`, and its parts, td_loss among them."""

    @abstractmethod
    def next_outputs(self, batch: TransitionBatch) -> Tensor:
        """Returns the outputs [B, H] for the next state's value, without a gradient; 0 if no choice is allowed."""

    @abstractmethod
    def warm_start(self, weights: Mapping[str, Tensor], assign: Assign) -> str:
        """Loads the weights of a model exported by the same algorithm; names the parts that start anew."""

    @property
    @abstractmethod
    def online(self) -> nn.Module:
        """The network that the target network follows."""

    @property
    @abstractmethod
    def scorer(self) -> Scorer:
        """Module that maps states and choices to the scores from which the policy is computed."""

    @property
    def restriction(self) -> nn.Module:
        """Module that limits the allowed choices of the policy, in targets, evaluation, simulation and export alike."""
        return Unrestricted()

    def td_losses(self, logged_outputs: Tensor, next_outputs: Tensor, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Returns TD loss and priority of each row, [B].

        Args:
            logged_outputs: [B, H] of the online network for the logged choice.
            next_outputs: result of `next_outputs`.
            batch: the rows.
        """
        bounds = self.settings.value_bounds
        return self.head.loss(logged_outputs, next_outputs, *self.rewards(batch), bounds)  # type: ignore[operator,no-any-return]

    @torch.no_grad()
    def evaluate(self, batch: TransitionBatch) -> BatchEvaluation:
        """Returns values and targets of a batch, and its TD loss, weighted by `batch.weight`."""
        outputs = allowed_values(self.online, batch.state, batch.actions)
        next_outputs = self.next_outputs(batch)
        next_value = self.head(next_outputs.unsqueeze(1)).squeeze(1)
        losses, _ = self.td_losses(select_choice(outputs, batch.action), next_outputs, batch)
        q = self.head(outputs)
        return BatchEvaluation(
            q=q,
            scores=q,
            choices=self.restriction(batch.state, batch.actions.mask, batch.actions.features),
            td_loss=batch.weight.dot(losses),
            target=td_target(*self.rewards(batch), next_value, self.settings.value_bounds),
        )

    def constant_loss(self, mean: float, variance: float) -> float | None:
        """Returns a TD loss that the best constant value does not exceed, for targets of this mean and variance.

        None for distributions: mean and variance do not determine the minimum of their loss.
        """
        if not isinstance(self.head, ScalarHead):
            return None
        return constant_loss(mean, variance / self.head.scale**2, self.head.kind)

    def parameter_groups(self, config: WorkflowConfig) -> list[dict[str, Any]]:
        """Returns the trainable parameters as groups of an optimizer; only the online network has weight decay."""
        online = list(self.online.parameters())
        ids = {id(parameter) for parameter in online}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in ids]
        decay = config.rainbow.c51_l2_decay if config.rainbow.categorical else config.training.l2_decay
        tables = learned_tables(self)
        groups = [
            {**group, "weight_decay": weight_decay}
            for parameters, weight_decay in ((online, decay), (others, 0.0))
            for group in by_learning_rate(parameters, tables)
        ]
        return [group for group in groups if group["params"]]

    def train(self, mode: bool = True) -> Self:
        """Sets the online networks' mode; the target network always evaluates."""
        super().train(mode)
        self.target_network.eval()
        return self

    def after_step(self) -> None:
        """Moves the target network towards the online network."""
        self._soft_update()

    @cached_property
    def _soft_update(self) -> SoftUpdate:
        return SoftUpdate(self.target_network, self.online, self.settings.target_update_rate)

    def rewards(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Returns reward with its boost [B], and the factor of the next value [B]."""
        reward = batch.reward if self.reward_boost is None else batch.reward + self.reward_boost[batch.action]
        return reward, discount(self.settings.gamma, batch.steps, batch.bootstrap)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Puts a network into evaluation mode: no dropout, and constant running statistics."""
    training = [module for module in network.modules() if module.training]
    for module in training:
        module.__dict__["training"] = False  # what eval() sets, without nn.Module's search of parameters
    try:
        yield
    finally:
        for module in training:
            module.__dict__["training"] = True


def tensors_under(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def reward_boost(config: WorkflowConfig) -> Tensor | None:
    """Returns rl.reward_boost by action, [K], or None."""
    boost = config.rl.reward_boost
    return torch.tensor([boost.get(name, 0.0) for name in config.actions]) if boost else None


def network_settings(training: TrainingConfig, *, outputs: int = 1, dueling: bool = False) -> NetworkSettings:
    """Returns the config's settings for a network with `outputs` numbers per choice."""
    return NetworkSettings(
        hidden=training.layers[1:-1],
        activations=training.activations[:-1],
        dueling=dueling,
        outputs=outputs,
        dropout=training.dropout_ratio,
        batch_norm=training.use_batch_norm,
        min_std=training.weight_init_min_std,
        conv_layers=training.conv_layers,
    )


def configured_network(config: WorkflowConfig, spec: SourceSpec, *, outputs: int, dueling: bool) -> nn.Module:
    """Returns a network of the class in training.network, else a network of this package."""
    settings = network_settings(config.training, outputs=outputs, dueling=dueling)
    network_class = config.training.network
    return build_q_network(spec, settings) if network_class is None else custom_network(network_class, spec, settings)
