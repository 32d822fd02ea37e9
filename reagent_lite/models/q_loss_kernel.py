"""The loss of a Q-network over fixed actions and its gradients, by kernels/dense/q_loss.cpp, called through ctypes."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from reagent_lite.models.dense import Run, runs_apply
from reagent_lite.models.dense_kernel import DenseKernel, KernelLayers, kernel_now, layer_table
from reagent_lite.models.q_networks import DiscreteQNetwork, DuelingDiscreteQNetwork

_Address = ctypes.c_void_p
_Long = ctypes.c_long


class Rule(IntEnum):
    """Who chooses the next action of a target; numbers as in q_loss.cpp."""

    LOGGED = 0
    GREEDY = 1
    DOUBLE = 2


@dataclass(frozen=True, slots=True)
class QRows:
    """A batch as the kernel reads it, on the CPU; all but the masks contiguous.

    Attributes:
        state, next_state: [B, S] float32.
        action: [B] int64.
        next_action: [B] int64, read where the log chooses; below 0 it is 0.
        mask, next_mask: [B, K] bool, in any layout.
        reward: [B] float32.
        discount: [B] float32, what the next state's value is multiplied by.
        weight: [B] float32, shares in the loss.
    """

    state: Tensor
    next_state: Tensor
    action: Tensor
    next_action: Tensor
    mask: Tensor
    next_mask: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor


class QLayers:
    """The layers of a Q-network over fixed actions, plain or dueling, as the kernel is told of them.

    Args:
        runs: all layers; or a trunk, a stream of one value and a stream of advantages.

    Attributes:
        parameters: weight and bias of each layer in turn.
        layers: all of them in turn.
        counts: layers of trunk, value and advantages; 0 where there are no streams.
        choices: K.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.parameters = tuple(p for run in runs for p in run.parameters)
        self.layers = KernelLayers(self.parameters, [relu for run in runs for _, _, relu in run.kernel_layers.shapes])
        counts = [len(run.kernel_layers.shapes) for run in runs]
        self.counts = (*counts, 0, 0)[:3]
        self.choices = self.layers.shapes[-1][1]
        self.scratch = 0

    @classmethod
    def of(cls, network: object) -> "QLayers | None":
        """Returns the layers of a network, or None where it has other ones than the kernel knows."""
        if isinstance(network, DiscreteQNetwork):
            runs = [network.layers.as_run()]
        elif isinstance(network, DuelingDiscreteQNetwork):
            runs = [part.as_run() for part in (network.trunk, network.value, network.advantage)]
        else:
            return None
        found = [run for run in runs if run is not None]
        return cls(found) if len(found) == len(runs) else None

    def suit(self, x: Tensor) -> bool:
        """Whether the kernel may and should compute these layers of x, as they are now."""
        return runs_apply(x) and self.layers.suit(x)


class QLossKernel:
    """The compiled function."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scratch = library.q_loss_scratch
        self._scratch.argtypes, self._scratch.restype = (_Address, _Long), _Long
        self._q_loss = library.q_loss
        self._q_loss.argtypes, self._q_loss.restype = (_Address, _Address, _Address), _Long

    def __call__(
        self, online: QLayers, target: QLayers, rows: QRows, rule: Rule, *, huber: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Returns the loss [], each row's loss [B], and the gradients of the loss by the online parameters.

        Args:
            online: of Q, that suit the states.
            target: of the target network, of the same shapes.
            rows: the batch.
            rule: who chooses the next action.
            huber: else the squared error.

        Raises:
            IndexError: an action is none of the network's.
        """
        shapes = online.layers.shapes
        count, nowhere = len(shapes), online.layers.nowhere
        losses, loss = rows.reward.new_empty(rows.reward.shape), rows.reward.new_empty(())
        gradients = [losses.new_empty(shape) for shape in online.layers.parameter_shapes]
        own = layer_table(shapes, online.layers.addresses(), nowhere[:count], [one.data_ptr() for one in gradients])
        frozen = layer_table(shapes, target.layers.addresses(), nowhere[:count], nowhere)
        online.scratch = online.scratch or int(self._scratch(own, count))
        scratch = losses.new_empty(online.scratch)
        networks = _words(*online.counts, ctypes.addressof(own), ctypes.addressof(frozen))
        transitions = _words(
            rows.reward.shape[0], rows.state.data_ptr(), rows.next_state.data_ptr(), rows.action.data_ptr(),
            rows.next_action.data_ptr(), rows.mask.data_ptr(), *rows.mask.stride(), rows.next_mask.data_ptr(),
            *rows.next_mask.stride(), rows.reward.data_ptr(), rows.discount.data_ptr(), rows.weight.data_ptr(),
            rule, huber, losses.data_ptr(), loss.data_ptr(),
        )  # fmt: skip
        wrong = self._q_loss(networks, transitions, scratch.data_ptr())
        if wrong >= 0:
            action, after = int(rows.action[wrong]), int(rows.next_action[wrong])
            raise IndexError(f"row {wrong} of the batch: action {action}, next action {after}, of {shapes[-1][1]}")
        return loss, losses, gradients


def q_loss_kernel() -> QLossKernel | None:
    """Returns the kernel where layers are left to it now."""
    own = kernel_now()
    return None if own is None else _of(own)


@functools.cache
def _of(own: DenseKernel) -> QLossKernel:
    return QLossKernel(own.library)


def _words(*values: int) -> ctypes.Array[_Long]:
    return (_Long * len(values))(*values)
