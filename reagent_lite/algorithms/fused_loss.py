"""The loss of DQN and its gradients in one call, for small networks over fixed actions on one core.

The formulas are those of dqn.py, which computes whatever this file leaves to it; the numbers are the same up to the
order in which float32 is summed. A few dozen rows at a time go through all passes of both networks and back, so that
nothing between them leaves the nearest cache, and one call takes the place of fifty.
[m] `python -m tests.benchmarks.steps` has both.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from reagent_lite.models.q_loss_kernel import QLayers, QLossKernel, QRows, Rule, q_loss_kernel
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.rl.td import discount
from reagent_lite.types import TransitionBatch

_LOSSES = ("mse", "huber")


class FusedLoss:
    """The loss by our kernel.

    Hooks on the networks' modules are not called, and gradients can be had once: a second backward pass is an error.

    Args:
        online: layers of Q.
        target: layers of the target network.
        rule: who chooses the next action.
        gamma: discount per step.
        huber: else the squared error.
    """

    def __init__(self, online: QLayers, target: QLayers, *, rule: Rule, gamma: float, huber: bool) -> None:
        self._online, self._target = online, target
        self._rule, self._gamma, self._huber = rule, gamma, huber

    @classmethod
    def of(
        cls, q_network: nn.Module, target_network: nn.Module, head: nn.Module, *, rule: Rule, gamma: float
    ) -> "FusedLoss | None":
        """Returns the loss, or None where networks or head are of a kind that the kernel does not know."""
        if not isinstance(head, ScalarHead) or head.kind not in _LOSSES:
            return None
        online, target = QLayers.of(q_network), QLayers.of(target_network)
        if online is None or target is None:
            return None
        return cls(online, target, rule=rule, gamma=gamma, huber=head.kind == "huber")

    def __call__(self, batch: TransitionBatch, reward: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the loss [] and each row's loss [B], detached; None where the kernel is not for this batch.

        Args:
            batch: of fixed actions.
            reward: [B] float32, boosts included.

        Raises:
            IndexError: an action is none of the network's.
        """
        own = q_loss_kernel()
        if own is None or not self._suits(batch, reward):
            return None
        loss, rows = _Fused.apply(self, own, batch, reward, *self._online.parameters)  # type: ignore[no-untyped-call]
        return loss, rows

    def computed(self, own: QLossKernel, batch: TransitionBatch, reward: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns the loss, each row's, and the gradients of all online parameters."""
        rows = QRows(
            state=batch.state.contiguous(),
            next_state=batch.next_state.contiguous(),
            action=batch.action.contiguous(),
            next_action=batch.next_action.contiguous(),
            mask=batch.actions.mask,
            next_mask=batch.next_actions.mask,
            reward=reward.contiguous(),
            discount=discount(self._gamma, batch.steps, batch.bootstrap),
            weight=batch.weight.contiguous(),
        )
        return own(self._online, self._target, rows, self._rule, huber=self._huber)

    def _suits(self, batch: TransitionBatch, reward: Tensor) -> bool:
        """Whether gradients of all parameters and of nothing else are asked for, in types that the kernel reads."""
        rows = batch.state.shape[:1]
        floats = (reward, batch.steps, batch.bootstrap, batch.weight)
        integers = (batch.action, batch.next_action)
        masks = (batch.actions.mask, batch.next_actions.mask)
        return (
            torch.is_grad_enabled()
            and self._online.suit(batch.state)
            and self._target.suit(batch.next_state)
            and batch.next_state.shape == batch.state.shape
            and all(x.dtype == torch.float32 and x.shape == rows for x in floats)
            and all(x.dtype == torch.int64 and x.shape == rows for x in integers)
            and all(x.dtype == torch.bool and x.shape == (*rows, self._online.choices) for x in masks)
            and all(p.requires_grad for p in self._online.parameters)
            and not any(x.requires_grad for x in (batch.state, reward, batch.weight))
            and all(x.is_cpu for x in (*floats, *integers, *masks))
        )


class _Fused(torch.autograd.Function):
    """Gradients come with the loss; the backward pass hands them out."""

    @staticmethod
    def forward(
        ctx: Any, fused: FusedLoss, own: QLossKernel, batch: TransitionBatch, reward: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, rows, ctx.gradients = fused.computed(own, batch, reward)
        ctx.mark_non_differentiable(rows)
        ctx.set_materialize_grads(False)
        return loss, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor, of_rows: None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss have been handed out; compute the loss again")
        if of_loss.item() != 1:
            torch._foreach_mul_(gradients, of_loss)
        return None, None, None, None, *gradients
