"""The loss of DQN over fixed actions and its gradients, written out in numpy and float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.types import Actions, TransitionBatch

Floats = NDArray[np.float64]
Parameters = Sequence[Tensor]


def truth(
    online: Sequence[Parameters], target: Sequence[Parameters], batch: TransitionBatch, *, gamma: float, rule: str,
    huber: bool, boost: Sequence[float] | None = None,
) -> tuple[float, Floats, list[Floats]]:  # fmt: skip
    """Returns the loss, each row's, and the gradients of all online parameters in turn.

    Args:
        online, target: weights and biases of one stretch of layers; or of trunk, value and advantages.
        batch: any number of rows.
        gamma: discount per step.
        rule: "logged", "greedy" or "double".
        huber: else the squared error.
        boost: added to the reward, by action.
    """
    after = _values(target, batch.next_state, batch.next_actions.mask)
    chooser = _values(online, batch.next_state, batch.next_actions.mask) if rule == "double" else after
    q = _values(online, batch.state, batch.actions.mask)
    losses, of_q = np.zeros(len(batch)), np.zeros(q.shape)
    for i in range(len(batch)):
        action, allowed = int(batch.action[i]), batch.next_actions.mask[i].numpy()
        choices = [k for k in range(q.shape[1]) if allowed[k]]
        if rule == "logged":
            value = after[i, int(batch.next_action[i])]
        else:
            value = after[i, max(choices, key=lambda k: chooser[i, k])] if choices else 0.0
        reward = float(batch.reward[i]) + (boost[action] if boost else 0.0)
        error = q[i, action] - (reward + gamma ** float(batch.steps[i]) * float(batch.bootstrap[i]) * value)
        small = abs(error) < 1
        losses[i] = (error**2 / 2 if small else abs(error) - 0.5) if huber else error**2
        slope = (error if small else np.sign(error)) if huber else 2 * error
        of_q[i, action] = float(batch.weight[i]) * slope
    return float(losses @ batch.weight.double().numpy()), losses, _gradients(online, batch, of_q)


def _layers(parameters: Parameters, x: Floats, *, relu_last: bool) -> list[Floats]:
    """Returns x and the outputs of every layer."""
    outputs, count = [x], len(parameters) // 2
    for i in range(count):
        y = (
            outputs[-1] @ parameters[2 * i].detach().double().numpy().T
            + parameters[2 * i + 1].detach().double().numpy()
        )
        outputs.append(np.maximum(y, 0) if i < count - 1 or relu_last else y)
    return outputs


def _values(network: Sequence[Parameters], state: Tensor, mask: Tensor) -> Floats:
    hidden = _layers(network[0], state.double().numpy(), relu_last=len(network) > 1)[-1]
    if len(network) == 1:
        return hidden
    value, advantage = (_layers(part, hidden, relu_last=False)[-1] for part in network[1:])
    return value + advantage - _means(advantage, mask)


def _means(advantage: Floats, mask: Tensor) -> Floats:
    allowed = mask.numpy().astype(np.float64)
    result: Floats = (advantage * allowed).sum(1, keepdims=True) / np.maximum(allowed.sum(1, keepdims=True), 1)
    return result


def _back(parameters: Parameters, outputs: list[Floats], g: Floats, *, relu_last: bool) -> tuple[Floats, list[Floats]]:
    gradients: list[Floats] = []
    for i in range(len(parameters) // 2 - 1, -1, -1):
        if relu_last or i < len(parameters) // 2 - 1:
            g = g * (outputs[i + 1] > 0)
        gradients[:0] = [g.T @ outputs[i], g.sum(0)]
        g = g @ parameters[2 * i].detach().double().numpy()
    return g, gradients


def _gradients(network: Sequence[Parameters], batch: TransitionBatch, of_q: Floats) -> list[Floats]:
    trunk = _layers(network[0], batch.state.double().numpy(), relu_last=len(network) > 1)
    if len(network) == 1:
        return _back(network[0], trunk, of_q, relu_last=False)[1]
    allowed = batch.actions.mask.numpy().astype(np.float64)
    total = of_q.sum(1, keepdims=True)
    of_advantage = of_q - allowed / np.maximum(allowed.sum(1, keepdims=True), 1) * total
    of_trunk, streams = np.zeros(trunk[-1].shape), []
    for part, g in zip(network[1:], (total, of_advantage), strict=True):
        of_x, gradients = _back(part, _layers(part, trunk[-1], relu_last=False), g, relu_last=False)
        of_trunk += of_x
        streams += gradients
    return [*_back(network[0], trunk, of_trunk, relu_last=True)[1], *streams]


def drawn(rows: int, states: int, choices: int, seed: int) -> TransitionBatch:
    """Rows with masks that allow some, all and none of the next choices, ends, several steps, unequal weights."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng)

    mask, next_mask = uniform(rows, choices) < 0.6, uniform(rows, choices) < 0.5
    values: dict[str, Any] = {
        "state": torch.randn(rows, states, generator=rng),
        "next_state": torch.randn(rows, states, generator=rng),
        "actions": Actions(mask=mask),
        "next_actions": Actions(mask=next_mask),
        "action": (uniform(rows) * choices).long(),
        "next_action": (uniform(rows) * choices).long(),
        "reward": 3 * torch.randn(rows, generator=rng),
        "steps": 1 + (uniform(rows) * 3).long().float(),
        "bootstrap": (uniform(rows) < 0.8).float(),
        "propensity": torch.ones(rows),
        "metrics": torch.zeros(rows, 0),
        "weight": uniform(rows) * (uniform(rows) < 0.9),
    }
    return TransitionBatch(**values)
